"""Several users learn in one go: each comes out as they would alone, and what happens to one happens to no other."""

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
from runtime_makers import ask, correct, greedy, nothing_changes, opened, quick_card

from personalpeft import InvalidId, InvalidInput, NothingToLearn, Runtime
from personalpeft.errors import HomeError
from personalpeft.learning.learner import MAX_CONCURRENT_USERS
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.store.error_mapping import sqlite3
from personalpeft.types import Verdict

PEOPLE = ("ada", "bo", "cy")
few = examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])


def say(runtime: Runtime, lessons: Sequence[tuple[int, int]] = ((5, 0), (6, 5), (0, 6))) -> None:
    """So many corrections of each person, and so many letters shown; no two of them say the same."""
    for number, (user, (edits, shown)) in enumerate(zip(PEOPLE, lessons, strict=True)):
        person = runtime.user(user)
        correct(person, edits, first=100 * number)
        for letter in range(shown):
            person.teach(f"Write to {number}.{letter}.", f"Dear {letter}", skill="email")


def stacks(runtime: Runtime) -> list[Any]:
    return [runtime.user(user).stack() for user in PEOPLE]


@few
@given(
    lessons=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), min_size=3, max_size=3),
    budgets=st.lists(st.integers(1, 30), max_size=3),
    stop=st.integers(0, 80),
)
def test_each_ends_with_the_bytes_of_learning_alone_however_often_they_are_stopped(
    tmp_path_factory: pytest.TempPathFactory,
    lessons: list[tuple[int, int]],
    budgets: list[int],
    stop: int,
) -> None:
    folder = tmp_path_factory.mktemp("homes")
    with opened(folder / "alone") as runtime:
        say(runtime, lessons)
        for user in PEOPLE:
            with suppress(NothingToLearn):
                runtime.user(user).learn()
        alone = stacks(runtime)
    with opened(folder / "together") as runtime:
        say(runtime, lessons)
        for steps in budgets:
            runtime.learn_many(PEOPLE, steps=steps)
        looks = iter(range(stop))
        runtime.learn_many(PEOPLE, cancelled=lambda: next(looks, None) is None)
        runtime.learn_many(PEOPLE)
        assert stacks(runtime) == alone
        assert runtime.verify() == ()


@pytest.mark.usefixtures("tiny_base")
def test_on_a_model_what_is_learned_together_is_what_is_learned_alone_to_the_rounding(
    tmp_path: Path,
) -> None:
    import numpy as np

    card, halves = quick_card(tmp_path), []
    for name in ("alone", "together"):
        with opened(tmp_path / name, card) as runtime:
            say(runtime, ((5, 0), (6, 0), (7, 0)))
            if name == "alone":
                for user in PEOPLE:
                    runtime.user(user).learn()
            else:
                assert all(report.revision for report in runtime.learn_many(PEOPLE))
            revisions = [runtime.user(user).revisions("style")[0] for user in PEOPLE]
            halves.append(
                [runtime.engine().read_adapter(revision.digest).pairs for revision in revisions]
            )
    for alone, together in zip(*halves, strict=True):
        for name, pair in alone.items():
            np.testing.assert_allclose(pair.a, together[name].a, atol=2e-3)
            np.testing.assert_allclose(pair.b, together[name].b, atol=2e-3)


def test_reports_come_in_the_order_in_which_users_were_named(runtime: Runtime) -> None:
    say(runtime)
    order = ("cy", "ada", "bo")
    reports = runtime.learn_many(order)
    assert [report.user for report in reports] == list(order)
    assert [report.live for report in reports] == [True, True, True]
    assert [report.layer for report in reports] == ["skill.email", "style", "style"]
    assert [each.layer for each in reports[2].above] == ["skill.email"]


def test_what_one_user_cannot_do_is_that_users_report_alone(runtime: Runtime, home: Path) -> None:
    say(runtime, ((5, 0), (5, 0), (0, 0)))
    with runtime._services.store.leases.acquire("learn-bo"):
        reports = runtime.learn_many(["cy", "bo", "nobody", "ada"])
    assert [report.error for report in reports] == ["NothingToLearn", "Busy", "NotFound", ""]
    assert [report.live for report in reports] == [False, False, False, True]
    assert all(report.verdict is Verdict.ABSTAINED and report.reason for report in reports[:3])
    assert "bo" in str(reports[1])
    assert runtime.learn_many(["bo"])[0].live


@pytest.mark.parametrize(
    ("users", "error"),
    [(["ada", "ada"], InvalidInput), (["Ada!"], InvalidId), (["ada", ""], InvalidId)],
)
def test_a_list_of_users_that_makes_no_sense_is_refused(
    runtime: Runtime, home: Path, users: list[str], error: type[Exception]
) -> None:
    say(runtime)
    with nothing_changes(home), pytest.raises(error):
        runtime.learn_many(users)


def test_who_names_nobody_gets_nothing(runtime: Runtime) -> None:
    assert runtime.learn_many([]) == ()


def test_a_disk_that_is_full_for_one_stops_no_other(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(runtime, ((5, 0), (5, 0), (5, 0)))
    store = runtime._services.store
    save = type(store).save_session

    def full_for_bo(self: Any, user: str, layer: str, data: bytes) -> None:
        if user == "bo":
            raise HomeError("The disk is full.", hint="Make room.")
        save(self, user, layer, data)

    monkeypatch.setattr(type(store), "save_session", full_for_bo)
    reports = runtime.learn_many(PEOPLE)
    assert [report.error for report in reports] == ["", "HomeError", ""]
    assert [report.live for report in reports] == [True, False, True]
    assert runtime.verify() == ()


PRIVATE = "what bo said in private"


def _a_row(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    """A row that is sound JSON, and not of the kind that is expected there."""
    with sqlite3.connect(runtime._services.store.home / "personalpeft.db") as db:
        db.execute("update signal set payload = ? where user = 'bo'", [json.dumps([PRIVATE])])
    db.close()


def _planning(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(patch, type(runtime._services.store.catalog), "holdout", lambda user, *more: user)


def _asking(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(
        patch,
        type(runtime.engine()),
        "complete",
        lambda requests, **more: {each.user for each in requests},
    )


def _saving(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
    _fails_for_bo(patch, type(runtime._services.store), "save_session", lambda user, *more: user)


def _publishing(runtime: Runtime, patch: pytest.MonkeyPatch) -> None:
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
    """Breaks one act of a part where it is done for bo."""
    act = getattr(part, name)

    def broken(self: Any, *given: Any, **named: Any) -> Any:
        if "bo" in users(*given, **named):
            raise error(PRIVATE)
        return act(self, *given, **named)

    patch.setattr(part, name, broken)


@pytest.mark.parametrize("breaks", [_a_row, _planning, _asking, _saving, _publishing])
def test_an_unexpected_error_of_one_user_is_that_users_report_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    breaks: Callable[[Runtime, pytest.MonkeyPatch], None],
) -> None:
    with opened(tmp_path / "alone") as runtime:
        say(runtime, ((5, 0), (6, 5), (7, 0)))
        alone = {user: runtime.user(user).learn().revision for user in ("ada", "cy")}
    with opened(tmp_path / "together") as runtime:
        say(runtime, ((5, 0), (6, 5), (7, 0)))
        with monkeypatch.context() as patch:
            breaks(runtime, patch)
            reports = runtime.learn_many(PEOPLE)
        assert [report.error for report in reports] == ["", "ServingFailed", ""]
        assert {report.user: report.revision for report in reports if report.live} == alone
        assert reports[1].verdict is Verdict.ABSTAINED
        told = f"{reports[1]} {reports[1].as_json()} {caplog.text}"
        assert PRIVATE not in told
        if breaks is not _a_row:
            assert runtime.learn_many(["bo"])[0].live
            assert runtime.verify() == ()


def test_an_unexpected_error_in_a_layer_leaves_the_reports_of_the_layers_below(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(runtime)
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_learn_of_all(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    say(runtime)
    catalog = type(runtime._services.store.catalog)
    with monkeypatch.context() as patch:
        _fails_for_bo(
            patch, catalog, "add_revision", lambda revision, *more, **further: revision.user, error
        )
        with pytest.raises(error):
            runtime.learn_many(PEOPLE)
    assert runtime.user("bo").learn().live


def test_what_the_callers_own_function_raises_ends_the_learn_of_all(runtime: Runtime) -> None:
    say(runtime)

    def progress(stage: str, done: float) -> None:
        if stage.startswith("Learning") and done:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runtime.learn_many(PEOPLE, progress=progress)
    assert all(report.live for report in runtime.learn_many(PEOPLE))


def test_a_step_that_fails_for_all_is_made_for_each_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(runtime, ((5, 0), (6, 0), (7, 0)))
    backend = type(runtime.engine().backend)
    advance, steps = backend.advance, []

    def no_memory(self: Any, sessions: Any, terms: Any, rates: Any) -> Any:
        steps.append(len(sessions))
        if len(sessions) == 3 and len(steps) == 5:
            # Half of it was done when it failed.
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
            runtime.user(user).learn(start="nothing").revision
            == together[PEOPLE.index(user)].entries[0].revision
        )


def test_who_chats_is_answered_by_their_own_stack_while_all_learn(runtime: Runtime) -> None:
    say(runtime)
    before = {user: greedy(runtime.user(user)) for user in PEOPLE}
    heard: list[bool] = []

    def talk(stage: str, done: float) -> None:
        if stage == "Learning for 3" and not heard:
            heard.append(all(greedy(runtime.user(user)) == before[user] for user in PEOPLE))

    runtime.learn_many(PEOPLE, progress=talk)
    assert heard == [True]
    # The third has learned a skill alone, which is not near to such questions.
    assert all(greedy(runtime.user(user)) != before[user] for user in PEOPLE[:2])


def test_a_learn_that_pauses_goes_on_where_it_was(runtime: Runtime) -> None:
    say(runtime)
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


def test_what_the_bare_base_says_is_asked_once_for_all_and_what_a_stack_says_only_for_its_owner(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = type(runtime.engine())
    texts, asked = engine.complete, []

    def counted(self: Any, requests: Any, **more: Any) -> Any:
        asked.extend(requests)
        return texts(self, requests, **more)

    monkeypatch.setattr(engine, "complete", counted)
    # The same words, so the same stack to the byte, of two people.
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


def test_where_memory_is_short_fewer_train_at_once_and_nobody_comes_out_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []
    for memory in (None, 0.03):
        with opened(tmp_path / f"{memory}") as runtime:
            say(runtime, ((5, 0), (6, 0), (7, 0)))
            backend, at_once = type(runtime.engine().backend), set[int]()
            advance = backend.advance

            def noted(
                self: Any,
                sessions: Any,
                *more: Any,
                at_once: set[int] = at_once,
                advance: Any = advance,
            ) -> Any:
                at_once.add(len(sessions))
                return advance(self, sessions, *more)

            with monkeypatch.context() as patch:
                patch.setattr(backend, "advance", noted)
                assert [report.live for report in runtime.learn_many(PEOPLE, memory=memory)] == [
                    True,
                    True,
                    True,
                ]
            ended.append((at_once, stacks(runtime)))
    assert (max(ended[0][0]), max(ended[1][0])) == (3, 1)
    assert ended[0][1] == ended[1][1]


def test_what_does_not_fit_into_memory_alone_is_not_built_and_told_how_much_it_takes(
    runtime: Runtime, home: Path
) -> None:
    say(runtime, ((5, 0), (5, 0), (5, 0)))
    with nothing_changes(home):
        report = runtime.user("ada").learn(memory=0.001)
    assert (report.verdict, report.revision) == (Verdict.ABSTAINED, None)
    assert report.reasons[0].code is ReasonCode.MEMORY_BUDGET
    assert report.reasons[0].data["allowed"] == 0.001


def test_many_more_users_than_train_at_once_all_learn(runtime: Runtime) -> None:
    people = [f"user-{number}" for number in range(MAX_CONCURRENT_USERS + 3)]
    for number, user in enumerate(people):
        correct(runtime.user(user), 5, first=10 * number)
    assert all(report.live for report in runtime.learn_many(people))
