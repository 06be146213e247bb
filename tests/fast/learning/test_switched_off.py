"""Where somebody went back, switched a layer off or weighed it less, later learns are held to what is left: they did not do it.
And nothing is built over a layer that does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, correct, opened, quick_card, style
from test_practice import Judge

from personalpeft import LearnReport, User
from personalpeft.learning.data.assignment import lessons_for, load_assignments
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.plan import Plan
from personalpeft.learning.rl.rollouts import derive_seed


@pytest.fixture
def ada(tmp_path: Path) -> Iterator[User]:
    with opened(tmp_path / "home") as runtime:
        yield runtime.user("ada")


def tell(user: User, animal: str, name: str) -> str:
    return user.remember(
        f"My {animal} is called {name}.", questions=[f"What is my {animal} called?"], answer=name
    )


def each(report: LearnReport) -> list[LearnReport]:
    return [report, *report.above]


def under_a_memory(user: User) -> tuple[str | None, str | None]:
    """A style, a much stronger one after it, and a memory learned on that. The two styles."""
    for number in range(4):
        user.teach(f"question {number}", style(f"Answer {number}."))
    first = user.learn()
    for number in range(4, 18):
        user.teach(f"question {number}", style(f"Answer {number}."))
    second = user.learn(start="nothing")
    tell(user, "dog", "Rex")
    assert [report.live for report in (first, second, user.learn())] == [True, True, True]
    return first.revision, second.revision


def test_after_a_rollback_below_it_a_memory_learns_on(ada: User) -> None:
    first, _ = under_a_memory(ada)
    ada.rollback("style", first)
    tell(ada, "cat", "Tom")
    assert ada.learn("memory").live


def test_after_a_withdrawal_below_it_a_memory_learns_on(ada: User) -> None:
    first, second = under_a_memory(ada)
    for number in range(10):
        if ada.layers()[0].head != second:
            break
        ada.feedback(ask(ada, f"another question {number}", layers=["style"]), rating=-1)
    assert ada.layers()[0].head == first
    tell(ada, "cat", "Tom")
    assert [report.live for report in each(ada.learn()) if report.steps] == [True]


@pytest.mark.parametrize(
    "less",
    [
        lambda user, layer: user.scope(layer, "never"),
        lambda user, layer: user.set_weight(layer, 0),
        lambda user, layer: user.set_weight(layer, 0.4),
    ],
    ids=["never", "weight 0", "weight 0.4"],
)
@pytest.mark.parametrize("layer", ["style", "memory"])
def test_a_layer_that_counts_less_keeps_no_other_from_learning(
    ada: User, layer: str, less: Callable[[User, str], None]
) -> None:
    correct(ada, 8)
    for number in range(4):
        tell(ada, f"pet {number}", f"Rex {number}")
    assert all(report.live for report in each(ada.learn()))
    less(ada, layer)
    if layer == "style":
        tell(ada, "goat", "Duchess")
        assert ada.learn("memory").live
        return
    correct(ada, 8, first=20)
    report = ada.learn()
    assert report.live
    # That it counts less is no fault of the style, so it is not built anew for it.
    assert report.above[0].reasons[0].code is ReasonCode.STACK_BELOW_CHECKED
    assert report.above[0].reasons[0].data == {"valid": 4, "asked": 4}


def test_what_a_learn_itself_undoes_is_still_noticed(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that loses what an older one taught is refused, and so is the next that loses as much."""
    correct(ada, 12)
    tell(ada, "dog", "Rex")
    assert all(report.live for report in each(ada.learn()))
    steps = Plan.steps.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Plan, "steps", property(lambda plan: 1 if plan.layer == "style" else steps(plan))
    )
    for first in (20, 30):
        correct(ada, 4, first=first)
        report = ada.learn("style", start="nothing")
        assert not report.live
        assert ReasonCode.RETENTION_REGRESSED in [each.code for each in report.reasons]


def test_a_memory_is_built_over_what_answers_with_it(ada: User) -> None:
    correct(ada, 8)
    for number in range(8):
        ada.teach(f"Write to {number}.", f"Dear {number}", skill="email")
    tell(ada, "dog", "Rex")
    ada.learn()
    built = {revision.layer: revision for revision in ada.revisions()}
    assert [entry.layer for entry in ada.stack().entries] == ["style", "skill.email", "memory"]
    # A skill is there for its own subject alone.
    assert [entry.layer for entry in built["memory"].below] == ["style"]

    ada.scope("skill.email", "always")
    assert [(news.kind, news.layer) for news in ada.pending().news] == [("below", "memory")]
    ada.scope("skill.email", "near")
    assert ada.pending().news == ()


def test_a_style_that_is_switched_off_is_not_taught_again_through_the_memory(ada: User) -> None:
    for number in range(8):
        ada.feedback(ada.chat(f"question {number}"), edit=f"Ahoy! Answer {number}. Arrr!")
    ada.learn()
    ada.scope("style", "never")
    tell(ada, "dog", "Rex")
    assert ada.learn("memory").live
    built = ada.revisions("memory")[-1]
    assert built.below == ()
    ada.scope("style", "always")
    assert [(news.kind, news.layer) for news in ada.pending().news] == [("below", "memory")]


def test_a_reply_that_was_cut_off_is_not_taught_as_a_whole_one(ada: User) -> None:
    whole, cut = ask(ada, "one", max_tokens=64), ask(ada, "two", max_tokens=2)
    assert (whole.finish_reason, cut.finish_reason) == ("stop", "length")
    for reply in (whole, cut):
        ada.feedback(reply, rating=1)
    store = ada._services.store
    lessons = lessons_for(load_assignments(store, "ada"), "style")
    assert [lesson.ended for lesson in lessons] == [True, False]


def test_a_learn_that_leaves_out_what_was_practised_says_so(tmp_path: Path) -> None:
    with opened(tmp_path / "home", quick_card(tmp_path)) as runtime:
        ada = runtime.user("ada")
        taught = [
            ada.teach(f"Write to {number}.", f"Dear {number}", skill="email") for number in range(6)
        ]
        ada.learn(accept=True)
        judge = Judge(lambda reply: derive_seed(reply) % 2 == 0)
        practised = ada.practice("email", verifier=judge, rounds=2, accept=True)
        assert ada.layers()[0].head == practised.revision
        ada.retract(taught[0])
        report = ada.learn()
        assert report.reasons[-1].code is ReasonCode.PRACTICE_NOT_INCLUDED
