"""Read tool calls in a model's replies, in the form that the model writes.

| format | a call |
| --- | --- |
| hermes (Hermes, Qwen, SmolLM3) | ``<tool_call>``, the JSON of name and arguments, ``</tool_call>`` |
| phi4_mini | ``<|tool_call|>``, a JSON list of such calls, ``<|/tool_call|>`` |
| llama3_json (Llama 3.1, 3.2) | the whole reply is the JSON of name and parameters; of several calls |
| | with ";" between them |

``chat_template.find_tool_format`` returns the format of a base.

Invariants: parts that a reader returns are final and in the order of the reply. Text
without a call passes unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from personalpeft.ids import TOOL_NAME
from personalpeft.types import Message, ToolCall, ToolFormat, parse_strict_json

ReplyPart: TypeAlias = str | ToolCall


@dataclass(frozen=True, slots=True)
class _Marks:
    """What stands around the calls of a format, and before the arguments of a call."""

    open: str
    close: str
    begin: str = '{"name":'
    arguments: str = "arguments"


_MARKS: Mapping[ToolFormat, _Marks] = {
    ToolFormat.HERMES: _Marks("<tool_call>", "</tool_call>", '\n{"name":'),
    ToolFormat.PHI4_MINI: _Marks("<|tool_call|>", "<|/tool_call|>", '[{"name":'),
    # The end of the reply ends its calls.
    ToolFormat.LLAMA3_JSON: _Marks("", "", arguments="parameters"),
}
_BETWEEN_CALLS = re.compile(r"\s*;\s*(?=\{)")


def call_end(tool_format: ToolFormat) -> str:
    """Return the end of a call, which as a stop string ends a reply after it; empty if none."""
    marks = _MARKS.get(tool_format)
    return marks.close if marks else ""


def read_calls(text: str, tool_format: ToolFormat) -> tuple[str, tuple[ToolCall, ...]]:
    """Split a complete reply into its text and its calls."""
    reader = call_reader(tool_format)
    parts = [*reader.push(text), *reader.finish()]
    return "".join(each for each in parts if isinstance(each, str)), tuple(
        each for each in parts if isinstance(each, ToolCall)
    )


def assistant_message(text: str, turn_id: str, tool_format: ToolFormat) -> Message:
    """Return a reply as a message, its tool calls parsed.

    Args:
        text: The reply, as the model wrote it.
        turn_id: Its turn, after which the calls are named.
        tool_format: How the base writes calls.
    """
    content, calls = read_calls(text, tool_format)
    named = (replace(call, id=f"call_{turn_id}_{n}") for n, call in enumerate(calls))
    return Message("assistant", content if calls else text, tuple(named))


def find_unfinished_call(message: Message, tool_format: ToolFormat) -> str:
    """Return the start of a reply that must call a tool, else "".

    It includes the name if only one tool can be called.
    """
    marks = _MARKS.get(tool_format)
    if not message.must_call or marks is None:
        return ""
    names = (
        [tool["function"]["name"] for tool in message.tools]
        if message.must_call is True
        else [message.must_call]
    )
    # Without a space at the end: tokenizers merge it with what follows.
    begin = marks.open + marks.begin
    return f'{begin} "{names[0]}", "{marks.arguments}":' if len(names) == 1 else begin


class _WholeReplyReader:
    """Reads calls that are the whole reply. Without calls in the format, all of it is text."""

    def __init__(self, *, reads_calls: bool) -> None:
        self._pending = ""
        self._may_call = reads_calls

    def push(self, text: str) -> Sequence[ReplyPart]:
        """Return the parts that this chunk completes, without space around calls."""
        self._pending += text
        begun = self._pending.lstrip()
        self._may_call = self._may_call and (not begun or begun.startswith("{"))
        return () if self._may_call else self._take()

    def finish(self) -> Sequence[ReplyPart]:
        """Return the rest at the end of the reply."""
        return (_calls(self._pending) if self._may_call else ()) or self._take()

    def _take(self) -> Sequence[ReplyPart]:
        text, self._pending = self._pending, ""
        return [text] if text else []


class _MarkedCallReader:
    """Reads calls between two marks, in a reply that arrives in chunks."""

    def __init__(self, marks: _Marks) -> None:
        self._open, self._close = marks.open, marks.close
        self._pending = ""
        # The white space before the call that is being read; None outside of calls.
        self._space: str | None = None
        self._called = False

    def push(self, text: str) -> Sequence[ReplyPart]:
        """Return the parts that this chunk completes, without space around calls."""
        self._pending += text
        parts: list[ReplyPart] = []
        while True:
            inside = self._space is not None
            before, mark, after = self._pending.partition(self._close if inside else self._open)
            if not mark:
                break
            self._pending = after
            if inside:
                parts += self._end_call(before, mark)
            else:
                stripped = before.rstrip()
                self._space = before[len(stripped) :]
                parts += self._text(stripped)
        return parts if self._space is not None else [*parts, *self._text(self._certain())]

    def finish(self) -> Sequence[ReplyPart]:
        """Return the rest at the end of the reply."""
        rest, self._pending = self._pending, ""
        # A model may end its turn without the closing mark.
        return self._text(rest) if self._space is None else self._end_call(rest, "")

    def _certain(self) -> str:
        """Take all but what may be the start of a mark, with white space before it."""
        starts = (self._open[:length] for length in range(len(self._open)))
        overlap = max(len(start) for start in starts if self._pending.endswith(start))
        ready = self._pending[: len(self._pending) - overlap].rstrip()
        self._pending = self._pending[len(ready) :]
        return ready

    def _end_call(self, body: str, end: str) -> Sequence[ReplyPart]:
        space, self._space = self._space or "", None
        calls = _calls(body)
        if not calls:
            return self._text(f"{space}{self._open}{body}{end}")
        self._called = True
        return calls

    def _text(self, text: str) -> Sequence[ReplyPart]:
        if self._called:
            text = text.lstrip()
        if not text:
            return []
        self._called = False
        return [text]


def call_reader(tool_format: ToolFormat) -> _WholeReplyReader | _MarkedCallReader:
    """Return the reader of a format.

    Where calls are the whole reply, a reply that begins as one is returned at its end.
    """
    marks = _MARKS.get(tool_format)
    if marks is None or not marks.open:
        return _WholeReplyReader(reads_calls=marks is not None)
    return _MarkedCallReader(marks)


def _calls(body: str) -> Sequence[ToolCall]:
    """Return the calls in a JSON object, a list or objects between ";"; none if one is invalid."""
    try:
        try:
            value = parse_strict_json(body)
        except ValueError:
            value = [parse_strict_json(each) for each in _BETWEEN_CALLS.split(body)]
    except (ValueError, RecursionError):
        return ()
    calls = [_call(each) for each in (value if isinstance(value, list) else [value])]
    return [each for each in calls if each is not None] if None not in calls else ()


def _call(value: Any) -> ToolCall | None:
    """Return the call that a JSON value describes, or None if it is no valid one."""
    if not isinstance(value, dict):
        return None
    if isinstance(function := value.get("function"), dict):
        value = function
    name, arguments = value.get("name"), value.get("arguments", value.get("parameters"))
    if isinstance(name, str) and TOOL_NAME.fullmatch(name) and isinstance(arguments, dict):
        return ToolCall(name, arguments)
    return None
