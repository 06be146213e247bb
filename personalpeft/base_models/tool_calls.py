"""The calls of tools in what a model writes.

One form is read, that of the Hermes and Qwen families: ``<tool_call>``, the JSON of name and arguments, ``</tool_call>``.
``template.takes_tools`` says whether a base's template speaks it.

Invariants: what a ``CallReader`` gives back is certain and never taken back; text without a call in it comes through as it is, whatever
it spells; the order is that of the reply.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Never, TypeAlias

from personalpeft.ids import TOOL_NAME
from personalpeft.types import Message, ToolCall

CALL_ENDS = "</tool_call>"
"""What ends a call in a reply: as a stop string, what ends a reply with its first call."""
_OPEN, _CLOSE = "<tool_call>", CALL_ENDS

Said: TypeAlias = str | ToolCall


def read_calls(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """A whole reply as its text without the calls, and the calls."""
    reader = CallReader()
    said = [*reader.push(text), *reader.finish()]
    return "".join(each for each in said if isinstance(each, str)), tuple(
        each for each in said if isinstance(each, ToolCall)
    )


def find_unfinished_call(asked: Message) -> str:
    """How a reply begins that must call a tool: up to the arguments where there is only one to call, else up to the name; empty where it
    need not.
    """
    if not asked.must_call:
        return ""
    names = (
        [tool["function"]["name"] for tool in asked.tools]
        if asked.must_call is True
        else [asked.must_call]
    )
    # It ends before a space, since tokenizers make one token of the space and what follows: after the space alone a model goes on as
    # it seldom has been taught to.
    begun = f'{_OPEN}\n{{"name":'
    return f'{begun} "{names[0]}", "arguments":' if len(names) == 1 else begun


class CallReader:
    """Tells text from calls in a reply that comes in pieces. White space around a call is no part of the text."""

    def __init__(self) -> None:
        self._pending = ""
        # The white space before the mark that was read last; None outside of a call.
        self._space: str | None = None
        self._called = False

    def push(self, text: str) -> Sequence[Said]:
        """What became certain with this piece."""
        self._pending += text
        said: list[Said] = []
        while True:
            before, found, after = self._pending.partition(_OPEN if self._space is None else _CLOSE)
            if not found:
                break
            self._pending = after
            if self._space is None:
                spoken = before.rstrip()
                self._space = before[len(spoken) :]
                said += self._text(spoken)
            else:
                said += self._call(before, _CLOSE)
        return said if self._space is not None else [*said, *self._text(self._certain())]

    def finish(self) -> Sequence[Said]:
        """What was kept back, at the end of the reply."""
        rest, self._pending = self._pending, ""
        # A model that ends its turn may leave the last mark out.
        return self._text(rest) if self._space is None else self._call(rest, "")

    def _certain(self) -> str:
        """Takes out what cannot be the beginning of a mark, nor white space before one."""
        held = next(
            (n for n in range(len(_OPEN) - 1, 0, -1) if self._pending.endswith(_OPEN[:n])), 0
        )
        ready = self._pending[: len(self._pending) - held].rstrip()
        self._pending = self._pending[len(ready) :]
        return ready

    def _call(self, body: str, end: str) -> list[Said]:
        space, self._space = self._space or "", None
        call = _call(body)
        if call is None:
            return self._text(f"{space}{_OPEN}{body}{end}")
        self._called = True
        return [call]

    def _text(self, text: str) -> list[Said]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [text]


def _call(body: str) -> ToolCall | None:
    """The call that stands between two marks, None where none does."""
    try:
        found = json.loads(body, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    name, arguments = found.get("name"), found.get("arguments", found.get("parameters"))
    if (
        not isinstance(name, str)
        or not TOOL_NAME.fullmatch(name)
        or not isinstance(arguments, dict)
    ):
        return None
    return ToolCall(name, arguments)


def _refuse(constant: str) -> Never:
    raise ValueError(constant)


def _finite(written: str) -> float:
    number = float(written)
    return number if math.isfinite(number) else _refuse(written)
