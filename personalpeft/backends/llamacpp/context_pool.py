"""Contexts of llama.cpp: each computes one row at a time, with one stack.

What a row computes depends on where its keys and values lie in a context, and on how many tokens are computed in one call
(docs/engines.md has the figures). So a row shares neither a context nor a call with another row: its keys and values
lie in its context from the beginning and without a gap, as if nothing else were served.

Invariants: all contexts together keep within a bound of places and of memory (while one grows, its old places besides). A
row gets, when it joins, all that its prompt and its longest reply can need. What is kept of a row that has left is found
only with the same stack, by rows of its owner whose prompts begin alike, and only in whole parts of ``PART`` tokens that were read as a
prompt. Keys and values are never read under another stack than they were written under.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Tokens
from personalpeft.backends.llamacpp.binding import Context, Logits, Lora, Place, Shape

PART = 64
"""Tokens of a prompt that are computed in one call. A prompt is cut at multiples of it, whatever is found of it."""

# A lane begins with at least this many places. llama.cpp rounds up to multiples of the step.
_FEWEST, _STEP = 512, 256
OpenContext = Callable[[Shape, Lora | None], Context]


@dataclass(frozen=True, slots=True)
class Room:
    """What all lanes may take together: ``places`` for tokens, and ``memory`` bytes, of which a place takes ``place`` and every
    lane ``lane`` besides, however short it is.
    """

    places: int
    memory: int
    place: int
    lane: int

    def left(self, taken: Sequence[int]) -> int:
        """How many places one more lane may have beside lanes of so many."""
        fits = (self.memory - (len(taken) + 1) * self.lane) // self.place
        return (min(self.places, fits) - sum(taken)) // _STEP * _STEP


class Lane:
    """A context for one row at a time, and the parts of the prompt that it keeps of the last one. Not thread-safe."""

    def __init__(self, lora: Lora | None, context: Context, open_context: OpenContext) -> None:
        self._lora, self._open = lora, open_context
        self._context = context
        self._owner = ""
        self._kept: Tokens = ()
        self.taken = False

    @property
    def lora(self) -> Lora | None:
        """The adapter that it computes with."""
        return self._lora

    @property
    def places(self) -> int:
        """How many tokens it has places for."""
        return self._context.shape.places

    @property
    def kept(self) -> int:
        """How many tokens it keeps of a row that has left."""
        return len(self._kept)

    def shared(self, owner: str, tokens: Tokens) -> int:
        """How many tokens of a prompt it keeps in whole parts. The last token is never one of them: the first token of the
        reply is computed from it.
        """
        if owner != self._owner:
            return 0
        return _alike(self._kept, tokens[: len(tokens) - 1]) // PART * PART

    def take(self, owner: str, tokens: Tokens) -> int:
        """Gives the lane to a row; returns how many tokens of its prompt are there already."""
        found = self._cut(self.shared(owner, tokens))
        self._kept, self.taken = (), True
        return found

    def leave(self, owner: str, read: Tokens) -> None:
        """Frees the lane, and keeps the whole parts of what was read of the row's prompt."""
        self._owner, self._kept, self.taken = (
            owner,
            read[: self._cut(len(read) // PART * PART)],
            False,
        )

    def compute(self, places: Sequence[Place]) -> Logits:
        """See ``Context.compute``."""
        return self._context.compute(places)

    def answer_with(self, lora: Lora | None) -> None:
        """Computes with another adapter from now on, and keeps nothing."""
        self._kept = ()
        if lora is not self._lora:
            self._context.answer_with(lora)
            self._lora = lora

    def grow(self, places: int) -> None:
        """Moves into a context of so many places, with all that it holds."""
        old, new = (
            self._context,
            self._open(replace(self._context.shape, places=places), self._lora),
        )
        try:
            new.restore(old.state())
        except BaseException:
            new.close()
            raise
        self._context = new
        old.clear()
        old.close()

    def forget(self) -> None:
        """Overwrites what is kept of rows that have left."""
        if self.taken:
            # Only what the row in it has read is copied.
            self.grow(self.places)
        else:
            self._kept = ()
            self._context.clear()

    def close(self) -> None:
        """Frees its memory."""
        self._context.close()

    def _cut(self, length: int) -> int:
        """Drops all but the first tokens; returns how many are left, none where this model cannot be cut there."""
        return length if self._context.cut(length) else 0


class Lanes:
    """The lanes of all rows, within ``room`` together. Not thread-safe.

    A lane that no row has is kept for the next turn of its conversation, or recycled: to make a context takes longer than to
    load an adapter. ``idle`` is how many of them there may be before another one is made.
    """

    def __init__(self, room: Room, shape: Shape, open_context: OpenContext, *, idle: int) -> None:
        self.room = room
        self._shape, self._open, self._idle = shape, open_context, idle
        # Least recently used first.
        self._lanes: OrderedDict[Lane, None] = OrderedDict()

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def with_room(self, lora: Lora | None, owner: str, tokens: Tokens, room: int) -> Lane | None:
        """A lane for a row of that length, which is still to ``take``: the one that keeps most of its prompt. None while other rows
        have the places for it. Lanes without a row give way.
        """
        least = -(-room // _STEP) * _STEP
        lane = self._alike(lora, owner, tokens)
        if lane is not None and lane.places < least:
            size = self._size(lane, least=least, wanted=2 * lane.places)
            if size is None:
                return None
            lane.grow(size)
        if lane is None:
            lane = self._recycled(lora, least) or self._made(lora, least)
        if lane is not None:
            self._lanes.move_to_end(lane)
        return lane

    def detach(self, lora: Lora) -> None:
        """Lets go of an adapter, which no row uses: it may be freed from here on, and what was computed with it is dropped."""
        for lane in self._lanes:
            if lane.lora is lora:
                lane.answer_with(None)

    def close_all(self) -> None:
        """Ends every lane and frees all memory."""
        for lane in tuple(self._lanes):
            self._close(lane)

    def _alike(self, lora: Lora | None, owner: str, tokens: Tokens) -> Lane | None:
        """The lane that keeps most of a prompt, if one keeps any of it."""
        lanes = [lane for lane in self._free() if lane.lora is lora and lane.shared(owner, tokens)]
        return max(lanes, key=lambda lane: lane.shared(owner, tokens), default=None)

    def _recycled(self, lora: Lora | None, least: int) -> Lane | None:
        """A lane that keeps nothing, or the one that was kept longest where there are enough, or no memory for more."""
        free = self._free()
        full = len(free) >= self._idle or self._left() < least
        lane = next(
            (lane for lane in free if lane.places >= least and (full or not lane.kept)), None
        )
        if lane is not None:
            lane.answer_with(lora)
        elif len(free) >= self._idle:
            self._close(free[0])
        return lane

    def _made(self, lora: Lora | None, least: int) -> Lane | None:
        size = self._size(None, least=least, wanted=_FEWEST)
        if size is None:
            return None
        lane = Lane(lora, self._open(replace(self._shape, places=size), lora), self._open)
        self._lanes[lane] = None
        return lane

    def _size(self, own: Lane | None, *, least: int, wanted: int) -> int | None:
        """How large a lane may become; None where it cannot be so large as it has to be."""
        if self.room.left([lane.places for lane in self if lane.taken]) < least:
            return None
        for lane in self._free():
            if self._left(own) >= least:
                break
            if lane is not own:
                self._close(lane)
        return min(max(least, wanted), self._left(own))

    def _left(self, own: Lane | None = None) -> int:
        """How many places there are for one more lane, or for one that there is."""
        return self.room.left([lane.places for lane in self if lane is not own])

    def _free(self) -> list[Lane]:
        return [lane for lane in self._lanes if not lane.taken]

    def _close(self, lane: Lane) -> None:
        del self._lanes[lane]
        lane.close()


def _alike(kept: Tokens, wanted: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    if kept[: len(wanted)] == wanted:
        return len(wanted)
    return next(
        (n for n, (a, b) in enumerate(zip(kept, wanted, strict=False)) if a != b),
        min(len(kept), len(wanted)),
    )
