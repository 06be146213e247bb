"""Render messages to the text that a base reads, through its chat template.

Invariant: the text of a message, tool or call never becomes a control token. In chats with tools it
never becomes a tool mark either. A zero-width space after the first character breaks up the text.

Templates are untrusted, so they run in jinja's sandbox with the settings of transformers.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from functools import lru_cache, partial
from typing import Any, Never

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from personalpeft.base_models.tool_calls import read_calls
from personalpeft.base_models.types import Base
from personalpeft.errors import CardError, InvalidInput, PersonalPeftError
from personalpeft.types import Message, ToolCall, ToolFormat

_ZERO_WIDTH_SPACE = "\u200b"
# Templates mark tools, calls and results with these. They are not control tokens of tokenizers.
_MARKS = (
    *("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<|tool|>", "<|/tool|>", "<|tool_call|>", "<|/tool_call|>"),
)
# Phi-4 mini's template shows the tools of a system message. This is the one of its makers' example.
_PHI4_MINI_SYSTEM = "You are a helpful assistant with some tools."
# The date of every prompt. With the date of today, a lesson would be another text on each day, and
# a revision could not be built again. Llama 3.2's template has this one where there is no clock.
_TODAY = date(2024, 7, 26)


class _Refusal(TemplateError):
    """A call of ``raise_exception`` in a template."""


class _Generation(Extension):
    """The tag around what a model generates. Only trainers of other libraries read it."""

    tags = {"generation"}  # noqa: RUF012 - jinja's name and type

    def parse(self, parser: Parser) -> list[Node]:
        """Return what is inside of the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render_chat(
    base: Base, messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> str:
    """Return messages as the base reads them.

    Args:
        base: The base.
        messages: The chat. Without a system message, it begins with the card's.
        add_generation_prompt: Whether a reply is to follow.

    Raises:
        InvalidInput: The template refuses the messages.
        CardError: The template does not work.
    """
    system = base.card.system
    if system is not None and not any(message.role == "system" for message in messages):
        messages = (Message("system", system), *messages)
    return _render(base, messages, add_generation_prompt=add_generation_prompt)


def _render(
    base: Base,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    tool_format: ToolFormat | None = None,
) -> str:
    """Return messages through the template as they are. ``tool_format`` replaces the base's."""
    about_tools = any(
        message.tools or message.tool_calls or message.role == "tool" for message in messages
    )
    control = (*base.control, *_MARKS) if about_tools else base.control
    escaped = [_messages_for_template(message, control) for message in messages]
    # The last tools that a message offers are the ones that can be called.
    offered = next((message.tools for message in reversed(messages) if message.tools), ())
    tools = [_escaped(tool, control) for tool in offered] or None
    if (tool_format or base.tool_format) is ToolFormat.PHI4_MINI:
        escaped, tools = _phi4_mini_messages(escaped, tools or ()), None
    try:
        return _compile(base.template).render(
            messages=escaped,
            add_generation_prompt=add_generation_prompt,
            bos_token=base.bos,
            eos_token=base.eos,
            tools=tools,
        )
    except _Refusal as error:
        raise InvalidInput(
            f"The chat template refuses these messages: {error.message}.",
            hint="Let user and assistant take turns, beginning with the user.",
        ) from error
    except Exception as error:  # The filters of jinja raise any kind.
        # jinja writes the line of a mistake below its message.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CardError(
            f"The chat template does not work: {reason}.", hint="Correct it in the card."
        ) from error


def escape_control_tokens(text: str, control: Sequence[str]) -> str:
    """Break up every spelling of a control token in a text."""
    single, longer = _spellings(tuple(control))
    for token in single:
        text = text.replace(token, "")
    return longer.sub(lambda match: match[0] + _ZERO_WIDTH_SPACE, text) if longer else text


def _messages_for_template(message: Message, control: Sequence[str]) -> dict[str, Any]:
    """Return a message as templates read it."""
    escape = partial(_escaped, control=control)
    fields: dict[str, Any] = {"role": escape(message.role), "content": escape(message.content)}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": escape(call.id),
                "type": "function",
                "function": {"name": escape(call.name), "arguments": escape(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        fields["tool_call_id"] = escape(message.tool_call_id)
    return fields


def _escaped(value: Any, control: Sequence[str]) -> Any:
    """Escape every text in a JSON value, keys too."""
    if isinstance(value, str):
        return escape_control_tokens(value, control)
    if isinstance(value, Mapping):
        return {_escaped(key, control): _escaped(each, control) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(each, control) for each in value]
    return value


def _phi4_mini_messages(
    messages: Sequence[dict[str, Any]], tools: Sequence[Any]
) -> list[dict[str, Any]]:
    """Return messages with tools and calls where Phi-4 mini reads them. Its template shows neither.

    The tools are a text in the system message, and calls are a part of a reply.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        calls = [
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            for call in message.get("tool_calls", ())
        ]
        text = f"<|tool_call|>{_tojson(calls)}<|/tool_call|>" if calls else ""
        shown.append({**message, "content": message["content"] + text})
    if tools:
        if not shown or shown[0]["role"] != "system":
            shown.insert(0, {"role": "system", "content": _PHI4_MINI_SYSTEM})
        functions = [tool.get("function", tool) for tool in tools]
        shown[0] = {**shown[0], "tools": _tojson(functions)}
    return shown


@lru_cache(maxsize=16)
def _spellings(control: tuple[str, ...]) -> tuple[tuple[str, ...], re.Pattern[str] | None]:
    # The pattern looks ahead for all but the first character, to match spellings that overlap.
    # It is grouped by first characters: a base can have thousands of control tokens.
    rests: defaultdict[str, list[str]] = defaultdict(list)
    for token in control:
        if len(token) > 1:
            rests[token[0]].append(re.escape(token[1:]))
    groups = [f"{re.escape(first)}(?={'|'.join(endings)})" for first, endings in rests.items()]
    single = tuple(token for token in control if len(token) == 1)
    return single, re.compile("|".join(groups)) if groups else None


@lru_cache(maxsize=16)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _TODAY.strftime
    return environment.from_string(template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> Never:
    raise _Refusal(message)


def end_of_turn(base: Base) -> str | None:
    """Return the control token that the template writes after a reply, if any.

    Raises ``CardError`` and ``InvalidInput`` if the template does not work, or refuses a chat.
    """
    question, reply = "personalpeft asks", "personalpeft replies"
    chat = [Message("user", question), Message("assistant", reply)]
    after = _render(base, chat, add_generation_prompt=False).rpartition(reply)[2].lstrip()
    return max((token for token in base.control if after.startswith(token)), key=len, default=None)


def shows_messages(base: Base) -> bool:
    """Return whether the template writes the content of a message, in whatever case."""
    text = "personalpeft asks"
    return text in _render(base, [Message("user", text)]).casefold()


def find_tool_format(base: Base) -> ToolFormat:
    """Return how a base writes tool calls: as its card says, or in the format of its template.

    ``NONE`` if the template does not show tools, their results, and calls in that format.
    """
    wanted = base.card.tool_format
    formats = ToolFormat if wanted is None else (wanted,)
    return next((each for each in formats if _shows_tools(base, each)), ToolFormat.NONE)


def _shows_tools(base: Base, tool_format: ToolFormat) -> bool:
    call = ToolCall("personalpeft_tool", {"text": "personalpeft calls"}, "call_1")
    about = {
        "name": call.name,
        "description": "personalpeft offers",
        "parameters": {"type": "object", "properties": {}},
    }
    asked, answered = "personalpeft asks", "personalpeft answers"
    tools = ({"type": "function", "function": about},)
    messages = [
        Message("user", asked, tools=tools),
        Message("assistant", "", (call,)),
        Message("tool", answered, tool_call_id=call.id),
    ]
    try:
        text = _render(base, messages, tool_format=tool_format)
        prompt = _render(base, messages[:1], tool_format=tool_format)
    except PersonalPeftError:
        return False
    reply = text.rpartition(answered)[0].rpartition(asked)[2]
    if tool_format is ToolFormat.LLAMA3_JSON and reply:
        # Nothing may stand around the call: it has no marks.
        reply = text.removeprefix(prompt)
        ends = (reply.find(each) for each in base.control if each in reply)
        reply = reply[: min(ends, default=len(reply))]
    _, calls = read_calls(reply, tool_format)
    return "personalpeft offers" in text and any(
        (each.name, each.arguments) == (call.name, call.arguments) for each in calls
    )
