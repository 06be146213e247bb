"""Practice through the public surface.

Rewarded replies become likelier, the gate judges on tasks never tried, and an unfinished practice
changes nothing.
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
from runtime_makers import ask, correct, greedy, home_unchanged, open_runtime, quick_card

from personalpeft import Busy, Cancelled, InvalidInput, LearnReport, NotFound, PluginError, User
from personalpeft.backends.fake import FakeBackend, FakeSession
from personalpeft.backends.sequence import SequenceState
from personalpeft.backends.torch.training.session import TorchSession
from personalpeft.engine.engine import Engine
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.rl.rollouts import derive_seed
from personalpeft.plugins import Attempt, Task
from personalpeft.store.integrity import verify
from personalpeft.types import Verdict

SOON = {"rounds": 3}


@dataclass
class RecordingVerifier:
    """Verifier of numbered tasks that applies ``right`` to each reply and records each prompt."""

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
        value = self.right(reply)
        return value if isinstance(value, dict) else float(value)


# The fake backend writes " as in " only with a stack attached, and its reply depends on the seed.
def has_stack_marker(reply: str) -> bool:
    return " as in " in reply


def passes_half(reply: str) -> bool:
    return derive_seed(reply) % 2 == 0


@pytest.fixture
def ada(home: Path) -> Iterator[User]:
    with open_runtime(home) as runtime:
        yield runtime.user("ada")


def teach_skill(user: User) -> str:
    """Learn a skill from demonstrations and return its first revision."""
    for number in range(6):
        user.teach(f"Task {number}.", f"Answer {number}", skill="email")
    revision = user.learn("skill.email").revision
    assert revision
    return revision


def test_practiced_skill_is_judged_on_untried_tasks_and_goes_live(
    ada: User,
) -> None:
    verifier = RecordingVerifier(lambda reply: passes_half(reply) or has_stack_marker(reply))
    heard: list[tuple[str, float]] = []
    report = ada.practice(
        "email", verifier=verifier, progress=lambda stage, done: heard.append((stage, done)), **SOON
    )
    assert report.verdict is Verdict.PROMOTED
    assert ada.stack().entries[0].revision == report.revision
    tasks = report.scores["tasks"]
    assert tasks["passed_after"] == tasks["asked"] > tasks["passed_before"]
    assert list(dict(heard)) == ["Practicing", "Judging"]
    practice_rounds = set(verifier.tried[: report.scores["practice"]["replies"]])
    judged_by = set(verifier.tried[report.scores["practice"]["replies"] :])
    assert practice_rounds
    assert judged_by
    assert not practice_rounds & judged_by
    assert "personalpeft rollback skill.email" in str(report)
    assert json.loads(json.dumps(report.as_json())) == json.loads(json.dumps(ada.reports()[-1]))
    assert verify(ada._services.store) == ()


def test_practice_that_made_the_skill_worse_is_refused(ada: User) -> None:
    report = ada.practice(
        "email",
        verifier=RecordingVerifier(
            lambda reply: passes_half(reply) and not has_stack_marker(reply)
        ),
        **SOON,
    )
    assert report.verdict is Verdict.REFUSED
    assert report.revision in {revision.id for revision in ada.revisions()}
    assert ada.stack().entries == ()


def test_evaluation_tasks_are_never_tried_in_any_practice(ada: User) -> None:
    for _ in range(3):
        verifier = RecordingVerifier(
            lambda reply: passes_half(reply) or has_stack_marker(reply), different=60
        )
        report = ada.practice("email", verifier=verifier, **SOON)
        replies = report.scores["practice"]["replies"]
        assert all(derive_seed("judged by", prompt) % 4 for prompt in verifier.tried[:replies])
        assert not any(derive_seed("judged by", prompt) % 4 for prompt in verifier.tried[replies:])


def test_practice_builds_on_demonstrations_and_a_learn_builds_on_practice(ada: User) -> None:
    shown = teach_skill(ada)
    practice_rounds = ada.practice(
        "email", verifier=RecordingVerifier(passes_half), **SOON
    ).revision
    assert practice_rounds
    ada.rollback("skill.email", practice_rounds)
    parents = {revision.id: revision.parent for revision in ada.revisions()}
    assert parents[practice_rounds] == shown
    for number in range(10, 14):
        ada.teach(f"Task {number}.", f"Answer {number}", skill="email")
    latest = ada.learn("skill.email").revision
    assert {revision.id: revision.parent for revision in ada.revisions()}[
        latest or ""
    ] == practice_rounds


def practice_rounds(user: User, family: str = "") -> int:
    """Practice briefly and return the number of rounds that the revision counts."""
    made = user.practice(
        "email", verifier=RecordingVerifier(passes_half), family=family, **SOON
    ).revision
    assert made
    user.rollback("skill.email", made)
    (revision,) = (each for each in user.revisions() if each.id == made)
    rounds: int = revision.recipe["practice"]["rounds"]
    return rounds


@pytest.mark.exhaustive
def test_short_practices_of_one_family_accumulate_and_new_demonstrations_restart(
    ada: User,
) -> None:
    teach_skill(ada)
    assert [practice_rounds(ada) for _ in range(2)] == [3, 6]
    assert practice_rounds(ada, "others") == 3
    for number in range(10, 14):
        ada.teach(f"Task {number}.", f"Answer {number}", skill="email")
    has_stack_marker = ada.learn("skill.email").revision
    assert has_stack_marker
    ada.rollback("skill.email", has_stack_marker)
    assert practice_rounds(ada) == 3


def test_held_out_lessons_of_all_layers_are_retention_items(ada: User) -> None:
    correct(ada, 6)
    ada.learn()
    teach_skill(ada)
    report = ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
    assert report.scores["retention"]["asked"] == 2


@pytest.mark.exhaustive
def test_same_practice_in_another_home_makes_the_same_revision(
    tmp_path: Path, tiny_base: object
) -> None:
    card, revisions = quick_card(tmp_path), []
    card.write_text(f"{card.read_text()}\n[practice]\nprompts_per_round = 4\nnum_eval_tasks = 8\n")
    for name in ("one", "two"):
        with open_runtime(tmp_path / name, card) as runtime:
            user = runtime.user(name)
            revisions.append(
                user.practice("email", verifier=RecordingVerifier(passes_half), rounds=2).revision
            )
    assert revisions[0] is not None
    assert revisions[0] == revisions[1]


@pytest.mark.exhaustive
def test_next_practice_draws_other_tasks(ada: User) -> None:
    tried = []
    for _ in range(2):
        verifier = RecordingVerifier(lambda reply: passes_half(reply) or has_stack_marker(reply))
        ada.practice("email", verifier=verifier, **SOON)
        tried.append(set(verifier.tried))
    assert tried[0] != tried[1]


@pytest.mark.parametrize(
    ("right", "code"),
    [(lambda reply: False, ReasonCode.NO_REPLY_PASSED), (lambda reply: True, None)],
)
def test_practice_without_a_learnable_task_builds_nothing_and_says_why(
    ada: User, right: Callable[[str], bool], code: ReasonCode | None
) -> None:
    before = greedy(ada)
    report = ada.practice("email", verifier=RecordingVerifier(right), rounds=40)
    assert not report.live
    if code:
        assert [each.code for each in report.reasons] == [code]
        assert report.revision is None
        assert ada.reports()[-1]["reason"] == report.reason
        # Practice ends early once all tasks are hopeless.
        assert report.scores["practice"]["rounds"] < 40
    assert greedy(ada) == before


@dataclass
class BrevityReward:
    """Reward shaper that favours short replies."""

    train_on_solved: bool = True
    groups: list[tuple[int, float]] = field(default_factory=list)

    def shape(self, attempts: Sequence[Attempt], pass_rate: float) -> list[float]:
        self.groups.append((len(attempts), pass_rate))
        return [1 - attempt.length for attempt in attempts]


@pytest.mark.exhaustive
def test_reward_shaper_gets_whole_groups_and_solved_tasks_only_on_request(
    ada: User,
) -> None:
    rounds = {}
    for train_on_solved in (True, False):
        shaping = BrevityReward(train_on_solved)
        report = ada.practice(
            "email", verifier=RecordingVerifier(lambda reply: True), shaping=shaping, rounds=40
        )
        rounds[train_on_solved] = report.scores["practice"]["rounds"]
    assert rounds[True] == 40 > rounds[False]
    assert {group for group in shaping.groups if group[0] == 5} <= {(5, 1.0)}


def test_several_rewards_are_accepted(ada: User) -> None:
    verifier = RecordingVerifier(
        lambda reply: {"right": float(passes_half(reply) or has_stack_marker(reply)), "brief": 0.5}
    )
    assert ada.practice("email", verifier=verifier, **SOON).revision


def test_time_limit_ends_the_rounds_and_the_result_is_judged(ada: User) -> None:
    verifier = RecordingVerifier(lambda reply: passes_half(reply) or has_stack_marker(reply))
    report = ada.practice("email", verifier=verifier, seconds=1e-9)
    assert report.scores["practice"]["rounds"] == 1
    assert report.revision


@pytest.mark.exhaustive
def test_stopped_practice_resumes_to_the_same_revision(tmp_path: Path, tiny_base: object) -> None:
    revisions = []
    for name, stops in (("one", ()), ("two", (0, 1, 2, 90))):
        with open_runtime(tmp_path / name, quick_card(tmp_path)) as runtime:
            ada = runtime.user("ada")
            verifier = RecordingVerifier(passes_half)
            for looks in stops:
                seen = iter(range(looks))
                with pytest.raises(Cancelled) as stopped:
                    ada.practice(
                        "email",
                        verifier=verifier,
                        **SOON,
                        cancelled=lambda: next(seen, None) is None,  # noqa: B023
                    )
                assert stopped.value.hint
                assert (ada.revisions(), ada.reports(), ada.stack().entries) == ((), (), ())
            verifier.tried.clear()
            report = ada.practice("email", verifier=verifier, **SOON)
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
    """Simulates a kill of the process."""


@dataclass
class StepKiller:
    """Counts training steps and raises once before each step listed in ``kills``."""

    kills: set[int] = field(default_factory=set)
    done: int = 0

    def watch(self, session: Any, monkeypatch: pytest.MonkeyPatch) -> StepKiller:
        step = session.step

        def counted(trained: Any, *given: Any) -> float:
            if self.done in self.kills:
                self.kills.remove(self.done)
                raise Killed
            self.done += 1
            return float(step(trained, *given))

        monkeypatch.setattr(session, "step", counted)
        return self


# Rejection sampling makes four steps in a round, and the policy gradient makes one.
@pytest.mark.parametrize(
    ("base", "session", "imitate", "rounds", "kills"),
    [
        ("fake", FakeSession, 12, 14, {0, 1, 2, 3, 4, 7, 48, 49}),
        pytest.param("tiny", TorchSession, 1, 2, {2, 4}, marks=pytest.mark.exhaustive),
    ],
    ids=["fake", "a model"],
)
def test_kill_costs_no_recorded_reply_and_no_finished_step(
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
            open_runtime(tmp_path / name, "fake" if base == "fake" else card) as runtime,
            monkeypatch.context() as patch,
        ):
            ada, verifier, steps = (
                runtime.user("ada"),
                RecordingVerifier(passes_half),
                StepKiller(before).watch(session, patch),
            )
            verdicts, report = ["before it was judged"] * bool(before), None
            while report is None:
                try:
                    report = ada.practice(
                        "email", verifier=verifier, rounds=rounds, progress=killed
                    )
                except Killed:
                    assert (ada.revisions(), ada.reports()) == ((), ())
            assert not before
            assert not verdicts
            ended.append(
                (report.revision, report.scores, report.steps, steps.done, len(verifier.tried))
            )
    assert ended[0] == ended[1]
    assert ended[0][0] is not None
    assert ended[0][2] == ended[0][3] == 4 * imitate + rounds - imitate


@pytest.mark.parametrize(("steps", "rounds"), [(2, 1), (4, 1), (5, 2)])
def test_step_limit_ends_practice_mid_round_and_the_result_is_judged(
    ada: User, home: Path, steps: int, rounds: int
) -> None:
    report = ada.practice(
        "email",
        verifier=RecordingVerifier(lambda reply: passes_half(reply) or has_stack_marker(reply)),
        steps=steps,
    )
    assert report.verdict is Verdict.PROMOTED
    assert (report.steps, report.scores["practice"]["rounds"]) == (steps, rounds)
    assert list((home / "sessions").rglob("*.session")) == []


def test_builds_of_equal_rounds_and_different_steps_have_different_inputs(ada: User) -> None:
    for steps in (2, 3):
        ada.practice("email", verifier=RecordingVerifier(passes_half), steps=steps)
        ada.rollback("skill.email", None)
    two, three = ada.revisions()
    assert two.recipe["practice"]["rounds"] == three.recipe["practice"]["rounds"] == 1
    assert two.inputs != three.inputs


def test_practice_that_exceeds_memory_is_refused_with_its_size(ada: User, home: Path) -> None:
    verifier = RecordingVerifier(passes_half)
    with home_unchanged(home):
        report = ada.practice("email", verifier=verifier, max_memory_mb=0.001)
    assert (report.verdict, report.revision, verifier.tried) == (None, None, [])
    assert report.reasons[0].code is ReasonCode.MEMORY_BUDGET
    assert report.reasons[0].data["allowed"] == 0.001
    assert ada.practice("email", verifier=verifier, max_memory_mb=100, **SOON).revision


def test_accepted_practice_goes_live_though_refused_and_is_recorded(
    ada: User,
) -> None:
    report = ada.practice(
        "email",
        verifier=RecordingVerifier(
            lambda reply: passes_half(reply) and not has_stack_marker(reply)
        ),
        accept=True,
        **SOON,
    )
    assert (report.verdict, report.accepted, report.live) == (Verdict.REFUSED, True, True)
    assert report.reasons[0].code is ReasonCode.OVERRIDDEN
    assert ada.stack().entries[0].revision == report.revision
    assert ada.history()[-1].cause == "accepted"
    assert ada.reports()[-1]["accepted"] is True


def test_promoted_practice_is_not_recorded_as_accepted(ada: User) -> None:
    verifier = RecordingVerifier(lambda reply: passes_half(reply) or has_stack_marker(reply))
    report = ada.practice("email", verifier=verifier, accept=True, **SOON)
    assert (report.verdict, report.accepted) == (Verdict.PROMOTED, False)
    assert ada.history()[-1].cause == "learn"


def test_withdrawn_practice_goes_live_again_only_by_name(
    ada: User,
) -> None:
    def practice(**more: Any) -> LearnReport:
        verifier = RecordingVerifier(
            lambda reply: passes_half(reply) or has_stack_marker(reply), different=24
        )
        return ada.practice("email", verifier=verifier, **SOON, **more)

    first = practice()
    assert (first.live, first.probation) == (True, True)
    for number in range(8):
        ada.feedback(ask(ada, f"Task {number}."), rating=-1)
    assert ada.history()[-1].cause == "withdrawn"
    again = practice()
    assert (again.revision, again.verdict) == (first.revision, Verdict.REFUSED)
    assert again.reasons[-1].code is ReasonCode.WITHDRAWN_BEFORE
    assert ada.stack().entries == ()
    assert practice(accept=True).accepted
    assert ada.stack().entries[0].revision == first.revision


def test_practice_yields_to_foreground_requests_before_each_step(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    step, give_way = FakeSession.step, Engine.yield_to_foreground

    def recording_step(session: FakeSession, *given: Any) -> float:
        order.append("step")
        return step(session, *given)

    def recording_yield(engine: Engine, longest: float) -> None:
        order.append("gave way")
        give_way(engine, longest)

    monkeypatch.setattr(FakeSession, "step", recording_step)
    monkeypatch.setattr(Engine, "yield_to_foreground", recording_yield)
    report = ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
    before = [one for one, other in pairwise(order) if other == "step"]
    assert before == ["gave way"] * report.steps


@pytest.mark.exhaustive
@pytest.mark.parametrize("moment", ["it tries", "a step"])
def test_paused_practice_submits_nothing_while_chats_are_served(
    home: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    paused, reached = threading.Event(), threading.Event()
    admit, step = FakeBackend.admit, FakeSession.step
    done: list[str] = []

    def record(what: str, count: int) -> None:
        done.append(what)
        if done.count(what) == count and what == moment and not reached.is_set():
            paused.set()
            reached.set()

    def recording_admit(backend: FakeBackend, row: SequenceState) -> int | None:
        if row.owner == "ada":
            record("it tries", 10)
        return admit(backend, row)

    def recording_step(session: FakeSession, *given: Any) -> float:
        record("a step", 2)
        return step(session, *given)

    monkeypatch.setattr(FakeBackend, "admit", recording_admit)
    monkeypatch.setattr(FakeSession, "step", recording_step)
    with open_runtime(home) as runtime:
        reports: list[LearnReport] = []
        ada = runtime.user("ada")
        practice = threading.Thread(
            target=lambda: reports.append(
                ada.practice(
                    "email", verifier=RecordingVerifier(passes_half), **SOON, paused=paused.is_set
                )
            )
        )
        practice.start()
        assert reached.wait(20)
        # Requests of the engine step that was running at the pause are still started.
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


@pytest.mark.exhaustive
def test_practice_of_another_family_does_not_resume_a_stopped_one(ada: User, home: Path) -> None:
    def fails(reply: str) -> bool:
        if len(verifier.tried) > 50:
            raise RuntimeError("no more paper")
        return passes_half(reply)

    verifier = RecordingVerifier(fails)
    with pytest.raises(PluginError, match=r"RecordingVerifier.*no more paper"):
        ada.practice("email", verifier=verifier, **SOON)
    (checkpoint,) = (home / "sessions").rglob("*.session")
    kept = checkpoint.read_bytes()
    others = ada.practice("email", verifier=RecordingVerifier(passes_half), family="others", **SOON)
    assert others.scores["practice"]["replies"] == 120
    checkpoint.parent.mkdir(exist_ok=True)
    checkpoint.write_bytes(kept[:-1])
    assert (
        ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON).scores["practice"][
            "replies"
        ]
        == 120
    )


def test_failing_verifier_is_named_and_changes_nothing(ada: User, home: Path) -> None:
    def fails(reply: str) -> bool:
        raise RuntimeError("no paper")

    with (
        home_unchanged(home),
        pytest.raises(PluginError, match=r"RecordingVerifier.*no paper"),
    ):
        ada.practice("email", verifier=RecordingVerifier(fails))


def test_verifier_whose_rewards_change_their_names_is_named_and_changes_nothing(
    ada: User, home: Path
) -> None:
    class Changing(RecordingVerifier):
        def verify(self, task: Task, reply: str) -> Any:
            return {"right": 0.5, **({"brief": 1.0} if len(reply) % 2 else {})}

    with pytest.raises(PluginError, match="brief"):
        ada.practice("email", verifier=Changing(passes_half), **SOON)
    assert ada.revisions() == ()


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"verifier": "nobody"}, NotFound, "'nobody'"),
        ({"verifier": "sums", "family": "9"}, InvalidInput, "'9'"),
        ({"verifier": "sums", "shaping": "nothing"}, NotFound, "'nothing'"),
        ({"verifier": RecordingVerifier(passes_half), "rounds": 0}, InvalidInput, "rounds"),
        ({"verifier": RecordingVerifier(passes_half), "seconds": 0}, InvalidInput, "seconds"),
        ({"verifier": RecordingVerifier(passes_half), "steps": 0}, InvalidInput, "steps"),
        ({"verifier": RecordingVerifier(passes_half), "max_memory_mb": 0}, InvalidInput, "memory"),
        ({"verifier": RecordingVerifier(passes_half, different=1)}, InvalidInput, "tasks"),
        ({"verifier": RecordingVerifier(passes_half), "skill": "Email"}, InvalidInput, "'Email'"),
        (
            {"verifier": RecordingVerifier(passes_half), "skill": "skill.email"},
            InvalidInput,
            "'skill.email'",
        ),
    ],
)
def test_invalid_practice_options_are_refused(
    ada: User, home: Path, asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    with home_unchanged(home), pytest.raises(error, match=words) as raised:
        ada.practice(**{"skill": "email", **asked})
    assert raised.value.hint  # type: ignore[attr-defined]


def test_second_learn_of_the_same_user_gets_busy_during_practice(ada: User) -> None:
    heard: list[str] = []

    def try_too(stage: str, done: float) -> None:
        with pytest.raises(Busy) as busy:
            ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
        heard.append(busy.value.message)

    ada.practice("email", verifier=RecordingVerifier(passes_half), progress=try_too, **SOON)
    assert heard


@pytest.mark.exhaustive
def test_solution_other_than_the_demonstrated_one_is_a_regression_only_if_forgotten(
    tmp_path: Path, tiny_base: object
) -> None:
    card = quick_card(tmp_path)
    card.write_text(
        f"{card.read_text()}\n[practice]\nimitate = 0\nlearning_rate = 0.005\nlongest = 8\nkl = 0\n"
    )
    with open_runtime(tmp_path / "home", card) as runtime:
        ada = runtime.user("ada")
        ada.rollback("skill.email", teach_skill(ada))
        report = ada.practice("email", verifier=RecordingVerifier(passes_half), rounds=6)
    (pin,) = (pin for name, pin in report.scores["items"].items() if not name.startswith("task_"))
    assert pin["after"] < pin["best"] - 0.02
    assert report.scores["retention"]["asked"] == 1
    assert report.scores["retention"]["regressed"] == 0
    undone = pin["after"] < (pin["base"] + pin["best"]) / 2
    codes = [each.code for each in report.reasons]
    assert (ReasonCode.RETENTION_FORGOTTEN in codes) == undone


def test_practiced_skill_is_built_on_the_style_and_leaves_it_unchanged(ada: User) -> None:
    correct(ada, 6)
    style = ada.learn().revision
    report = ada.practice("email", verifier=RecordingVerifier(passes_half), **SOON)
    ada.rollback("skill.email", report.revision)
    assert [entry.revision for entry in ada.stack().entries] == [style, report.revision]
    (revision,) = ada.revisions("skill.email")
    assert [entry.revision for entry in revision.below] == [style]
    assert revision.recipe["practice"]["verifier"].endswith("RecordingVerifier")


def test_held_out_implicit_feedback_is_a_retention_item_of_practice(home: Path) -> None:
    with open_runtime(home, implicit_feedback="learned") as runtime:
        ada = runtime.user("ada")
        seen = {
            ada.record_implicit_feedback(ask(ada, f"thing {number}"), "copied")
            for number in range(8)
        }
        assert ada.learn().live
        held = {
            signal
            for revision in ada.revisions()
            for signal, role in revision.signals.items()
            if role == "held_out"
        }
        assert held
        assert held <= seen
        report = ada.practice("email", verifier=RecordingVerifier(passes_half), rounds=1)
    assert held <= set(report.scores["items"])
