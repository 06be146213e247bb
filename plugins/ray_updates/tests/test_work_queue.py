"""The work queue hands out each user fairly, whatever happens to workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from personalpeft_ray_updates.work_queue import MAX_LOSSES, WorkQueue


@given(
    count=st.integers(0, 40),
    at_once=st.integers(1, 9),
    among=st.integers(1, 5),
    lost=st.lists(st.booleans(), max_size=60),
)
def test_each_user_is_finished_or_given_up_once_and_held_by_one_worker_at_a_time(
    count: int, at_once: int, among: int, lost: list[bool]
) -> None:
    users = [f"user-{number}" for number in range(count)]
    queue, fate = WorkQueue(users, at_once), iter(lost)
    finished: list[str] = []
    with_workers: list[tuple[str, ...]] = []
    while queue.num_waiting or with_workers:
        while len(with_workers) < among and (some := queue.take(among)):
            assert len(some) <= (1 if any(map(queue.num_losses, some)) else at_once)
            with_workers.append(some)
        assert sum(map(len, with_workers)) + queue.num_waiting + len(finished) == count
        some = with_workers.pop(0)
        finished += queue.retry(some) if next(fate, False) else some
    assert sorted(finished) == sorted(users)
    assert all(queue.num_losses(user) <= MAX_LOSSES for user in users)


@given(at_once=st.integers(1, 9), among=st.integers(1, 5), others=st.integers(0, 30))
def test_a_user_that_kills_every_worker_delays_no_other_and_is_given_up(
    at_once: int, among: int, others: int
) -> None:
    queue = WorkQueue(["bad", *map(str, range(others))], at_once)
    finished: list[str] = []
    while some := queue.take(among):
        given_up = queue.retry(some) if "bad" in some else ()
        finished += given_up or (some if "bad" not in some else ())
    assert finished[-1] == "bad" or queue.num_losses(finished[-1]) == 1
    assert queue.num_losses("bad") == MAX_LOSSES
    assert all(queue.num_losses(str(user)) <= 1 for user in range(others))


@given(count=st.integers(1, 40), at_once=st.integers(1, 9), among=st.integers(1, 5))
def test_the_last_users_are_spread_over_all_workers(count: int, at_once: int, among: int) -> None:
    queue = WorkQueue([str(number) for number in range(count)], at_once)
    first = [len(queue.take(among)) for _ in range(among)]
    assert max(first) == min(at_once, -(-count // among))
    assert sum(size > 0 for size in first) >= min(among, -(-count // at_once))


def test_a_dismissed_worker_waits_no_longer() -> None:
    queue = WorkQueue(["ada", "bo", "cy"], 1)
    assert queue.retry(queue.take(1)) == ()
    assert queue.clear() == ("bo", "cy", "ada")
    assert (queue.num_waiting, queue.take(1)) == (0, ())
