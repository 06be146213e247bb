"""Each user of ``learn_many`` ends as after learning alone, and one user's failure affects no
other.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import ask, correct, greedy, home_unchanged, open_runtime, quick_card

from personalpeft import InvalidId, InvalidInput, NothingToLearn, Runtime
from personalpeft.errors import HomeError
from personalpeft.learning.learner import MAX_CONCURRENT_USERS
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.train import loop
from personalpeft.store.error_mapping import sqlite3

PEOPLE = ("ada", "bo", "cy")
few = examples(3, suppress_health_check=[HealthCheck.function_scoped_fixture])


def give_feedback(
    runtime: Runtime, lessons: Sequence[tuple[int, int]] = ((5, 0), (6, 5), (0, 6))
) -> None:
    """Record corrections and demonstrations for each user, no two of them alike."""
    for number, (user, (edits, shown)) in enumerate(zip(PEOPLE, lessons, strict=True)):
        person = runtime.user(user)
        correct(person, edits, first=100 * number)
        for letter in range(shown):
            person.teach(f"Write to {number}.{letter}.", f"Dear {letter}", skill="email")


def stacks(runtime: Runtime) -> list[Any]:
    return [runtime.user(user).stack() for user in PEOPLE]


@few
@given(
    lessons=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 5)), min_size=3, max_size=3),
    budgets=st.lists(st.integers(1, 30), max_size=3),
    stop=st.integers(0, 80),
)
@pytest.mark.exhaustive
def test_interrupted_learn_many_gives_the_bytes_of_learning_alone(
    tmp_path_factory: pytest.TempPathFactory,
    lessons: list[tuple[int, int]],
    budgets: list[int],
    stop: int,
) -> None:
    folder = tmp_path_factory.mktemp("homes")
    with open_runtime(folder / "alone") as runtime:
        give_feedback(runtime, lessons)
        for user in PEOPLE:
            with suppress(NothingToLearn):
                runtime.user(user).learn()
        alone = stacks(runtime)
    with open_runtime(folder / "together") as runtime:
        give_feedback(runtime, lessons)
        for steps in budgets:
            runtime.learn_many(PEOPLE, steps=steps)
        looks = iter(range(stop))
        runtime.learn_many(PEOPLE, cancelled=lambda: next(looks, None) is None)
        runtime.learn_many(PEOPLE)
        assert stacks(runtime) == alone
        assert runtime.verify() == ()


@pytest.mark.exhaustive
@pytest.mark.usefixtures("tiny_base")
def test_on_a_model_learn_many_equals_learning_alone_up_to_rounding(
    tmp_path: Path,
) -> None:
    import numpy as np

    card, halves = quick_card(tmp_path), []
    for name in ("alone", "together"):
        with open_runtime(tmp_path / name, card) as runtime:
            give_feedback(runtime, ((5, 0), (6, 0), (7, 0)))
            if name == "alone":
                for user in PEOPLE:
                    runtime.user(user).learn()
            else:
                assert all(report.revision for report in runtime.learn_many(PEOPLE))
            revisions = [runtime.user(user).revisions("style")[0] for user in PEOPLE]
            halves.append(
                [runtime.engine().read_adapter(revision.digest).weights for revision in revisions]
            )
    for alone, together in zip(*halves, strict=True):
        for name, pair in alone.items():
            np.testing.assert_allclose(pair.a, together[name].a, atol=2e-3)
            np.testing.assert_allclose(pair.b, together[name].b, atol=2e-3)


def test_reports_come_in_the_order_of_the_given_users(runtime: Runtime) -> None:
    give_feedback(runtime)
    order = ("cy", "ada", "bo")
    reports = runtime.learn_many(order)
    assert [report.user for report in reports] == list(order)
    assert [report.live for report in reports] == [True, True, True]
    assert [report.layer for report in reports] == ["skill.email", "style", "style"]
    assert [each.layer for each in reports[2].above] == ["skill.email"]


def test_error_of_one_user_is_reported_for_that_user_alone(runtime: Runtime, home: Path) -> None:
    give_feedback(runtime, ((5, 0), (5, 0), (0, 0)))
    with runtime._services.store.leases.acquire("learn-bo"):
        reports = runtime.learn_many(["cy", "bo", "nobody", "ada"])
    assert [report.error for report in reports] == ["NothingToLearn", "Busy", "NotFound", ""]
    assert [report.live for report in reports] == [False, False, False, True]
    assert all(report.verdict is None and report.reason for report in reports[:3])
    assert "bo" in str(reports[1])
    assert runtime.learn_many(["bo"])[0].live


@pytest.mark.parametrize(
    ("users", "error"),
    [(["ada", "ada"], InvalidInput), (["Ada!"], InvalidId), (["ada", ""], InvalidId)],
)
def test_invalid_list_of_users_is_refused(
    runtime: Runtime, home: Path, users: list[str], error: type[Exception]
) -> None:
    give_feedback(runtime)
    with home_unchanged(home), pytest.raises(error):
        runtime.learn_many(users)


def test_empty_list_of_users_returns_no_reports(runtime: Runtime) -> None:
    assert runtime.learn_many([]) == ()


def test_full_disk_of_one_user_stops_no_other(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_feedback(runtime, ((5, 0), (5, 0), (5, 0)))
    store = runtime._services.store
    save = type(store).save_checkpoint

    def full_for_bo(self: Any, user: str, layer: str, data: bytes) -> None:
        if user == "bo":
            raise HomeError("The disk is full.", hint="Make room.")
        save(self, user, layer, data)

    monkeypatch.setattr(type(store), "save_checkpoint", full_for_bo)
    # Each step has a checkpoint, as where steps are slow.
    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    reports = runtime.learn_many(PEOPLE)
    assert [report.error for report in reports] == ["", "HomeError", ""]
    assert [report.live for report in reports] == [True, False, True]
    assert runtime.verify() == ()


PRIVATE = "what bo said in private"


def _corrupt_row(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """Store a row that is valid JSON of the wrong type."""
    with sqlite3.connect(runtime._services.store.home / "personalpeft.db") as db:
        db.execute("update signal set payload = ? where user = 'bo'", [json.dumps([PRIVATE])])
    db.close()


def _break_planning(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(patch, type(runtime._services.store.catalog), "holdout", lambda user, *more: user)


def _break_evaluation(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(
        patch,
        type(runtime.engine()),
        "complete",
        lambda requests, **more: {each.user for each in requests},
    )


def _break_saving(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    _fails_for_bo(patch, type(runtime._services.store), "save_checkpoint", lambda user, *more: user)


def _break_promotion(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(
        patch,
        type(runtime._services.store.catalog),
        "add_revision",
        lambda revision, *more, **further: revision.user,
    )


def _fails_for_bo(
    patch: pytest.MonkeyPatch,
    part: Any,
    name: str,
    users: Callable[..., str | set[str]],
    error: type[BaseException] = KeyError,
) -> None:
    """Break one method of a module where it runs for bo."""
    act = getattr(part, name)

    def broken(self: Any, *given: Any, **named: Any) -> Any:
        if "bo" in users(*given, **named):
            raise error(PRIVATE)
        return act(self, *given, **named)

    patch.setattr(part, name, broken)


@pytest.fixture(scope="module")
def learned_alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """The revisions of two users who learned alone."""
    with open_runtime(tmp_path_factory.mktemp("alone") / "home") as runtime:
        give_feedback(runtime, ((5, 0), (6, 5), (7, 0)))
        return {user: runtime.user(user).learn().revision for user in ("ada", "cy")}


@pytest.mark.parametrize(
    "breaks",
    [
        _corrupt_row,
        *(
            pytest.param(each, marks=pytest.mark.exhaustive)
            for each in (_break_evaluation, _break_planning, _break_saving, _break_promotion)
        ),
    ],
)
def test_unexpected_error_of_one_user_is_reported_for_that_user_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[Runtime, pytest.MonkeyPatch], None],
    learned_alone: dict[str, str | None],
) -> None:
    with open_runtime(tmp_path / "home") as runtime:
        give_feedback(runtime, ((5, 0), (6, 5), (7, 0)))
        with monkeypatch.context() as patch:
            breaks(runtime, patch)
            reports = runtime.learn_many(PEOPLE)
        assert [report.error for report in reports] == ["", "ServingFailed", ""]
        assert {report.user: report.revision for report in reports if report.live} == learned_alone
        assert reports[1].verdict is None
        shown = f"{reports[1]} {reports[1].as_json()} {caplog.text}"
        assert PRIVATE not in shown
        if breaks is not _corrupt_row:
            assert runtime.learn_many(["bo"])[0].live
            assert runtime.verify() == ()


def test_unexpected_error_in_a_layer_keeps_the_reports_of_the_layers_below(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_feedback(runtime)
    catalog = type(runtime._services.store.catalog)
    _fails_for_bo(
        monkeypatch,
        catalog,
        "add_revision",
        lambda revision, *m, **f: revision.layer[6:] and revision.user,
    )
    report = runtime.learn_many(PEOPLE)[1]
    assert (report.layer, report.live, report.error) == ("style", True, "")
    assert [(each.layer, each.live, each.error) for each in report.above] == [
        ("skill.email", False, "ServingFailed")
    ]


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, pytest.param(SystemExit, marks=pytest.mark.exhaustive)]
)
def test_interrupt_ends_the_learn_of_all_users(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    give_feedback(runtime)
    catalog = type(runtime._services.store.catalog)
    with monkeypatch.context() as patch:
        _fails_for_bo(
            patch, catalog, "add_revision", lambda revision, *more, **further: revision.user, error
        )
        with pytest.raises(error):
            runtime.learn_many(PEOPLE)
    assert runtime.user("bo").learn().live


def test_error_in_the_callers_callback_ends_the_learn_of_all_users(runtime: Runtime) -> None:
    give_feedback(runtime)

    def progress(stage: str, done: float) -> None:
        if stage.startswith("Learning") and done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.learn_many(PEOPLE, progress=progress)
    assert all(report.live for report in runtime.learn_many(PEOPLE))


def test_step_that_fails_for_the_group_is_retried_for_each_user_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_feedback(runtime, ((5, 0), (6, 0), (7, 0)))
    backend = type(runtime.engine().backend)
    advance, steps = backend.advance, []

    def no_memory(self: Any, sessions: Any, terms: Any, rates: Any) -> Any:
        steps.append(len(sessions))
        if len(sessions) == 3 and len(steps) == 5:
            # The step was half done when it failed.
            sessions[0].step(terms[0], rates[0])
            raise MemoryError
        return advance(self, sessions, terms, rates)

    monkeypatch.setattr(backend, "advance", no_memory)
    assert [report.live for report in runtime.learn_many(PEOPLE)] == [True, True, True]
    assert steps[:5] == [3] * 5
    assert set(steps[5:]) == {1}
    together = stacks(runtime)
    for user in PEOPLE:
        assert (
            runtime.user(user).learn(start="scratch").revision
            == together[PEOPLE.index(user)].entries[0].revision
        )


def test_chats_are_answered_by_each_users_own_stack_during_learn_many(runtime: Runtime) -> None:
    give_feedback(runtime)
    before = {user: greedy(runtime.user(user)) for user in PEOPLE}
    answered: list[bool] = []

    def talk(stage: str, done: float) -> None:
        if stage == "Learning for 3" and not answered:
            answered.append(all(greedy(runtime.user(user)) == before[user] for user in PEOPLE))

    runtime.learn_many(PEOPLE, progress=talk)
    assert answered == [True]
    # The third user learned only a skill, and such questions are not near it.
    assert all(greedy(runtime.user(user)) != before[user] for user in PEOPLE[:2])


def test_paused_learn_resumes_where_it_stopped(runtime: Runtime) -> None:
    give_feedback(runtime)
    paused, seen = threading.Event(), threading.Event()
    looked: list[bool] = []

    def is_paused() -> bool:
        if not seen.is_set() and len(looked) == 5:
            paused.set()
            seen.set()
            threading.Timer(0.2, paused.clear).start()
        looked.append(paused.is_set())
        return paused.is_set()

    reports = runtime.learn_many(PEOPLE, paused=is_paused)
    assert any(looked)
    assert all(report.live for report in reports)


def test_completions_of_the_base_are_shared_and_those_of_a_stack_are_not(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = type(runtime.engine())
    texts, asked = engine.complete, []

    def counted(self: Any, requests: Any, **more: Any) -> Any:
        asked.extend(requests)
        return texts(self, requests, **more)

    monkeypatch.setattr(engine, "complete", counted)
    # The same lessons, so two users have the same stack to the byte.
    for user in ("ada", "bo"):
        correct(runtime.user(user), 6)
    runtime.learn_many(["ada", "bo"])
    bare = [
        request.messages
        for request in asked
        if not request.stack.entries and len(request.messages) == 1
    ]
    general = [each for each in bare if "question" not in each[0].content]
    assert len(general) == len(set(general))
    stack = runtime.user("ada").stack()
    assert stack == runtime.user("bo").stack()
    of_it = [request for request in asked if request.stack == stack]
    assert {request.user for request in of_it} == {"ada", "bo"}
    counts = [sum(request.user == user for request in of_it) for user in ("ada", "bo")]
    assert counts[0] == counts[1]
    asked.clear()
    correct(runtime.user("cy"), 6, first=50)
    runtime.user("cy").learn()
    assert not [
        request
        for request in asked
        if not request.stack.entries and "question" not in request.messages[0].content
    ]
    assert ask(runtime.user("cy")).text


def test_fewer_users_train_at_once_where_memory_is_short_with_equal_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    for memory in (None, 0.03):
        with open_runtime(tmp_path / f"{memory}") as runtime:
            give_feedback(runtime, ((5, 0), (6, 0), (7, 0)))
            backend, at_once = type(runtime.engine().backend), set[int]()
            advance = backend.advance

            def recorded(
                self: Any,
                sessions: Any,
                *more: Any,
                at_once: set[int] = at_once,
                advance: Any = advance,
            ) -> Any:
                at_once.add(len(sessions))
                return advance(self, sessions, *more)

            with monkeypatch.context() as patch:
                patch.setattr(backend, "advance", recorded)
                assert [
                    report.live for report in runtime.learn_many(PEOPLE, max_memory_mb=memory)
                ] == [
                    True,
                    True,
                    True,
                ]
            ended.append((at_once, stacks(runtime)))
    assert (max(ended[0][0]), max(ended[1][0])) == (3, 1)
    assert ended[0][1] == ended[1][1]


def test_build_that_exceeds_memory_alone_is_refused_with_its_size(
    runtime: Runtime, home: Path
) -> None:
    give_feedback(runtime, ((5, 0), (5, 0), (5, 0)))
    with home_unchanged(home):
        report = runtime.user("ada").learn(max_memory_mb=0.001)
    assert (report.verdict, report.revision) == (None, None)
    assert report.reasons[0].code is ReasonCode.MEMORY_BUDGET
    assert report.reasons[0].data["allowed"] == 0.001


@pytest.mark.exhaustive
def test_more_users_than_can_train_at_once_all_learn(runtime: Runtime) -> None:
    users = [f"user-{number}" for number in range(MAX_CONCURRENT_USERS + 3)]
    for number, user in enumerate(users):
        correct(runtime.user(user), 5, first=10 * number)
    assert all(report.live for report in runtime.learn_many(users))
