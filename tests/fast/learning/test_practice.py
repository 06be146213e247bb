"""Practice at the public surface: what passes becomes likelier, the gate judges on tasks that were never tried, and what
does not come to its end has not happened.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import ask, correct, greedy, nothing_changes, opened, quick_card

from personalpeft import Busy, Cancelled, InvalidInput, LearnReport, NotFound, PluginError, User
from personalpeft.backends.base import SequenceState
from personalpeft.backends.fake import FakeBackend, _FakeSession
from personalpeft.backends.torch.training.session import TorchSession
from personalpeft.engine.engine import Engine
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.rl.rollouts import derive_seed
from personalpeft.plugins import Attempt, Task
from personalpeft.store.integrity import verify
from personalpeft.types import Verdict

SOON = {"rounds": 3}


@dataclass
class Judge:
    """Sets numbered tasks and passes the replies that ``right`` says; remembers all that it was asked."""

    right: Callable[[str], Any]
    different: int = 10_000
    tried: list[str] = field(default_factory=list)

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        return [
            Task(f"n{number % self.different}", f"Task {number % self.different}.", {})
            for number in range(seed % 1000, seed % 1000 + count)
        ]

    def verify(self, task: Task, reply: str) -> Any:
        self.tried.append(task.prompt)
        said = self.right(reply)
        return said if isinstance(said, dict) else float(said)


# The fake says these two words only where a stack is attached, and a different reply to every seed.
def learned(reply: str) -> bool:
    return " as in " in reply


def half(reply: str) -> bool:
    return derive_seed(reply) % 2 == 0


@pytest.fixture
def ada(home: Path) -> Iterator[User]:
    with opened(home) as runtime:
        yield runtime.user("ada")


def taught(user: User) -> str:
    """A skill that was shown how, as its first revision."""
    for number in range(6):
        user.teach(f"Task {number}.", f"Answer {number}", skill="email")
    revision = user.learn("skill.email").revision
    assert revision
    return revision


def test_what_was_practised_is_judged_on_tasks_that_were_never_tried_and_goes_live(
    ada: User,
) -> None:
    judge = Judge(lambda reply: half(reply) or learned(reply))
    heard: list[tuple[str, float]] = []
    report = ada.practice(
        "email", verifier=judge, progress=lambda stage, done: heard.append((stage, done)), **SOON
    )
    assert report.verdict is Verdict.PROMOTED
    assert ada.stack().entries[0].revision == report.revision
    tasks = report.scores["tasks"]
    assert tasks["passed_after"] == tasks["asked"] > tasks["passed_before"]
    assert list(dict(heard)) == ["Practising", "Judging"]
    practised = set(judge.tried[: report.scores["practice"]["replies"]])
    judged_by = set(judge.tried[report.scores["practice"]["replies"] :])
    assert practised
    assert judged_by
    assert not practised & judged_by
    assert "personalpeft rollback skill.email" in str(report)
    assert json.loads(json.dumps(report.as_json())) == json.loads(json.dumps(ada.reports()[-1]))
    assert verify(ada._services.store) == ()


def test_what_made_it_worse_is_refused_and_stays_out(ada: User) -> None:
    report = ada.practice(
        "email", verifier=Judge(lambda reply: half(reply) and not learned(reply)), **SOON
    )
    assert report.verdict is Verdict.REFUSED
    assert report.revision in {revision.id for revision in ada.revisions()}
    assert ada.stack().entries == ()


def test_a_task_to_judge_by_is_never_tried_in_any_practice(ada: User) -> None:
    for _ in range(3):
        judge = Judge(lambda reply: half(reply) or learned(reply), different=60)
        report = ada.practice("email", verifier=judge, **SOON)
        replies = report.scores["practice"]["replies"]
        assert all(derive_seed("judged by", prompt) % 4 for prompt in judge.tried[:replies])
        assert not any(derive_seed("judged by", prompt) % 4 for prompt in judge.tried[replies:])


def test_practice_goes_on_from_what_was_taught_and_a_learn_goes_on_from_practice(ada: User) -> None:
    shown = taught(ada)
    practised = ada.practice("email", verifier=Judge(half), **SOON).revision
    assert practised
    ada.rollback("skill.email", practised)
    parents = {revision.id: revision.parent for revision in ada.revisions()}
    assert parents[practised] == shown
    for number in range(10, 14):
        ada.teach(f"Task {number}.", f"Answer {number}", skill="email")
    latest = ada.learn("skill.email").revision
    assert {revision.id: revision.parent for revision in ada.revisions()}[latest or ""] == practised


def practised(user: User, family: str = "") -> int:
    """How many rounds the revision that a short practice made counts."""
    made = user.practice("email", verifier=Judge(half), family=family, **SOON).revision
    assert made
    user.rollback("skill.email", made)
    (revision,) = (each for each in user.revisions() if each.id == made)
    rounds: int = revision.recipe["practice"]["rounds"]
    return rounds


def test_short_practices_of_the_same_tasks_count_on_and_new_demonstrations_begin_anew(
    ada: User,
) -> None:
    taught(ada)
    assert [practised(ada) for _ in range(2)] == [3, 6]
    assert practised(ada, "others") == 3
    for number in range(10, 14):
        ada.teach(f"Task {number}.", f"Answer {number}", skill="email")
    learned = ada.learn("skill.email").revision
    assert learned
    ada.rollback("skill.email", learned)
    assert practised(ada) == 3


def test_what_was_held_back_in_any_layer_counts_as_older_answers(ada: User) -> None:
    correct(ada, 6)
    ada.learn()
    taught(ada)
    report = ada.practice("email", verifier=Judge(half), **SOON)
    assert report.scores["retention"]["asked"] == 2


def test_the_same_practice_in_another_home_makes_the_same_revision(
    tmp_path: Path, tiny_base: object
) -> None:
    revisions = []
    for name in ("one", "two"):
        with opened(tmp_path / name, quick_card(tmp_path)) as runtime:
            user = runtime.user(name)
            revisions.append(user.practice("email", verifier=Judge(half), **SOON).revision)
    assert revisions[0] is not None
    assert revisions[0] == revisions[1]


def test_a_seed_names_other_tasks_in_the_next_practice(ada: User) -> None:
    tried = []
    for _ in range(2):
        judge = Judge(lambda reply: half(reply) or learned(reply))
        ada.practice("email", verifier=judge, **SOON)
        tried.append(set(judge.tried))
    assert tried[0] != tried[1]


@pytest.mark.parametrize(
    ("right", "code"),
    [(lambda reply: False, ReasonCode.NO_REPLY_PASSED), (lambda reply: True, None)],
)
def test_where_nothing_can_be_learned_nothing_is_built_and_the_reason_said(
    ada: User, right: Callable[[str], bool], code: ReasonCode | None
) -> None:
    before = greedy(ada)
    report = ada.practice("email", verifier=Judge(right), rounds=40)
    assert report.verdict is Verdict.ABSTAINED
    if code:
        assert [each.code for each in report.reasons] == [code]
        assert report.revision is None
        assert ada.reports()[-1]["reason"] == report.reason
        # Once all tasks are hopeless there is nothing left to try.
        assert report.scores["practice"]["rounds"] < 40
    assert greedy(ada) == before


@dataclass
class Short:
    """Rewards short replies alone."""

    train_on_solved: bool = True
    groups: list[tuple[int, float]] = field(default_factory=list)

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> list[float]:
        self.groups.append((len(attempts), pass_rate))
        return [1 - attempt.length for attempt in attempts]


def test_a_shaping_sees_whole_groups_and_only_one_that_asks_for_them_gets_solved_tasks(
    ada: User,
) -> None:
    rounds = {}
    for train_on_solved in (True, False):
        shaping = Short(train_on_solved)
        report = ada.practice(
            "email", verifier=Judge(lambda reply: True), shaping=shaping, rounds=40
        )
        rounds[train_on_solved] = report.scores["practice"]["rounds"]
    assert rounds[True] == 40 > rounds[False]
    assert {group for group in shaping.groups if group[0] == 5} <= {(5, 1.0)}


def test_several_rewards_are_taken(ada: User) -> None:
    judge = Judge(lambda reply: {"right": float(half(reply) or learned(reply)), "brief": 0.5})
    assert ada.practice("email", verifier=judge, **SOON).revision


def test_time_that_is_up_ends_the_rounds_and_what_was_practised_is_judged(ada: User) -> None:
    judge = Judge(lambda reply: half(reply) or learned(reply))
    report = ada.practice("email", verifier=judge, seconds=1e-9)
    assert report.scores["practice"]["rounds"] == 1
    assert report.revision


@pytest.mark.exhaustive
def test_a_practice_that_is_stopped_goes_on_from_what_was_done_to_the_same_revision(
    tmp_path: Path, tiny_base: object
) -> None:
    revisions = []
    for name, stops in (("one", ()), ("two", (0, 1, 2, 90))):
        with opened(tmp_path / name, quick_card(tmp_path)) as runtime:
            ada = runtime.user("ada")
            judge = Judge(half)
            for looks in stops:
                seen = iter(range(looks))
                with pytest.raises(Cancelled) as stopped:
                    ada.practice(
                        "email",
                        verifier=judge,
                        **SOON,
                        cancelled=lambda: next(seen, None) is None,  # noqa: B023
                    )
                assert stopped.value.hint
                assert (ada.revisions(), ada.reports(), ada.stack().entries) == ((), (), ())
            judge.tried.clear()
            report = ada.practice("email", verifier=judge, **SOON)
            revisions.append((report.revision, report.scores))
            assert (
                len(report.scores["practice"]["pass_rate"])
                == report.scores["practice"]["rounds"]
                == 3
            )
            assert list((tmp_path / name / "sessions").rglob("*.session")) == []
    assert revisions[0] == revisions[1]
    assert revisions[0][0] is not None


class Killed(BaseException):
    """The process ended here."""


@dataclass
class Steps:
    """Counts the steps of training, and ends the process before each whose number is in ``kills``, once."""

    kills: set[int] = field(default_factory=set)
    done: int = 0

    def watched(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> Steps:
        step = session.step

        def counted(trained: Any, *given: Any) -> float:
            if self.done in self.kills:
                self.kills.remove(self.done)
                raise Killed
            self.done += 1
            return float(step(trained, *given))

        monkeypatch.setattr(session, "step", counted)
        return self


# A round that learns from what is right makes four steps, one along the policy gradient makes one.
@pytest.mark.parametrize(
    ("base", "session", "imitate", "rounds", "kills"),
    [
        ("fake", _FakeSession, 12, 14, {0, 1, 2, 3, 4, 7, 48, 49}),
        pytest.param("tiny", TorchSession, 1, 2, {2, 4}, marks=pytest.mark.exhaustive),
    ],
    ids=["fake", "a model"],
)
def test_a_kill_before_any_step_or_the_verdict_costs_no_reply_and_no_step_that_was_made(
    tmp_path: Path,
    tiny_base: object,
    monkeypatch: pytest.MonkeyPatch,
    base: str,
    session: Any,
    imitate: int,
    rounds: int,
    kills: set[int],
) -> None:
    def killed(stage: str, done: float) -> None:
        if stage == "Judging" and verdicts:
            raise Killed(verdicts.pop())

    ended = []
    card = quick_card(tmp_path)
    card.write_text(
        f"{card.read_text()}\n[practice]\nrejection_rounds = {imitate}\nprompts_per_round = 4\nnum_eval_tasks = 8\n"
    )
    for name, before in (("one", set[int]()), ("two", set(kills))):
        with (
            opened(tmp_path / name, "fake" if base == "fake" else card) as runtime,
            monkeypatch.context() as patch,
        ):
            ada, judge, steps = (
                runtime.user("ada"),
                Judge(half),
                Steps(before).watched(session, patch),
            )
            verdicts, report = ["before it was judged"] * bool(before), None
            while report is None:
                try:
                    report = ada.practice("email", verifier=judge, rounds=rounds, progress=killed)
                except Killed:
                    assert (ada.revisions(), ada.reports()) == ((), ())
            assert not before
            assert not verdicts
            ended.append(
                (report.revision, report.scores, report.steps, steps.done, len(judge.tried))
            )
    assert ended[0] == ended[1]
    assert ended[0][0] is not None
    assert ended[0][2] == ended[0][3] == 4 * imitate + rounds - imitate


@pytest.mark.parametrize(("steps", "rounds"), [(2, 1), (4, 1), (5, 2)])
def test_steps_end_it_in_the_middle_of_a_round_and_what_was_practised_is_judged(
    ada: User, home: Path, steps: int, rounds: int
) -> None:
    report = ada.practice(
        "email", verifier=Judge(lambda reply: half(reply) or learned(reply)), steps=steps
    )
    assert report.verdict is Verdict.PROMOTED
    assert (report.steps, report.scores["practice"]["rounds"]) == (steps, rounds)
    assert list((home / "sessions").rglob("*.session")) == []


def test_two_builds_of_as_many_rounds_and_other_steps_have_other_inputs(ada: User) -> None:
    for steps in (2, 3):
        ada.practice("email", verifier=Judge(half), steps=steps)
        ada.rollback("skill.email", None)
    two, three = ada.revisions()
    assert two.recipe["practice"]["rounds"] == three.recipe["practice"]["rounds"] == 1
    assert two.inputs != three.inputs


def test_what_does_not_fit_into_memory_is_not_practised_and_told_how_much_it_takes(
    ada: User, home: Path
) -> None:
    judge = Judge(half)
    with nothing_changes(home):
        report = ada.practice("email", verifier=judge, memory=0.001)
    assert (report.verdict, report.revision, judge.tried) == (Verdict.ABSTAINED, None, [])
    assert report.reasons[0].code is ReasonCode.MEMORY_BUDGET
    assert report.reasons[0].data["allowed"] == 0.001
    assert ada.practice("email", verifier=judge, memory=100, **SOON).revision


def test_what_is_accepted_by_name_goes_live_although_it_was_refused_and_that_is_recorded(
    ada: User,
) -> None:
    report = ada.practice(
        "email",
        verifier=Judge(lambda reply: half(reply) and not learned(reply)),
        accept=True,
        **SOON,
    )
    assert (report.verdict, report.accepted, report.live) == (Verdict.REFUSED, True, True)
    assert report.reasons[0].code is ReasonCode.OVERRIDDEN
    assert ada.stack().entries[0].revision == report.revision
    assert ada.history()[-1].cause == "accepted"
    assert ada.reports()[-1]["accepted"] is True


def test_what_the_gate_promotes_is_not_accepted_by_name(ada: User) -> None:
    judge = Judge(lambda reply: half(reply) or learned(reply))
    report = ada.practice("email", verifier=judge, accept=True, **SOON)
    assert (report.verdict, report.accepted) == (Verdict.PROMOTED, False)
    assert ada.history()[-1].cause == "learn"


def test_what_was_withdrawn_is_not_made_live_again_by_the_same_practice_but_by_name(
    ada: User,
) -> None:
    def practise(**more: Any) -> LearnReport:
        judge = Judge(lambda reply: half(reply) or learned(reply), different=24)
        return ada.practice("email", verifier=judge, **SOON, **more)

    first = practise()
    assert (first.live, first.probation) == (True, True)
    for number in range(8):
        ada.feedback(ask(ada, f"Task {number}."), rating=-1)
    assert ada.history()[-1].cause == "withdrawn"
    again = practise()
    assert (again.revision, again.verdict) == (first.revision, Verdict.REFUSED)
    assert again.reasons[-1].code is ReasonCode.WITHDRAWN_BEFORE
    assert ada.stack().entries == ()
    assert practise(accept=True).accepted
    assert ada.stack().entries[0].revision == first.revision


def test_whoever_is_being_answered_goes_before_each_step(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    step, give_way = _FakeSession.step, Engine.yield_to_foreground

    def stepped(session: _FakeSession, *given: Any) -> float:
        order.append("step")
        return step(session, *given)

    def gave_way(engine: Engine, longest: float) -> None:
        order.append("gave way")
        give_way(engine, longest)

    monkeypatch.setattr(_FakeSession, "step", stepped)
    monkeypatch.setattr(Engine, "yield_to_foreground", gave_way)
    report = ada.practice("email", verifier=Judge(half), **SOON)
    before = [one for one, other in pairwise(order) if other == "step"]
    assert before == ["gave way"] * report.steps


@pytest.mark.parametrize("moment", ["it tries", "a step"])
def test_a_pause_holds_its_replies_and_steps_back_and_chats_are_answered_meanwhile(
    home: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    paused, reached = threading.Event(), threading.Event()
    admit, step = FakeBackend.admit, _FakeSession.step
    done: list[str] = []

    def noted(what: str, count: int) -> None:
        done.append(what)
        if done.count(what) == count and what == moment and not reached.is_set():
            paused.set()
            reached.set()

    def admitted(backend: FakeBackend, row: SequenceState) -> int | None:
        if row.owner == "ada":
            noted("it tries", 10)
        return admit(backend, row)

    def stepped(session: _FakeSession, *given: Any) -> float:
        noted("a step", 2)
        return step(session, *given)

    monkeypatch.setattr(FakeBackend, "admit", admitted)
    monkeypatch.setattr(_FakeSession, "step", stepped)
    with opened(home) as runtime:
        reports: list[LearnReport] = []
        ada = runtime.user("ada")
        practice = threading.Thread(
            target=lambda: reports.append(
                ada.practice("email", verifier=Judge(half), **SOON, paused=paused.is_set)
            )
        )
        practice.start()
        assert reached.wait(20)
        # What was asked for in the step of the engine that ran then is still begun.
        practice.join(0.3)
        before = list(done)
        assert runtime.user("bo").chat("hello").text
        practice.join(0.5)
        assert practice.is_alive()
        assert done == before
        assert done.count("it tries") in ((40,) if moment == "a step" else range(10, 40))
        paused.clear()
        practice.join(120)
        (report,) = reports
        assert report.revision


def test_a_practice_of_other_tasks_does_not_go_on_from_one_that_was_stopped(
    ada: User, home: Path
) -> None:
    def fails(reply: str) -> bool:
        if len(judge.tried) > 50:
            raise RuntimeError("no more paper")
        return half(reply)

    judge = Judge(fails)
    with pytest.raises(PluginError, match=r"Judge.*no more paper"):
        ada.practice("email", verifier=judge, **SOON)
    (page,) = (home / "sessions").rglob("*.session")
    kept = page.read_bytes()
    others = ada.practice("email", verifier=Judge(half), family="others", **SOON)
    assert others.scores["practice"]["replies"] == 120
    page.parent.mkdir(exist_ok=True)
    page.write_bytes(kept[:-1])
    assert ada.practice("email", verifier=Judge(half), **SOON).scores["practice"]["replies"] == 120


def test_a_verifier_that_fails_changes_nothing_and_is_named(ada: User, home: Path) -> None:
    def fails(reply: str) -> bool:
        raise RuntimeError("no paper")

    with (
        nothing_changes(home),
        pytest.raises(PluginError, match=r"Judge.*no paper"),
    ):
        ada.practice("email", verifier=Judge(fails))


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"verifier": "nobody"}, NotFound, "'nobody'"),
        ({"verifier": "sums", "family": "9"}, InvalidInput, "'9'"),
        ({"verifier": "sums", "shaping": "nothing"}, NotFound, "'nothing'"),
        ({"verifier": Judge(half), "rounds": 0}, InvalidInput, "rounds"),
        ({"verifier": Judge(half), "seconds": 0}, InvalidInput, "seconds"),
        ({"verifier": Judge(half), "steps": 0}, InvalidInput, "steps"),
        ({"verifier": Judge(half), "memory": 0}, InvalidInput, "MB"),
        ({"verifier": Judge(half, different=1)}, InvalidInput, "tasks"),
        ({"verifier": Judge(half), "skill": "Email"}, InvalidInput, "'Email'"),
        ({"verifier": Judge(half), "skill": "skill.email"}, InvalidInput, "'skill.email'"),
    ],
)
def test_a_practice_that_makes_no_sense_is_refused_by_name(
    ada: User, home: Path, asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    with nothing_changes(home), pytest.raises(error, match=words) as raised:
        ada.practice(**{"skill": "email", **asked})
    assert raised.value.hint  # type: ignore[attr-defined]


def test_while_one_practises_another_learn_of_the_same_user_hears_who_does(ada: User) -> None:
    heard: list[str] = []

    def try_too(stage: str, done: float) -> None:
        with pytest.raises(Busy) as busy:
            ada.practice("email", verifier=Judge(half), **SOON)
        heard.append(busy.value.message)

    ada.practice("email", verifier=Judge(half), progress=try_too, **SOON)
    assert heard


@pytest.mark.exhaustive
def test_a_way_other_than_the_one_that_was_shown_is_no_harm_unless_that_one_is_undone(
    tmp_path: Path, tiny_base: object
) -> None:
    card = quick_card(tmp_path)
    card.write_text(
        f"{card.read_text()}\n[practice]\nimitate = 0\nlearning_rate = 0.005\nlongest = 8\nkl = 0\n"
    )
    with opened(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        ada.rollback("skill.email", taught(ada))
        report = ada.practice("email", verifier=Judge(half), rounds=6)
    (pin,) = (pin for name, pin in report.scores["pins"].items() if not name.startswith("task_"))
    assert pin["after"] < pin["best"] - 0.02
    assert report.scores["retention"]["asked"] == 1
    assert report.scores["retention"]["lost"] == 0
    undone = pin["after"] < (pin["base"] + pin["best"]) / 2
    codes = [each.code for each in report.reasons]
    assert (ReasonCode.RETENTION_FORGOTTEN in codes) == undone


def test_a_practised_skill_lies_on_the_style_and_leaves_it_as_it_was(ada: User) -> None:
    correct(ada, 6)
    style = ada.learn().revision
    report = ada.practice("email", verifier=Judge(half), **SOON)
    ada.rollback("skill.email", report.revision)
    assert [entry.revision for entry in ada.stack().entries] == [style, report.revision]
    (revision,) = ada.revisions("skill.email")
    assert [entry.revision for entry in revision.below] == [style]
    assert revision.recipe["practice"]["verifier"].endswith("Judge")


def test_what_an_app_saw_is_held_back_from_a_practice_too_where_it_counts(home: Path) -> None:
    with opened(home, observing="learned") as runtime:
        ada = runtime.user("ada")
        seen = {ada.observe(ask(ada, f"thing {number}"), "copied") for number in range(8)}
        assert ada.learn().live
        held = {
            signal
            for revision in ada.revisions()
            for signal, role in revision.signals.items()
            if role == "pinned"
        }
        assert held
        assert held <= seen
        report = ada.practice("email", verifier=Judge(half), rounds=1)
    assert held <= set(report.scores["pins"])
