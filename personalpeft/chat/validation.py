"""What may be asked: prompts and the numbers beside them, checked before anything is loaded or changed."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Never, TypeAlias, cast, get_args

from personalpeft.errors import InvalidInput, nearest
from personalpeft.ids import TOOL_NAME
from personalpeft.types import MOST_TOP_LOGPROBS, Message, Role, Sampling, ToolCall, canonical_json

Prompt: TypeAlias = str | Sequence[Mapping[str, Any] | Message]
Tool: TypeAlias = Mapping[str, Any]
"""A tool as OpenAI's API writes it: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

LONGEST_WRITTEN = 100_000
MOST_TOOLS = 128
# Of JSON within a message; the ledger takes twice as much.
_DEEPEST = 32
_CALL_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_ROLES: tuple[str, ...] = get_args(Role)


def check_prompt(prompt: Prompt) -> tuple[Message, ...]:
    """A string or OpenAI-style messages as messages, of which the last asks something or is what a tool answers. Raises
    ``InvalidInput``.
    """
    if isinstance(prompt, str):
        return (Message("user", check_written(prompt, what="prompt")),)
    if not isinstance(prompt, list | tuple) or not prompt:
        raise InvalidInput(
            "The prompt is empty.",
            hint="Give a string, or a list of messages with role and content.",
        )
    messages = tuple(_message(number, given) for number, given in enumerate(prompt, 1))
    if messages[-1].role == "tool":
        return messages
    if messages[-1].role != "user":
        raise InvalidInput(
            f"The last message is the {messages[-1].role}'s.",
            hint="End with a message of the user.",
        )
    check_written(messages[-1].content, what="prompt")
    return messages


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """OpenAI-style tools, each a function with a name of its own. Raises ``InvalidInput``."""
    if not isinstance(tools, list | tuple) or len(tools) > MOST_TOOLS:
        raise InvalidInput(
            "tools is no list that can be used.", hint=f"Give a list of at most {MOST_TOOLS}."
        )
    names = []
    for number, tool in enumerate(tools, 1):
        about = (
            tool.get("function")
            if isinstance(tool, Mapping) and tool.get("type") == "function"
            else None
        )
        name = about.get("name") if isinstance(about, Mapping) else None
        if (
            not isinstance(about, Mapping)
            or not isinstance(name, str)
            or not TOOL_NAME.fullmatch(name)
        ):
            raise InvalidInput(
                f"Tool {number} is no function with a name that can be used.",
                hint="Each is {'type': 'function', 'function': {'name': letters, digits, '_', '-' and '.', …}}.",
            )
        if not isinstance(about.get("description") or "", str) or not isinstance(
            about.get("parameters") or {}, Mapping
        ):
            raise InvalidInput(
                f"Tool {number} has a description that is no text, or parameters that are no object.",
                hint="Give the parameters as a JSON Schema.",
            )
        names.append(name)
    if len(set(names)) < len(names):
        raise InvalidInput("Two tools have the same name.", hint="Give each a name of its own.")
    return tuple(_check_json(tool, what=f"tool {number}") for number, tool in enumerate(tools, 1))


def check_must_call(tools: Sequence[Tool], must_call: bool | str) -> bool | str:
    """Whether one of these tools is to be called, or which. Raises ``InvalidInput`` where none of them can be meant."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(must_call, bool) and (names or not must_call):
        return must_call
    if isinstance(must_call, str) and must_call in names:
        return must_call
    known = (
        nearest(must_call, names, what="tool")
        if isinstance(must_call, str) and names
        else "Offer it in tools."
    )
    raise InvalidInput("must_call names none of the tools that are offered.", hint=known)


def with_tools(
    messages: tuple[Message, ...], tools: tuple[Tool, ...], must_call: bool | str = False
) -> tuple[Message, ...]:
    """The messages with these tools offered for the reply; as they are without any. Raises as ``check_must_call``."""
    must_call = check_must_call(tools, must_call)
    return (
        (*messages[:-1], replace(messages[-1], tools=tools, must_call=must_call))
        if tools
        else messages
    )


def about_tools(messages: Sequence[Message]) -> bool:
    """Whether a template that knows no tools would leave something of these messages out."""
    return any(
        message.tools or message.tool_calls or message.role == "tool" for message in messages
    )


def check_written(text: object, *, what: str) -> str:
    """A text as it is, if it says something and is storable. Raises ``InvalidInput``."""
    if not isinstance(text, str):
        raise InvalidInput(
            f"The {what} is not text but {type(text).__name__}.", hint="Give a string."
        )
    if all(unicodedata.category(character)[0] in "CZ" for character in text):
        raise InvalidInput(f"The {what} is empty.", hint="Say something in it.")
    if len(text) > LONGEST_WRITTEN:
        raise InvalidInput(
            f"The {what} has {len(text)} characters; at most {LONGEST_WRITTEN} are taken.",
            hint="Shorten it.",
        )
    if "\0" in text or any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise InvalidInput(
            f"The {what} holds characters that are not text.", hint="Send plain text."
        )
    return text


def check_sampling(
    default: Sampling,
    *,
    temperature: float | None,
    top_p: float | None,
    max_tokens: int | None,
    stop: Sequence[str],
    seed: int,
) -> Sampling:
    """The card's defaults with what was asked for in their place. Raises ``InvalidInput`` for a number out of range."""
    if isinstance(stop, str):
        stop = (stop,)
    if not isinstance(stop, list | tuple):
        raise InvalidInput(
            f"stop cannot be {stop!r}.", hint="Give a list of texts that are not empty."
        )
    sampling = Sampling(
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
        max_tokens=default.max_tokens if max_tokens is None else max_tokens,
        seed=seed,
        stop=tuple(stop) or default.stop,
    )
    for name, value, fits, allowed in (
        (
            "temperature",
            sampling.temperature,
            lambda v: _is_number(v) and 0 <= v <= 10,
            "a number from 0 to 10",
        ),
        (
            "top_p",
            sampling.top_p,
            lambda v: _is_number(v) and 0 < v <= 1,
            "a number above 0, at most 1",
        ),
        (
            "max_tokens",
            sampling.max_tokens,
            lambda v: _is_whole(v) and v >= 1,
            "a whole number above 0",
        ),
        (
            "seed",
            sampling.seed,
            lambda v: _is_whole(v) and 0 <= v < 2**63,
            "a whole number from 0 to 2^63 - 1",
        ),
        (
            "stop",
            sampling.stop,
            lambda v: all(isinstance(s, str) and s for s in v),
            "a list of texts that are not empty",
        ),
    ):
        if not fits(value):
            raise InvalidInput(f"{name} cannot be {value!r}.", hint=f"Give {allowed}.")
    return sampling


def check_timeout(seconds: float | None) -> float | None:
    """How long a reply may take. Raises ``InvalidInput``."""
    if seconds is not None and not (_is_number(seconds) and 0 < seconds < float("inf")):
        raise InvalidInput(
            f"timeout cannot be {seconds!r}.", hint="Give seconds above 0, or nothing for no limit."
        )
    return seconds


def check_top_logprobs(count: int) -> int:
    """How many of the likeliest tokens are told of in the place of each. Raises ``InvalidInput``."""
    if not (_is_whole(count) and 0 <= count <= MOST_TOP_LOGPROBS):
        raise InvalidInput(
            f"top_logprobs cannot be {count!r}.",
            hint=f"Give a whole number from 0 to {MOST_TOP_LOGPROBS}.",
        )
    return count


def _message(number: int, given: object) -> Message:
    said: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if isinstance(given, Message):
        said = {field.name: getattr(given, field.name) for field in fields(given)}
    role, content, call_id = said.get("role"), said.get("content"), said.get("tool_call_id") or ""
    listed = said.get("tool_calls") or ()
    if not isinstance(listed, list | tuple) or len(listed) > MOST_TOOLS:
        raise _no_call(number)
    calls = tuple(_call(number, each) for each in listed)
    tools = check_tools(given.tools) if isinstance(given, Message) else ()
    must_call = check_must_call(tools, given.must_call) if isinstance(given, Message) else False
    if content is None and calls:
        content = ""
    if role not in _ROLES or not isinstance(content, str):
        raise InvalidInput(
            f"Message {number} has no role and content that can be used.",
            hint=f"Each message is {{'role': one of {', '.join(_ROLES)}, 'content': text}}.",
        )
    if (calls and role != "assistant") or (call_id and role != "tool"):
        raise InvalidInput(
            f"Message {number} is the {role}'s, and has calls or the id of one.",
            hint="The assistant has tool_calls, a tool the tool_call_id that it answers.",
        )
    if content:
        check_written(content + ".", what=f"content of message {number}")
    if call_id and not (isinstance(call_id, str) and _CALL_ID.fullmatch(call_id)):
        raise _no_call(number)
    for call in calls:
        if not TOOL_NAME.fullmatch(call.name) or (call.id and not _CALL_ID.fullmatch(call.id)):
            raise _no_call(number)
        _check_json(call.arguments, what=f"call of message {number}")
    return Message(cast(Role, role), content, calls, call_id, tools, must_call)


def _call(number: int, given: object) -> ToolCall:
    """A call as OpenAI's API writes it, or one of ours."""
    if isinstance(given, ToolCall):
        return given
    said = given.get("function") if isinstance(given, Mapping) else None
    name, arguments = (
        (said.get("name"), said.get("arguments")) if isinstance(said, Mapping) else (None, None)
    )
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", parse_constant=_no_number)
        except (ValueError, RecursionError):
            arguments = None
    call_id = given.get("id") or "" if isinstance(given, Mapping) else None
    if (
        not isinstance(name, str)
        or not isinstance(arguments, Mapping)
        or not isinstance(call_id, str)
    ):
        raise _no_call(number)
    return ToolCall(name, arguments, call_id)


def _no_call(number: int) -> InvalidInput:
    return InvalidInput(
        f"Message {number} has a call, or the id of one, that cannot be used.",
        hint="A call is {'id': …, 'type': 'function', 'function': {'name': …, 'arguments': a JSON object}}.",
    )


def _no_number(constant: str) -> Never:
    raise ValueError(constant)


def _check_json(value: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
    """A JSON object of our own, which nobody changes under us. Raises ``InvalidInput``."""
    try:
        written = canonical_json(value)
        deep = _depth(value) > _DEEPEST
    except (TypeError, ValueError, RecursionError):
        written, deep = "", True
    if deep:
        raise InvalidInput(
            f"The {what} is no JSON, or nested too deep.", hint=f"Nest at most {_DEEPEST} deep."
        )
    check_written(written, what=what)
    copied: Mapping[str, Any] = json.loads(written)
    return copied


def _depth(value: object) -> int:
    inner = (
        value.values()
        if isinstance(value, Mapping)
        else value
        if isinstance(value, list | tuple)
        else ()
    )
    return 1 + max(map(_depth, inner), default=0)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
