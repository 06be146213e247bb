"""The queue serves users in turn and starves none, in every order that hypothesis generates."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from personalpeft.engine.fair_queue import FairQueue, QueueLimit

USERS = st.sampled_from(["ada", "bo", "cy", "di"])


@dataclass(eq=False)
class QueuedRequest:
    owner: str
    number: int
    background: bool = False
    order: int = -1


def queue(
    waiting: int = 100, waiting_per_user: int = 100, running_per_user: int = 100
) -> FairQueue:
    return FairQueue(
        max_waiting=waiting,
        max_waiting_per_user=waiting_per_user,
        max_running_per_user=running_per_user,
    )


def drain(line: FairQueue) -> list[tuple[str, int]]:
    """Start and finish each request in the queue's order."""
    order = []
    while (one := line.next_ready(lambda each: True)) is not None:
        line.start(one)
        line.finish(one)
        order.append((one.owner, one.number))
    return order


@given(users=st.lists(USERS, max_size=30))
def test_users_take_turns_and_each_users_requests_are_first_come_first_served(
    users: list[str],
) -> None:
    line = queue()
    line.add(QueuedRequest(user, n) for n, user in enumerate(users))
    expected_order = [(each.owner, each.number) for each in line.in_order()]
    order = drain(line)
    assert order == expected_order
    counts = Counter(users)
    # The n-th request of a user is in the n-th round, and rounds follow each other.
    rounds = [sum(1 for user, _ in order[:i] if user == order[i][0]) for i in range(len(order))]
    assert rounds == sorted(rounds)
    for user in counts:
        own = [number for who, number in order if who == user]
        assert own == sorted(own)
    assert len(line) == 0


def test_a_hundred_requests_of_one_user_delay_another_by_one() -> None:
    line = queue()
    line.add(QueuedRequest("ada", n) for n in range(100))
    line.start(line.next_ready(lambda each: True))  # type: ignore[arg-type]
    line.add([QueuedRequest("bo", 0)])
    assert drain(line).index(("bo", 0)) <= 1


def test_a_user_at_the_limit_yields_to_users_below_it() -> None:
    line = queue(running_per_user=2)
    line.add(QueuedRequest("ada", n) for n in range(5))
    for _ in range(3):
        # Alone, a user may exceed the limit.
        line.start(line.next_ready(lambda each: True))  # type: ignore[arg-type]
    line.add(QueuedRequest("bo", n) for n in range(3))
    begun = []
    for _ in range(3):
        one = line.next_ready(lambda each: True)
        assert one is not None
        line.start(one)
        begun.append(one.owner)
    assert begun[:2] == ["bo", "bo"]
    # Even if the other request is not ready: the row is reserved for it.
    line.add([QueuedRequest("cy", 0)])
    assert line.next_ready(lambda each: each.owner != "cy") is None


def test_a_preempted_request_precedes_new_ones_of_its_kind() -> None:
    line = queue()
    learn, first, second = (
        QueuedRequest("bo", 0, background=True),
        QueuedRequest("ada", 1),
        QueuedRequest("ada", 2),
    )
    line.add([first, second])
    for order, one in enumerate((first, second)):
        line.start(one)
        one.order = order
    line.preempt(second)
    line.preempt(first)
    line.add([learn, QueuedRequest("cy", 3)])
    assert line.has_foreground
    assert len(line) == 4
    # New requests of other users do not precede it either.
    assert line.next_ready(lambda each: each.order < 0) is None
    assert drain(line) == [("ada", 1), ("ada", 2), ("cy", 3), ("bo", 0)]
    line.add([learn])
    line.start(learn)
    learn.order = 2
    line.preempt(learn)
    line.add([QueuedRequest("cy", 4), QueuedRequest("di", 5, background=True)])
    assert drain(line) == [("cy", 4), ("bo", 0), ("di", 5)]


def test_background_work_starts_only_while_no_interactive_request_waits() -> None:
    line = queue(waiting=1)
    line.add(QueuedRequest("bo", n, background=True) for n in range(3))
    line.add([QueuedRequest("ada", 0)])
    assert line.next_ready(lambda each: each.background) is None
    assert [each.owner for each in line.in_order()] == ["ada"]
    assert len(line) == len(list(line)) == 4
    assert drain(line) == [("ada", 0), ("bo", 0), ("bo", 1), ("bo", 2)]


@given(
    there=st.lists(USERS, max_size=8),
    more=st.lists(st.tuples(USERS, st.booleans()), max_size=8),
    bound=st.integers(1, 9),
)
def test_a_call_is_accepted_whole_or_refused_with_its_excess(
    there: list[str], more: list[tuple[str, bool]], bound: int
) -> None:
    line = queue(waiting=bound, waiting_per_user=3)
    line.add(QueuedRequest(user, 0) for user in there)
    limit = line.exceeded([QueuedRequest(user, 0, background) for user, background in more])
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


class QueueMachine(RuleBasedStateMachine):
    """Enqueue, start, finish and cancel requests; each other user overtakes the first at most once."""

    def __init__(self) -> None:
        super().__init__()
        self.line = queue(running_per_user=2)
        self.count = self.started = 0
        self.running: list[QueuedRequest] = []
        self.head: QueuedRequest | None = None
        self.overtook: Counter[str] = Counter()

    @initialize(users=st.lists(USERS, max_size=5))
    def start_with(self, users: list[str]) -> None:
        for user in users:
            self.enqueue(user)

    @rule(user=USERS)
    def enqueue(self, user: str) -> None:
        self.count += 1
        self.line.add([QueuedRequest(user, self.count)])
        self._record_order()

    @rule(ready=st.sets(USERS, min_size=1))
    def start(self, ready: set[str]) -> None:
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
        self._record_order()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.line.preempt(one)
        orders = [each.order for each in self.line.preempted]
        assert orders == sorted(orders)
        self._record_order()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.line.finish(one)
        self._record_order()

    @precondition(lambda self: len(self.line))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.line.drop(data.draw(st.sampled_from(list(self.line))))
        self._record_order()

    def _record_order(self) -> None:
        head = next(self.line.in_order(), None)
        if head is not self.head:
            self.head, self.overtook = head, Counter()

    @invariant()
    def no_request_is_lost(self) -> None:
        queued = list(self.line.in_order())
        assert len(queued) == len(set(queued)) == len(self.line)
        if queued:
            assert self.line.next_ready(lambda each: True) is queued[0]


TestTurns = QueueMachine.TestCase
TestTurns.settings = examples(40, stateful_step_count=30)
