"""What every batch of rows shares that does not depend on where the numbers come from: how a reply grows by a token, what
ends it, and whose prompts are read on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from personalpeft.backends.base import Piece, Row
from personalpeft.backends.tokenizer import Text, TextStream
from personalpeft.types import FinishReason


@dataclass(frozen=True, slots=True)
class Known:
    """Of one token: its log-prob (nats, at temperature 1), and the likeliest tokens in its place with theirs, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Writing:
    """One row's reply, token by token. It ends with a stop token, a stop string or its longest length, whichever comes first;
    nothing may be asked of it after that.
    """

    def __init__(self, number: int, row: Row, text: Text) -> None:
        self.number, self.row = number, row
        self._stop_tokens = text.stop_tokens
        self._stream = TextStream(text, row.sampling.stop)
        self.written = 0

    @classmethod
    def of(cls, number: int, row: Row, text: Text) -> Writing:
        """Return the output of a row that is admitted as ``number``; of one resumed, as it was."""
        if not isinstance(row.output, cls):
            row.output = cls(number, row, text)
        row.output.number = number
        return row.output

    def take(self, token: int, known: Known | None = None) -> Piece:
        """What this token adds to the reply, and whether it ends it. ``known`` is what the piece says of it where the row asked."""
        if token in self._stop_tokens:
            return self.end("stop")
        self.written += 1
        self.row.token_ids.append(token)
        text = self._stream.push(token)
        finish: FinishReason | None = "stop" if self._stream.stopped else None
        if finish is None and self.written >= self.row.sampling.max_tokens:
            text += self._stream.finish()
            finish = "stop" if self._stream.stopped else "length"
        logprobs = (known.logprob,) if known else ()
        top = (known.top,) if known and self.row.top else ()
        return Piece(self.number, text, (token,), finish, logprobs, top, self._stream.stop)

    def end(self, finish: FinishReason) -> Piece:
        """Its last piece, where something else ends it."""
        return Piece(self.number, self._stream.finish(), (), finish)


class Reads(Protocol):
    """A row of which so many tokens are still to be read; one is what is left of any row that is being decoded."""

    @property
    def pending(self) -> int: ...


R = TypeVar("R", bound=Reads)


def read_on(budget: int, rows: Iterable[R]) -> Iterator[tuple[R, int]]:
    """Which prompts are read on in a step of so many tokens, and how far each: those that came first first."""
    for row in rows:
        if row.pending > 1 and budget:
            count = min(budget, row.pending)
            budget -= count
            yield row, count
