"""A user's layers move to another base, and back, without the loss of anything."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from runtime_makers import QUICK_CARD, ask, correct, greedy, open_runtime

from personalpeft import (
    BaseMismatch,
    Cancelled,
    InvalidInput,
    NotFound,
    NothingToLearn,
    RebaseReport,
    Runtime,
    User,
    Verdict,
)
from personalpeft.learning.gate.evidence import EvalItem, Evidence, Leakage, ProbeResults
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.outcomes import RebaseOutcome, text_reason
from personalpeft.learning.rebase_build import BaseComparison
from personalpeft.rebase import RebasedLayer, judge_rebase

# A build takes a second. The promises do not depend on how well it learns.
CARD = QUICK_CARD.replace("min_steps = 12", "min_steps = 3\nkl_prompts = 0\nfew_shot_replies = 0")
GUESTS = ("Quetzal", "Ocelot", "Tapir", "Coati", "Margay")


def first_card(folder: Path) -> Path:
    path = folder / "tiny-quick.toml"
    path.write_text(CARD)
    return path


def other_card(folder: Path, name: str = "tiny-other", **changes: object) -> Path:
    """Return the card of another tiny base, which also has another shape and rank."""
    card = CARD.replace('"tiny-quick"', f'"{name}"')
    for old, new in {
        "seed = 7": "seed = 8",
        "hidden_size = 64": "hidden_size = 48",
        **changes,
    }.items():
        assert old in card
        card = card.replace(old, str(new))
    path = folder / f"{name}.toml"
    path.write_text(card)
    return path


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, tiny_base: object) -> Path:
    """A home in which ada has a style and a skill on the first base."""
    folder = tmp_path_factory.mktemp("learned")
    with open_runtime(folder / "home", first_card(folder)) as runtime:
        ada = runtime.user("ada")
        correct(ada, 5)
        for number in range(5):
            name = GUESTS[number]
            ada.teach(f"Write to guest {number}.", f"Dear {name}, welcome.", skill="email")
        ada.learn(accept=True)
        assert [layer.head is not None for layer in ada.layers()] == [True, True]
    return folder / "home"


class Bases:
    """A copy of the home, and the cards of two bases."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.home = shutil.copytree(home, folder / "home")
        self.first, self.second = first_card(folder), other_card(folder)

    @contextmanager
    def open(self, base: Path) -> Iterator[tuple[Runtime, User]]:
        with open_runtime(self.home, base) as runtime:
            yield runtime, runtime.user("ada")

    def rebase(self, base: Path, to: Path, **options: Any) -> RebaseReport:
        with self.open(base) as (runtime, _):
            return runtime.rebase("ada", to, **options)


@pytest.fixture
def bases(tmp_path: Path, learned: Path) -> Bases:
    return Bases(tmp_path, learned)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory, learned: Path) -> tuple[Path, RebaseReport]:
    """A home in which ada has moved to the second base, and the report."""
    bases = Bases(tmp_path_factory.mktemp("moved"), learned)
    return bases.home, bases.rebase(bases.first, bases.second, accept=True)


@pytest.fixture
def bases_after(tmp_path: Path, moved: tuple[Path, RebaseReport]) -> Bases:
    (tmp_path / "after").mkdir()
    return Bases(tmp_path / "after", moved[0])


def test_layers_move_to_another_base_and_back_and_nothing_is_trained_twice(
    bases: Bases, bases_after: Bases, moved: tuple[Path, RebaseReport]
) -> None:
    with bases.open(bases.first) as (_, ada):
        answers, heads = greedy(ada), [layer.head for layer in ada.layers()]
        held_out = {
            s for each in ada.revisions() for s, r in each.signals.items() if r == "held_out"
        }
    bases, report = bases_after, moved[1]
    assert report.switched
    assert [each.trained for each in report.layers] == [True, True]
    with bases.open(bases.second) as (_, ada):
        leakages = {
            each.layer: each.scores["leakage"] for each in ada.revisions() if each.base == report.to
        }
        assert 0 <= leakages["skill.email"]["auc"] <= 1
        # No lesson of the style has words of its own.
        assert leakages["style"]["missing"]
    assert [each.before for each in report.layers] == heads
    assert {each.signal for each in report.questions} == held_out
    assert report.improved + report.regressed + report.tied == len(report.questions) > 0
    assert report.examples
    assert report.examples[0].before != report.examples[0].after
    assert "held-out question" in str(report)
    assert report.as_json()["improved"] == report.improved

    with bases.open(bases.first) as (_, ada), pytest.raises(BaseMismatch):
        ask(ada)
    with bases.open(bases.second) as (runtime, ada):
        assert [each.revision for each in ada.stack().entries] == [
            layer.after for layer in report.layers
        ]
        assert {each.base for each in ada.revisions()} == {report.base, report.to}
        assert runtime.verify() == ()
        assert ada.reproduce(ada.stack().entries[1].revision).equal

    back = bases.rebase(bases.second, bases.first, accept=True)
    assert [each.after for each in back.layers] == heads
    assert not any(each.trained for each in back.layers)
    assert (back.improved, back.regressed, back.tied) == (
        report.regressed,
        report.improved,
        report.tied,
    )
    with bases.open(bases.first) as (_, ada):
        assert greedy(ada) == answers
    again = bases.rebase(bases.first, bases.second, accept=True)
    assert [each.after for each in again.layers] == [each.after for each in report.layers]
    assert not any(each.trained for each in again.layers)


def test_one_layer_alone_does_not_go_back_to_the_former_base(bases_after: Bases) -> None:
    with bases_after.open(bases_after.first) as (_, ada), pytest.raises(BaseMismatch):
        ada.rollback("style")
    with bases_after.open(bases_after.second) as (_, ada):
        assert ask(ada).text
        ada.rollback("style", "base")
        ada.rollback("style")
        assert len(ada.stack().entries) == 2


def test_style_on_another_base_is_served_with_examples_too(bases_after: Bases) -> None:
    with bases_after.open(bases_after.second) as (_, ada):
        reply = ask(ada, "question 2")
        assert [signal.kind for signal in ada.why(reply).items] == ["edit", "edit"]


def test_user_with_layers_of_two_bases_moves_to_another_home_with_all_of_them(
    bases_after: Bases, tmp_path: Path
) -> None:
    bases = bases_after
    with bases.open(bases.second) as (_, ada):
        revisions = [each.id for each in ada.revisions()]
        ada.export(tmp_path / "ada.personal")
    with open_runtime(tmp_path / "new", bases.second) as runtime:
        summary = runtime.import_user(tmp_path / "ada.personal")
        assert (summary.revisions, summary.left_out) == (4, 0)
        assert [each.id for each in runtime.user("ada").revisions()] == revisions
        back = runtime.rebase("ada", bases.first, accept=True)
        assert back.switched
        assert not any(each.trained for each in back.layers)
    with open_runtime(tmp_path / "first", bases.first) as runtime:
        assert runtime.import_user(tmp_path / "ada.personal").revisions == 0


def test_without_agreement_nothing_changes_and_the_builds_are_kept(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "personalpeft.rebase.judge_rebase",
        lambda *args, **how: (RebaseOutcome.REFUSED, text_reason("it is worse")),
    )
    with bases.open(bases.first) as (runtime, ada):
        stack, answers = ada.stack(), greedy(ada)
        report = runtime.rebase("ada", bases.second)
        assert not report.switched
        assert ada.stack() == stack
        assert greedy(ada) == answers
        judged = [each for each in ada.revisions() if each.base == report.to]
        assert [each.verdict for each in judged] == [Verdict.REFUSED] * 2
        again = runtime.rebase("ada", bases.second, accept=True)
        assert not any(each.trained for each in again.layers)
        assert again.switched
        assert again.accepted


@pytest.mark.exhaustive
def test_learning_goes_on_after_the_switch_and_going_back_learns_only_what_is_new(
    bases: Bases,
) -> None:
    bases.rebase(bases.first, bases.second, accept=True)
    with bases.open(bases.second) as (_, ada):
        correct(ada, 4, first=30)
        learned = ada.learn("style", accept=True)
        assert learned.revision
        signals = {s for r in ada.revisions("style")[-1:] for s in r.signals}
    back = bases.rebase(bases.second, bases.first, accept=True)
    by_layer = {each.layer: each for each in back.layers}
    assert by_layer["style"].trained
    with bases.open(bases.first) as (_, ada):
        style = {each.id: each for each in ada.revisions("style")}[by_layer["style"].after or ""]
        assert style.parent
        assert signals <= {s for each in (style.id, style.parent) for s in ada_signals(ada, each)}


@pytest.mark.exhaustive
def test_layer_whose_lessons_were_retracted_does_not_come_back(bases: Bases) -> None:
    bases.rebase(bases.first, bases.second, accept=True)
    with bases.open(bases.second) as (_, ada):
        ada.retract(*(each.id for each in ada.signals() if each.kind == "demonstration"))
    back = bases.rebase(bases.second, bases.first, accept=True)
    assert {each.layer: each.after is None for each in back.layers} == {
        "style": False,
        "skill.email": True,
    }
    assert "skill.email" in back.reason


@pytest.mark.exhaustive
def test_layer_that_was_rolled_back_stays_so(bases: Bases) -> None:
    with bases.open(bases.first) as (_, ada):
        ada.rollback("style", None)
    report = bases.rebase(bases.first, bases.second, accept=True)
    assert [each.layer for each in report.layers] == ["skill.email"]
    with bases.open(bases.second) as (_, ada):
        assert [each.layer for each in ada.stack().entries] == ["skill.email"]


def ada_signals(user: User, revision: str) -> set[str]:
    return {s for each in user.revisions() if each.id == revision for s in each.signals}


@pytest.mark.exhaustive
def test_updated_weights_are_compared_with_the_bare_base_and_accepted_by_name(
    bases: Bases,
) -> None:
    bases.first.write_text(bases.first.read_text().replace("seed = 7", "seed = 9"))
    with bases.open(bases.first) as (runtime, ada):
        with pytest.raises(BaseMismatch):
            ask(ada)
        report = runtime.rebase("ada", bases.first)
        assert report.against_bare_base
        assert (report.verdict, report.switched) == (Verdict.ABSTAINED, False)
        assert report.questions
        assert report.examples
        again = runtime.rebase("ada", bases.first, accept=True)
        assert again.switched
        assert not any(each.trained for each in again.layers)
        ask(ada)
        assert runtime.verify() == ()


@pytest.mark.exhaustive
def test_updated_weights_are_compared_with_the_former_ones_where_both_are_here(
    bases: Bases,
) -> None:
    updated = other_card(
        bases.home.parent, "tiny-updated", **{"hidden_size = 64": "hidden_size = 64"}
    )
    updated.write_text(updated.read_text().replace('"tiny-updated"', '"tiny-quick"'))
    report = bases.rebase(bases.first, updated, accept=True)
    assert report.switched
    assert not report.against_bare_base
    assert report.questions
    back = bases.rebase(updated, bases.first, accept=True)
    assert [each.after for each in back.layers] == [each.before for each in report.layers]


@pytest.mark.exhaustive
def test_comparing_alone_switches_nothing_whatever_the_gate_says(
    bases: Bases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "personalpeft.rebase.judge_rebase",
        lambda *args, **how: (RebaseOutcome.PROMOTED, text_reason("as good")),
    )
    with bases.open(bases.first) as (runtime, ada):
        stack = ada.stack()
        with pytest.raises(InvalidInput):
            runtime.rebase("ada", bases.second, accept=True, compare_only=True)
        report = runtime.rebase("ada", bases.second, compare_only=True)
        assert (report.verdict, report.switched) == (Verdict.PROMOTED, False)
        assert report.questions
        assert ada.stack() == stack
        assert runtime.rebase("ada", bases.second).switched


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["tiny-quick", "tiny-changed"])
def test_other_recipe_of_the_same_base_builds_from_scratch_and_is_compared(
    bases: Bases, name: str
) -> None:
    changed = bases.home.parent / "changed" / "card.toml"
    changed.parent.mkdir()
    text = bases.first.read_text().replace('"tiny-quick"', f'"{name}"')
    changed.write_text(text.replace("rank = 2", "rank = 4"))
    report = bases.rebase(bases.first, changed, accept=True)
    assert report.base == report.to
    assert [each.trained for each in report.layers] == [True, True]
    assert report.questions
    with bases.open(changed) as (_, ada):
        live = [each.revision for each in ada.stack().entries]
        ranks = [each.recipe["rank"] for each in ada.revisions() if each.id in live]
        assert ranks == [4, 4]
        # All are revisions of one base, so a rollback goes back as well.
        assert ada.rollback("style").after == report.layers[0].before


@pytest.mark.exhaustive
def test_cancelled_rebase_changes_nothing_and_goes_on_later(bases: Bases) -> None:
    seen: list[str] = []

    def progress(stage: str, done: float) -> None:
        seen.append(stage)

    with bases.open(bases.first) as (runtime, ada):
        stack = ada.stack()
        with pytest.raises(Cancelled):
            runtime.rebase(
                "ada",
                bases.second,
                progress=progress,
                cancelled=lambda: "Building skill.email" in seen,
            )
        assert ada.stack() == stack
        report = runtime.rebase("ada", bases.second, accept=True)
    assert [each.trained for each in report.layers] == [False, True]


@pytest.mark.exhaustive
def test_forgetting_after_a_switch_does_not_bring_back_a_head_of_the_former_base(
    bases: Bases,
) -> None:
    bases.rebase(bases.first, bases.second, accept=True)
    with bases.open(bases.second) as (runtime, ada):
        bases_of = {each.id: each.base for each in ada.revisions()}
        correct(ada, 4, first=30)
        ada.learn("style", accept=True)
        first_edit = next(s for s in ada.signals() if s.kind == "edit")
        ada.forget(first_edit.id, rebuild=False)
        heads = [layer.head for layer in ada.layers()]
        assert {bases_of[head] for head in heads if head} <= {runtime.base().digest}
        assert runtime.verify() == ()
        ask(ada)


def test_users_without_layers_and_unknown_names_get_an_error(bases: Bases) -> None:
    with bases.open(bases.first) as (runtime, _):
        runtime.user("bo")
        with pytest.raises(NothingToLearn):
            runtime.rebase("bo", bases.second)
        with pytest.raises(NotFound):
            runtime.rebase("nobody", bases.second)
        with pytest.raises(NotFound):
            runtime.rebase("ada", "no-such-base")


def test_unknown_base_is_named_also_where_nothing_is_live_and_no_model_is_loaded(
    runtime: Runtime,
) -> None:
    runtime.user("bo")
    with pytest.raises(NotFound, match="no-such-base"):
        runtime.rebase("bo", "no-such-base")


EVIDENCE = Evidence((), (), (), ProbeResults(), 0.0)


def items(*changes: float) -> BaseComparison:
    found = tuple(EvalItem(f"s_{n}", -1.0, -1.0 + c, -2.0) for n, c in enumerate(changes))
    return BaseComparison((), found, ())


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ([0.0] * 8, RebaseOutcome.PROMOTED),
        ([0.5] * 8, RebaseOutcome.PROMOTED),
        ([0.5] * 7 + [-0.3], RebaseOutcome.PROMOTED),
        ([-0.5] * 2 + [0.0] * 6, RebaseOutcome.REFUSED),
        ([-0.5] * 4 + [0.5] * 4, RebaseOutcome.REFUSED),
        ([], RebaseOutcome.ABSTAINED),
    ],
)
def test_gate_agrees_where_the_new_base_is_not_worse(
    changes: list[float], outcome: RebaseOutcome
) -> None:
    layers = [RebasedLayer("style", "style@1", "style@2")]
    assert judge_rebase(layers, items(*changes), EVIDENCE, Margins())[0] is outcome


def test_a_rebase_is_refused_above_the_leakage_that_the_card_allows() -> None:
    layers = [RebasedLayer("style", "style@1", "style@2")]
    bounded = Margins(max_membership_auc=0.8)
    for leakage, outcome in (
        (Leakage(9, 3, exposure=2.0, auc=0.9), RebaseOutcome.REFUSED),
        (Leakage(), RebaseOutcome.REFUSED),
        (Leakage(9, 3, exposure=1.0, auc=0.7), RebaseOutcome.PROMOTED),
    ):
        judged = judge_rebase(layers, items(0.5), EVIDENCE, bounded, leakages=[leakage])
        assert judged[0] is outcome


def test_gate_judges_nothing_where_a_layer_would_be_left_behind_or_none_changed() -> None:
    left = [RebasedLayer("skill.x", "skill.x@1", None)]
    same = [RebasedLayer("style", "style@1", "style@1")]
    for layers, wanted in (
        (left, RebaseOutcome.LAYERS_MISSING),
        (same, RebaseOutcome.UNCHANGED),
    ):
        outcome, reason = judge_rebase(layers, items(0.5), EVIDENCE, Margins())
        assert (outcome, outcome.verdict) == (wanted, None)
        assert reason
