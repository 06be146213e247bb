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
from personalpeft.backends.llamacpp.adapters import Loras
from personalpeft.backends.llamacpp.binding import Logits, Place
from personalpeft.backends.llamacpp.context_pool import PART, Lane, Lanes
from personalpeft.backends.llamacpp.sampling import Picker, known_of
from personalpeft.backends.sequence_output import Writing
from personalpeft.backends.tokenizer import Text

# Prompt tokens in one step beside rows that are being decoded, and when there are none.
_BESIDE_OTHERS, _ALONE = PART, 4 * PART


# eq=False: two rows that ask for the same are two rows.
@dataclass(eq=False, slots=True)
class _Live:
    """A row in the batch. Of its tokens ``read`` lie in its lane."""

    number: int
    row: Row
    lane: Lane
    writing: Writing
    read: int

    @property
    def pending(self) -> int:
        return len(self.row.token_ids) - self.read

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
            Place(self.row.token_ids[n], n, n == len(self.row.token_ids) - 1)
            for n in range(self.read, self.read + self.part)
        ]
        logits = self.lane.compute(places)
        self.read += len(places)
        return logits

    def take(self, logits: Logits) -> Piece:
        """The next token, and what it adds to the reply."""
        token = self.row.sampler.pick(logits)
        return self.writing.take(
            token, known_of(logits, token, self.row.top) if self.row.logprobs else None
        )


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
        live = self._seated(row, room)
        if live is None:
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

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        live = self._live.pop(number, None)
        if live is not None:
            live.lane.leave(live.row.owner, live.prompt)

    def detach(self, key: str) -> None:
        """See ``Backend.detach``."""
        if any(live.row.stack == key for live in self._live.values()):
            raise RuntimeError("a row of the batch uses this stack")
        if loaded := self._loras.drop(key):
            # First in the lanes that compute with it.
            self._lanes.detach(loaded.lora)
            loaded.lora.close()

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

    def check_integrity(self) -> None:
        """See ``Backend.check_integrity``."""
        taken = {id(lane) for lane in self._lanes if lane.taken}
        if taken != {id(live.lane) for live in self._live.values()}:
            raise RuntimeError("the lanes that are taken are not those of the rows")

    def _seated(self, row: Row, room: int) -> _Live | None:
        lora = None if row.stack is None else self._loras.get(row.stack).lora
        lane = self._lanes.with_room(lora, row.owner, row.tokens, room)
        if lane is None:
            return None
        # What can fail comes before the lane is taken.
        number = next(self._numbers)
        if row.sampler is None:
            row.sampler = Picker.of(row.sampling)
        writing = Writing.of(number, row, self._text)
        return _Live(number, row, lane, writing, lane.take(row.owner, row.tokens))

    def _advance(self, live: _Live) -> Piece | None:
        """One call for a row; its next token, where all of its prompt is read."""
        logits = live.compute()
        if live.pending:
            return None
        piece = live.take(logits[0])
        if piece.finish is not None:
            self.remove(live.number)
        return piece
