"""Who is next: everybody in turn, nobody for ever, against every order of coming and going that hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from personalpeft.engine.fair_queue import FairQueue, QueueLimit

USERS = st.sampled_from(["ada", "bo", "cy", "di"])


@dataclass(eq=False)
class Asker:
    owner: str
    number: int
    background: bool = False
    order: int = -1


def queue(
    waiting: int = 100, waiting_per_user: int = 100, running_per_user: int = 100
) -> FairQueue[Asker]:
    return FairQueue(
        max_waiting=waiting,
        max_waiting_per_user=waiting_per_user,
        max_running_per_user=running_per_user,
    )


def served(line: FairQueue[Asker]) -> list[tuple[str, int]]:
    """Lets one after the other begin, and end at once."""
    order = []
    while (one := line.next_ready(lambda each: True)) is not None:
        line.start(one)
        line.finish(one)
        order.append((one.owner, one.number))
    return order


@given(users=st.lists(USERS, max_size=30))
def test_users_take_turns_and_within_one_it_is_first_come_first_served(users: list[str]) -> None:
    line = queue()
    line.add(Asker(user, n) for n, user in enumerate(users))
    expected_order = [(each.owner, each.number) for each in line.in_order()]
    order = served(line)
    assert order == expected_order
    counts = Counter(users)
    # The n-th of a user comes in the n-th round, and rounds follow each other.
    rounds = [sum(1 for user, _ in order[:i] if user == order[i][0]) for i in range(len(order))]
    assert rounds == sorted(rounds)
    for user in counts:
        own = [number for who, number in order if who == user]
        assert own == sorted(own)
    assert len(line) == 0


def test_a_hundred_requests_of_one_user_make_another_wait_for_one() -> None:
    line = queue()
    line.add(Asker("ada", n) for n in range(100))
    line.start(line.next_ready(lambda each: True))  # type: ignore[arg-type]
    line.add([Asker("bo", 0)])
    assert served(line).index(("bo", 0)) <= 1


def test_who_has_the_share_running_lets_those_go_first_who_have_less() -> None:
    line = queue(running_per_user=2)
    line.add(Asker("ada", n) for n in range(5))
    for _ in range(3):
        # Alone, more than the share is fine.
        line.start(line.next_ready(lambda each: True))  # type: ignore[arg-type]
    line.add(Asker("bo", n) for n in range(3))
    begun = []
    for _ in range(3):
        one = line.next_ready(lambda each: True)
        assert one is not None
        line.start(one)
        begun.append(one.owner)
    assert begun[:2] == ["bo", "bo"]
    # Not even where the other is not ready: the row is kept for who has less.
    line.add([Asker("cy", 0)])
    assert line.next_ready(lambda each: each.owner != "cy") is None


def test_what_was_preempted_goes_on_before_anything_new_of_its_kind() -> None:
    line = queue()
    learn, first, second = Asker("bo", 0, background=True), Asker("ada", 1), Asker("ada", 2)
    line.add([first, second])
    for order, one in enumerate((first, second)):
        line.start(one)
        one.order = order
    line.preempt(second)
    line.preempt(first)
    line.add([learn, Asker("cy", 3)])
    assert line.has_foreground
    assert len(line) == 4
    # Not even another user's new request goes before them.
    assert line.next_ready(lambda each: each.order < 0) is None
    assert served(line) == [("ada", 1), ("ada", 2), ("cy", 3), ("bo", 0)]
    line.add([learn])
    line.start(learn)
    learn.order = 2
    line.preempt(learn)
    line.add([Asker("cy", 4), Asker("di", 5, background=True)])
    assert served(line) == [("cy", 4), ("bo", 0), ("di", 5)]


def test_background_work_begins_only_while_no_person_waits() -> None:
    line = queue(waiting=1)
    line.add(Asker("bo", n, background=True) for n in range(3))
    line.add([Asker("ada", 0)])
    assert line.next_ready(lambda each: each.background) is None
    assert [each.owner for each in line.in_order()] == ["ada"]
    assert len(line) == len(list(line)) == 4
    assert served(line) == [("ada", 0), ("bo", 0), ("bo", 1), ("bo", 2)]


@given(
    there=st.lists(USERS, max_size=8),
    more=st.lists(st.tuples(USERS, st.booleans()), max_size=8),
    bound=st.integers(1, 9),
)
def test_a_call_is_taken_whole_or_told_by_how_much_it_is_too_much(
    there: list[str], more: list[tuple[str, bool]], bound: int
) -> None:
    line = queue(waiting=bound, waiting_per_user=3)
    line.add(Asker(user, 0) for user in there)
    limit = line.exceeded([Asker(user, 0, background) for user, background in more])
    people = Counter(user for user, background in more if not background)
    own = {
        user: there.count(user) + count - 3
        for user, count in people.items()
        if there.count(user) + count > 3
    }
    over = len(there) + people.total() - bound
    if own:
        assert limit is not None
        assert limit.per_user
        assert limit.excess in own.values()
    elif people and over > 0:
        assert limit == QueueLimit(over, bound, per_user=False)
    elif over <= 0:
        assert limit is None


class Turns(RuleBasedStateMachine):
    """Requests come, begin when ready, end and give up; whoever is first in line is overtaken by each other user once
    at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self.line = queue(running_per_user=2)
        self.count = self.started = 0
        self.running: list[Asker] = []
        self.head: Asker | None = None
        self.overtook: Counter[str] = Counter()

    @initialize(users=st.lists(USERS, max_size=5))
    def begin_with(self, users: list[str]) -> None:
        for user in users:
            self.come(user)

    @rule(user=USERS)
    def come(self, user: str) -> None:
        self.count += 1
        self.line.add([Asker(user, self.count)])
        self._look()

    @rule(ready=st.sets(USERS, min_size=1))
    def begin(self, ready: set[str]) -> None:
        one = self.line.next_ready(lambda each: each.owner in ready)
        if one is None:
            return
        if one is not self.head and self.head is not None:
            self.overtook[one.owner] += 1
            assert one.owner != self.head.owner
        if self.line.preempted:
            assert one in self.line.preempted, "a new request went before one that is to resume"
        self.line.start(one)
        if one.order < 0:
            self.started += 1
            one.order = self.started
        self.running.append(one)
        self._look()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.line.preempt(one)
        orders = [each.order for each in self.line.preempted]
        assert orders == sorted(orders)
        self._look()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.line.finish(one)
        self._look()

    @precondition(lambda self: len(self.line))
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.line.drop(data.draw(st.sampled_from(list(self.line))))
        self._look()

    def _look(self) -> None:
        head = next(self.line.in_order(), None)
        if head is not self.head:
            self.head, self.overtook = head, Counter()

    @invariant()
    def nothing_is_lost(self) -> None:
        everybody = list(self.line.in_order())
        assert len(everybody) == len(set(everybody)) == len(self.line)
        if everybody:
            assert self.line.next_ready(lambda each: True) is everybody[0]


TestTurns = Turns.TestCase
