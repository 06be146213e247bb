"""Read tool calls in a model's replies, in the form of the Hermes and Qwen families.

A call is ``<tool_call>``, the JSON of name and arguments, ``</tool_call>``.
``chat_template.supports_tools`` returns whether a base's template uses this form.

Invariants: parts that a ``CallReader`` returns are final and in the order of the reply. Text
without a call passes unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

from personalpeft.ids import TOOL_NAME
from personalpeft.types import Message, ToolCall, parse_strict_json

CALL_ENDS = "</tool_call>"
"""The end of a call; as a stop string it ends a reply after the first call."""
_OPEN, _CLOSE = "<tool_call>", CALL_ENDS

ReplyPart: TypeAlias = str | ToolCall


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a complete reply into its text and its calls."""
    reader = CallReader()
    parts = [*reader.push(text), *reader.finish()]
    return "".join(each for each in parts if isinstance(each, str)), tuple(
        each for each in parts if isinstance(each, ToolCall)
    )


def assistant_message(text: str, turn_id: str) -> Message:
    """Return a reply as a message, its tool calls parsed and named after its turn."""
    content, calls = read_calls(text)
    named = (replace(call, id=f"call_{turn_id}_{n}") for n, call in enumerate(calls))
    return Message("assistant", content if calls else text, tuple(named))


def find_unfinished_call(message: Message) -> str:
    """Return the start of a reply that must call a tool, else "".

    It includes the name if only one tool can be called.
    """
    if not message.must_call:
        return ""
    names = (
        [tool["function"]["name"] for tool in message.tools]
        if message.must_call is True
        else [message.must_call]
    )
    # Without a space at the end: tokenizers merge it with what follows.
    begin = f'{_OPEN}\n{{"name":'
    return f'{begin} "{names[0]}", "arguments":' if len(names) == 1 else begin


class CallReader:
    """Separate text from calls in a reply that arrives in chunks, without space around calls."""

    def __init__(self) -> None:
        self._pending = ""
        # The white space before the call that is being read; None outside of calls.
        self._space: str | None = None
        self._called = False

    def push(self, text: str) -> Sequence[ReplyPart]:
        """Return the parts that this chunk completes."""
        self._pending += text
        parts: list[ReplyPart] = []
        while True:
            before, mark, after = self._pending.partition(_OPEN if self._space is None else _CLOSE)
            if not mark:
                break
            self._pending = after
            if self._space is None:
                stripped = before.rstrip()
                self._space = before[len(stripped) :]
                parts += self._text(stripped)
            else:
                parts += self._call(before, _CLOSE)
        return parts if self._space is not None else [*parts, *self._text(self._certain())]

    def finish(self) -> Sequence[ReplyPart]:
        """Return the rest at the end of the reply."""
        rest, self._pending = self._pending, ""
        # A model may end its turn without the closing mark.
        return self._text(rest) if self._space is None else self._call(rest, "")

    def _certain(self) -> str:
        """Take all but what may be the start of a mark, with white space before it."""
        overlap = next(
            (n for n in range(len(_OPEN) - 1, 0, -1) if self._pending.endswith(_OPEN[:n])), 0
        )
        ready = self._pending[: len(self._pending) - overlap].rstrip()
        self._pending = self._pending[len(ready) :]
        return ready

    def _call(self, body: str, end: str) -> list[ReplyPart]:
        space, self._space = self._space or "", None
        call = _call(body)
        if call is None:
            return self._text(f"{space}{_OPEN}{body}{end}")
        self._called = True
        return [call]

    def _text(self, text: str) -> list[ReplyPart]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [text]


def _call(body: str) -> ToolCall | None:
    """Return the call between two marks, or None if there is no valid one."""
    try:
        value = parse_strict_json(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if (
        not isinstance(name, str)
        or not TOOL_NAME.fullmatch(name)
        or not isinstance(arguments, dict)
    ):
        return None
    return ToolCall(name, arguments)
