"""The tools of a request, in OpenAI's format and the library's, and the calls of a reply.

Invariant: tools reach the base's chat template, or the request is refused with the parameter's
name. The server never calls a tool.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import AliasChoices, AliasPath, Field

from personalpeft import Reply, ServingFailed
from personalpeft.base_models.tool_calls import ReplyPart, call_end, call_reader
from personalpeft.chat.validation import Tool, check_prompt, check_tools
from personalpeft.errors import InvalidInput
from personalpeft.types import Json, ToolCall, ToolFormat
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.models import Models
from personalpeft_app.http.validation import Part

Choice: TypeAlias = bool | str | None
"""``must_call`` of ``User.chat``, or None if the request switches tools off."""

ChoiceWord: TypeAlias = Literal["auto", "none", "required"]


class NamedTool(Part):
    """The tool that must be called, in the format of OpenAI's chats or its responses."""

    type: Literal["function"]
    name: str = Field(validation_alias=AliasChoices("name", AliasPath("function", "name")))


class FlatTool(Part):
    """A tool whose fields are not nested, as in OpenAI's Responses API and Anthropic's API."""

    name: str
    description: str = ""
    strict: bool | None = None
    parameters: dict[str, Any] = Field(
        default_factory=dict, validation_alias=AliasChoices("parameters", "input_schema")
    )

    def nested(self) -> Tool:
        """Return the tool in the format of OpenAI's chats."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        strict = {} if self.strict is None else {"strict": self.strict}
        return {"type": "function", "function": {**about, **strict}}


class RequiredCallMissing(ServingFailed):
    """The model wrote no valid call where the request requires one."""

    # The client libraries of OpenAI and Anthropic would ask twice more by themselves.
    should_retry = False


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request.

    Attributes:
        tools: Empty if tools are switched off.
        required: Whether the reply must call a tool, or the name of one.
        single: Whether the reply ends with its first call. Where that has no mark at its end, later
            ones are left out.
        default_stops: The stop strings of a request that names none.
        tool_format: How the base writes calls.
    """

    tools: tuple[Tool, ...] = ()
    required: bool | str = False
    single: bool = False
    default_stops: tuple[str, ...] = ()
    tool_format: ToolFormat = ToolFormat.NONE

    def options(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return options for ``User.stream`` with the tools."""
        stop = how["stop"]
        if self.single and (end := call_end(self.tool_format)):
            # A stop string replaces the defaults.
            stop = (*(stop or self.default_stops), end)
        return {**how, "tools": self.tools, "must_call": self.required, "stop": stop}

    def parts(self, pieces: Iterable[str]) -> Iterator[ReplyPart]:
        """Yield the texts and calls in the pieces of a reply: no call if no tool was offered."""
        if not self.tools:
            yield from pieces
            return
        reader = call_reader(self.tool_format)
        for piece in pieces:
            yield from reader.push(piece)
        yield from reader.finish()

    def check(self, reply: Reply, calls: Sequence[ToolCall]) -> None:
        """Raise ``RequiredCallMissing`` for a finished reply without the required call.

        A reply can be started as a call, but the model may not finish one.
        """
        wanted = (
            {self.required}
            if isinstance(self.required, str)
            else {tool["function"]["name"] for tool in self.tools}
        )
        if (
            self.required
            and reply.finish_reason == "stop"
            and not any(call.name in wanted for call in calls)
        ):
            raise RequiredCallMissing(
                "The reply must call a tool, and the model wrote no valid call.",
                hint="Ask again, or with tool_choice auto.",
            )

    def stop_of(self, reply: Reply) -> str:
        """Return the request's stop string that ended a reply, else empty."""
        return "" if self.single and reply.stop == call_end(self.tool_format) else reply.stop


def tool_options(
    models: Models, tools: Sequence[Tool], choice: Choice, *, single: bool
) -> ToolOptions:
    """Return the tools of a request, in the format of OpenAI's chats, as options.

    Raises ``InvalidParameter``.
    """
    if not tools and not choice:
        return ToolOptions()
    with _checking(models, "tools"):
        checked = check_tools(tools)
        if any(tool["function"].get("strict") for tool in checked):
            raise InvalidInput("A tool is strict, and no schema is enforced.")
    if choice is None:
        return ToolOptions()
    names = [tool["function"]["name"] for tool in checked]
    if choice and not (names if choice is True else choice in names):
        raise InvalidParameter("tool_choice", "must name one of the tools")
    base = models.base
    return ToolOptions(checked, choice, single, base.card.sampling.stop, base.tool_format)


def openai_choice(choice: ChoiceWord | NamedTool) -> Choice:
    """Return OpenAI's ``tool_choice`` for ``tool_options``."""
    if isinstance(choice, NamedTool):
        return choice.name
    words: Mapping[ChoiceWord, Choice] = {"auto": False, "none": None, "required": True}
    return words[choice]


def check_calls(
    models: Models, messages: Sequence[Json], where: str = "messages"
) -> Sequence[Json]:
    """Return the messages if their tool calls are valid. Raises ``InvalidParameter``."""
    about = {"tool_calls", "tool_call_id"}
    if any(message["role"] == "tool" or about & message.keys() for message in messages):
        with _checking(models, where):
            check_prompt(messages)
    return messages


@contextmanager
def _checking(models: Models, param: str) -> Iterator[None]:
    """Raise ``InvalidParameter`` for a base without tools, and for ``InvalidInput`` inside."""
    if models.base.tool_format is ToolFormat.NONE:
        raise InvalidParameter(param, "needs a base whose chat template has tools")
    try:
        yield
    except InvalidInput as error:
        raise InvalidParameter(param, f"is invalid: {error}".removesuffix(".")) from error


def openai_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in the format of OpenAI's chats."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}
