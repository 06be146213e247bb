"""The batch: rows join and leave between steps, and each step gives every row that is ready its next token.

A step is one call of llama.cpp for each stack that has rows: one token of each row that is being decoded, then as much of the
waiting prompts as fits the step.

Invariants: a row's numbers depend on its own tokens and stack alone; what a row held is free as soon as it has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Occupancy, Piece, Row
from personalpeft.backends.llamacpp.lanes import Lane, Lanes, Seat
from personalpeft.backends.llamacpp.library import Logits, Place
from personalpeft.backends.llamacpp.loras import Loaded, Loras
from personalpeft.backends.llamacpp.sampling import Picker, known_of
from personalpeft.backends.residents import Resident
from personalpeft.backends.text import Text
from personalpeft.backends.writing import Writing, read_on

# Prompt tokens in one step beside rows that are being decoded, and when there are none (``Shape.batch`` has room for both).
BESIDE_OTHERS = 64
ALONE = 256


# eq=False: two rows that ask for the same are two rows.
@dataclass(eq=False, slots=True)
class _Live:
    """A row in the batch. ``tokens`` are the prompt and what was picked, of which ``read`` lie in its seat."""

    number: int
    row: Row
    stack: Resident[Loaded] | None
    lane: Lane
    seat: Seat
    picker: Picker
    writing: Writing
    read: int
    tokens: list[int]

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.read

    def places(self, count: int) -> Iterator[Place]:
        """Its next tokens; the last of all that is pending is answered."""
        for position in range(self.read, self.read + count):
            asked = position == len(self.tokens) - 1
            yield Place(self.tokens[position], position, self.seat.sequence, asked)

    def take(self, logits: Logits) -> Piece:
        """The next token, and what it adds to the reply."""
        token = self.picker.pick(logits)
        piece = self.writing.take(token, known_of(logits, token, self.row.top) if self.row.logprobs else None)
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
            raise ValueError(f"a row of {room} tokens is longer than the {self._longest} that there is memory for")
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
        self._reused += live.seat.found
        self._live[live.number] = live
        return live.number

    def step(self) -> Sequence[Piece]:
        """See ``Backend.step``."""
        by_lane: dict[Lane, list[_Live]] = {}
        for live in self._live.values():
            by_lane.setdefault(live.lane, []).append(live)
        waiting = any(live.pending == 1 for live in self._live.values())
        reading = dict(read_on(BESIDE_OTHERS if waiting else ALONE, self._live.values()))
        return [piece for lane, rows in by_lane.items() for piece in self._advance(lane, rows, reading)]

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
        lane = self._lanes.with_room(stack.held.lora if stack else None, room)
        if lane is None:
            return None
        # What can fail comes before the seat is taken.
        number = next(self._numbers)
        picker, writing = Picker.of(row.sampling), Writing(number, row, self._text)
        seat = lane.take(row.owner, row.tokens, room)
        return _Live(number, row, stack, lane, seat, picker, writing, seat.found, list(row.tokens))

    def _advance(self, lane: Lane, rows: Sequence[_Live], reading: Mapping[_Live, int]) -> Iterator[Piece]:
        """A step of one lane's rows, of which some read so much of their prompts."""
        going = [(live, 1) for live in rows if live.pending == 1]
        going += [(live, reading[live]) for live in rows if live in reading]
        if not going:
            return
        logits = lane.compute([place for live, count in going for place in live.places(count)])
        answers = iter(logits)
        for live, count in going:
            live.read += count
            if live.pending == 0:
                piece = live.take(next(answers))
                if piece.finish is not None:
                    self._remove(live)
                yield piece

    def _remove(self, live: _Live) -> None:
        del self._live[live.number]
        live.lane.leave(live.seat, live.row.owner, tuple(live.tokens[: live.read]))
        self.let_go(live.stack)

    def _close(self, gone: Loaded | None) -> None:
        """Lets go of a stack that nobody will name again: its lane first, which answers with it."""
        if gone is not None:
            self._lanes.close(gone.lora)
            gone.lora.close()
