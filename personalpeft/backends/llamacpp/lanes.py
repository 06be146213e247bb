"""Where rows are computed: one lane for each stack that somebody asks, with a context of its own.

A context has one set of adapters, so rows of different stacks share none; to change the set of one costs as much as half a
token, to keep another context costs its keys and values. Rows of one stack share a lane, and are computed in one call.

Invariants: all lanes together keep within a bound of places and of memory (while one grows, its old ones besides), and a
row gets, when it joins, all that its prompt and its longest reply can need; what is kept of a row that has left is found
only in the lane of its stack, by rows of its owner whose tokens begin alike; a sequence is never read under another stack
than it was written under.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.base import Tokens
from personalpeft.backends.llamacpp.library import Context, Logits, Lora, Place, Shape

# A lane begins with this many places, and doubles when its rows need more. llama.cpp rounds up to multiples of the step.
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


@dataclass(frozen=True, slots=True)
class Seat:
    """A row's sequence in a lane, with room for ``room`` tokens, of which ``found`` are there already."""

    sequence: int
    room: int
    found: int


@dataclass(frozen=True, slots=True)
class _Kept:
    owner: str
    tokens: Tokens


class Lane:
    """One stack's context. Not thread-safe."""

    def __init__(self, lora: Lora | None, context: Context, open_context: OpenContext) -> None:
        self._lora, self._open = lora, open_context
        self._context = context
        self._seats: dict[int, int] = {}
        self._kept: OrderedDict[int, _Kept] = OrderedDict()

    @property
    def places(self) -> int:
        """How many tokens it has places for."""
        return self._context.shape.places

    @property
    def rows(self) -> int:
        return len(self._seats)

    @property
    def kept(self) -> int:
        """How many tokens it keeps of rows that have left."""
        return sum(len(kept.tokens) for kept in self._kept.values())

    @property
    def full(self) -> bool:
        """Whether every sequence has a row."""
        return len(self._seats) == self._context.shape.sequences

    def missing(self, room: int) -> int:
        """How many places it lacks for a row of that length; it may forget what it keeps for it."""
        return max(0, sum(self._seats.values()) + room - self.places)

    def take(self, owner: str, tokens: Tokens, room: int) -> Seat:
        """A seat for a row that ``missing`` says there is room for."""
        sequence, found = self._alike(owner, tokens)
        if sequence is None:
            sequence = self._free()
        # What is found counts as the row's own from here on, so it is not dropped to make room for it.
        while sum(self._seats.values()) + room + self.kept > self.places:
            self._drop(next(iter(self._kept)))
        self._seats[sequence] = room
        return Seat(sequence, room, found)

    def leave(self, seat: Seat, owner: str, read: Tokens) -> None:
        """Frees a seat, and keeps what was read there for a later row."""
        del self._seats[seat.sequence]
        if read:
            self._kept[seat.sequence] = _Kept(owner, read)
        else:
            self._context.cut(seat.sequence, 0)

    def compute(self, places: Sequence[Place]) -> Logits:
        """See ``Context.compute``."""
        return self._context.compute(places)

    def grow(self, places: int) -> None:
        """Moves into a context of so many places, with all that it holds."""
        self._move(replace(self._context.shape, places=places), [*self._seats, *self._kept])

    def forget(self) -> None:
        """Keeps nothing of rows that have left; their keys and values are overwritten, or freed with their context."""
        if self._seats:
            self._move(self._context.shape, [*self._seats])
        else:
            self._context.clear()
        self._kept.clear()

    def close(self) -> Context:
        """Ends it, and gives its context back."""
        return self._context

    def _move(self, shape: Shape, sequences: Sequence[int]) -> None:
        old, new = self._context, self._open(shape, self._lora)
        try:
            for sequence in sequences:
                new.restore(sequence, old.state(sequence))
        except BaseException:
            new.close()
            raise
        self._context = new
        old.clear()
        old.close()

    def _alike(self, owner: str, tokens: Tokens) -> tuple[int | None, int]:
        """What is kept of the owner and begins alike: its sequence, cut to what is the same, and how long that is."""
        # The last token at least is read anew, since that is what the first token of the reply comes from.
        wanted = tokens[: len(tokens) - 1]
        best, longest = None, 0
        for sequence, kept in self._kept.items():
            if kept.owner == owner and (same := _alike(kept.tokens, wanted)) > longest:
                best, longest = sequence, same
        if best is None:
            return None, 0
        del self._kept[best]
        return best, longest if self._context.cut(best, longest) else 0

    def _free(self) -> int:
        """A sequence that nobody has; the one that was kept longest where all are taken."""
        if len(self._seats) + len(self._kept) == self._context.shape.sequences:
            self._drop(next(iter(self._kept)))
        return next(s for s in range(self._context.shape.sequences) if s not in self._seats and s not in self._kept)

    def _drop(self, sequence: int) -> None:
        del self._kept[sequence]
        self._context.cut(sequence, 0)


class Lanes:
    """The lanes of all stacks, within ``room`` together. Not thread-safe.

    The context of a lane that ended is kept for the next: to make one takes longer than to load an adapter.
    """

    def __init__(self, room: Room, shape: Shape, open_context: OpenContext) -> None:
        self.room = room
        self._shape, self._open = shape, open_context
        # Least recently used first.
        self._lanes: OrderedDict[Lora | None, Lane] = OrderedDict()
        self._spare: Context | None = None

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def with_room(self, lora: Lora | None, room: int) -> Lane | None:
        """The lane of a stack, with room for a row of that length; None while other rows have the places for it. Lanes that
        nobody uses give way.
        """
        lane = self._lanes.get(lora)
        if lane is not None and lane.full:
            return None
        if lane is None:
            context = self._context(lora, _rounded(room))
            if context is None:
                return None
            lane = self._lanes[lora] = Lane(lora, context, self._open)
        elif lacking := lane.missing(room):
            size = self._size(lane, least=_rounded(lane.places + lacking), wanted=2 * lane.places)
            if size is None:
                return None
            lane.grow(size)
        self._lanes.move_to_end(lora)
        return lane

    def close(self, lora: Lora | None) -> None:
        """Ends the lane of a stack, if there is one."""
        lane = self._lanes.pop(lora, None)
        if lane is not None:
            self._let_go_of_spare()
            self._spare = lane.close()
            # The adapter may be freed from here on, and what was said with it is nobody's any more.
            self._spare.answer_with(None)

    def close_all(self) -> None:
        """Ends every lane and frees all memory."""
        for lora in tuple(self._lanes):
            self.close(lora)
        self._let_go_of_spare()

    def _context(self, lora: Lora | None, least: int) -> Context | None:
        spare = self._spare
        if spare is not None and spare.shape.places >= least:
            spare.answer_with(lora)
            self._spare = None
            return spare
        size = self._size(None, least=least, wanted=_FEWEST)
        return None if size is None else self._open(replace(self._shape, places=size), lora)

    def _let_go_of_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def _size(self, own: Lane | None, *, least: int, wanted: int) -> int | None:
        """How large a lane may become; None where it cannot be so large as it has to be."""

        def left() -> int:
            spare = [] if self._spare is None else [self._spare.shape.places]
            return self.room.left(spare + [lane.places for lane in self if lane is not own])

        for lora, lane in tuple(self._lanes.items()):
            if left() >= least:
                break
            if lane is not own and not lane.rows:
                self.close(lora)
                self._let_go_of_spare()
        if left() < least:
            self._let_go_of_spare()
        return min(max(least, wanted), left()) if left() >= least else None


def _rounded(places: int) -> int:
    return -(-places // _STEP) * _STEP


def _alike(kept: Tokens, wanted: Tokens) -> int:
    """How many tokens two texts begin with alike."""
    if kept[: len(wanted)] == wanted:
        return len(wanted)
    return next((n for n, (a, b) in enumerate(zip(kept, wanted, strict=False)) if a != b), min(len(kept), len(wanted)))
