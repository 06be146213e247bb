"""OpenAI's ``/v1/responses``, without state: each request brings the whole conversation."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import count, groupby
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Len
from flask import Blueprint, Response
from pydantic import Discriminator, Field, Tag

from personalpeft.types import Json, ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.generation import (
    MAX_MESSAGES,
    Content,
    Generation,
    ReplyReader,
    Tokens,
    text_of,
)
from personalpeft_app.http.models import Models
from personalpeft_app.http.openai_chat import OpenAIBody, TopLogprobs, format_logprobs
from personalpeft_app.http.tools import ChoiceWord, FlatTool, NamedTool, ToolOptions
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


class ResponseBody(OpenAIBody):
    """The body of ``/v1/responses``."""

    input: str | Annotated[list[_Item], Len(1, MAX_MESSAGES)]
    instructions: str = ""
    max_output_tokens: Tokens | None = None
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: ChoiceWord | NamedTool = "auto"
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
            raise InvalidParameter("include", "must be empty with tools: they have no log-probs")
        if self.top_logprobs and not self.include:
            raise InvalidParameter("top_logprobs", f"goes with include {_LOGPROBS}")
        return {"logprobs": bool(self.include), "top_logprobs": self.top_logprobs}


def blueprint(models: Models) -> Blueprint:
    routes = Blueprint("openai_responses", __name__)

    @routes.post("/v1/responses")
    def responses() -> Response:
        given = validation.read_object()
        body = validation.parse(ResponseBody, given)
        prompt = tools.check_calls(models, body.messages(), "input")
        options = tools.tool_options(
            models,
            [each.nested() for each in body.tools],
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
        events = _events(batch, _head(body, given, model.name))
        if body.stream:
            numbers = count()
            texts = (_event(numbers, kind, **more) for kind, more in events)
            return batch.stream(texts, partial(_fault, numbers))
        with closing(batch):
            *_, (_, last) = events
        return batch.response(last["response"])

    return routes


Event = tuple[str, dict[str, Any]]


def _head(body: ResponseBody, given: Json, model: str) -> dict[str, Any]:
    """Return what a response has from its start. Its id is not the turn's."""
    # The response repeats these fields as the client sent them.
    names = ("instructions", "max_output_tokens", "temperature", "top_p")
    return {
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
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def _events(batch: Generation, head: dict[str, Any]) -> Iterator[Event]:
    """Yield the events of a reply. The last one has the whole response."""
    (reader,) = batch.readers()
    yield "response.created", {"response": head}
    yield "response.in_progress", {"response": head}
    items: list[dict[str, Any]] = []
    for is_call, run in groupby(_parts(reader), key=lambda each: isinstance(each[0], ToolCall)):
        if is_call:
            for call, _ in run:
                yield from _call_events(call, items)
        else:
            yield from _message_events(run, items, reader)
    status = _status(reader)
    read, written = reader.reply.usage.prompt_tokens, reader.reply.usage.completion_tokens
    whole = {
        **head,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if reader.is_cut else None,
        "output": items,
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
        "personalpeft": batch.metadata(reader.reply),
    }
    yield f"response.{status}", {"response": whole}


def _parts(reader: ReplyReader) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yield the parts, each with the log-probs of its tokens if requested."""
    for part in reader:
        yield part, format_logprobs(reader.take_logprobs())
    # The last tokens may have made no text. An empty response has one message.
    rest = format_logprobs(reader.take_logprobs())
    if rest or not (reader.texts or reader.calls):
        yield "", rest


def _message_events(
    run: Iterable[tuple[str, list[dict[str, Any]]]],
    items: list[dict[str, Any]],
    reader: ReplyReader,
) -> Iterator[Event]:
    """Yield the events of a message, and append it to the items."""
    name, number = f"msg_{secrets.token_hex(16)}", len(items)
    item: dict[str, Any] = {
        "type": "message",
        "id": name,
        "status": "in_progress",
        "role": "assistant",
        "content": [],
    }
    place = {"item_id": name, "output_index": number, "content_index": 0}
    yield "response.output_item.added", {"output_index": number, "item": item}
    yield "response.content_part.added", {**place, "part": _part("", [])}
    texts, likely = [], []
    for text, known in run:
        texts.append(text)
        likely += known
        if text or known:
            yield "response.output_text.delta", {**place, "delta": text, "logprobs": known}
    part = _part("".join(texts), likely)
    item = {**item, "status": _status(reader), "content": [part]}
    items.append(item)
    yield "response.output_text.done", {**place, "text": part["text"], "logprobs": likely}
    yield "response.content_part.done", {**place, "part": part}
    yield "response.output_item.done", {"output_index": number, "item": item}


def _call_events(call: ToolCall, items: list[dict[str, Any]]) -> Iterator[Event]:
    """Yield the events of a call, and append it to the items."""
    name, number = f"fc_{secrets.token_hex(16)}", len(items)
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    item = {
        "type": "function_call",
        "id": name,
        "call_id": f"call_{secrets.token_hex(12)}",
        "name": call.name,
        "arguments": arguments,
        "status": "completed",
    }
    items.append(item)
    place = {"item_id": name, "output_index": number}
    begun = {**item, "arguments": "", "status": "in_progress"}
    done = {**place, "name": call.name, "arguments": arguments}
    yield "response.output_item.added", {"output_index": number, "item": begun}
    yield "response.function_call_arguments.delta", {**place, "delta": arguments}
    yield "response.function_call_arguments.done", done
    yield "response.output_item.done", {"output_index": number, "item": item}


def _status(reader: ReplyReader) -> str:
    return "incomplete" if reader.is_cut else "completed"


def _part(text: str, likely: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the one part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": likely}


def _event(numbers: Iterator[int], kind: str, **more: Any) -> str:
    value = {"type": kind, "sequence_number": next(numbers), **more}
    return generation.format_event(value, kind)


def _fault(numbers: Iterator[int], body: dict[str, Any]) -> str:
    about = {name: body["error"][name] for name in ("code", "message", "param")}
    return _event(numbers, "error", **about)
