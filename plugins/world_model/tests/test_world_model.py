"""A world model is taught, learned and judged by games, and used in three ways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from world_makers import (
    BURNED,
    DINNER,
    FRIED,
    RAW,
    RECORDINGS,
    TASK,
    TRAINING,
    Kitchen,
    kitchen,
    kitchen_model,
)

import personalpeft
from personalpeft import InvalidInput, NotFound, NothingToLearn, Runtime
from personalpeft_world_model import (
    Outcome,
    Rate,
    State,
    Step,
    Training,
    Trajectory,
    Verification,
    WorldModel,
    begins_with,
    imagine,
    measure_consistency,
    measure_fidelity,
    measure_success,
    random_policy,
    read_jsonl,
    run_policy,
    warm_start,
)


@pytest.mark.parametrize("epochs", [0, -1, float("nan"), float("inf"), 1e300])
def test_epochs_that_no_training_could_take_are_refused_before_anything_is_taught(
    epochs: float,
) -> None:
    with pytest.raises(InvalidInput):
        Training(epochs=epochs)


QUICK = Training(epochs=1, batch_size=8, rank=4, learning_rate=0.02, holdout=0.34)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, card: Path) -> Iterator[WorldModel]:
    """A model that has learned the kitchen."""
    with personalpeft.open(tmp_path_factory.mktemp("world") / "home", base=card) as runtime:
        yield kitchen_model(runtime)


def clumsy(task: str, state: State, rng: random.Random) -> str:
    """An agent that cooks at first and then does anything."""
    return "cook" if state.text == RAW.text else rng.choice(["cook", "eat"])


@pytest.mark.exhaustive
def test_a_real_game_is_learned_and_judged_by_whole_games(runtime: Runtime) -> None:
    trajectories = read_jsonl(RECORDINGS)
    model = WorldModel(runtime.user("world"), "coin")
    with pytest.raises(NotFound):
        model.predict(trajectories[0].task, trajectories[0].initial, "go east")
    new = model.teach(trajectories)
    assert 0 < new < sum(len(each.steps) for each in trajectories)
    assert model.teach(trajectories) == 0
    report = model.learn(QUICK, accept=True)
    (revision,) = model.user.revisions(model.layer)
    games = {each.id: each.payload["group"] for each in model.user.signals()}
    held_out = {games[s] for s, role in revision.signals.items() if role == "held_out"}
    trained = {games[s] for s, role in revision.signals.items() if role == "trained"}
    assert held_out
    assert trained
    assert not held_out & trained
    assert report.scores["tasks"]["asked"] == list(revision.signals.values()).count("held_out")
    with pytest.raises(NothingToLearn):
        model.learn(QUICK)
    # It answers no chat by itself.
    assert model.user.chat("hello").stack.entries == ()

    shown = trajectories[:2]
    fidelity = measure_fidelity(model, shown)
    steps = sum(len(each.steps) for each in shown)
    assert fidelity.matched.asked == steps
    assert sum(share.asked for share in fidelity.by_step.values()) == steps
    assert sum(share.asked for share in fidelity.by_environment.values()) == steps


@pytest.mark.exhaustive
def test_other_learns_of_the_layer_train_and_judge_it_likewise(runtime: Runtime) -> None:
    def teach(first: int) -> None:
        numbers = range(first, first + 8)
        model.teach(Trajectory(f"g{n}", f"Dish {n}.", RAW, (Step("cook", FRIED),)) for n in numbers)

    model = WorldModel(runtime.user("world"), "shop")
    teach(0)
    model.learn(QUICK, accept=True)
    teach(8)
    plain = model.user.learn(accept=True)
    lesson = next(iter(model.user.revisions(model.layer)[0].signals))
    (rebuilt,) = model.user.forget(lesson).rebuilt
    for report in (plain, rebuilt):
        assert report.layer == model.layer
        assert report.scores["tasks"]["asked"] > 0
    (revision,) = (each for each in model.user.revisions() if each.id == rebuilt.revision)
    assert revision.recipe["overrides"] == QUICK.recipe


def test_what_was_learned_is_predicted_word_for_word(model: WorldModel) -> None:
    assert model.predict(TASK, RAW, "cook") == State("fried")
    assert model.predict(TASK, FRIED, "cook") == State("ash", Outcome.LOST)
    fidelity = measure_fidelity(model, kitchen())
    assert fidelity.matched == Rate(5, 5)
    assert fidelity.by_environment == {"kitchen": Rate(5, 5)}
    assert fidelity.by_step == {1: Rate(3, 3), 2: Rate(2, 2)}


def test_an_action_that_would_lose_is_not_taken_while_the_budget_lasts(model: WorldModel) -> None:
    def results(budget: int) -> list[State]:
        finals = []
        for seed in range(8):
            agent = Verification(model, clumsy, begins_with(["cook", "eat"]), budget)
            finals.append(run_policy(Kitchen(), agent, random.Random(seed)).final)
            assert agent.checks <= budget
        return finals

    assert {state.text for state in results(0)} == {DINNER.text, BURNED.text}
    assert set(results(10)) == {DINNER}


@pytest.mark.parametrize("budget", [1, 10])
def test_an_agent_that_repeats_a_losing_action_does_not_get_its_way(
    model: WorldModel, budget: int
) -> None:
    checked = Verification(model, lambda *_: "cook", begins_with(["cook"]), budget)
    for _ in range(3):
        assert checked(TASK, FRIED, random.Random(0)) == "eat"
        assert checked(TASK, replace(FRIED, actions=()), random.Random(0)) is None
    assert checked.checks == 1


@pytest.mark.exhaustive
def test_a_state_that_is_cut_has_no_known_outcome(runtime: Runtime) -> None:
    end = State("you see " + "many things, " * 30 + "and the end", Outcome.LOST)
    model = WorldModel(runtime.user("world"), "shop")
    runs = [Trajectory(f"g{n}", f"Task {n}.", RAW, (Step("buy", end),)) for n in range(4)]
    model.teach(runs)
    model.learn(replace(TRAINING, epochs=10), accept=True)
    assert model.predict("Task 1.", RAW, "buy").outcome is Outcome.UNKNOWN
    assert measure_fidelity(model, runs).matched == Rate(0, 4)
    checked = Verification(model, lambda *_: "buy", begins_with(["buy"]))
    assert checked("Task 1.", replace(RAW, actions=()), random.Random(0)) is None
    (imagined,) = imagine(model, [Kitchen()], lambda *_: "buy", 1, seed=0)
    assert all(step.state.outcome is not Outcome.UNKNOWN for step in imagined.steps)


def test_space_around_a_state_is_no_miss(model: WorldModel) -> None:
    spaced = [
        replace(
            run,
            steps=tuple(
                Step(s.action, State(f" {s.state.text}\n", s.state.outcome)) for s in run.steps
            ),
        )
        for run in kitchen()
    ]
    assert measure_fidelity(model, spaced).matched == Rate(5, 5)


def test_a_corrected_recording_is_taught(runtime: Runtime) -> None:
    model = WorldModel(runtime.user("world"), "kitchen")
    wrong, right = (
        [Trajectory("kitchen", TASK, RAW, (Step("cook", State(text)),))]
        for text in ("raw", "fried")
    )
    assert [model.teach(each) for each in (wrong, wrong, right, right)] == [1, 0, 1, 0]


def test_a_negative_budget_is_refused(model: WorldModel) -> None:
    with pytest.raises(InvalidInput, match="budget"):
        Verification(model, clumsy, begins_with(["cook"]), -1)


def test_imagined_trajectories_begin_in_real_states_and_follow_the_model(
    model: WorldModel,
) -> None:
    found = list(
        imagine(
            model, [Kitchen()], random_policy, 6, seed=3, actions_of=lambda state: ("cook", "eat")
        )
    )
    assert len(found) == 6
    assert {each.initial for each in found} == {RAW}
    real = {step.state.written for each in kitchen() for step in each.steps}
    assert {step.state.written for each in found for step in each.steps} <= real
    assert {each.policy for each in found} == {"imagined"}


@pytest.mark.exhaustive
def test_a_faithful_model_is_consistent(model: WorldModel) -> None:
    measured = measure_consistency(model, [Kitchen()] * 8, clumsy, seed=1)
    assert measured.real.asked == measured.replayed.asked == 8
    assert measured.ratio == 1


@pytest.mark.exhaustive
def test_the_success_of_an_agent_is_the_share_of_games_that_it_wins(model: WorldModel) -> None:
    games = [Kitchen()] * 8

    def good(task: str, state: State, rng: random.Random) -> str:
        return "cook" if state.text == RAW.text else "eat"

    assert measure_success(games, good, seed=0) == Rate(8, 8)
    assert measure_success(games, lambda *_: "cook", seed=0) == Rate(0, 8)
    assert measure_success(games, good, seed=0, max_steps=1) == Rate(0, 8)
    unchecked = measure_success(games, clumsy, seed=1)
    assert 0 < unchecked.right < 8
    assert unchecked == measure_consistency(model, games, clumsy, seed=1).real


@pytest.mark.exhaustive
def test_a_skill_starts_from_what_the_model_learned(model: WorldModel) -> None:
    user = model.user
    first = warm_start(model, user, "cook")
    assert first.layer == "skill.cook"
    for number in range(8):
        user.teach(f"Dish {number}: what now?", "cook", skill="cook")
    report = user.learn("skill.cook", recipe=QUICK.recipe, accept=True)
    (built,) = (each for each in user.revisions("skill.cook") if each.id == report.revision)
    assert built.parent == first.id
    with pytest.raises(InvalidInput, match="live"):
        warm_start(model, user, "cook")


@pytest.mark.exhaustive
def test_a_skill_forgets_what_the_model_forgets(runtime: Runtime) -> None:
    model = kitchen_model(runtime)
    user = model.user
    first = warm_start(model, user, "cook")
    lesson = next(iter(user.revisions(model.layer)[-1].signals))
    assert first.id in user.forget(lesson, rebuild=False).revisions


def test_a_skill_of_another_user_is_refused(model: WorldModel, runtime: Runtime) -> None:
    with pytest.raises(InvalidInput, match="belongs to") as refused:
        warm_start(model, runtime.user("bob"), "cook")
    assert refused.value.hint


@pytest.mark.parametrize("name", ["", "Coin", "a b", "x" * 40])
def test_a_wrong_name_is_refused(runtime: Runtime, name: str) -> None:
    with pytest.raises(InvalidInput, match="name"):
        WorldModel(runtime.user("world"), name)
