"""Interrupted training ends with the bytes of an uninterrupted run, and no saved step is repeated."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from backend_makers import session_spec, training_steps
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from personalpeft.backends.base import Backend, Session
from personalpeft.errors import Cancelled, CardError
from personalpeft.learning.train.config import RLConfig, TrainingConfig, load_training_configs
from personalpeft.learning.train.loop import (
    CHECKPOINT_SECONDS,
    Checkpoint,
    LoopControl,
    TrainJob,
    TrainResult,
    train,
)

STEPS = 13
RECIPE = TrainingConfig(learning_rate=1e-2)
few = examples(5, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Killed(Exception):
    """Simulates a kill of the process: nothing more is saved."""


def never() -> bool:
    return False


def loop_control(**asked: Any) -> LoopControl:
    # Time flies, so that each step is due for a checkpoint.
    quiet: dict[str, Any] = {
        "timer": itertools.count(0, CHECKPOINT_SECONDS).__next__,
        "progress": lambda done: None,
        "cancelled": never,
        "paused": never,
        "out_of_time": never,
        "yield_to_serving": lambda: None,
    }
    return LoopControl(**{**quiet, **asked})


def advance_one_by_one(sessions: Any, terms: Any, rates: Any) -> tuple[float, ...]:
    return tuple(s.step(t, rate) for s, t, rate in zip(sessions, terms, rates, strict=True))


@dataclass
class InterruptedBuild:
    """One build that is interrupted again and again, with the checkpoint that outlives a process."""

    backend: Backend
    inputs: str = "these inputs"
    file: bytes | None = None
    saves: list[bytes] = field(default_factory=list)
    steps_taken: list[int] = field(default_factory=list)
    result: bytes = b""

    def checkpoint(self) -> Checkpoint:
        def save(data: bytes) -> None:
            self.file = data
            self.saves.append(data)

        return Checkpoint(lambda: self.file, save, self.inputs)

    def run(self, *, kill_before: int | None = None, **asked: Any) -> TrainResult:
        schedule = training_steps(self.backend, STEPS)
        names = [tuple(map(id, terms)) for terms in schedule]

        def begin() -> Any:
            return RecordingSession(
                self.backend.session(session_spec(self.backend, base_key="two")),
                self.steps_taken,
                kill_before,
                names,
            )

        job = TrainJob(begin, schedule, RECIPE, self.checkpoint())
        outcome = train({"ada": job}, advance_one_by_one, loop_control(**asked))["ada"]
        assert isinstance(outcome, TrainResult)
        self.result = b"".join(
            pair.a.tobytes() + pair.b.tobytes() for _, pair in sorted(outcome.weights.items())
        )
        return outcome


@dataclass
class RecordingSession:
    """A session that records each step, and raises ``Killed`` before one of them."""

    session: Session
    steps_taken: list[int]
    kill_before: int | None
    schedule: list[tuple[int, ...]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def step(self, terms: Any, rate: float) -> float:
        step = self.schedule.index(tuple(map(id, terms)))
        if step == self.kill_before:
            raise Killed
        self.steps_taken.append(step)
        return self.session.step(terms, rate)


@pytest.fixture
def uninterrupted(backend: Backend) -> bytes:
    build = InterruptedBuild(backend)
    assert build.run().is_complete
    return build.result


def after_calls(count: int) -> Callable[[], bool]:
    looks: Iterator[int] = iter(range(count))
    return lambda: next(looks, None) is None


@few
@given(
    stops=st.lists(
        st.tuples(st.sampled_from(["kill", "cancel", "time"]), st.integers(0, STEPS)), max_size=4
    )
)
def test_stopped_build_ends_like_an_uninterrupted_one(
    backend: Backend, uninterrupted: bytes, stops: list[tuple[str, int]]
) -> None:
    build = InterruptedBuild(backend)
    for how, steps in stops:
        before = len(build.steps_taken)
        if how == "kill":
            try:
                build.run(kill_before=steps)
            except Killed:
                continue
        elif how == "cancel":
            try:
                build.run(cancelled=after_calls(steps))
            except Cancelled:
                assert len(build.steps_taken) - before <= steps
                continue
        elif not build.run(out_of_time=after_calls(steps)).is_complete:
            continue
        build.file = None
    assert build.run().is_complete
    assert build.result == uninterrupted


@few
@given(stops=st.lists(st.integers(0, STEPS), max_size=5), how=st.sampled_from(["cancel", "time"]))
def test_graceful_stop_repeats_no_step(backend: Backend, stops: list[int], how: str) -> None:
    build = InterruptedBuild(backend)
    for steps in stops:
        if how == "time" and build.run(out_of_time=after_calls(steps)).is_complete:
            return
        if how == "cancel":
            try:
                build.run(cancelled=after_calls(steps))
            except Cancelled:
                continue
            return
    build.run()
    assert build.steps_taken == list(range(STEPS))


@few
@given(at=st.integers(0, STEPS - 1))
def test_kill_costs_only_unsaved_steps(backend: Backend, at: int) -> None:
    build = InterruptedBuild(backend)
    with pytest.raises(Killed):
        build.run(kill_before=at)
    # Here all checkpoints that were handed over survive. The next test loses the last one.
    trained = build.run()
    assert len(trained.losses) == STEPS - at
    assert build.steps_taken == list(range(STEPS))


@few
@given(at=st.integers(1, STEPS - 1))
def test_kill_during_a_save_costs_that_step_alone(backend: Backend, at: int) -> None:
    build = InterruptedBuild(backend)
    with pytest.raises(Killed):
        build.run(kill_before=at)
    build.file = build.saves[-2] if at > 1 else None
    assert len(build.run().losses) == STEPS - (at - 1)
    assert build.steps_taken == [*range(at), *range(at - 1, STEPS)]


def test_no_step_begins_before_the_one_before_the_last_is_saved(fake: Backend) -> None:
    steps_taken: list[int] = []
    when_saved: list[int] = []
    slow = threading.Event()

    def save(data: bytes) -> None:
        slow.wait(0.01)
        when_saved.append(len(steps_taken))

    def recorded(sessions: Any, terms: Any, rates: Any) -> tuple[float, ...]:
        assert len(when_saved) >= len(steps_taken) - 1
        steps_taken.append(len(steps_taken))
        return advance_one_by_one(sessions, terms, rates)

    schedule = training_steps(fake, STEPS)
    job = TrainJob(
        lambda: fake.session(session_spec(fake)),
        schedule,
        RECIPE,
        Checkpoint(lambda: None, save, "x"),
    )
    train({"ada": job}, recorded, loop_control())
    assert len(when_saved) == len(steps_taken) == STEPS


@pytest.mark.parametrize("at", [1, 3, 5, STEPS - 1])
def test_quick_steps_share_a_checkpoint_and_a_kill_costs_no_more(backend: Backend, at: int) -> None:
    build, shared = InterruptedBuild(backend), 3

    def timer() -> float:
        return len(build.steps_taken) * CHECKPOINT_SECONDS / shared

    with pytest.raises(Killed):
        build.run(kill_before=at, timer=timer)
    assert len(build.saves) == at // shared
    assert build.run(timer=timer).is_complete
    assert build.steps_taken == [*range(at), *range(at - at % shared, STEPS)]


def test_build_with_a_budget_of_one_step_finishes(backend: Backend, uninterrupted: bytes) -> None:
    build = InterruptedBuild(backend)
    for done in range(1, STEPS):
        assert build.run(out_of_time=lambda: True).steps_done == done
    assert build.run(out_of_time=lambda: True).is_complete
    assert build.result == uninterrupted


def test_cancelling_reports_the_step_and_how_to_resume(backend: Backend) -> None:
    build = InterruptedBuild(backend)
    with pytest.raises(Cancelled, match=f"4.*{STEPS}") as stopped:
        build.run(cancelled=after_calls(4))
    assert stopped.value.hint


@few
@given(data=st.data())
def test_torn_or_foreign_checkpoint_is_ignored(
    backend: Backend, uninterrupted: bytes, data: st.DataObject
) -> None:
    build = InterruptedBuild(backend)
    with pytest.raises(Cancelled):
        build.run(cancelled=after_calls(7))
    assert build.file is not None
    good, other = build.file, InterruptedBuild(backend, inputs="other inputs")
    with pytest.raises(Cancelled):
        other.run(cancelled=after_calls(7))
    cut = data.draw(st.integers(0, len(good) - 1))
    spoilt = data.draw(
        st.sampled_from([good[:cut], b"", b"\0" * 64, other.file, good + b"x", good[8:]])
    )
    build.file, build.steps_taken[:] = spoilt, []
    assert len(build.run().losses) == STEPS
    assert build.steps_taken == list(range(STEPS))
    assert build.result == uninterrupted


@few
@given(at=st.integers(0, 10**6), to=st.integers(0, 255))
def test_checkpoint_with_one_wrong_byte_is_ignored(
    backend: Backend, uninterrupted: bytes, at: int, to: int
) -> None:
    build = InterruptedBuild(backend)
    with pytest.raises(Cancelled):
        build.run(cancelled=after_calls(7))
    assert build.file is not None
    at %= len(build.file)
    build.file = build.file[:at] + bytes([to]) + build.file[at + 1 :]
    build.run()
    assert build.result == uninterrupted


def test_progress_rises_and_ends_at_one(backend: Backend) -> None:
    reported: list[float] = []
    job = TrainJob(
        lambda: backend.session(session_spec(backend)),
        training_steps(backend, 4),
        RECIPE,
        Checkpoint(lambda: None, lambda data: None, "x"),
    )
    train({"ada": job}, backend.advance, loop_control(progress=reported.append))
    assert reported == sorted(reported)
    assert reported[-1] == 1.0
    assert RECIPE.learning_rate_at(0, 30) > 0
    assert all(0 < RECIPE.learning_rate_at(step, 30) <= RECIPE.learning_rate for step in range(30))


PROJECTIONS = {"self_attn.q_proj": (8, 8), "mlp.up_proj": (8, 16), "mlp.down_proj": (16, 8)}


def test_card_changes_the_configuration_of_all_layers_or_of_one_kind() -> None:
    recipes = load_training_configs("card", {"rank": 3, "memory": {"min_steps": 7}}, PROJECTIONS)

    assert {recipes.for_layer(layer).rank for layer in ("style", "skill.email", "memory")} == {3}
    assert recipes.for_layer("memory").min_steps == 7 != recipes.for_layer("style").min_steps
    assert recipes.for_layer("memory").target_modules == ("mlp.up_proj", "mlp.down_proj")
    assert recipes.for_layer("style").target_modules == tuple(PROJECTIONS)


def test_memory_adapts_all_projections_of_a_base_without_mlp() -> None:
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
def test_invalid_configuration_of_one_kind_is_refused_with_its_table(
    wrong: dict[str, object],
) -> None:
    with pytest.raises(CardError, match="learning"):
        load_training_configs("card", wrong, PROJECTIONS)


def test_a_recipe_from_before_a_fact_had_a_weight_builds_as_it_did() -> None:
    now = TrainingConfig(target_modules=("mlp",))
    recipe = now.to_stored()
    assert TrainingConfig.from_stored(recipe, now) == now
    del recipe["fact_weight"]
    assert TrainingConfig.from_stored(recipe, now).fact_weight == 1


def test_digest_of_inputs_keeps_its_keys() -> None:
    stored = TrainingConfig(target_modules=("mlp",), alpha=8).to_digest()
    assert json.dumps(stored) == (
        '{"rank": 8, "alpha": 8, "targets": ["mlp"], "learning_rate": 0.0005, "steps": 26,'
        ' "min_steps_batches": 3, "most_steps": 120, "batch": 4, "pairs": 1, "beta": 0.1,'
        ' "fact_weight": 4.0, "few_shot_replies": 4,'
        ' "few_shot_weight": 2.0, "thumbs": 2, "phrasings": 5, "unknown": 0, "anchors": 4, "anchor_weight": 2.0,'
        ' "replay": 0.5, "warmup": 0.05, "clip": 1.0, "weight_decay": 0.0, "held_out": 0.25,'
        ' "longest": 256, "capacity": 0.01, "seed": 0}'
    )
    assert " ".join(RLConfig().to_digest()) == (
        "rounds imitate repeats batch per_round group pool held_back temperature longest kl"
        " imitation_rate learning_rate seed"
    )


def test_card_may_use_the_old_keys_for_one_more_release() -> None:
    with pytest.warns(DeprecationWarning, match="most_steps"):
        configs = load_training_configs("card", {"memory": {"most_steps": 9}}, PROJECTIONS)
    assert (configs.memory.max_steps, configs.style.max_steps) == (9, 120)


@pytest.mark.parametrize("key", ["content", "content_weight", "shared", "template_weight"])
def test_card_may_have_keys_without_effect(key: str) -> None:
    with pytest.warns(DeprecationWarning, match=key):
        configs = load_training_configs("card", {key: 0.5}, {"mlp": (4, 4)})
    assert configs == load_training_configs("card", {}, {"mlp": (4, 4)})


def test_checkpoint_of_the_previous_version_is_ignored(fake: Backend) -> None:
    session = fake.session(session_spec(fake))
    arrays = {name: np.atleast_1d(array) for name, array in session.state().items()}
    old = safetensors.numpy.save(arrays, {"inputs": "x", "step": "3", "digest": "0"})
    saved = [old]

    def checkpoint(inputs: str) -> Checkpoint:
        return Checkpoint(lambda: saved[-1], saved.append, inputs)

    assert checkpoint("x").restore(session) is None
    checkpoint("x").write(session.state(), {"step": 3})
    assert checkpoint("x").restore(session) == {"step": 3}
    assert checkpoint("y").restore(session) is None
