"""Each revision has a leakage score, and the gate can refuse above a bound of the card."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import ask, correct

from personalpeft import Runtime, User
from personalpeft.errors import CardError
from personalpeft.learning.evaluate.exposure import MIN_LESSONS_EACH, measure_leakage, rank_gain
from personalpeft.learning.gate.evidence import (
    EvalHistory,
    EvalItem,
    Evidence,
    Leakage,
    LeakageGap,
    ProbeResults,
)
from personalpeft.learning.gate.gate import Margins, judge, load_margins, override
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.types import Verdict

ENOUGH = MIN_LESSONS_EACH


def evidence(leakage: Leakage) -> Evidence:
    improved = tuple(EvalItem(f"s_{n}", -3.0, -1.0) for n in range(3))
    return Evidence(improved, (), (), ProbeResults(), kl=0.1, leakage=leakage)


def test_memorized_lessons_have_the_highest_score_and_unlearned_ones_that_of_chance() -> None:
    memorized = measure_leakage([2.0] * 9, [0.1, 0.2, 0.3])
    assert (memorized.auc, memorized.exposure) == (1.0, 2.0)
    equal = measure_leakage([0.2] * 9, [0.2] * 3)
    assert equal.auc == 0.5


@given(st.integers(1, 40))
def test_chance_is_the_mean_over_all_ranks(unseen: int) -> None:
    others = [float(n) for n in range(unseen)]
    by_rank = [rank_gain(n - 0.5, others) for n in range(unseen + 1)]
    chance = Leakage(1, unseen).chance_exposure
    assert fmean(each.bits for each in by_rank) == pytest.approx(chance, abs=1e-3)
    assert fmean(each.auc for each in by_rank) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("trained", "unseen"),
    [
        ([1.0] * (ENOUGH - 1), [0.0] * 9),
        ([1.0] * 9, [0.0] * (ENOUGH - 1)),
        ([math.nan] * 9, [0.0] * 9),
    ],
)
def test_too_few_lessons_and_figures_that_are_none_give_no_score(
    trained: list[float], unseen: list[float]
) -> None:
    leakage = measure_leakage(trained, unseen)
    assert (leakage.trained, leakage.unseen) == (len(trained), len(unseen))
    assert leakage.auc is None
    assert leakage.exposure is None


def test_report_and_revision_have_the_score(ada: User) -> None:
    correct(ada, 12)
    report = ada.learn()
    leakage = report.scores["leakage"]
    assert (leakage["trained"], leakage["unseen"]) == (9, 3)
    assert 0 <= leakage["auc"] <= 1
    assert 0 <= leakage["exposure"] <= 2
    (revision,) = ada.revisions()
    assert revision.scores["leakage"] == leakage
    assert f"{leakage['auc']:.2f}" in str(report)
    why = ada.why(ask(ada))
    assert [part.revision.scores["leakage"] for part in why.parts] == [leakage]
    # Of a second learn all that is held out counts, also what was held out before.
    correct(ada, 8, first=12)
    assert ada.learn().scores["leakage"]["unseen"] == 5


def test_lessons_are_ranked_among_variants_of_themselves_where_too_few_are_held_out(
    ada: User,
) -> None:
    for number, name in enumerate(("Quetzal", "Ocelot", "Tapir", "Coati", "Margay")):
        ada.feedback(ask(ada, f"Who is guest {number}?"), edit=f"Guest {number} is Mx {name}.")
    report = ada.learn()
    leakage = report.scores["leakage"]
    assert (leakage["unseen"], leakage["variants"], leakage["matched"]) == (15, True, False)
    assert 0 <= leakage["auc"] <= 1
    assert "2 lessons against 15 variants each" in str(report)


def test_lessons_without_words_of_their_own_have_no_score_and_the_report_says_so(
    ada: User,
) -> None:
    correct(ada, 5)
    report = ada.learn()
    assert report.scores["leakage"]["missing"] == LeakageGap.NO_VARIANTS
    assert "not measured: too few lessons are held out" in str(report)


def test_imported_adapter_says_why_it_has_no_score(
    ada: User, runtime: Runtime, tmp_path: Path
) -> None:
    correct(ada, 5)
    ada.learn(accept=True)
    ada.export_peft(tmp_path / "peft", layer="style")
    bo = runtime.user("bo")
    revision = bo.import_peft(tmp_path / "peft")
    assert revision.scores["leakage"]["missing"] == LeakageGap.TRAINED_ELSEWHERE
    assert "not measured: it was trained elsewhere" in str(bo.why(ask(bo)))


def test_facts_of_a_memory_are_ranked_among_variants_of_themselves(ada: User) -> None:
    for number in range(3):
        ada.remember(
            f"Dog {number} is called Rex{number}.",
            questions=[f"What is dog {number} called?", f"Name of dog {number}?"],
            answer=f"Rex{number}",
        )
    report = ada.learn("memory", recipe={"min_steps": 8})
    leakage = report.scores["leakage"]
    assert (leakage["trained"], leakage["unseen"], leakage["matched"]) == (2, 15, True)
    assert 0 <= leakage["auc"] <= 1
    assert 0 <= leakage["exposure"] <= 4
    assert "2 facts against 15 variants each" in str(report)


def test_the_gate_refuses_above_the_bound_of_the_card_only() -> None:
    leaking = evidence(Leakage(9, 3, exposure=2.0, auc=0.9))
    bounded = load_margins("tiny", {"max_membership_auc": 0.8})
    judgement = judge(leaking, bounded)
    assert judgement.verdict is Verdict.REFUSED
    assert [each.code for each in judgement.reasons] == [ReasonCode.LEAKAGE_TOO_LARGE]
    assert override(judgement, leaking).live
    low, none = Leakage(9, 3, exposure=1.5, auc=0.8), Leakage(missing=LeakageGap.NO_LESSONS)
    for leakage in (low, none):
        assert judge(replace(leaking, leakage=leakage), bounded).live
    # What is unknown does not pass a limit.
    for leakage in (Leakage(2, 3), Leakage(missing=LeakageGap.TRAINED_ELSEWHERE)):
        judgement = judge(replace(leaking, leakage=leakage), bounded)
        assert [each.code for each in judgement.reasons] == [ReasonCode.LEAKAGE_UNKNOWN]
        assert judge(replace(leaking, leakage=leakage), Margins()).live
    # A memory is to know its facts.
    facts = Leakage(2, 15, exposure=4.0, auc=1.0, matched=True)
    assert judge(replace(leaking, leakage=facts), bounded).live
    certain = replace(leaking, leakage=Leakage(9, 3, exposure=2.0, auc=1.0))
    assert judge(certain, Margins()).live


def test_a_bound_outside_0_to_1_is_refused() -> None:
    with pytest.raises(CardError):
        load_margins("tiny", {"max_membership_auc": 1.5})


def test_a_lesson_counts_once_although_its_text_was_scrubbed_since() -> None:
    item = EvalItem("s_0/0123abcd", -3.0, -1.0)
    history = EvalHistory(spent_items=frozenset({"s_0"}))
    spent = Evidence((item,), (), (), ProbeResults(), kl=0.1, history=history)
    assert spent.e_value == 1.0
