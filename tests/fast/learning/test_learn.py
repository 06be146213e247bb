"""What ``learn`` promises, through the public surface, on the fake backend and the tiny base."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_counts import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from runtime_makers import (
    ask,
    correct,
    greedy,
    home_contents,
    home_unchanged,
    open_runtime,
    pinned,
    python_environment,
    quick_card,
    style,
    trained_on,
)

from personalpeft import (
    Busy,
    Cancelled,
    HomeError,
    InvalidId,
    InvalidInput,
    NotFound,
    NothingToLearn,
    Runtime,
    User,
)
from personalpeft.backends.fake import FakeBackend
from personalpeft.errors import NothingCause
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.types import Verdict

few = examples(3, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture(params=["fake", pytest.param("torch", marks=pytest.mark.exhaustive)])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "fake":
        return "fake"
    request.getfixturevalue("tiny_base")
    return quick_card(tmp_path)


@pytest.fixture
def runtime(home: Path, base: str | Path) -> Iterator[Runtime]:
    with open_runtime(home, base) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    return runtime.user("ada")


@pytest.fixture
def fake_ada(home: Path) -> Iterator[User]:
    with open_runtime(home) as runtime:
        yield runtime.user("ada")


def stopped_after(user: User, steps: int) -> None:
    """Return a ``cancelled`` callback that stops a learn after this many steps."""
    seen: list[float] = []

    def progress(stage: str, done: float) -> None:
        if stage == "Learning" and done:
            seen.append(done)

    user.learn(progress=progress, cancelled=lambda: len(seen) >= steps)


@pytest.mark.parametrize("base", ["fake", "torch"], indirect=True)
def test_learn_changes_the_answers_and_names_its_sources(ada: User) -> None:
    before = greedy(ada)
    signals = correct(ada, 6)
    heard: list[tuple[str, float]] = []
    report = ada.learn(progress=lambda stage, done: heard.append((stage, done)))
    assert report.verdict is Verdict.PROMOTED
    assert greedy(ada) != before
    assert list(dict(heard)) == ["Reading", "Learning", "Judging"]
    assert {source.signal for source in report.sources} == set(signals)
    assert trained_on(ada) | pinned(ada) == set(signals)
    assert [m.after for m in ada.history()] == [report.revision]
    assert ada.stack().entries[0].revision == report.revision
    assert json.loads(json.dumps(report.as_json())) == json.loads(json.dumps(ada.reports()[-1]))


def test_rollback_restores_the_old_answers_exactly(ada: User) -> None:
    before = greedy(ada)
    correct(ada, 5)
    first = ada.learn()
    between = greedy(ada)
    correct(ada, 5, first=10)
    second = ada.learn()
    assert (first.verdict, second.verdict) == (Verdict.PROMOTED, Verdict.PROMOTED)
    latest = greedy(ada)
    assert ada.rollback("style").after == first.revision
    assert greedy(ada) == between
    ada.rollback("style", None)
    assert greedy(ada) == before
    assert ada.stack().entries == ()
    ada.rollback("style", second.revision)
    assert greedy(ada) == latest


def test_same_signals_in_another_home_make_the_same_revision(
    tmp_path: Path, base: str | Path
) -> None:
    digests = []
    for name in ("one", "two"):
        with open_runtime(tmp_path / name, base) as runtime:
            ada = runtime.user("ada" if name == "one" else "somebody.else")
            if name == "two":
                ask(ada, "something unrelated before")
            correct(ada, 5)
            first = ada.learn()
            correct(ada, 3, first=20)
            digests.append((first.revision, ada.learn().revision))
    assert digests[0] == digests[1]


def test_building_twice_from_scratch_gives_the_same_bytes(fake_ada: User) -> None:
    correct(fake_ada, 6)
    first = fake_ada.learn(start="scratch")
    head = fake_ada.stack()
    again = fake_ada.learn(start="scratch")
    assert (again.revision, fake_ada.stack()) == (first.revision, head)
    assert len(fake_ada.revisions()) == 1


def test_revision_is_built_on_its_parent_or_from_scratch(fake_ada: User) -> None:
    correct(fake_ada, 5)
    first = fake_ada.learn()
    correct(fake_ada, 4, first=10)
    second = fake_ada.learn()
    parents = {revision.id: revision.parent for revision in fake_ada.revisions()}
    assert (parents[first.revision or ""], parents[second.revision or ""]) == (None, first.revision)
    third = fake_ada.learn(start="scratch")
    assert {r.id: r.parent for r in fake_ada.revisions()}[third.revision or ""] is None


@pytest.mark.parametrize("again", ["edit", "edit of what was held back"])
def test_restated_lesson_is_built_from_scratch_without_the_older_text(
    fake_ada: User, again: str
) -> None:
    replies = [ask(fake_ada, f"question {n}") for n in range(6)]
    old = [fake_ada.feedback(reply, edit=style(f"Answer {n}.")) for n, reply in enumerate(replies)]
    fake_ada.learn()
    which = 0 if again == "edit" else old.index(next(iter(pinned(fake_ada))))
    new = fake_ada.feedback(replies[which], edit="Something else entirely.")
    report = fake_ada.learn()
    (revision,) = (r for r in fake_ada.revisions() if r.id == report.revision)
    assert old[which] not in revision.signals
    assert new in revision.signals
    if again == "edit":
        assert revision.parent is None


ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("correct"), st.integers(1, 6)),
        st.tuples(st.just("teach"), st.integers(1, 4)),
        st.tuples(st.just("again"), st.integers(0, 30)),
        st.tuples(st.just("like"), st.integers(0, 30)),
        st.tuples(st.just("learn"), st.sampled_from(["auto", "scratch"])),
        st.tuples(st.just("rollback"), st.none()),
    ),
    min_size=4,
    max_size=10,
)


@few
@given(acts=ACTS)
def test_held_out_signals_are_never_trained_on_whatever_users_do(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[str, object]]
) -> None:
    with open_runtime(tmp_path_factory.mktemp("home") / "h") as runtime:
        ada, asked, held = runtime.user("ada"), 0, set[str]()
        for act, value in [("correct", 5), ("learn", "auto"), *acts, ("learn", "scratch")]:
            if act == "correct":
                correct(ada, int(str(value)), first=asked)
                asked += int(str(value))
            elif act == "teach":
                for _ in range(int(str(value))):
                    ada.teach(f"taught {asked}", style(f"Answer {asked}."))
                    asked += 1
            elif act in ("again", "like") and ada.turns():
                turns = ada.turns()
                turn = turns[int(str(value)) % len(turns)]
                ada.feedback(
                    turn,
                    **({"rating": 1} if act == "like" else {"edit": style(f"Rather {value}.")}),
                )
            elif act == "rollback":
                ada.rollback("style", None)
            elif act == "learn":
                try:
                    ada.learn(start="scratch" if value == "scratch" else "auto")
                except NothingToLearn:
                    continue
                held |= pinned(ada)
                assert not trained_on(ada) & held
                assert set(ada._services.store.catalog.holdout("ada", "style")) == held
        assert runtime.verify() == ()


def test_nothing_new_raises_and_changes_nothing(fake_ada: User, home: Path) -> None:
    with home_unchanged(home), pytest.raises(NothingToLearn) as nothing:
        fake_ada.learn()
    assert nothing.value.cause is NothingCause.NO_FEEDBACK
    fake_ada.remember("My dog is called Biscuit.")
    fake_ada.feedback(ask(fake_ada), rating=-1)
    with home_unchanged(home), pytest.raises(NothingToLearn) as nothing:
        fake_ada.learn()
    assert nothing.value.cause is NothingCause.NOT_FOR_LAYER
    correct(fake_ada, 5)
    fake_ada.learn()
    with home_unchanged(home), pytest.raises(NothingToLearn) as nothing:
        fake_ada.learn()
    assert nothing.value.cause is NothingCause.NOTHING_NEW


def test_too_few_lessons_report_how_many_are_missing(fake_ada: User) -> None:
    correct(fake_ada, 3)
    report = fake_ada.learn()
    assert (report.verdict, report.revision) == (None, None)
    assert report.reasons[0].code is ReasonCode.TOO_FEW_LESSONS
    assert (report.reasons[0].data["count"], report.reasons[0].data["needed"]) == (3, 4)
    correct(fake_ada, 1, first=3)
    assert fake_ada.learn().revision


def test_dry_run_reports_the_plan_and_changes_nothing(fake_ada: User, home: Path) -> None:
    correct(fake_ada, 6)
    with home_unchanged(home):
        report = fake_ada.learn(dry_run=True)
    assert report.dry_run
    assert report.reasons[-1].code is ReasonCode.WOULD_TRAIN
    assert fake_ada.learn().revision


def test_dry_run_works_in_a_home_that_is_read_only(fake_ada: User, home: Path) -> None:
    correct(fake_ada, 6)
    expected = fake_ada.learn(dry_run=True)
    with open_runtime(home, read_only=True) as runtime, home_unchanged(home):
        ada = runtime.user("ada", create=False)
        assert ada.learn(dry_run=True).sources == expected.sources
        (together,) = runtime.learn_many(["ada"], dry_run=True)
        assert together.sources == expected.sources
        with pytest.raises(HomeError):
            ada.learn()


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda ada: ada.learn("Style"), InvalidId, "'Style'"),
        (lambda ada: ada.learn("skill."), InvalidId, "'skill.'"),
        (lambda ada: ada.learn("../style"), InvalidId, "../style"),
        (lambda ada: ada.learn("skill.email"), NothingToLearn, "skill.email"),
        (lambda ada: ada.learn(start="anywhere"), InvalidInput, "'anywhere'"),
        (lambda ada: ada.learn(seconds=0), InvalidInput, "seconds"),
        (lambda ada: ada.learn(seconds=float("nan")), InvalidInput, "nan"),
    ],
)
def test_invalid_learn_options_are_refused(
    fake_ada: User, home: Path, wrong: Callable[[User], object], error: type[Exception], words: str
) -> None:
    correct(fake_ada, 5)
    with home_unchanged(home), pytest.raises(error, match=words.replace(".", r"\.")) as raised:
        wrong(fake_ada)
    assert raised.value.hint or error is NothingToLearn  # type: ignore[attr-defined]


def test_cancelled_learn_changes_nothing_visible_and_the_next_one_resumes(
    ada: User, home: Path
) -> None:
    correct(ada, 6)
    before, rows = greedy(ada), None
    for steps in (3, 4):
        rows = home_contents(home)[0]
        with pytest.raises(Cancelled) as stopped:
            stopped_after(ada, steps)
        assert stopped.value.hint
        assert home_contents(home)[0] == rows
        assert ada.revisions() == ()
    assert greedy(ada) == before
    finished = ada.learn().revision
    assert ada.learn(start="scratch").revision == finished


def test_cancelling_while_a_candidate_is_scored_promotes_nothing(
    fake_ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(fake_ada, 6)
    stages: list[str] = []
    scored: list[object] = []
    score = FakeBackend.score

    def count(backend: FakeBackend, *args: Any, **more: Any) -> Any:
        if "Judging" in stages:
            scored.append(backend)
        return score(backend, *args, **more)

    monkeypatch.setattr(FakeBackend, "score", count)
    with pytest.raises(Cancelled):
        fake_ada.learn(
            cancelled=lambda: bool(scored), progress=lambda stage, done: stages.append(stage)
        )
    assert scored
    assert fake_ada.revisions() == ()
    assert fake_ada.learn().live


def test_learn_in_small_budgets_equals_one_uninterrupted_run(tmp_path: Path) -> None:
    revisions = []
    for name, seconds in (("whole", None), ("pieces", 1e-9)):
        with open_runtime(tmp_path / name) as runtime:
            ada = runtime.user("ada")
            correct(ada, 6)
            for _ in range(40):
                report = ada.learn(seconds=seconds)
                if report.revision:
                    break
                assert report.reasons[0].code is ReasonCode.TIME_BUDGET
            revisions.append(report.revision)
    assert revisions[0] is not None
    assert revisions[0] == revisions[1]


def test_rollback_during_a_learn_takes_precedence(fake_ada: User) -> None:
    correct(fake_ada, 6)
    fake_ada.learn()
    more = correct(fake_ada, 6, first=20)
    moved: list[str | None] = []

    def go_back(stage: str, done: float) -> None:
        if stage == "Judging" and not moved:
            moved.append(fake_ada.rollback("style", None).after)

    count = len(fake_ada.revisions())
    report = fake_ada.learn(progress=go_back)
    assert (report.live, report.moved) == (False, True)
    assert [each.code for each in report.reasons] == [ReasonCode.HEAD_MOVED]
    assert fake_ada.stack().entries == ()
    assert len(fake_ada.revisions()) == count
    # A later erasure could not find a file that no revision names.
    assert _blobs(fake_ada) == {each.digest for each in fake_ada.revisions()}
    assert {trigger.key for trigger in fake_ada.pending().triggers} == set(more)
    assert fake_ada.learn().live


@pytest.mark.parametrize("error", [Cancelled("", hint=""), RuntimeError("a bug")])
def test_learn_that_ends_while_it_judges_leaves_no_adapter_behind(
    fake_ada: User, error: Exception
) -> None:
    correct(fake_ada, 6)

    def fail(stage: str, done: float) -> None:
        if stage == "Judging":
            raise error

    with pytest.raises(type(error)):
        fake_ada.learn(progress=fail)
    assert _blobs(fake_ada) == set()
    assert fake_ada.learn().live


def _blobs(user: User) -> set[str]:
    folder = user._services.store.home / "blobs"
    return {path.name for path in folder.glob("*/*")}


def test_signals_recorded_while_a_learn_was_stopped_are_learned_too(fake_ada: User) -> None:
    correct(fake_ada, 6)
    with pytest.raises(Cancelled):
        stopped_after(fake_ada, 7)
    late = correct(fake_ada, 2, first=10)
    fake_ada.learn()
    assert set(late) <= trained_on(fake_ada) | pinned(fake_ada)


def test_refused_candidate_leaves_the_head_and_can_be_accepted_by_name(fake_ada: User) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    head, before = fake_ada.stack(), greedy(fake_ada)
    learner = Learner.from_services(fake_ada._services)
    strict = replace(learner, margins=Margins.model_construct(max_kl=-1.0))
    correct(fake_ada, 3, first=10)
    report = strict.learn("ada", "style", LearnOptions())
    assert report.verdict is Verdict.REFUSED
    assert ReasonCode.KL_TOO_LARGE in [each.code for each in report.reasons]
    assert (fake_ada.stack(), greedy(fake_ada)) == (head, before)
    assert [r.verdict for r in fake_ada.revisions()] == [Verdict.PROMOTED, Verdict.REFUSED]
    fake_ada.rollback("style", report.revision)
    assert fake_ada.stack().entries[0].revision == report.revision


def test_skill_is_a_separate_layer_above_the_style(fake_ada: User) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    signals = [fake_ada.teach(f"Write to {n}.", f"Dear {n}", skill="email") for n in range(5)]
    report = fake_ada.learn("skill.email")
    assert [entry.layer for entry in fake_ada.stack().entries] == ["style", "skill.email"]
    (revision,) = fake_ada.revisions("skill.email")
    assert set(revision.signals) == set(signals)
    assert [entry.layer for entry in revision.below] == ["style"]
    assert report.layer == "skill.email"


HOLDER = """
import sys, time
import personalpeft
with personalpeft.open(sys.argv[1], backend="fake") as runtime:
    def wait(stage, done):
        print(stage, flush=True)
        time.sleep(60)
    runtime.user("ada").learn(progress=wait)
"""


def test_second_process_gets_busy_for_the_same_user_and_can_learn_another(
    home: Path, fake_ada: User, shared_cache: Path
) -> None:
    correct(fake_ada, 5)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(home)],
        stdout=subprocess.PIPE,
        text=True,
        env=python_environment(shared_cache),
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == "Reading\n"
        with home_unchanged(home), pytest.raises(Busy, match=str(other.pid)) as busy:
            fake_ada.learn()
        assert busy.value.hint
        with open_runtime(home) as runtime:
            bo = runtime.user("bo")
            correct(bo, 5)
            assert bo.learn().revision
        assert ask(fake_ada).text
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    assert fake_ada.learn().revision


def test_second_thread_gets_busy_while_one_learns(fake_ada: User) -> None:
    correct(fake_ada, 5)
    heard: list[str] = []

    def try_too(stage: str, done: float) -> None:
        with pytest.raises(Busy) as busy:
            fake_ada.learn()
        heard.append(busy.value.message)

    assert fake_ada.learn(progress=try_too).revision
    assert heard


def test_rollback_of_an_unknown_layer_suggests_the_nearest(fake_ada: User, home: Path) -> None:
    correct(fake_ada, 5)
    fake_ada.learn()
    with home_unchanged(home), pytest.raises(NotFound) as missing:
        fake_ada.rollback("styl")
    assert "style" in missing.value.hint
