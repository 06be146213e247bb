"""OpenAI's ``/v1/responses``, without state: each request brings the whole conversation."""

from __future__ import annotations

import itertools
import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Len
from flask import Blueprint, Response
from pydantic import Discriminator, Field, Tag

from personalpeft import Reply
from personalpeft.base_models.tool_calls import ReplyPart
from personalpeft.chat.reply import TokenLogprob
from personalpeft.types import Json, ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import (
    MAX_MESSAGES,
    Content,
    Generation,
    Tokens,
    text_of,
)
from personalpeft_app.http.models import Models
from personalpeft_app.http.openai_chat import OpenAIBody, TopLogprobs, format_logprobs
from personalpeft_app.http.tools import ChoiceWord, FlatNamedTool, FlatTool, ToolOptions
from personalpeft_app.http.validation import Ignored, Part, only

_LOGPROBS = "message.output_text.logprobs"


class _Message(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def for_library(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_of(self.content)}


class _FunctionCall(Part):
    call_id: str
    name: str
    arguments: str

    def for_library(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        calls = [{"id": self.call_id, "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}


class _FunctionCallOutput(Part):
    call_id: str
    output: Content

    def for_library(self) -> dict[str, Any]:
        return {"role": "tool", "content": text_of(self.output), "tool_call_id": self.call_id}


def _item_type(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else None


_Item: TypeAlias = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_FunctionCall, Tag("function_call")]
    | Annotated[_FunctionCallOutput, Tag("function_call_output")],
    Discriminator(_item_type),
]


class _Tool(FlatTool):
    type: Literal["function"] = "function"
    parameters: dict[str, Any] = Field(default_factory=dict)


class ResponseBody(OpenAIBody):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[_Item], Len(1, MAX_MESSAGES)]
    instructions: str = ""
    max_output_tokens: Tokens | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: ChoiceWord | FlatNamedTool = "auto"
    parallel_tool_calls: bool = True
    include: Annotated[list[Literal["message.output_text.logprobs"]], Len(0, 1)] = Field(
        default_factory=list
    )
    top_logprobs: TopLogprobs = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    # Its only option, hiding lengths from others on the network, is not supported.
    stream_options: Ignored = None
    store: Annotated[Any, *only(False)] = False
    background: Annotated[Any, *only(False)] = False
    text: Annotated[Any, *only({"format": {"type": "text"}})] = None

    def messages(self) -> list[dict[str, Any]]:
        """Return the messages, each with its calls: in the input both are items."""
        first = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*first, {"role": "user", "content": self.input}]
        joined: list[dict[str, Any]] = []
        for item in self.input:
            message = item.for_library()
            if isinstance(item, _FunctionCall) and joined and joined[-1]["role"] == "assistant":
                calls = [*joined[-1].get("tool_calls", ()), *message["tool_calls"]]
                joined[-1] = {**joined[-1], "tool_calls": calls}
            else:
                joined.append(message)
        return [*first, *joined]

    def logprobs(self, options: ToolOptions) -> dict[str, Any]:
        """Return the options of log-probs. Raises ``InvalidParameter``."""
        if self.include and options.tools:
            # Which of the tokens are text and which are calls shows only when the reply is read.
            raise InvalidParameter("include: log-probs are not available with tools.", "include")
        if self.top_logprobs and not self.include:
            raise InvalidParameter(f"top_logprobs goes with include {_LOGPROBS}.", "top_logprobs")
        return {"logprobs": bool(self.include), "top_logprobs": self.top_logprobs}


def blueprint(models: Models) -> Blueprint:
    """Return the route."""
    routes = Blueprint("openai_responses", __name__)

    @routes.post("/v1/responses")
    def responses() -> Response:
        given = validation.read_object()
        body = validation.parse(ResponseBody, given)
        prompt = tools.check_calls(models, body.messages(), "input")
        options = tools.tool_options(
            models,
            [each.nested(each.parameters) for each in body.tools],
            tools.openai_choice(body.tool_choice),
            single=not body.parallel_tool_calls,
        )
        how = {
            **body.sampling(body.max_output_tokens),
            **body.logprobs(options),
            "truncation": body.truncation,
        }
        model = models.resolve(body.model)
        batch = Generation(model, [prompt], how, options)
        response = _Response(body, given, model.name)
        events = _events(batch, response)
        if body.stream:
            numbers = itertools.count()
            texts = (_event(numbers, kind, **more) for kind, more in events)
            return batch.stream(texts, partial(_fault, numbers))
        with closing(batch):
            *_, (_, last) = events
        return batch.response(last["response"])

    return routes


Event = tuple[str, dict[str, Any]]


class _Response:
    """The response object while it grows. Its methods yield the events of its output items.

    Its id is not the turn's.
    """

    def __init__(self, body: ResponseBody, given: Json, model: str) -> None:
        # The response repeats these fields as the client sent them.
        names = ("instructions", "max_output_tokens", "temperature", "top_p")
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **{name: given.get(name) for name in names},
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice") or "auto",
            "tools": given.get("tools") or [],
            "top_logprobs": body.top_logprobs,
            "truncation": body.truncation,
            "error": None,
        }
        self._items: list[dict[str, Any]] = []
        self._text: list[str] | None = None
        self._likely: list[dict[str, Any]] = []
        self._id = ""

    def begun(self) -> dict[str, Any]:
        """Return the response at its start."""
        return {
            **self._head,
            "status": "in_progress",
            "incomplete_details": None,
            "output": [],
            "usage": None,
        }

    def ended(self, reply: Reply) -> dict[str, Any]:
        """Return the finished response."""
        cut = reply.finish_reason == "length"
        read, written = reply.usage.prompt_tokens, reply.usage.completion_tokens
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": read + written,
            },
        }

    def add(self, part: ReplyPart, tokens: Sequence[TokenLogprob] = ()) -> Iterator[Event]:
        """Add a text or call, with the log-probs of its tokens if requested."""
        if isinstance(part, ToolCall):
            yield from self._closed("completed")
            yield from self._call(part)
            return
        if self._text is None:
            self._text, self._id = [], f"msg_{secrets.token_hex(16)}"
            item = {**self._message("in_progress"), "content": []}
            yield "response.output_item.added", {"output_index": len(self._items), "item": item}
            yield "response.content_part.added", {**self._place, "part": _part("", [])}
        known = format_logprobs(tokens)
        self._text.append(part)
        self._likely += known
        if part or known:
            yield "response.output_text.delta", {**self._place, "delta": part, "logprobs": known}

    def end(self, reply: Reply) -> Iterator[Event]:
        """End the open item with the reply. An empty response has one message."""
        if not self._items and self._text is None:
            yield from self.add("")
        yield from self._closed("incomplete" if reply.finish_reason == "length" else "completed")

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._id, "output_index": len(self._items), "content_index": 0}

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
        self._items.append(item)
        yield (
            "response.output_text.done",
            {**place, "text": part["text"], "logprobs": part["logprobs"]},
        )
        yield "response.content_part.done", {**place, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        number, name = len(self._items), f"fc_{secrets.token_hex(16)}"
        item = {
            "type": "function_call",
            "id": name,
            "call_id": f"call_{secrets.token_hex(12)}",
            "name": call.name,
            "arguments": json.dumps(call.arguments, ensure_ascii=False),
            "status": "completed",
        }
        place, arguments = {"item_id": name, "output_index": number}, item["arguments"]
        self._items.append(item)
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


def _event(numbers: Iterator[int], kind: str, **more: Any) -> str:
    value = {"type": kind, "sequence_number": next(numbers), **more}
    return generation.format_event(value, kind)


def _events(batch: Generation, response: _Response) -> Iterator[Event]:
    """Yield the events of a reply. The last one has the whole response."""
    (reader,) = batch.readers()
    yield "response.created", {"response": response.begun()}
    yield "response.in_progress", {"response": response.begun()}
    for part in reader:
        yield from response.add(part, reader.take_logprobs())
    # The last tokens may have made no text.
    if rest := reader.take_logprobs():
        yield from response.add("", rest)
    reply = reader.reply
    yield from response.end(reply)
    whole = {**response.ended(reply), "personalpeft": batch.metadata(reply)}
    yield f"response.{whole['status']}", {"response": whole}


def _fault(numbers: Iterator[int], body: dict[str, Any]) -> str:
    about = {name: body["error"][name] for name in ("code", "message", "param")}
    return _event(numbers, "error", **about)
