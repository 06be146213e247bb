"""Tools as OpenAI's and Anthropic's clients speak of them, and the library's words for the same.

Invariant: what is offered here goes through the base's chat template, or the request is refused by the name of the parameter; a tool is
never called here.
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
"""What a request says of calling: as ``must_call`` of ``User.chat``, and None where tools are switched off."""

_ONE_ALONE = "tool_choice must be {}, or name one of the tools."


@dataclass(frozen=True, slots=True)
class ToolOptions:
    """The tools of a request, none where they are switched off; whether one ``must`` be called, or which; ``alone``: a reply ends with
    its first call, or as ``usual`` where the request names no stop strings.
    """

    tools: tuple[Tool, ...] = ()
    required: bool | str = False
    single: bool = False
    default_parser: tuple[str, ...] = ()

    def asked(self, how: Mapping[str, Any]) -> dict[str, Any]:
        """How to ask, with all of this in it."""
        # Any stop string stands in place of the usual ones.
        stop = (*(how["stop"] or self.default_parser), CALL_ENDS) if self.single else how["stop"]
        return {**how, "tools": self.tools, "must_call": self.required, "stop": stop}

    def reader(self) -> CallReader | NullToolParser:
        """What tells calls from text in a reply; all is text where no tool was offered."""
        return CallReader() if self.tools else NullToolParser()

    def read(self, reply: Reply) -> list[Said]:
        """A whole reply as its text and calls. Raises as ``check``."""
        reading = self.reader()
        said = [*reading.push(reply.text), *reading.finish()]
        self.check(reply, calls_of(said))
        return said

    def check(self, reply: Reply, calls: Sequence[ToolCall]) -> None:
        """Raises ``ServingFailed`` for a reply that came to its end without the call that it had to make: a reply can be begun as a
        call, but not be made to go on as one.
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
                "The reply had to call a tool, and the model wrote no call that can be read.",
                hint="Ask again, or with tool_choice auto.",
            )

    def stop_of(self, reply: Reply) -> str:
        """The stop string of the request that ended a reply, empty where none did."""
        return "" if self.single and reply.stop == CALL_ENDS else reply.stop


def calls_of(said: Iterable[Said]) -> list[ToolCall]:
    """The calls among what was said."""
    return [each for each in said if isinstance(each, ToolCall)]


def text_of(said: Iterable[Said]) -> str:
    """The text among what was said."""
    return "".join(each for each in said if isinstance(each, str))


def offered(
    models: Models, body: Body, listed: Any, choice: Choice, *, alone: bool = False
) -> ToolOptions:
    """What a request offers; ``listed`` are its tools as OpenAI's chats have them. Raises ``Unsupported``."""
    if not body.get("tools"):
        if choice:
            raise InvalidParameter("tool_choice: there are no tools to choose from.", "tool_choice")
        return ToolOptions()
    if not models.take_tools:
        raise InvalidParameter("tools: the chat template of this base knows no tools.", "tools")
    try:
        tools = check_tools(listed)
    except InvalidInput as error:
        raise InvalidParameter(f"tools: {error}", "tools") from error
    for number, tool in enumerate(tools):
        if tool["function"].get("strict"):
            place = f"tools[{number}].strict"
            raise InvalidParameter(
                f"{place}: nothing sees to it that arguments fit their schema.", place
            )
    if choice is None:
        return ToolOptions()
    if isinstance(choice, str) and choice not in (tool["function"]["name"] for tool in tools):
        raise InvalidParameter("tool_choice names none of the tools.", "tool_choice")
    return ToolOptions(tools, choice, alone, models.default_stops)


def checked(
    models: Models, messages: Sequence[Mapping[str, Any]], where: str = "messages"
) -> Sequence[Mapping[str, Any]]:
    """The messages, if what they say of tools can be read. Raises ``Unsupported``, which names ``where`` they stand."""
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages):
        if not models.take_tools:
            raise InvalidParameter(
                f"{where}: the chat template of this base knows no tools.", where
            )
        try:
            check_prompt(messages)
        except InvalidInput as error:
            raise InvalidParameter(f"{where}: {error}", where) from error
    return messages


def openai_choice(body: Body, *, flat: bool = False) -> Choice:
    """``tool_choice`` as OpenAI's chats have it, or ``flat`` as its responses do. Raises ``Unsupported``."""
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
    """What a message of OpenAI's chats says of tools. Raises ``Unsupported``."""
    if each["role"] == "tool" and not isinstance(each.get("tool_call_id"), str):
        raise InvalidParameter(f"{place}.tool_call_id is missing.", f"{place}.tool_call_id")
    return {key: each[key] for key in ("tool_calls", "tool_call_id") if each.get(key)}


def openai_call(call: ToolCall) -> dict[str, Any]:
    """A call as OpenAI's clients read it."""
    function = {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def flat_tools(listed: Any) -> Any:
    """The tools of OpenAI's responses as those of its chats."""
    return _tools(listed, "function", "parameters")


def anthropic_tools(listed: Any) -> Any:
    """Anthropic's tools as OpenAI's."""
    return _tools(listed, "custom", "input_schema")


def anthropic_choice(body: Body) -> tuple[Choice, bool]:
    """``tool_choice`` as Anthropic's clients have it, and whether a call stands alone. Raises ``Unsupported``."""
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
    """Anthropic's messages with calls and results as parts, as OpenAI's with both as messages of their own."""
    if not isinstance(listed, list):
        return listed
    return [said for each in listed for said in _apart(each)]


def anthropic_call(call: ToolCall) -> dict[str, Any]:
    """A call as a block of content."""
    return {
        "type": "tool_use",
        "id": f"toolu_{secrets.token_hex(12)}",
        "name": call.name,
        "input": dict(call.arguments),
    }


class NullToolParser:
    """A reader that finds no calls."""

    def push(self, text: str) -> Sequence[Said]:
        return (text,)

    def finish(self) -> Sequence[Said]:
        return ()


def _tools(listed: Any, kind: str, schema: str) -> Any:
    """Tools of which all stands beside their type, as OpenAI's chats have them."""
    if not isinstance(listed, list):
        return listed
    made = []
    for number, each in enumerate(listed):
        if not isinstance(each, dict) or each.get("type", kind) != kind:
            raise InvalidParameter(
                f"tools[{number}]: only tools of one's own can be offered.", f"tools[{number}]"
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
