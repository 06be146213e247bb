"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeAlias

from annotated_types import Ge, Le, Len
from flask import Blueprint, Response, jsonify
from pydantic import Field

from personalpeft import Reply
from personalpeft.types import ToolCall
from personalpeft_app.http import generation, tools, validation
from personalpeft_app.http.generation import (
    MAX_MESSAGES,
    Content,
    Generation,
    GenerationBody,
    ReplyReader,
    StopText,
    TextPart,
    Tokens,
    text_of,
)
from personalpeft_app.http.models import Models
from personalpeft_app.http.tools import Choice, FlatTool, ToolOptions
from personalpeft_app.http.validation import Body, Ignored, Part, only


class _ToolUse(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class _ToolResult(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Content = ""


_Part: TypeAlias = Annotated[TextPart | _ToolUse | _ToolResult, Field(discriminator="type")]


class _Message(Part):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[_Part], Len(0, MAX_MESSAGES)]

    def for_library(self) -> Iterator[dict[str, Any]]:
        """Yield the message. For the library, results of tools are messages of their own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        texts = [part for part in self.content if isinstance(part, TextPart)]
        calls = [
            {"id": part.id, "function": {"name": part.name, "arguments": part.input}}
            for part in self.content
            if isinstance(part, _ToolUse)
        ]
        results = [part for part in self.content if isinstance(part, _ToolResult)]
        # The library refuses a call of the user, and a result in a message of the assistant.
        role = "tool" if self.role == "user" else self.role
        for part in results:
            text = text_of(part.content)
            yield {"role": role, "content": text, "tool_call_id": part.tool_use_id}
        if texts or calls or not results:
            about = {"tool_calls": calls} if calls else {}
            yield {"role": self.role, "content": text_of(texts), **about}


class _Tool(FlatTool):
    type: Literal["custom"] = "custom"


class _Choice(Part):
    type: Literal["auto", "none", "any", "tool"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    def for_tools(self) -> Choice:
        words: dict[str, Choice] = {"auto": False, "none": None, "any": True, "tool": self.name}
        return words[self.type]


class CountBody(Body):
    """The body of ``/v1/messages/count_tokens``: the prompt of a reply."""

    model: Annotated[str, Len(1, 256)]
    messages: Annotated[list[_Message], Len(1, MAX_MESSAGES)]
    system: Content = ""
    tools: list[_Tool] = Field(default_factory=list)
    tool_choice: _Choice | None = None
    thinking: Annotated[Any, *only({"type": "disabled"})] = None
    metadata: Ignored = None
    service_tier: Ignored = None
    cache_control: Ignored = None

    def prompt(self, models: Models) -> Sequence[dict[str, Any]]:
        """Return the messages for the library. Raises ``InvalidParameter``."""
        messages = [message for each in self.messages for message in each.for_library()]
        tools.check_calls(models, messages)
        first = [{"role": "system", "content": text_of(self.system)}] if self.system else []
        return [*first, *messages]

    def tool_options(self, models: Models) -> ToolOptions:
        """Return the tools. Raises ``InvalidParameter``."""
        choice = self.tool_choice or _Choice(type="auto")
        return tools.tool_options(
            models,
            [each.nested() for each in self.tools],
            choice.for_tools(),
            single=choice.disable_parallel_tool_use,
        )


class MessageBody(CountBody, GenerationBody):
    """The body of ``/v1/messages``."""

    temperature: Annotated[float, Ge(0), Le(1)] | None = None
    max_tokens: Tokens
    stop_sequences: Annotated[list[StopText], Len(0, 16)] = Field(default_factory=list)


def blueprint(models: Models) -> Blueprint:
    routes = Blueprint("anthropic_messages", __name__)

    @routes.post("/v1/messages")
    def messages() -> Response:
        body = validation.read_body(MessageBody)
        prompt, options = body.prompt(models), body.tool_options(models)
        how = body.sampling(body.max_tokens, stop=body.stop_sequences)
        model = models.resolve(body.model)
        batch = Generation(model, [prompt], how, options)
        head = {
            "id": batch.turn_id,
            "type": "message",
            "role": "assistant",
            "model": model.name,
        }
        if body.stream:
            events = _events(batch, head, options)
            return batch.stream(events, lambda error: generation.format_event(error, "error"))
        (reader,) = batch.read()
        text = "".join(reader.texts)
        content = [{"type": "text", "text": text}] if text or not reader.calls else []
        content += map(_tool_use, reader.calls)
        return batch.response(
            {
                **head,
                "content": content,
                **_end(options, reader),
                "usage": _usage(reader.reply),
                "personalpeft": batch.metadata(reader.reply),
            }
        )

    @routes.post("/v1/messages/count_tokens")
    def count() -> Response:
        body = validation.read_body(CountBody)
        prompt, options = body.prompt(models), body.tool_options(models)
        model = models.resolve(body.model)
        # An unread stream never reaches the model.
        unread = model.user.stream(
            prompt,
            tools=options.tools,
            must_call=options.required,
            max_tokens=1,
            **model.options,
        )
        return jsonify({"input_tokens": unread.prompt_tokens})

    return routes


_EMPTY = {"type": "text", "text": ""}


def _tool_use(call: Any) -> dict[str, Any]:
    """Return a call as a block of content."""
    name = f"toolu_{secrets.token_hex(12)}"
    return {"type": "tool_use", "id": name, "name": call.name, "input": dict(call.arguments)}


def _usage(reply: Reply) -> dict[str, int]:
    usage = reply.usage
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens}


def _end(options: ToolOptions, reader: ReplyReader) -> dict[str, str | None]:
    """Return the stop reason in Anthropic's format."""
    if stop := options.stop_of(reader.reply):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    ended = "max_tokens" if reader.is_cut else "tool_use" if reader.calls else "end_turn"
    return {"stop_reason": ended, "stop_sequence": None}


def _events(batch: Generation, head: dict[str, Any], options: ToolOptions) -> Iterator[str]:
    def event(kind: str, **more: Any) -> str:
        return generation.format_event({"type": kind, **more}, kind)

    (reader,) = batch.readers()
    usage = {"input_tokens": batch.streams[0].prompt_tokens, "output_tokens": 0}
    begun = {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
    yield event("message_start", message=begun)
    for index, (block, deltas) in enumerate(_blocks(reader)):
        yield event("content_block_start", index=index, content_block=block)
        for delta in deltas:
            yield event("content_block_delta", index=index, delta=delta)
        yield event("content_block_stop", index=index)
    yield event(
        "message_delta",
        delta=_end(options, reader),
        usage=_usage(reader.reply),
        personalpeft=batch.metadata(reader.reply),
    )
    yield event("message_stop")


def _blocks(reader: ReplyReader) -> Iterator[tuple[dict[str, Any], Iterable[dict[str, Any]]]]:
    """Yield the content blocks as they begin, each with its deltas. Texts in a row are one block."""
    for is_call, run in groupby(reader, key=lambda part: isinstance(part, ToolCall)):
        if is_call:
            for call in map(_tool_use, run):
                arguments = json.dumps(call["input"], ensure_ascii=False)
                delta = {"type": "input_json_delta", "partial_json": arguments}
                yield {**call, "input": {}}, [delta]
        else:
            yield _EMPTY, ({"type": "text_delta", "text": text} for text in run)
    if not (reader.texts or reader.calls):
        # An empty message has one block of text.
        yield _EMPTY, [{"type": "text_delta", "text": ""}]
