"""OpenAI's ``/v1/responses``, without state: each request brings the whole conversation."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from flask import Blueprint, Response, jsonify

from personalpeft import Reply
from personalpeft.base_models.tool_calls import Said
from personalpeft.chat.reply import TokenLogprob
from personalpeft.types import MAX_TOP_LOGPROBS, ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import Generation
from personalpeft_app.http.models import Models
from personalpeft_app.http.openai_chat import IGNORED, format_logprobs
from personalpeft_app.http.tools import ToolOptions
from personalpeft_app.http.validation import Body

_KNOWN = (
    *("model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream"),
    *("tools", "tool_choice", "parallel_tool_calls", "include", "top_logprobs", "truncation"),
)
_NEUTRAL = {
    "store": False,
    "background": False,
    "text": {"format": {"type": "text"}},
}
_LOGPROBS = "message.output_text.logprobs"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_PARTS = ("input_text", "output_text")


def blueprint(models: Models) -> Blueprint:
    """Return the route."""
    routes = Blueprint("openai_responses", __name__)

    @routes.post("/v1/responses")
    def responses() -> Response:
        body = validation.read_object()
        validation.check_names(
            body, known=_KNOWN, ignored=(*IGNORED, "stream_options"), neutral=_NEUTRAL
        )
        how = generation.sampling(body, length="max_output_tokens")
        prompt = tools.checked(models, _read_messages(body), "input")
        alone = not validation.read_bool(body, "parallel_tool_calls", True)
        choice = tools.openai_choice(body, flat=True)
        offer = tools.offered(
            models, body, tools.flat_tools(body.get("tools")), choice, alone=alone
        )
        how |= {**_likely(body, offer), "truncation": _truncation(body)}
        stream = validation.read_bool(body, "stream")
        model = models.named(generation.model_name(body))
        asked = Generation(model, [prompt], **offer.options(how))
        shape = _Shape(body, model.name)
        if stream:
            return generation.sse_response(asked, _events(asked, shape, offer), _fault)
        (reply,) = asked.replies()
        output = _Output()
        for part in offer.read(reply):
            list(output.add(part, reply.logprobs))
        list(output.end(reply))
        whole = {**shape.ended(reply, output), "personalpeft": generation.metadata(model, reply)}
        response = jsonify(whole)
        response.headers.update(generation.headers(model, reply.stack.digest, reply.turn_id))
        return response

    return routes


def _likely(body: Body, offer: ToolOptions) -> dict[str, Any]:
    """Return the options of log-probs."""
    top = validation.read_int(body, "top_logprobs", least=0, most=MAX_TOP_LOGPROBS) or 0
    wanted = validation.read_texts(body, "include", most=1) if body.get("include") else ()
    if wanted not in ((), (_LOGPROBS,)):
        raise InvalidParameter(f"include can be {_LOGPROBS}.", "include")
    if wanted and offer.tools:
        # Which of the tokens are text and which are calls shows only when the reply is read.
        raise InvalidParameter("include: log-probs are not available with tools.", "include")
    if top and not wanted:
        raise InvalidParameter(f"top_logprobs goes with include {_LOGPROBS}.", "top_logprobs")
    return {"logprobs": bool(wanted), "top_logprobs": top}


def _read_messages(body: Body) -> list[dict[str, Any]]:
    given = body.get("input")
    if isinstance(given, str):
        messages: list[dict[str, Any]] = [{"role": "user", "content": given}]
    else:
        items = given if isinstance(given, list) else []
        listed = [_message(item, f"input[{number}]") for number, item in enumerate(items)]
        messages = _joined(generation.messages(listed, "input", _PARTS, {**_ROLES, "tool": "tool"}))
    first = validation.read_text(body, "instructions")
    return [{"role": "system", "content": first}, *messages] if first else messages


def _message(item: Any, place: str) -> Any:
    """Return an item of the input as a message of a chat."""
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message" and item.get("role") != "tool":
        return {"role": item["role"], "content": item.get("content")}
    if kind == "function_call":
        call = {
            "id": item.get("call_id"),
            "function": {"name": item.get("name"), "arguments": item.get("arguments")},
        }
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    raise InvalidParameter(
        f"{place}: only messages, function calls and their outputs can be read.", place
    )


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each call in its message: here both are items."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            before = joined[-1]
            joined[-1] = {
                **before,
                "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]],
            }
        else:
            joined.append(message)
    return joined


def _truncation(body: Body) -> str:
    mode = body.get("truncation") or "disabled"
    if mode not in ("auto", "disabled"):
        raise InvalidParameter("truncation must be auto or disabled.", "truncation")
    return str(mode)


class _Shape:
    """The response object while it grows. Its id is not the turn's."""

    def __init__(self, body: Body, model: str) -> None:
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "temperature": body.get("temperature"),
            "top_p": body.get("top_p"),
            "metadata": {},
            "parallel_tool_calls": validation.read_bool(body, "parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "top_logprobs": body.get("top_logprobs") or 0,
            "truncation": _truncation(body),
        }

    def begun(self) -> dict[str, Any]:
        """Return the response at its start."""
        return {
            **self._head,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def ended(self, reply: Reply, output: _Output) -> dict[str, Any]:
        """Return the finished response."""
        cut = reply.finish_reason == "length"
        read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output.items,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }


Event = tuple[str, dict[str, Any]]


class _Output:
    """The output items of a response: messages and calls. Its methods yield their events."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.calls: list[ToolCall] = []
        self._text: list[str] | None = None
        self._likely: list[dict[str, Any]] = []
        self._id = ""

    def add(self, part: Said, tokens: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Add a text or call, with the log-probs of its tokens if requested."""
        if isinstance(part, ToolCall):
            yield from self._closed("completed")
            yield from self._call(part)
            return
        if self._text is None:
            self._text, self._id = [], f"msg_{secrets.token_hex(16)}"
            item = {**self._message("in_progress"), "content": []}
            yield "response.output_item.added", {"output_index": len(self.items), "item": item}
            yield "response.content_part.added", {**self._place, "part": _part("", [])}
        known = format_logprobs(tokens)
        self._text.append(part)
        self._likely += known
        if part or known:
            yield "response.output_text.delta", {**self._place, "delta": part, "logprobs": known}

    def end(self, reply: Reply) -> Iterator[Event]:
        """End the open item with the reply. An empty response has one message."""
        if not self.items and self._text is None:
            yield from self.add("")
        yield from self._closed("incomplete" if reply.finish_reason == "length" else "completed")

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self.items), "content_index": 0}

    def _message(self, status: str) -> dict[str, Any]:
        content = [_part("".join(self._text or ()), self._likely)]
        return {
            "type": "message",
            "id": self._id,
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def _closed(self, status: str) -> Iterator[Event]:
        if self._text is None:
            return
        item, place = self._message(status), self._place
        (part,) = item["content"]
        self._text, self._likely = None, []
        self.items.append(item)
        yield (
            "response.output_text.done",
            {**place, "text": part["text"], "logprobs": part["logprobs"]},
        )
        yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        number, name = len(self.items), f"fc_{secrets.token_hex(16)}"
        item = {
            "type": "function_call",
            "id": name,
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }
        place, arguments = {"item_id": name, "output_index": number}, item["arguments"]
        self.items.append(item)
        self.calls.append(call)
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield "response.output_item.added", {"output_index": number, "item": begun}
        yield "response.function_call_arguments.delta", {**place, "delta": arguments}
        yield (
            "response.function_call_arguments.done",
            {**place, "name": call.name, "arguments": arguments},
        )
        yield "response.output_item.done", {"output_index": number, "item": item}


def _part(text: str, likely: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": likely}


def _events(asked: Generation, shape: _Shape, offer: ToolOptions) -> Iterator[str]:
    count = 0

    def event(kind: str, **more: Any) -> str:
        nonlocal count
        count += 1
        return generation.format_event({"type": kind, "sequence_number": count - 1, **more}, kind)

    (stream,) = asked.streams
    # An error before the first piece is a response with a status, so it comes first.
    first = [piece] if (piece := next(stream, None)) is not None else []
    yield event("response.created", response=shape.begun())
    yield event("response.in_progress", response=shape.begun())
    reading, output, sent = offer.reader(), _Output(), 0
    for part in (part for each in chain(first, stream) for part in reading.push(each)):
        tokens = stream.logprobs[sent:]
        sent += len(tokens)
        for kind, more in output.add(part, tokens):
            yield event(kind, **more)
    reply, rest = generation.read_all(stream), reading.finish()
    offer.check(reply, [*output.calls, *tools.calls_of(rest)])
    # The last tokens may have made no text.
    rest = rest or ([""] if sent < len(reply.logprobs) else [])
    for kind, more in chain(
        *(output.add(part, reply.logprobs[sent:]) for part in rest), output.end(reply)
    ):
        yield event(kind, **more)
    kind = "response.incomplete" if reply.finish_reason == "length" else "response.completed"
    yield event(
        kind,
        response={
            **shape.ended(reply, output),
            "personalpeft": generation.metadata(asked.model, reply),
        },
    )


def _fault(body: dict[str, Any]) -> str:
    error = body["error"]
    flat = {
        "type": "error",
        "code": error["code"],
        "message": error["message"],
        "param": error["param"],
    }
    return generation.format_event({**flat, "sequence_number": 0}, "error")
