"""Who is next: a bounded queue that is fair to users. Pure: it knows no clock, no thread and no model.

Rules, the first that decides:

1. Background work (a learn's questions) begins only while no person waits.
2. A user with their share of rows running lets those go first who have less.
3. Users take turns; within one user it is first come, first served.

Invariant: whoever is first in ``line()`` is only ever overtaken by users who have been served less, each of them once.
So everybody's turn comes as long as rows end.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Waiting(Protocol):
    """What the queue must know of one that waits."""

    @property
    def user(self) -> str: ...

    @property
    def background(self) -> bool: ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True, slots=True)
class Full:
    """Why the queue takes no more: ``over`` is how many would have to go first, ``own`` whether it is the user's own
    share that is full.
    """

    over: int
    bound: int
    own: bool


class FairQueue(Generic[W]):
    """Requests that wait for a row. Not thread-safe: its owner holds a lock."""

    def __init__(self, *, waiting: int, waiting_per_user: int, running_per_user: int) -> None:
        self._bound = waiting
        self._bound_per_user = waiting_per_user
        self._share = running_per_user
        # The order of the keys is the order of the turns. Nobody is in it who does not wait.
        self._people: dict[str, deque[W]] = {}
        self._background: dict[str, deque[W]] = {}
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, (*self._people.values(), *self._background.values())))

    def __iter__(self) -> Iterator[W]:
        """All who wait, in no order that means anything."""
        return itertools.chain(*self._people.values(), *self._background.values())

    @property
    def people(self) -> bool:
        """Whether anybody waits or has a row, background work aside."""
        return bool(self._people or self._running)

    def full(self, more: Sequence[W]) -> Full | None:
        """Why these cannot all be taken in; None when they can. Background work is always taken in: it waits longer."""
        people = Counter(each.user for each in more if not each.background)
        for user, count in people.items():
            over = len(self._people.get(user, ())) + count - self._bound_per_user
            if over > 0:
                return Full(over, self._bound_per_user, own=True)
        over = sum(map(len, self._people.values())) + people.total() - self._bound
        return Full(over, self._bound, own=False) if over > 0 else None

    def add(self, more: Iterable[W]) -> None:
        """Takes them in, each behind those of its user."""
        for each in more:
            self._turns(each).setdefault(each.user, deque()).append(each)

    def line(self) -> Iterator[W]:
        """All whose turn can come now, in the order in which it comes if nothing else changes."""
        for group in self._groups():
            for rank in itertools.zip_longest(*group):
                yield from (each for each in rank if each is not None)

    def first(self, ready: Callable[[W], bool]) -> W | None:
        """Who may begin: the first who is ready among those whose turn it is. It waits on until ``begin``."""
        group = next((group for group in self._groups() if group), ())
        return next((line[0] for line in group if ready(line[0])), None)

    def begin(self, one: W) -> None:
        """It has a row now, and its user's next turn comes after everybody else's."""
        turns = self._turns(one)
        line = turns.pop(one.user)
        line.remove(one)
        if line:
            turns[one.user] = line
        if not one.background:
            self._running[one.user] += 1

    def end(self, one: W) -> None:
        """Its row is free again."""
        if not one.background:
            self._running[one.user] -= 1
            if not self._running[one.user]:
                del self._running[one.user]

    def drop(self, one: W) -> None:
        """It no longer waits, and had no row."""
        turns = self._turns(one)
        turns[one.user].remove(one)
        if not turns[one.user]:
            del turns[one.user]

    def _turns(self, one: W) -> dict[str, deque[W]]:
        return self._background if one.background else self._people

    def _groups(self) -> tuple[list[deque[W]], ...]:
        """Whose turn it is, then who lets them go first."""
        if not self._people:
            return (list(self._background.values()),)
        below = [line for user, line in self._people.items() if self._running[user] < self._share]
        return below, [
            line for user, line in self._people.items() if self._running[user] >= self._share
        ]
