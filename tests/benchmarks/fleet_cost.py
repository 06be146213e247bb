"""``bench fleet-cost``: how many machines a million users need, by simulation from measured figures.

Two pools are simulated. A machine that serves shares its speed among the rows of its batch. Its
users read a while after each reply and ask again. A machine that learns takes one learn after
another from one queue. It dies at random and is replaced; the learn that ran starts again. The
search finds the fewest machines with which replies begin in time and learns are promoted in time.

Assumptions: a machine's speed is that of the kept results, on two cores. Active users are spread
evenly over machines. Every session ends with one learn. Sessions begin at a steady rate. Adapters
come from object storage, whose time is not counted.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.pages import read_results

MINT_GPUS = (144, 288)
"""GPUs that MinT (arXiv 2605.13779) is compared with: issue 24 of this project names them."""

_DAY = 86_400.0
_SERVED_SECONDS = 1800.0
_SEED = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """The measured speed of one machine.

    Attributes:
        one_row: Tokens a second of one row.
        all_rows: Tokens a second of all rows together, each with another adapter.
        rows: How many rows a batch has.
        learn_seconds: Seconds of measured learns; a simulated learn takes one of them.
        adapter_mb: Size of a user's packed adapter.
        bundle_mb: Size of what is sent to learn for a user, and of what comes back.
        publications: Promotions a second of one home.
        home_mb: Size of the home of all users, without adapters.
    """

    one_row: float
    all_rows: float
    rows: int
    learn_seconds: tuple[float, ...]
    adapter_mb: float
    bundle_mb: float
    publications: float
    home_mb: float


@dataclass(frozen=True, slots=True)
class Load:
    """What the users do.

    Attributes:
        users: How many there are.
        active: How many are in a session at any time.
        session_minutes: Length of a session.
        think_seconds: Mean time from a reply to the next request.
        reply_tokens: Length of a reply.
        max_wait_seconds: What 95 % of the replies may wait before they begin.
        max_learn_minutes: What 95 % of the learns may take from the session's end to the promotion.
        hours_between_failures: Mean life of a machine that learns.
        replacement_minutes: Until a machine that died is replaced.
    """

    users: int = 1_000_000
    active: int = 2300
    session_minutes: float = 20.0
    think_seconds: float = 60.0
    reply_tokens: int = 128
    max_wait_seconds: float = 1.0
    max_learn_minutes: float = 30.0
    hours_between_failures: float = 24.0
    replacement_minutes: float = 10.0

    @property
    def learns_a_day(self) -> int:
        """One for each session."""
        return round(self.active * _DAY / (60 * self.session_minutes))


def measured_machine(adapter_mb: float = 4.9, bundle_mb: float = 5.0) -> Machine:
    """Return the machine of the kept results: two cores, the default base.

    Args:
        adapter_mb: Rank 8 on all linear layers of the default base, in half precision.
        bundle_mb: The same and a ledger.
    """
    results = read_results()
    rates, catalog = results["serve-zen4"]["tokens_per_second"], results["catalog-zen4"]
    return Machine(
        one_row=rates["own_mixed_1"],
        all_rows=rates["own_mixed_16"],
        rows=16,
        learn_seconds=tuple(each["learn_seconds"] for each in results["style-zen4"]["styles"]),
        adapter_mb=adapter_mb,
        bundle_mb=bundle_mb,
        publications=catalog["publish_per_second"],
        home_mb=catalog["home_mb"] * 1_000_000 / catalog["users"],
    )


def bench_fleet_cost(machine: Machine, load: Load) -> dict[str, Any]:
    """Search the least machines for a load; return how many there are, and what they do."""
    users = _largest(
        lambda count: serve(machine, load, count).wait_p95 <= load.max_wait_seconds, load.active
    )
    served = serve(machine, load, users)
    mean = sum(machine.learn_seconds) / len(machine.learn_seconds)
    least = math.ceil(load.learns_a_day * mean / _DAY)
    count = _smallest(
        lambda count: learn(machine, load, count).promoted_p95 <= 60 * load.max_learn_minutes,
        least,
    )
    learned = learn(machine, load, count)
    rate = load.learns_a_day / _DAY
    return {
        "bench": "fleet-cost",
        "load": load,
        "machine": machine,
        "serving_machines": math.ceil(load.active / users),
        "users_a_machine": users,
        "wait_p95_seconds": round(served.wait_p95, 2),
        "reply_p95_seconds": round(served.reply_p95, 1),
        "learning_machines": count,
        "learns_a_day": load.learns_a_day,
        "learn_p95_minutes": round(learned.promoted_p95 / 60, 1),
        "learns_lost_a_day": learned.lost,
        "publications_a_second": round(rate, 2),
        "homes": math.ceil(rate / machine.publications),
        "moved_mb_a_second": round(2 * rate * machine.bundle_mb, 1),
        "adapters_gb": round(load.users * machine.adapter_mb / 1000),
        "home_gb": round(load.users / 1_000_000 * machine.home_mb / 1000, 1),
        "mint_gpus": MINT_GPUS,
    }


@dataclass(frozen=True, slots=True)
class Served:
    """95 % of the replies began, and were complete, within so many seconds."""

    wait_p95: float
    reply_p95: float


def serve(machine: Machine, load: Load, users: int) -> Served:
    """Simulate one machine with so many active users."""
    draw = random.Random(_SEED)
    asking = [(draw.expovariate(1 / load.think_seconds), user) for user in range(users)]
    heapq.heapify(asking)
    waiting: deque[float] = deque()
    # By the work that the machine must have given each row until it ends; and when it was asked.
    rows: list[tuple[float, float]] = []
    waits, replies = [], []
    now = given = 0.0
    while now < _SERVED_SECONDS and (asking or rows):
        rate = _row_rate(machine, len(rows)) if rows else 0.0
        end = now + (rows[0][0] - given) / rate if rows else math.inf
        ask = asking[0][0] if asking else math.inf
        then = min(end, ask)
        given += (then - now) * rate
        now = then
        if end <= ask:
            _, asked = heapq.heappop(rows)
            replies.append(now - asked)
            heapq.heappush(asking, (now + draw.expovariate(1 / load.think_seconds), 0))
        else:
            heapq.heappop(asking)
            waiting.append(now)
        while waiting and len(rows) < machine.rows:
            asked = waiting.popleft()
            waits.append(now - asked)
            heapq.heappush(rows, (given + load.reply_tokens, asked))
    # Those that still wait count as well.
    waits += [now - asked for asked in waiting]
    return Served(_percentile(waits, 0.95), _percentile(replies, 0.95))


def _row_rate(machine: Machine, rows: int) -> float:
    """Return the tokens a second of each row, between the two measured batches on a line."""
    if machine.rows == 1:
        return machine.all_rows
    share = (rows - 1) / (machine.rows - 1)
    return (machine.one_row + share * (machine.all_rows - machine.one_row)) / rows


@dataclass(frozen=True, slots=True)
class Learned:
    """95 % of a day's learns were promoted within so many seconds; ``lost`` ran on what died."""

    promoted_p95: float
    lost: int


def learn(machine: Machine, load: Load, count: int) -> Learned:
    """Simulate a day of so many machines that learn."""
    draw = random.Random(_SEED)
    life = 3600 * load.hours_between_failures
    # Free machines by when they are free, with the time of their death.
    free = [(0.0, draw.expovariate(1 / life)) for _ in range(count)]
    heapq.heapify(free)
    now, lost, taken = 0.0, 0, []
    rate = load.learns_a_day / _DAY
    while True:
        now += draw.expovariate(rate)
        if now > _DAY:
            return Learned(_percentile(taken, 0.95), lost)
        seconds, began = draw.choice(machine.learn_seconds), now
        while True:
            at, death = heapq.heappop(free)
            begin = max(began, at)
            if begin + seconds <= death:
                heapq.heappush(free, (begin + seconds, death))
                taken.append(begin + seconds - now)
                break
            back = max(begin, death) + 60 * load.replacement_minutes
            heapq.heappush(free, (back, back + draw.expovariate(1 / life)))
            if begin < death:
                lost += 1
                began = death


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 1 to a limit that holds; 1 where none does."""
    low, high = 1, limit + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def _smallest(holds: Callable[[int], bool], least: int) -> int:
    """Return the smallest number from a least one on that holds."""
    high = max(1, least)
    while not holds(high):
        high *= 2
    low = max(0, least - 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
