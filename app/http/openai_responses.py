"""``/v1/responses``, as OpenAI's clients speak it, without state: each request brings all that was said before."""

from __future__ import annotations

import secrets
import time
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
from personalpeft_app.http.openai_chat import IGNORED

_KNOWN = ("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream")
_NEUTRAL = {
    "store": False,
    "background": False,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
    "top_logprobs": 0,
    "include": [],
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text")


def blueprint(models: Models) -> Blueprint:
    """The route."""
    made = Blueprint("openai_responses", __name__)

    @made.post("/v1/responses")
    def responses() -> Response:
        body = bodies.read_object()
        asking.no_tools(body, "tools")
        bodies.only(body, known=_KNOWN, ignored=(*IGNORED, "tools", "stream_options"), neutral=_NEUTRAL)
        how = asking.sampling(body, length="max_output_tokens")
        said = _said(body)
        stream = bodies.flag(body, "stream")
        model = models.named(asking.model_name(body))
        asked = Asked(model, [said], **how)
        shape = _Shape(body, model.name)
        if stream:
            return asking.sent(asked, _events(asked, shape), _fault)
        (reply,) = asked.replies()
        response = jsonify({**shape.response(reply), "personalpeft": asking.about(model, reply)})
        response.headers.update(asking.headers(model, reply.stack.digest, reply.turn_id))
        return response

    return made


def _said(body: Body) -> list[dict[str, str]]:
    given = body.get("input")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    else:
        for number, item in enumerate(given if isinstance(given, list) else ()):
            if not isinstance(item, dict) or item.get("type", "message") != "message":
                raise Unsupported(f"input[{number}]: only messages can be read.", f"input[{number}]")
        messages = asking.messages(given, "input", _PARTS, _ROLES)
    first = bodies.text(body, "instructions")
    return [{"role": "system", "content": first}, *messages] if first else messages


class _Shape:
    """One response as it grows. Ids are its own; the turn's is beside it."""

    def __init__(self, body: Body, model: str) -> None:
        self._id, self._message = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self._head = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }

    def response(self, reply: Reply | None) -> dict[str, Any]:
        """All of it: complete with a reply, else just begun."""
        if reply is None:
            begun = {"status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None}
            return {**self._head, **begun}
        cut = reply.finish_reason == "length"
        read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self.item(reply)],
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }

    def item(self, reply: Reply | None) -> dict[str, Any]:
        """The one message of the output."""
        cut = reply is not None and reply.finish_reason == "length"
        status = "in_progress" if reply is None else "incomplete" if cut else "completed"
        content = [] if reply is None else [self.part(reply.text)]
        return {"type": "message", "id": self._message, "status": status, "role": "assistant", "content": content}

    def part(self, text: str) -> dict[str, Any]:
        """The one part of the message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    @property
    def place(self) -> dict[str, Any]:
        """Where the text is, as events say it."""
        return {"item_id": self._message, "output_index": 0, "content_index": 0}


def _events(asked: Asked, shape: _Shape) -> Iterator[str]:
    count = 0

    def event(kind: str, **more: Any) -> str:
        nonlocal count
        count += 1
        return asking.event({"type": kind, "sequence_number": count - 1, **more}, kind)

    (stream,) = asked.streams
    # Asked for before anything is said, so that what keeps the first piece away has a status of its own.
    first = [piece] if (piece := next(stream, None)) is not None else []
    yield event("response.created", response=shape.response(None))
    yield event("response.in_progress", response=shape.response(None))
    yield event("response.output_item.added", output_index=0, item=shape.item(None))
    yield event("response.content_part.added", **shape.place, part=shape.part(""))
    for each in chain(first, stream):
        yield event("response.output_text.delta", **shape.place, delta=each, logprobs=[])
    reply = asking.whole(stream)
    yield event("response.output_text.done", **shape.place, text=reply.text, logprobs=[])
    yield event("response.content_part.done", **shape.place, part=shape.part(reply.text))
    yield event("response.output_item.done", output_index=0, item=shape.item(reply))
    kind = "response.incomplete" if reply.finish_reason == "length" else "response.completed"
    yield event(kind, response={**shape.response(reply), "personalpeft": asking.about(asked.model, reply)})


def _fault(said: dict[str, Any]) -> str:
    error = said["error"]
    flat = {"type": "error", "code": error["code"], "message": error["message"], "param": error["param"]}
    return asking.event({**flat, "sequence_number": 0}, "error")
