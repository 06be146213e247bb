"""The queue of users for workers: a few at a time, and again after a worker was lost.

Invariants: a user is with one worker at a time, and leaves the queue once: done, given up or
cancelled. A user whose worker was lost is retried alone, after all who were never tried. So a user
who crashes workers affects no other user twice and delays none.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

MAX_LOSSES = 3
"""Workers that may be lost over one user."""


class WorkQueue:
    """At most ``batch_size`` users go to a worker together."""

    def __init__(self, users: Sequence[str], batch_size: int) -> None:
        self._new = deque(users)
        self._retries: deque[str] = deque()
        self._batch_size = batch_size
        self._losses: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        """How many users wait for a worker."""
        return len(self._new) + len(self._retries)

    def num_losses(self, user: str) -> int:
        """Return how many workers were lost that had this user."""
        return self._losses[user]

    def take(self, num_workers: int) -> tuple[str, ...]:
        """Return users for a free worker: its share of those who wait.

        So the last users are spread over all workers.
        """
        if self._new:
            share = min(self._batch_size, -(-len(self._new) // num_workers))
            return tuple(self._new.popleft() for _ in range(share))
        return (self._retries.popleft(),) if self._retries else ()

    def retry(self, users: Sequence[str]) -> tuple[str, ...]:
        """Queue the users of a lost worker again. Return the users that are given up."""
        self._losses.update(users)
        given_up = tuple(user for user in users if self._losses[user] >= MAX_LOSSES)
        self._retries.extend(user for user in users if user not in given_up)
        return given_up

    def clear(self) -> tuple[str, ...]:
        """Remove and return all who wait."""
        waiting = (*self._new, *self._retries)
        self._new.clear()
        self._retries.clear()
        return waiting
