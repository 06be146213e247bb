"""Learns after a rollback, withdrawal, scope or weight change are compared with the changed stack.

Layers that do not answer are not built upon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime, style
from test_practice import RecordingVerifier

from personalpeft import LearnReport, User
from personalpeft.learning.data.batching import build_lesson_losses
from personalpeft.learning.data.lesson_assignment import lessons_for, load_assignments
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.plan import Plan
from personalpeft.learning.rl.rollouts import derive_seed
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.learning.train.losses import DPOLoss, encode_continuation


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[User]:
    with open_runtime(tmp_path / "home") as runtime:
        yield runtime.user("ada")


def tell(user: User, animal: str, name: str) -> str:
    return user.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


def all_reports(report: LearnReport) -> list[LearnReport]:
    return [report, *report.above]


def never(user: User, layer: str) -> None:
    user.scope(layer, "never")


def off(user: User, layer: str) -> None:
    user.set_weight(layer, 0)


def lighter(user: User, layer: str) -> None:
    user.set_weight(layer, 0.4)


def learn_memory_on_two_styles(user: User) -> tuple[str | None, str | None]:
    """Learn a style, a stronger one and a memory on it; return the two styles."""
    for number in range(4):
        user.teach(f"question {number}", style(f"Answer {number}."))
    first = user.learn()
    for number in range(4, 18):
        user.teach(f"question {number}", style(f"Answer {number}."))
    second = user.learn(start="scratch")
    tell(user, "dog", "Rex")
    assert [report.live for report in (first, second, user.learn())] == [True, True, True]
    return first.revision, second.revision


def test_memory_learns_after_a_rollback_below_it(ada: User) -> None:
    first, _ = learn_memory_on_two_styles(ada)
    ada.rollback("style", first)
    tell(ada, "cat", "Tom")
    assert ada.learn("memory").live


def test_memory_learns_after_a_withdrawal_below_it(ada: User) -> None:
    first, second = learn_memory_on_two_styles(ada)
    for number in range(10):
        if ada.layers()[0].head != second:
            break
        ada.feedback(ask(ada, f"another question {number}", layers=["style"]), rating=-1)
    assert ada.layers()[0].head == first
    tell(ada, "cat", "Tom")
    assert [report.live for report in all_reports(ada.learn()) if report.steps] == [True]


@pytest.mark.parametrize(
    ("layer", "less"),
    [
        pytest.param("style", never, id="style never"),
        pytest.param("memory", lighter, id="memory, weight 0.4"),
        pytest.param("style", off, id="style, weight 0", marks=pytest.mark.exhaustive),
        pytest.param("style", lighter, id="style, weight 0.4", marks=pytest.mark.exhaustive),
        pytest.param("memory", never, id="memory never", marks=pytest.mark.exhaustive),
        pytest.param("memory", off, id="memory, weight 0", marks=pytest.mark.exhaustive),
    ],
)
def test_layer_with_less_weight_blocks_no_other_layer(
    ada: User, layer: str, less: Callable[[User, str], None]
) -> None:
    correct(ada, 8)
    for number in range(4):
        tell(ada, f"pet {number}", f"Rex {number}")
    assert all(report.live for report in all_reports(ada.learn()))
    less(ada, layer)
    if layer == "style":
        tell(ada, "goat", "Duchess")
        assert ada.learn("memory").live
        return
    correct(ada, 8, first=20)
    report = ada.learn()
    assert report.live
    # The lower weight is no fault of the style, so the style is not rebuilt.
    assert report.above[0].reasons[0].code is ReasonCode.STACK_BELOW_CHECKED
    assert report.above[0].reasons[0].data == {"valid": 4, "asked": 4}


def test_loss_caused_by_a_learn_itself_is_a_regression(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that loses earlier lessons is refused, and so is the next one that loses as many."""
    correct(ada, 12)
    tell(ada, "dog", "Rex")
    assert all(report.live for report in all_reports(ada.learn()))
    steps = Plan.steps.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Plan, "steps", property(lambda plan: 1 if plan.layer == "style" else steps(plan))
    )
    for first in (20, 30):
        correct(ada, 4, first=first)
        report = ada.learn("style", start="scratch")
        assert not report.live
        assert ReasonCode.RETENTION_REGRESSED in [
            all_reports.code for all_reports in report.reasons
        ]


def test_memory_is_built_over_the_layers_that_answer_with_it(ada: User) -> None:
    correct(ada, 8)
    for number in range(8):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    tell(ada, "dog", "Rex")
    ada.learn()
    built = {revision.layer: revision for revision in ada.revisions()}
    assert [entry.layer for entry in ada.stack().entries] == ["style", "skill.email", "memory"]
    # A skill answers near its own lessons alone.
    assert [entry.layer for entry in built["memory"].below] == ["style"]

    ada.scope("skill.email", "always")
    assert [(trigger.kind, trigger.layer) for trigger in ada.pending().triggers] == [
        ("stack_below_changed", "memory")
    ]
    ada.scope("skill.email", "near")
    assert ada.pending().triggers == ()


def test_disabled_style_is_not_learned_again_through_the_memory(ada: User) -> None:
    for number in range(8):
        ada.feedback(ada.chat(f"question {number}"), edit=f"Ahoy! Answer {number}. Arrr!")
    ada.learn()
    ada.scope("style", "never")
    tell(ada, "dog", "Rex")
    assert ada.learn("memory").live
    built = ada.revisions("memory")[-1]
    assert built.below == ()
    ada.scope("style", "always")
    assert [(trigger.kind, trigger.layer) for trigger in ada.pending().triggers] == [
        ("stack_below_changed", "memory")
    ]


def test_truncated_reply_is_a_lesson_without_an_end(ada: User) -> None:
    whole, cut = ask(ada, "one", max_tokens=64), ask(ada, "two", max_tokens=2)
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    for reply in (whole, cut):
        ada.feedback(reply, rating=1)
    store = ada._services.store
    lessons = lessons_for(load_assignments(store, "ada"), "style")
    assert [lesson.ended for lesson in lessons] == [True, False]


def test_rejected_reply_that_was_cut_off_teaches_nothing_about_its_end(ada: User) -> None:
    for limit in (64, 2):
        ada.feedback(ask(ada, f"up to {limit}", max_tokens=limit), edit="Boil it.")
    backend = ada._services.training_backend
    losses = build_lesson_losses(
        lessons_for(load_assignments(ada._services.store, "ada"), "style"),
        lambda messages, answer, ended: encode_continuation(
            backend, messages, answer, 256, ended=ended
        ),
        TrainingConfig(preference_pairs=2),
    )
    end = backend.end_of_turn
    pairs = [
        (loss.chosen.completion, loss.rejected.completion)
        for loss in losses
        if isinstance(loss, DPOLoss)
    ]
    assert [[tokens[-len(end) :] == end for tokens in pair] for pair in pairs] == [
        [True, True],
        [True, False],
    ]


def test_learn_that_drops_practiced_work_says_so(home: Path) -> None:
    with open_runtime(home) as runtime:
        ada = runtime.user("ada")
        taught = [
            ada.teach(f"Write to {number}.", f"Dear {number}", skill="email") for number in range(6)
        ]
        ada.learn(accept=True)
        judge = RecordingVerifier(lambda reply: derive_seed(reply) % 2 == 0)
        practiced = ada.practice("email", verifier=judge, rounds=2, accept=True)
        assert ada.layers()[0].head == practiced.revision
        ada.retract(taught[0])
        report = ada.learn()
        assert report.reasons[-1].code is ReasonCode.PRACTICE_NOT_INCLUDED
