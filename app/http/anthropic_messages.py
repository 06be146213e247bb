"""``/v1/messages`` and its counting of tokens, as Anthropic's clients speak them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from itertools import chain
from typing import Any

from flask import Blueprint, Response, jsonify

from personalpeft import Reply
from personalpeft_app.http import asking, bodies
from personalpeft_app.http.asking import Asked
from personalpeft_app.http.bodies import Body
from personalpeft_app.http.failures import Unsupported
from personalpeft_app.http.models import Models

_KNOWN = ("model", "messages", "system")
_SAMPLING = ("max_tokens", "stop_sequences", "temperature", "top_p", "stream")
# They say who asks, or how to bill, cache or route it, and change no reply.
_IGNORED = ("metadata", "service_tier", "cache_control", "tools")
_NEUTRAL = {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}}
_ROLES = {"user": "user", "assistant": "assistant"}


def blueprint(models: Models) -> Blueprint:
    """The two routes."""
    made = Blueprint("anthropic_messages", __name__)

    @made.post("/v1/messages")
    def messages() -> Response:
        body = bodies.read_object()
        asking.no_tools(body, "tools")
        bodies.only(body, known=(*_KNOWN, *_SAMPLING), ignored=_IGNORED, neutral=_NEUTRAL)
        how = asking.sampling(body, stop="stop_sequences", hottest=1.0)
        if how["max_tokens"] is None:
            raise Unsupported("max_tokens is missing.", "max_tokens")
        said = _said(body)
        stream = bodies.flag(body, "stream")
        model = models.named(asking.model_name(body))
        asked = Asked(model, [said], **how)
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model.name}
        if stream:
            return asking.sent(asked, _events(asked, head), lambda said: asking.event(said, "error"))
        (reply,) = asked.replies()
        content = [{"type": "text", "text": reply.text}]
        usage = {"input_tokens": reply.usage.prompt_tokens, "output_tokens": reply.usage.completion_tokens}
        whole = {**head, "content": content, **_end(reply), "usage": usage}
        response = jsonify({**whole, "personalpeft": asking.about(model, reply)})
        response.headers.update(asking.headers(model, reply.stack.digest, reply.turn_id))
        return response

    @made.post("/v1/messages/count_tokens")
    def count() -> Response:
        body = bodies.read_object()
        asking.no_tools(body, "tools")
        bodies.only(body, known=_KNOWN, ignored=_IGNORED, neutral=_NEUTRAL)
        said = _said(body)
        model = models.named(asking.model_name(body))
        # A stream that nobody reads asks nothing of the model.
        return jsonify({"input_tokens": model.user.stream(said, max_tokens=1, **model.asked).prompt_tokens})

    return made


def _said(body: Body) -> list[dict[str, str]]:
    said = asking.messages(body.get("messages"), "messages", ("text",), _ROLES)
    system = body.get("system")
    if not system:
        return said
    return [{"role": "system", "content": asking.text_of(system, "system", ("text",))}, *said]


def _end(reply: Reply) -> dict[str, str | None]:
    """Why it ended, in Anthropic's words."""
    if reply.stop:
        return {"stop_reason": "stop_sequence", "stop_sequence": reply.stop}
    return {"stop_reason": "max_tokens" if reply.finish_reason == "length" else "end_turn", "stop_sequence": None}


def _events(asked: Asked, head: dict[str, Any]) -> Iterator[str]:
    def event(kind: str, **more: Any) -> str:
        return asking.event({"type": kind, **more}, kind)

    (stream,) = asked.streams
    # Asked for before anything is said, so that what keeps the first piece away has a status of its own.
    first = [piece] if (piece := next(stream, None)) is not None else []
    usage = {"input_tokens": stream.prompt_tokens, "output_tokens": 0}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=begun)
    yield event("content_block_start", index=0, content_block={"type": "text", "text": ""})
    for each in chain(first, stream):
        yield event("content_block_delta", index=0, delta={"type": "text_delta", "text": each})
    reply = asking.whole(stream)
    yield event("content_block_stop", index=0)
    usage = {"input_tokens": reply.usage.prompt_tokens, "output_tokens": reply.usage.completion_tokens}
    yield event("message_delta", delta=_end(reply), usage=usage, personalpeft=asking.about(asked.model, reply))
    yield event("message_stop")
