"""Validate prompts, tools and sampling parameters before anything is loaded or changed."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any, Literal, TypeAlias, TypeGuard, cast, get_args

from personalpeft.arguments import check_number
from personalpeft.errors import InvalidInput, suggest_nearest
from personalpeft.ids import TOOL_NAME
from personalpeft.types import (
    Message,
    Role,
    Sampling,
    ToolCall,
    canonical_json,
    parse_strict_json,
)

Prompt: TypeAlias = str | Sequence[Mapping[str, Any] | Message]
Tool: TypeAlias = Mapping[str, Any]
"""An OpenAI tool: ``{"type": "function", "function": {"name", "description", "parameters"}}``."""

Truncation: TypeAlias = Literal["auto", "disabled"]

MAX_TEXT_LENGTH = 100_000
MAX_TOOLS = 128
# Of JSON inside a message; the ledger accepts twice as much.
_MAX_DEPTH = 32
# Empty where a call has none.
_CALL_ID = re.compile(r"[A-Za-z0-9_.:-]{0,128}")
_ROLES: tuple[str, ...] = get_args(Role)


def check_prompt(prompt: Prompt) -> tuple[Message, ...]:
    """Return a string or OpenAI-style messages as messages.

    The last one must be from the user or a tool. Raises ``InvalidInput``.
    """
    if isinstance(prompt, str):
        return (Message("user", check_text(prompt, what="prompt")),)
    hint = "Give a string, or a list of messages with role and content."
    if not isinstance(prompt, list | tuple):
        kind = type(prompt).__name__
        raise InvalidInput(f"The prompt must be text or a list of messages, got {kind}.", hint=hint)
    if not prompt:
        raise InvalidInput("The prompt is empty.", hint=hint)
    messages = tuple(_message(number, each) for number, each in enumerate(prompt, 1))
    if messages[-1].role == "tool":
        return messages
    if messages[-1].role != "user":
        raise InvalidInput(
            f"The last message must have the role user or tool, got {messages[-1].role}.",
            hint="End with a message of the user.",
        )
    check_text(messages[-1].content, what="prompt")
    return messages


def check_tools(tools: Sequence[Tool]) -> tuple[Tool, ...]:
    """Return copies of OpenAI-style tools with distinct names. Raises ``InvalidInput``."""
    if not isinstance(tools, list | tuple) or len(tools) > MAX_TOOLS:
        raise InvalidInput(
            f"tools must be a list of at most {MAX_TOOLS}.", hint="Give fewer, in a list."
        )
    for number, tool in enumerate(tools, 1):
        if not _is_tool(tool):
            raise InvalidInput(
                f"Tool {number} must be a function with a valid name, a text as its description, "
                "and objects as its parameters and their properties.",
                hint="Give {'type': 'function', 'function': {'name': …, 'parameters': …}}: the name "
                "of letters, digits, '_', '-' and '.', the parameters as a JSON Schema.",
            )
    if len({tool["function"]["name"] for tool in tools}) < len(tools):
        raise InvalidInput("Two tools have the same name.", hint="Rename one of them.")
    return tuple(_check_json(tool, what=f"tool {number}") for number, tool in enumerate(tools, 1))


def _is_tool(tool: Tool) -> bool:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            parameters = rest.get("parameters") or {}
            return (
                TOOL_NAME.fullmatch(name) is not None
                and isinstance(rest.get("description") or "", str)
                and isinstance(parameters, Mapping)
                # Chat templates read it as an object.
                and isinstance(parameters.get("properties") or {}, Mapping)
            )
    return False


def check_must_call(tools: Sequence[Tool], must_call: bool | str) -> bool | str:
    """Return ``must_call`` if the tools can satisfy it. Raises ``InvalidInput``."""
    names = [tool["function"]["name"] for tool in tools]
    if isinstance(must_call, bool) and (names or not must_call):
        return must_call
    if isinstance(must_call, str) and must_call in names:
        return must_call
    raise InvalidInput(
        "must_call must be a bool or the name of one of the tools.",
        hint=suggest_nearest(must_call, names, what="tool")
        if isinstance(must_call, str) and names
        else "Add the tool to tools.",
    )


def attach_tools(
    messages: tuple[Message, ...], tools: tuple[Tool, ...], must_call: bool | str = False
) -> tuple[Message, ...]:
    """Return the messages with tools offered in the last one. Raises as ``check_must_call``."""
    must_call = check_must_call(tools, must_call)
    if not tools:
        return messages
    return (*messages[:-1], replace(messages[-1], tools=tools, must_call=must_call))


def check_text(
    text: object, *, what: str, max_length: int = MAX_TEXT_LENGTH, is_plain: bool = False
) -> str:
    """Return ``text`` if it is a visible, storable string.

    Args:
        text: What to check.
        what: Its name in the message, as in "prompt".
        max_length: The most characters that it may have.
        is_plain: Whether tabs and line ends are the only control characters that it may have.

    Raises:
        InvalidInput: It is not.
    """
    if not isinstance(text, str):
        raise InvalidInput(
            f"The {what} must be text, got {type(text).__name__}.", hint="Give a string."
        )
    if all(unicodedata.category(character)[0] in "CZ" for character in text):
        raise InvalidInput(f"The {what} is empty.", hint="Give a text with visible characters.")
    if len(text) > max_length:
        raise InvalidInput(
            f"The {what} must have at most {max_length} characters, got {len(text)}.",
            hint="Shorten it.",
        )
    for character in text:
        is_control = is_plain and unicodedata.category(character) == "Cc"
        if (
            character == "\0"
            or 0xD800 <= ord(character) <= 0xDFFF
            or (is_control and character not in "\t\n\r")
        ):
            raise InvalidInput(
                f"The {what} contains U+{ord(character):04X}, which is not text.",
                hint="Send plain text.",
            )
    return text


def check_sampling(
    default: Sampling,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    seed: int = 0,
) -> Sampling:
    """Return the card's sampling with the given values in place. Raises ``InvalidInput``."""
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(t, str) and t for t in texts):
        allowed = "a list of texts that are not empty"
        raise InvalidInput(f"stop must be {allowed}, got {stop!r}.", hint=f"Give {allowed}.")
    sampling = replace(
        default,
        temperature=default.temperature if temperature is None else temperature,
        top_p=default.top_p if top_p is None else top_p,
        max_tokens=default.max_tokens if max_tokens is None else max_tokens,
        seed=seed,
        stop=tuple(texts) or default.stop,
    )
    check_number("temperature", sampling.temperature, 0, 10)
    check_number("top_p", sampling.top_p, 0, 1, above=True)
    check_number("max_tokens", sampling.max_tokens, 1, whole=True)
    check_number("seed", sampling.seed, 0, 2**63 - 1, whole=True)
    return sampling


def check_continuation(messages: Sequence[Message]) -> None:
    """Raise ``InvalidInput`` unless messages can be added to a stored conversation."""
    if any(message.role == "assistant" for message in messages):
        raise InvalidInput(
            "The history of a conversation is added by itself.",
            hint="Give only the new messages, or leave conversation_id and replaces out.",
        )


def _message(number: int, value: object) -> Message:
    data: Mapping[str, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, Message):
        data = {field.name: getattr(value, field.name) for field in fields(value)}
    role, content, call_id = data.get("role"), data.get("content"), data.get("tool_call_id") or ""
    listed = data.get("tool_calls") or ()
    if not _is_call_id(call_id) or not isinstance(listed, list | tuple) or len(listed) > MAX_TOOLS:
        raise _invalid_call(number)
    calls = tuple(_call(number, each) for each in listed)
    # Tools inside a message exist only in our own type; a mapping offers them beside the prompt.
    tools = check_tools(value.tools) if isinstance(value, Message) else ()
    must_call = check_must_call(tools, value.must_call) if isinstance(value, Message) else False
    if content is None and calls:
        content = ""
    if role not in _ROLES or not isinstance(content, str):
        kind = type(content).__name__
        raise InvalidInput(
            f"Message {number} has an invalid role or content: {role!a:.40}, {kind}.",
            hint=f"Give {{'role': one of {', '.join(_ROLES)}, 'content': text}}.",
        )
    if (calls and role != "assistant") or (call_id and role != "tool"):
        raise InvalidInput(
            f"Message {number} has tool_calls or a tool_call_id that its role cannot have.",
            hint="Only the assistant has tool_calls, only a tool has a tool_call_id.",
        )
    if content:
        # With a full stop, since a message may be blank.
        check_text(content + ".", what=f"content of message {number}")
    return Message(cast(Role, role), content, calls, call_id, tools, must_call)


def _call(number: int, value: object) -> ToolCall:
    """Return an OpenAI tool call, or a ``ToolCall``, as a ``ToolCall``."""
    call_id: object
    match value:
        case ToolCall(name, arguments, call_id):
            pass
        case {"function": {"name": str(name), "arguments": arguments}, **rest}:
            call_id = rest.get("id") or ""
            if isinstance(arguments, str):
                with suppress(ValueError, RecursionError):
                    arguments = parse_strict_json(arguments or "{}")
        case _:
            raise _invalid_call(number)
    if (
        not _is_call_id(call_id)
        or not isinstance(arguments, Mapping)
        or not TOOL_NAME.fullmatch(name)
    ):
        raise _invalid_call(number)
    _check_json(arguments, what=f"call of message {number}")
    # A copy in the same order: the caller may change its dictionary before the turn is recorded.
    return ToolCall(name, deepcopy(arguments), call_id)


def _is_call_id(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _CALL_ID.fullmatch(value) is not None


def _invalid_call(number: int) -> InvalidInput:
    return InvalidInput(
        f"Message {number} has an invalid tool call or tool_call_id.",
        hint="A call is {'id': …, 'type': 'function', 'function': {'name': …, 'arguments': …}}, "
        "the arguments a JSON object.",
    )


def _check_json(value: Mapping[str, Any], *, what: str) -> Mapping[str, Any]:
    """Return a deep copy of a JSON object, safe from callers' changes. Raises ``InvalidInput``."""
    try:
        text = canonical_json(value)
        is_valid = _depth(value) <= _MAX_DEPTH
    except (TypeError, ValueError, RecursionError):
        text, is_valid = "", False
    if not is_valid:
        raise InvalidInput(
            f"The {what} must be JSON nested at most {_MAX_DEPTH} deep.", hint="Flatten it."
        )
    check_text(text, what=what)
    copied: Mapping[str, Any] = json.loads(text)
    return copied


def _depth(value: object) -> int:
    if isinstance(value, Mapping):
        return 1 + max(map(_depth, value.values()), default=0)
    return 1 + max(map(_depth, value), default=0) if isinstance(value, list | tuple) else 1
