"""However often training is stopped, it ends with the bytes of a run that never was, and nothing saved is done twice."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from backend_makers import lessons, spec
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend, Session
from personalpeft.errors import Cancelled, CardError
from personalpeft.learning.train.checkpoint import (
    CheckpointStore,
    encode_checkpoint,
    restore_checkpoint,
)
from personalpeft.learning.train.config import RLConfig, TrainingConfig, load_training_configs
from personalpeft.learning.train.loop import LoopControl, TrainJob, TrainResult, train

STEPS = 13
RECIPE = TrainingConfig(learning_rate=1e-2)
few = examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Killed(Exception):
    """The process ended here: nothing more was saved."""


def never() -> bool:
    return False


def manners(**asked: Any) -> LoopControl:
    quiet: dict[str, Any] = {
        "progress": lambda done: None,
        "cancelled": never,
        "paused": never,
        "out_of_time": never,
        "yield_to_serving": lambda: None,
    }
    return LoopControl(**{**quiet, **asked})


def one_by_one(sessions: Any, terms: Any, rates: Any) -> tuple[float, ...]:
    return tuple(s.step(t, rate) for s, t, rate in zip(sessions, terms, rates, strict=True))


@dataclass
class Bench:
    """One build that is interrupted again and again, with all that outlives a process: the file on the desk."""

    backend: Backend
    inputs: str = "these inputs"
    file: bytes | None = None
    saves: list[bytes] = field(default_factory=list)
    taken: list[int] = field(default_factory=list)
    result: bytes = b""

    def desk(self) -> CheckpointStore:
        def save(data: bytes) -> None:
            self.file = data
            self.saves.append(data)

        return CheckpointStore(load=lambda: self.file, save=save)

    def run(self, *, kill_before: int | None = None, **asked: Any) -> TrainResult:
        schedule = lessons(self.backend, STEPS)
        names = [tuple(map(id, terms)) for terms in schedule]

        def begin() -> Any:
            return Watched(
                self.backend.session(spec(self.backend, base_key="two")),
                self.taken,
                kill_before,
                names,
            )

        course = TrainJob(begin, schedule, RECIPE, self.inputs, self.desk())
        outcome = train({"ada": course}, one_by_one, manners(**asked))["ada"]
        assert isinstance(outcome, TrainResult)
        self.result = b"".join(
            pair.a.tobytes() + pair.b.tobytes() for _, pair in sorted(outcome.pairs.items())
        )
        return outcome


@dataclass
class Watched:
    """A session that notes which step of the schedule it is given, and ends the process before one of them."""

    session: Session
    taken: list[int]
    kill_before: int | None
    schedule: list[tuple[int, ...]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, terms: Any, rate: float) -> float:
        step = self.schedule.index(tuple(map(id, terms)))
        if step == self.kill_before:
            raise Killed
        self.taken.append(step)
        return self.session.step(terms, rate)


@pytest.fixture
def whole(backend: Backend) -> bytes:
    bench = Bench(backend)
    assert bench.run().is_complete
    return bench.result


def after(count: int) -> Callable[[], bool]:
    looks: Iterator[int] = iter(range(count))
    return lambda: next(looks, None) is None


@few
@given(
    stops=st.lists(
        st.tuples(st.sampled_from(["kill", "cancel", "time"]), st.integers(0, STEPS)), max_size=4
    )
)
def test_a_build_that_was_stopped_ends_as_one_that_was_not(
    backend: Backend, whole: bytes, stops: list[tuple[str, int]]
) -> None:
    bench = Bench(backend)
    for how, steps in stops:
        before = len(bench.taken)
        if how == "kill":
            try:
                bench.run(kill_before=steps)
            except Killed:
                continue
        elif how == "cancel":
            try:
                bench.run(cancelled=after(steps))
            except Cancelled:
                assert len(bench.taken) - before <= steps
                continue
        elif not bench.run(out_of_time=after(steps)).is_complete:
            continue
        bench.file = None
    assert bench.run().is_complete
    assert bench.result == whole


@few
@given(stops=st.lists(st.integers(0, STEPS), max_size=5), how=st.sampled_from(["cancel", "time"]))
def test_who_is_asked_to_stop_does_no_step_twice(
    backend: Backend, stops: list[int], how: str
) -> None:
    bench = Bench(backend)
    for steps in stops:
        if how == "time" and bench.run(out_of_time=after(steps)).is_complete:
            return
        if how == "cancel":
            try:
                bench.run(cancelled=after(steps))
            except Cancelled:
                continue
            return
    bench.run()
    assert bench.taken == list(range(STEPS))


@few
@given(at=st.integers(0, STEPS - 1))
def test_a_kill_costs_only_what_was_not_saved_yet(backend: Backend, at: int) -> None:
    bench = Bench(backend)
    with pytest.raises(Killed):
        bench.run(kill_before=at)
    # What the process had handed over to be saved, the system had not lost with it; the next test loses that too.
    trained = bench.run()
    assert (trained.resumed_at, len(trained.losses)) == (at, STEPS - at)
    assert bench.taken == list(range(STEPS))


@few
@given(at=st.integers(1, STEPS - 1))
def test_a_kill_while_a_step_is_being_saved_costs_that_step_alone(
    backend: Backend, at: int
) -> None:
    bench = Bench(backend)
    with pytest.raises(Killed):
        bench.run(kill_before=at)
    bench.file = bench.saves[-2] if at > 1 else None
    assert bench.run().resumed_at == at - 1
    assert bench.taken == [*range(at), *range(at - 1, STEPS)]


def test_no_step_begins_before_the_one_before_the_last_is_safe(fake: Backend) -> None:
    taken: list[int] = []
    when_saved: list[int] = []
    slow = threading.Event()

    def save(data: bytes) -> None:
        slow.wait(0.01)
        when_saved.append(len(taken))

    def noted(sessions: Any, terms: Any, rates: Any) -> tuple[float, ...]:
        assert len(when_saved) >= len(taken) - 1
        taken.append(len(taken))
        return one_by_one(sessions, terms, rates)

    schedule = lessons(fake, STEPS)
    course = TrainJob(
        lambda: fake.session(spec(fake)), schedule, RECIPE, "x", CheckpointStore(lambda: None, save)
    )
    train({"ada": course}, noted, manners())
    assert len(when_saved) == len(taken) == STEPS


def test_a_budget_that_is_always_used_up_still_gets_there(backend: Backend, whole: bytes) -> None:
    bench = Bench(backend)
    for done in range(1, STEPS):
        assert bench.run(out_of_time=lambda: True).steps_done == done
    assert bench.run(out_of_time=lambda: True).is_complete
    assert bench.result == whole


def test_cancelling_says_where_it_stopped_and_how_to_go_on(backend: Backend) -> None:
    bench = Bench(backend)
    with pytest.raises(Cancelled, match=f"4.*{STEPS}") as stopped:
        bench.run(cancelled=after(4))
    assert stopped.value.hint


@few
@given(data=st.data())
def test_a_file_that_is_torn_or_of_another_build_is_as_if_it_were_not_there(
    backend: Backend, whole: bytes, data: st.DataObject
) -> None:
    bench = Bench(backend)
    with pytest.raises(Cancelled):
        bench.run(cancelled=after(7))
    assert bench.file is not None
    good, other = bench.file, Bench(backend, inputs="other inputs")
    with pytest.raises(Cancelled):
        other.run(cancelled=after(7))
    cut = data.draw(st.integers(0, len(good) - 1))
    spoilt = data.draw(
        st.sampled_from([good[:cut], b"", b"\0" * 64, other.file, good + b"x", good[8:]])
    )
    bench.file, bench.taken[:] = spoilt, []
    assert bench.run().resumed_at == 0
    assert bench.taken == list(range(STEPS))
    assert bench.result == whole


@few
@given(at=st.integers(0, 10**6), to=st.integers(0, 255))
def test_a_file_with_one_wrong_byte_is_not_built_on(
    backend: Backend, whole: bytes, at: int, to: int
) -> None:
    bench = Bench(backend)
    with pytest.raises(Cancelled):
        bench.run(cancelled=after(7))
    assert bench.file is not None
    at %= len(bench.file)
    bench.file = bench.file[:at] + bytes([to]) + bench.file[at + 1 :]
    bench.run()
    assert bench.result == whole


def test_progress_only_rises_and_ends_at_one(backend: Backend) -> None:
    heard: list[float] = []
    desk = CheckpointStore(load=lambda: None, save=lambda data: None)
    course = TrainJob(
        lambda: backend.session(spec(backend)), lessons(backend, 4), RECIPE, "x", desk
    )
    train({"ada": course}, backend.advance, manners(progress=heard.append))
    assert heard == sorted(heard)
    assert heard[-1] == 1.0
    assert RECIPE.learning_rate_at(0, 30) > 0
    assert all(0 < RECIPE.learning_rate_at(step, 30) <= RECIPE.learning_rate for step in range(30))


PROJECTIONS = {"self_attn.q_proj": (8, 8), "mlp.up_proj": (8, 16), "mlp.down_proj": (16, 8)}


def test_each_kind_of_layer_has_a_recipe_that_the_card_can_change_for_all_or_for_one() -> None:
    recipes = load_training_configs("card", {"rank": 3, "memory": {"min_steps": 7}}, PROJECTIONS)

    assert {recipes.for_layer(layer).rank for layer in ("style", "skill.email", "memory")} == {3}
    assert recipes.for_layer("memory").min_steps == 7 != recipes.for_layer("style").min_steps
    assert recipes.for_layer("memory").target_modules == ("mlp.up_proj", "mlp.down_proj")
    assert recipes.for_layer("style").target_modules == tuple(PROJECTIONS)


def test_a_memory_takes_all_projections_of_a_base_that_has_no_mlp() -> None:
    assert load_training_configs("card", {}, {"q": (8, 8)}).for_layer("memory").target_modules == (
        "q",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory": {"rnk": 3}},
        {"memory": {"target_modules": ["nose"]}},
        {"memory": 3},
        {"dream": {}},
    ],
)
def test_a_mistake_in_the_recipe_of_one_kind_is_said_with_its_table(
    wrong: dict[str, object],
) -> None:
    with pytest.raises(CardError, match="learning"):
        load_training_configs("card", wrong, PROJECTIONS)


def test_what_is_stored_of_a_configuration_keeps_its_keys_whatever_its_fields_are_called() -> None:
    """Digests of inputs and adapter files hold these keys."""
    stored = TrainingConfig(target_modules=("mlp",), alpha=8).to_stored()
    assert json.dumps(stored) == (
        '{"rank": 8, "alpha": 8, "targets": ["mlp"], "learning_rate": 0.0005, "steps": 26,'
        ' "most_steps": 120, "batch": 4, "pairs": 1, "beta": 0.1, "content": 0.3, "shared": 1.0,'
        ' "thumbs": 2, "phrasings": 5, "unknown": 0, "anchors": 4, "anchor_weight": 2.0,'
        ' "replay": 0.5, "warmup": 0.05, "clip": 1.0, "weight_decay": 0.0, "held_out": 0.25,'
        ' "longest": 96, "capacity": 0.01, "seed": 0}'
    )
    assert TrainingConfig.from_stored({**stored, "practice": {}}).to_stored() == stored
    assert " ".join(RLConfig().to_stored()) == (
        "rounds imitate repeats batch per_round group pool held_back temperature longest kl"
        " imitation_rate learning_rate seed"
    )


def test_a_card_may_use_the_old_keys_for_one_release_more() -> None:
    with pytest.warns(DeprecationWarning, match="most_steps"):
        configs = load_training_configs("card", {"memory": {"most_steps": 9}}, PROJECTIONS)
    assert (configs.memory.max_steps, configs.style.max_steps) == (9, 120)


def test_a_checkpoint_of_the_version_before_is_as_if_it_were_not_there(fake: Backend) -> None:
    session = fake.session(spec(fake))
    arrays = {name: np.atleast_1d(array) for name, array in session.state().items()}
    old = safetensors.numpy.save(arrays, {"inputs": "x", "step": "3", "digest": "0"})
    assert restore_checkpoint(old, session, "x") is None
    new = encode_checkpoint(session.state(), "x", {"step": 3})
    assert restore_checkpoint(new, session, "x") == {"step": 3}
    assert restore_checkpoint(new, session, "y") is None
