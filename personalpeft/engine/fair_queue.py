"""The order in which requests start: bounded and fair to users. No clock, no thread, no model.

Rules, the first that decides:

1. Background work (evaluation during a learn) starts only while no foreground request waits.
2. Preempted requests resume before new ones start, oldest first.
3. A user at the share of running requests lets users below it go first.
4. Users take turns; one user's requests start in order of arrival.

Invariant: only preempted requests and users who were served less overtake the first request of
``in_order``, each once. So each request starts as long as requests finish.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from personalpeft.engine.request import RequestState


@dataclass(frozen=True, slots=True)
class QueueLimit:
    """The limit that a submission exceeds by ``excess``; the user's own share if ``per_user``."""

    excess: int
    limit: int
    per_user: bool


class FairQueue:
    """Requests that wait to start or to resume. Not thread-safe: its owner holds a lock."""

    def __init__(
        self, *, max_waiting: int, max_waiting_per_user: int, max_running_per_user: int
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_per_user = max_waiting_per_user
        self._max_running_per_user = max_running_per_user
        # The order of the users is the order of their turns. Users without a request are absent.
        self._foreground: dict[str, deque[RequestState]] = {}
        self._background: dict[str, deque[RequestState]] = {}
        self._preempted: list[RequestState] = []
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._preempted) + sum(
            map(len, (*self._foreground.values(), *self._background.values()))
        )

    def __iter__(self) -> Iterator[RequestState]:
        """Iterate over all requests in no particular order."""
        return itertools.chain(
            self._preempted, *self._foreground.values(), *self._background.values()
        )

    @property
    def preempted(self) -> Sequence[RequestState]:
        """The requests that started and wait to resume, oldest first."""
        return self._preempted

    @property
    def has_foreground(self) -> bool:
        """Whether a foreground request waits or runs."""
        preempted = any(not each.background for each in self._preempted)
        return bool(self._foreground or self._running or preempted)

    def exceeded(self, more: Sequence[RequestState]) -> QueueLimit | None:
        """Return the limit that adding ``more`` would exceed. Background work is never limited."""
        counts = Counter(each.owner for each in more if not each.background)
        for user, count in counts.items():
            excess = len(self._foreground.get(user, ())) + count - self._max_waiting_per_user
            if excess > 0:
                return QueueLimit(excess, self._max_waiting_per_user, per_user=True)
        waiting = sum(map(len, self._foreground.values()))
        excess = waiting + counts.total() - self._max_waiting
        return QueueLimit(excess, self._max_waiting, per_user=False) if excess > 0 else None

    def add(self, more: Iterable[RequestState]) -> None:
        """Append requests, each behind those of its user."""
        for each in more:
            self._turns(each).setdefault(each.owner, deque()).append(each)

    def in_order(self) -> Iterator[RequestState]:
        """Iterate over requests that may be next, in the order they start if nothing changes."""
        for group in self._groups():
            for rank in itertools.zip_longest(*group):
                yield from (each for each in rank if each is not None)

    def next_ready(self, is_ready: Callable[[RequestState], bool]) -> RequestState | None:
        """Return the first ready request whose turn it is. It stays queued until ``start``."""
        group = next((group for group in self._groups() if group), ())
        return next((line[0] for line in group if is_ready(line[0])), None)

    def start(self, request: RequestState) -> None:
        """Move a request from the queue to running; its user's next turn comes last."""
        was_preempted = request in self._preempted
        self.drop(request)
        turns = self._turns(request)
        if request.owner in turns and not was_preempted:
            turns[request.owner] = turns.pop(request.owner)
        if not request.background:
            self._running[request.owner] += 1

    def finish(self, request: RequestState) -> None:
        """Record that a running request ended."""
        if not request.background:
            self._running[request.owner] -= 1
            if not self._running[request.owner]:
                del self._running[request.owner]

    def preempt(self, request: RequestState) -> None:
        """Move a running request back into the queue, before all that have not started."""
        self.finish(request)
        self._preempted.append(request)
        self._preempted.sort(key=lambda each: each.order)

    def drop(self, request: RequestState) -> None:
        """Remove a request that is not running."""
        if request in self._preempted:
            self._preempted.remove(request)
            return
        turns = self._turns(request)
        turns[request.owner].remove(request)
        if not turns[request.owner]:
            del turns[request.owner]

    def _turns(self, request: RequestState) -> dict[str, deque[RequestState]]:
        return self._background if request.background else self._foreground

    def _groups(self) -> tuple[list[Sequence[RequestState]], ...]:
        """Return the waiting lines by precedence; a later group waits for the earlier ones."""
        foreground = [(each,) for each in self._preempted if not each.background]
        if not self._foreground and not foreground:
            background = [(each,) for each in self._preempted]
            return [*background], list(self._background.values())
        below: list[Sequence[RequestState]] = []
        at_share: list[Sequence[RequestState]] = []
        for user, line in self._foreground.items():
            group = below if self._running[user] < self._max_running_per_user else at_share
            group.append(line)
        return [*foreground], below, at_share
