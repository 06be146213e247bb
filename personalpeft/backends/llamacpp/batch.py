"""The batch: rows join and leave between steps, and each step gives every row that is ready its next token.

A step is one call of llama.cpp for each row that is being decoded, then one for each part of the waiting prompts that fits
the step. A call computes tokens of one row alone: one token that was picked, or a part of its prompt between two multiples of ``PART``.

Invariants: a row's numbers depend on its own tokens and stack alone, to the bit; what a row held is free as soon as it has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Occupancy, Piece, Row, Tokens
from personalpeft.backends.llamacpp.adapters import Loaded, Loras
from personalpeft.backends.llamacpp.binding import Logits, Place
from personalpeft.backends.llamacpp.context_pool import PART, Lane, Lanes
from personalpeft.backends.llamacpp.sampling import Picker, known_of
from personalpeft.backends.resident_stacks import Resident
from personalpeft.backends.sequence_output import Writing
from personalpeft.backends.tokenizer import Text

# Prompt tokens in one step beside rows that are being decoded, and when there are none.
_BESIDE_OTHERS, _ALONE = PART, 4 * PART


# eq=False: two rows that ask for the same are two rows.
@dataclass(eq=False, slots=True)
class _Live:
    """A row in the batch. ``tokens`` are the prompt and what was picked, of which ``read`` lie in its lane."""

    number: int
    row: Row
    stack: Resident[Loaded] | None
    lane: Lane
    picker: Picker
    writing: Writing
    read: int
    tokens: list[int]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.read

    @property
    def part(self) -> int:
        """How many tokens its next call computes."""
        return min(PART - self.read % PART, self.pending)

    @property
    def prompt(self) -> Tokens:
        """What was read of its prompt."""
        return self.row.tokens[: self.read]

    def compute(self) -> Logits:
        """Computes its next part; gives the logits after its last token, where that is in it."""
        places = [
            Place(self.tokens[n], n, n == len(self.tokens) - 1)
            for n in range(self.read, self.read + self.part)
        ]
        logits = self.lane.compute(places)
        self.read += len(places)
        return logits

    def take(self, logits: Logits) -> Piece:
        """The next token, and what it adds to the reply."""
        token = self.picker.pick(logits)
        piece = self.writing.take(
            token, known_of(logits, token, self.row.top) if self.row.logprobs else None
        )
        self.tokens += piece.tokens
        return piece


class Batch:
    """Up to ``rows`` rows at once. Not thread-safe: one thread runs it."""

    def __init__(self, lanes: Lanes, loras: Loras, text: Text, *, rows: int, longest: int) -> None:
        self._lanes, self._loras, self._text = lanes, loras, text
        self._rows, self._longest = rows, longest
        self._live: dict[int, _Live] = {}
        self._numbers = itertools.count()
        self._reused = 0

    def admit(self, row: Row) -> int | None:
        """See ``Backend.admit``."""
        room = len(row.tokens) + row.sampling.max_tokens
        if room > self._longest:
            raise ValueError(
                f"a row of {room} tokens is longer than the {self._longest} that there is memory for"
            )
        if len(self._live) >= self._rows:
            return None
        stack = self._loras.point(row.stack)
        try:
            live = self._seated(row, stack, room)
        except BaseException:
            # Else one moment without memory would take a slot for good.
            self.let_go(stack)
            raise
        if live is None:
            self.let_go(stack)
            return None
        self._reused += live.read
        self._live[live.number] = live
        return live.number

    def step(self) -> Sequence[Piece]:
        """See ``Backend.step``."""
        rows = tuple(self._live.values())
        pieces = [self._advance(live) for live in rows if live.pending == 1]
        budget = _BESIDE_OTHERS if pieces else _ALONE
        for live in rows:
            while live.pending > 1 and live.part <= budget:
                budget -= live.part
                pieces.append(self._advance(live))
        return [piece for piece in pieces if piece is not None]

    def leave(self, number: int) -> Piece | None:
        """See ``Backend.leave``."""
        live = self._live.get(number)
        if live is None:
            return None
        self._remove(live)
        return live.writing.end("cancelled")

    def detach(self, key: str) -> None:
        """See ``Backend.detach``."""
        self._close(self._loras.drop(key))

    def forget(self) -> None:
        """See ``Backend.forget``."""
        for lane in self._lanes:
            lane.forget()

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``."""
        used = sum(live.read for live in self._live.values())
        kept = sum(lane.kept for lane in self._lanes)
        return Occupancy(len(self._live), used, kept, self._lanes.room.places, self._reused)

    def close(self) -> None:
        """Frees all contexts; rows that were still there are gone."""
        self._live.clear()
        self._lanes.close_all()

    def let_go(self, stack: Resident[Loaded] | None) -> None:
        """Ends one use of a stack, and closes it where it was the last of one that was dropped."""
        self._close(self._loras.let_go(stack))

    def _seated(self, row: Row, stack: Resident[Loaded] | None, room: int) -> _Live | None:
        lane = self._lanes.with_room(
            stack.held.lora if stack else None, row.owner, row.tokens, room
        )
        if lane is None:
            return None
        # What can fail comes before the lane is taken.
        number = next(self._numbers)
        picker, writing = Picker.of(row.sampling), Writing(number, row, self._text)
        found = lane.take(row.owner, row.tokens)
        return _Live(number, row, stack, lane, picker, writing, found, list(row.tokens))

    def _advance(self, live: _Live) -> Piece | None:
        """One call for a row; its next token, where all of its prompt is read."""
        logits = live.compute()
        if live.pending:
            return None
        piece = live.take(logits[0])
        if piece.finish is not None:
            self._remove(live)
        return piece

    def _remove(self, live: _Live) -> None:
        del self._live[live.number]
        live.lane.leave(live.row.owner, live.prompt)
        self.let_go(live.stack)

    def _close(self, gone: Loaded | None) -> None:
        """Frees a stack that was dropped: first in the lanes that compute with it."""
        if gone is not None:
            self._lanes.detach(gone.lora)
            gone.lora.close()
