"""Whose turn it is: users are handed out as workers come free, a few at a time, and again where a worker was lost.

Invariants: a user is with one worker at a time; each leaves the rota once, as done, given up or sent away; whoever was with a worker
that was lost is handed out alone from then on, after all who wait for their first turn, so that one who brings workers down
takes nobody along twice and holds nobody up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

MOST_LOSSES = 3
"""So many workers may be lost over one user."""


class Rota:
    """All of ``users`` wait; at most ``at_once`` of them go to a worker together."""

    def __init__(self, users: Sequence[str], at_once: int) -> None:
        self._first = deque(users)
        self._again: deque[str] = deque()
        self._at_once = at_once
        self._losses: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """How many wait for a worker."""
        return len(self._first) + len(self._again)

    def losses(self, user: str) -> int:
        """How many workers were lost that had this user."""
        return self._losses[user]

    def take(self, among: int) -> tuple[str, ...]:
        """Who goes to a worker that came free, one of ``among``: its share of those who wait, so that the last ones are spread
        over all workers and nobody waits for the end of a long list.
        """
        if self._first:
            share = min(self._at_once, -(-len(self._first) // among))
            return tuple(self._first.popleft() for _ in range(share))
        return (self._again.popleft(),) if self._again else ()

    def lost(self, users: Sequence[str]) -> tuple[str, ...]:
        """Their worker was lost: they wait again, but for those who are given up, which are returned."""
        self._losses.update(users)
        given_up = tuple(user for user in users if self._losses[user] >= MOST_LOSSES)
        self._again.extend(user for user in users if user not in given_up)
        return given_up

    def send_away(self) -> tuple[str, ...]:
        """All who wait, of whom nobody waits any longer."""
        waiting = (*self._first, *self._again)
        self._first.clear()
        self._again.clear()
        return waiting
