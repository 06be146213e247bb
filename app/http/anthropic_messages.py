"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from flask import Blueprint, Response, jsonify

from personalpeft import Reply
from personalpeft.base_models.tool_calls import Said
from personalpeft.types import ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import Generation
from personalpeft_app.http.models import Models
from personalpeft_app.http.tools import ToolOptions
from personalpeft_app.http.validation import Body

_KNOWN = ("model", "messages", "system", "tools", "tool_choice")
_SAMPLING = ("max_tokens", "stop_sequences", "temperature", "top_p", "stream")
# They concern billing, caching and routing, and change no reply.
_IGNORED = ("metadata", "service_tier", "cache_control")
_NEUTRAL = {"thinking": {"type": "disabled"}}
_ROLES = {"user": "user", "assistant": "assistant", "tool": "tool"}


def blueprint(models: Models) -> Blueprint:
    """Return the routes."""
    routes = Blueprint("anthropic_messages", __name__)

    @routes.post("/v1/messages")
    def messages() -> Response:
        body = validation.read_object()
        validation.check_names(
            body, known=(*_KNOWN, *_SAMPLING), ignored=_IGNORED, neutral=_NEUTRAL
        )
        how = generation.sampling(body, stop="stop_sequences", hottest=1.0)
        if how["max_tokens"] is None:
            raise InvalidParameter("max_tokens is missing.", "max_tokens")
        prompt = _read_messages(models, body)
        offer = _offer(models, body)
        stream = validation.read_bool(body, "stream")
        model = models.named(generation.model_name(body))
        asked = Generation(model, [prompt], **offer.options(how))
        head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model.name,
        }
        if stream:
            return generation.sse_response(
                asked,
                _events(asked, head, offer),
                lambda error: generation.format_event(error, "error"),
            )
        (reply,) = asked.replies()
        written = offer.read(reply)
        text, calls = tools.text_of(written), tools.calls_of(written)
        content = [{"type": "text", "text": text}] if text or not calls else []
        content += [tools.anthropic_call(call) for call in calls]
        usage = {
            "input_tokens": reply.usage.prompt_tokens,
            "output_tokens": reply.usage.completion_tokens,
        }
        whole = {**head, "content": content, **_end(offer, reply, calls), "usage": usage}
        response = jsonify({**whole, "personalpeft": generation.metadata(model, reply)})
        response.headers.update(generation.headers(model, reply.stack.digest, reply.turn_id))
        return response

    @routes.post("/v1/messages/count_tokens")
    def count() -> Response:
        body = validation.read_object()
        validation.check_names(body, known=_KNOWN, ignored=_IGNORED, neutral=_NEUTRAL)
        prompt, offer = _read_messages(models, body), _offer(models, body)
        model = models.named(generation.model_name(body))
        # An unread stream never reaches the model.
        unread = model.user.stream(
            prompt, tools=offer.tools, must_call=offer.required, max_tokens=1, **model.options
        )
        return jsonify({"input_tokens": unread.prompt_tokens})

    return routes


def _read_messages(models: Models, body: Body) -> list[dict[str, Any]]:
    listed = tools.anthropic_messages(body.get("messages"))
    messages = generation.messages(listed, "messages", ("text",), _ROLES)
    tools.checked(models, messages)
    system = body.get("system")
    if not system:
        return messages
    return [
        {"role": "system", "content": generation.text_of(system, "system", ("text",))},
        *messages,
    ]


def _offer(models: Models, body: Body) -> ToolOptions:
    choice, alone = tools.anthropic_choice(body)
    return tools.offered(
        models, body, tools.anthropic_tools(body.get("tools")), choice, alone=alone
    )


def _end(offer: ToolOptions, reply: Reply, calls: Sequence[ToolCall]) -> dict[str, str | None]:
    """Return the stop reason in Anthropic's format."""
    if stop := offer.stop_of(reply):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    ended = "max_tokens" if reply.finish_reason == "length" else "tool_use" if calls else "end_turn"
    return {"stop_reason": ended, "stop_sequence": None}


def _events(asked: Generation, head: dict[str, Any], offer: ToolOptions) -> Iterator[str]:
    def event(kind: str, **more: Any) -> str:
        return generation.format_event({"type": kind, **more}, kind)

    (stream,) = asked.streams
    # An error before the first piece is a response with a status, so it comes first.
    first = [piece] if (piece := next(stream, None)) is not None else []
    usage = {"input_tokens": stream.prompt_tokens, "output_tokens": 0}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=begun)
    reading, blocks = offer.reader(), _Blocks()
    for part in (part for each in chain(first, stream) for part in reading.push(each)):
        for kind, more in blocks.add(part):
            yield event(kind, **more)
    reply, rest = generation.read_all(stream), reading.finish()
    offer.check(reply, [*blocks.calls, *tools.calls_of(rest)])
    for kind, more in chain(*map(blocks.add, rest), blocks.end()):
        yield event(kind, **more)
    usage = {
        "input_tokens": reply.usage.prompt_tokens,
        "output_tokens": reply.usage.completion_tokens,
    }
    ended = _end(offer, reply, blocks.calls)
    yield event(
        "message_delta",
        delta=ended,
        usage=usage,
        personalpeft=generation.metadata(asked.model, reply),
    )
    yield event("message_stop")


class _Blocks:
    """The content blocks of a message: text and calls."""

    def __init__(self) -> None:
        self._number = 0
        self._open = False
        self.calls: list[ToolCall] = []

    def add(self, part: Said) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the events of a text or call."""
        if isinstance(part, str):
            if not self._open:
                self._open = True
                yield (
                    "content_block_start",
                    {"index": self._number, "content_block": {"type": "text", "text": ""}},
                )
            yield (
                "content_block_delta",
                {"index": self._number, "delta": {"type": "text_delta", "text": part}},
            )
            return
        yield from self._closed()
        self.calls.append(part)
        call = tools.anthropic_call(part)
        asked = json.dumps(call["input"], ensure_ascii=False)
        yield "content_block_start", {"index": self._number, "content_block": {**call, "input": {}}}
        yield (
            "content_block_delta",
            {"index": self._number, "delta": {"type": "input_json_delta", "partial_json": asked}},
        )
        self._open = True
        yield from self._closed()

    def end(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the last events. An empty message has one block of text."""
        if not self._number and not self._open:
            yield from self.add("")
        yield from self._closed()

    def _closed(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._open:
            yield "content_block_stop", {"index": self._number}
            self._open, self._number = False, self._number + 1
