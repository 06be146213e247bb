"""Convert tools and tool calls between OpenAI's and Anthropic's formats and the library's.

Invariant: tools reach the base's chat template, or the request is refused with the parameter's
name. The server never calls a tool.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from personalpeft import Reply, ServingFailed
from personalpeft.base_models.tool_calls import CALL_ENDS, CallReader, Said
from personalpeft.chat.validation import Tool, check_prompt, check_tools
from personalpeft.errors import InvalidInput
from personalpeft.types import ToolCall
from personalpeft_app.http import validation
from personalpeft_app.http.error_responses import InvalidParameter
from personalpeft_app.http.models import Models
from personalpeft_app.http.validation import Body

Choice: TypeAlias = bool | str | None
"""``must_call`` of ``User.chat``, or None if the request switches tools off."""

_ONE_ALONE = "tool_choice must be {}, or name one of the tools."


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request.

    Attributes:
        tools: None if tools are switched off.
        required: Whether the reply must call a tool, or the name of one.
        single: Whether the reply ends with its first call.
        default_stops: The stop strings of a request that names none.
    """

    tools: tuple[Tool, ...] = ()
    required: bool | str = False
    single: bool = False
    default_stops: tuple[str, ...] = ()

    def options(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """Return options for ``User.stream`` with the tools."""
        # A stop string replaces the defaults.
        stop = (*(how["stop"] or self.default_stops), CALL_ENDS) if self.single else how["stop"]
        return {**how, "tools": self.tools, "must_call": self.required, "stop": stop}

    def reader(self) -> CallReader | NullToolParser:
        """Return a parser of calls, which finds none if no tool was offered."""
        return CallReader() if self.tools else NullToolParser()

    def read(self, reply: Reply) -> list[Said]:
        """Return the text and calls of a whole reply. Raises as ``check``."""
        reading = self.reader()
        parts = [*reading.push(reply.text), *reading.finish()]
        self.check(reply, calls_of(parts))
        return parts

    def check(self, reply: Reply, calls: Sequence[ToolCall]) -> None:
        """Raise ``ServingFailed`` for a finished reply without the required call.

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
            raise ServingFailed(
                "The reply must call a tool, and the model wrote no valid call.",
                hint="Ask again, or with tool_choice auto.",
            )

    def stop_of(self, reply: Reply) -> str:
        """Return the request's stop string that ended a reply, else empty."""
        return "" if self.single and reply.stop == CALL_ENDS else reply.stop


def calls_of(parts: Iterable[Said]) -> list[ToolCall]:
    """Return the calls in parts of a reply."""
    return [each for each in parts if isinstance(each, ToolCall)]


def text_of(parts: Iterable[Said]) -> str:
    """Return the text in parts of a reply."""
    return "".join(each for each in parts if isinstance(each, str))


def offered(
    models: Models, body: Body, listed: Any, choice: Choice, *, alone: bool = False
) -> ToolOptions:
    """Return the tools of a request, listed as in OpenAI's chats. Raises ``InvalidParameter``."""
    if not body.get("tools"):
        if choice:
            raise InvalidParameter("tool_choice: there are no tools to choose from.", "tool_choice")
        return ToolOptions()
    if not models.take_tools:
        raise InvalidParameter("tools: the chat template of this base has no tools.", "tools")
    try:
        tools = check_tools(listed)
    except InvalidInput as error:
        raise InvalidParameter(f"tools: {error}", "tools") from error
    for number, tool in enumerate(tools):
        if tool["function"].get("strict"):
            place = f"tools[{number}].strict"
            raise InvalidParameter(
                f"{place}: arguments are not constrained to their schema.", place
            )
    if choice is None:
        return ToolOptions()
    if isinstance(choice, str) and choice not in (tool["function"]["name"] for tool in tools):
        raise InvalidParameter("tool_choice names none of the tools.", "tool_choice")
    return ToolOptions(tools, choice, alone, models.default_stops)


def checked(
    models: Models, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> Sequence[Mapping[str, Any]]:
    """Return the messages if their tool calls are valid. Raises ``InvalidParameter``."""
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        if not models.take_tools:
            raise InvalidParameter(f"{where}: the chat template of this base has no tools.", where)
        try:
            check_prompt(messages)
        except InvalidInput as error:
            raise InvalidParameter(f"{where}: {error}", where) from error
    return messages


def openai_choice(body: Body, *, flat: bool = False) -> Choice:
    """Read ``tool_choice`` of OpenAI's chats, or ``flat`` of its responses."""
    choice = body.get("tool_choice")
    words: dict[Any, Choice] = {"auto": False, "none": None, "required": True}
    if choice is None:
        return False
    if isinstance(choice, str) and choice in words:
        return words[choice]
    if isinstance(choice, dict) and choice.get("type") == "function":
        about = choice if flat else choice.get("function")
        if isinstance(about, dict) and isinstance(about.get("name"), str):
            return str(about["name"])
    raise InvalidParameter(_ONE_ALONE.format("auto, none or required"), "tool_choice")


def about_tools(each: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the tool calls or results of a message of OpenAI's chats."""
    if each["role"] == "tool" and not isinstance(each.get("tool_call_id"), str):
        raise InvalidParameter(f"{place}.tool_call_id is missing.", f"{place}.tool_call_id")
    return {key: each[key] for key in ("tool_calls", "tool_call_id") if each.get(key)}


def openai_call(call: ToolCall) -> dict[str, Any]:
    """Return a call in OpenAI's format."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def flat_tools(listed: Any) -> Any:
    """Return tools of OpenAI's responses in the format of its chats."""
    return _tools(listed, "function", "parameters")


def anthropic_tools(listed: Any) -> Any:
    """Return Anthropic's tools in OpenAI's format."""
    return _tools(listed, "custom", "input_schema")


def anthropic_choice(body: Body) -> tuple[Choice, bool]:
    """Read Anthropic's ``tool_choice``, and whether a call must be the only one."""
    choice = body.get("tool_choice")
    if choice is None:
        return False, False
    kinds: dict[Any, Choice] = {"auto": False, "none": None, "any": True}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(kind, str) and kind in kinds:
        return kinds[kind], validation.read_bool(choice, "disable_parallel_tool_use")
    if kind == "tool" and isinstance(choice.get("name"), str):
        return choice["name"], validation.read_bool(choice, "disable_parallel_tool_use")
    raise InvalidParameter(_ONE_ALONE.format("of type auto, none or any"), "tool_choice")


def anthropic_messages(listed: Any) -> Any:
    """Return Anthropic's messages in OpenAI's format, where tool results are messages."""
    if not isinstance(listed, list):
        return listed
    return [message for each in listed for message in _apart(each)]


def anthropic_call(call: ToolCall) -> dict[str, Any]:
    """Return a call as Anthropic's block of content."""
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": dict(call.arguments),
    }


class NullToolParser:
    """A parser that finds no calls."""

    def push(self, text: str) -> Sequence[Said]:
        return (text,)

    def finish(self) -> Sequence[Said]:
        return ()


def _tools(listed: Any, kind: str, schema: str) -> Any:
    """Return flat tools in the format of OpenAI's chats."""
    if not isinstance(listed, list):
        return listed
    made = []
    for number, each in enumerate(listed):
        if not isinstance(each, dict) or each.get("type", kind) != kind:
            raise InvalidParameter(
                f"tools[{number}]: only function tools are supported.", f"tools[{number}]"
            )
        about = {
            "name": each.get("name"),
            "description": each.get("description") or "",
            "strict": each.get("strict"),
        }
        given = {key: value for key, value in about.items() if value is not None}
        made.append(
            {"type": "function", "function": {**given, "parameters": each.get(schema) or {}}}
        )
    return made


def _apart(each: Any) -> Iterator[Any]:
    content = each.get("content") if isinstance(each, dict) else None
    if not isinstance(content, list):
        yield each
        return
    kinds = {"user": "tool_result", "assistant": "tool_use"}
    kind = kinds.get(str(each.get("role")))
    own = [part for part in content if isinstance(part, dict) and part.get("type") == kind]
    rest = [part for part in content if part not in own]
    if not own:
        yield each
    elif kind == "tool_use":
        calls = [
            {
                "id": part.get("id"),
                "function": {"name": part.get("name"), "arguments": part.get("input")},
            }
            for part in own
        ]
        yield {"role": "assistant", "content": rest, "tool_calls": calls}
    else:
        for part in own:
            yield {
                "role": "tool",
                "content": part.get("content") or "",
                "tool_call_id": part.get("tool_use_id"),
            }
        if rest:
            yield {"role": "user", "content": rest}
