"""The gate refuses harm, promotes improvements, and gives a reason with each verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.errors import CardError
from personalpeft.learning.gate.evidence import (
    CONFIRMATION_E_VALUE,
    TIE_MARGIN,
    BaseProbeResults,
    EvalHistory,
    EvalItem,
    Evidence,
    GenerationResults,
    ProbeResults,
    TextQuality,
)
from personalpeft.learning.gate.gate import Margins, judge, load_margins, override
from personalpeft.learning.outcomes import Reason, ReasonCode, reason, render_reasons
from personalpeft.types import Verdict

MARGINS = Margins()
few = examples(50)

NATS = st.floats(-20, 0)
SCORE = NATS | st.just(math.nan) | st.just(-math.inf)
FIGURES = st.lists(st.tuples(NATS, SCORE, st.none() | NATS, st.none() | NATS), max_size=6)


def eval_items(name: str) -> st.SearchStrategy[tuple[EvalItem, ...]]:
    return FIGURES.map(
        lambda drawn: tuple(EvalItem(f"{name} {n}", *figures) for n, figures in enumerate(drawn))
    )


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    asked = draw(st.integers(0, 10))
    right = draw(st.integers(0, asked))
    of_base = draw(st.sets(st.integers(0, 9), max_size=asked))
    undecided = draw(eval_items("undecided"))
    return Evidence(
        undecided=undecided,
        retention=draw(eval_items("retention")),
        decided=draw(eval_items("earlier")),
        probes=ProbeResults(
            asked=asked,
            right_before=right,
            still_right=draw(st.integers(0, right)),
            base=BaseProbeResults("questions", tuple(of_base), draw(st.integers(0, asked))),
            kept_of_base=tuple(draw(st.sets(st.sampled_from(sorted(of_base))))) if of_base else (),
            broken=draw(st.integers(0, asked)),
            broken_before=draw(st.integers(0, asked)),
        ),
        kl=draw(st.floats(0, 10) | st.just(math.nan)),
        text_quality=TextQuality(
            pmi=draw(st.none() | st.floats()),
            end_surprisal=draw(st.none() | st.floats()),
            learned_end_surprisal=draw(st.none() | st.floats()),
        ),
        history=EvalHistory(
            draw(st.floats(0.01, CONFIRMATION_E_VALUE)),
            draw(st.frozensets(st.sampled_from([each.signal for each in undecided])))
            if undecided
            else frozenset(),
        ),
    )


def items(
    *, improved: int = 0, regressed: int = 0, tied: int = 0, forgotten: int = 0
) -> tuple[EvalItem, ...]:
    better, worse, equal = (-3.0, -1.0), (-1.0, -3.0), (-1.0, -1.0 + TIE_MARGIN / 2)
    gone = (-3.0, -3.0, -4.0, -1.0)
    kinds = (better,) * improved + (worse,) * regressed + (equal,) * tied + (gone,) * forgotten
    return tuple(EvalItem(f"s_{number}", *figures) for number, figures in enumerate(kinds))


def evidence(**changes: Any) -> Evidence:
    probe_results = ProbeResults(
        asked=6,
        right_before=5,
        still_right=5,
        base=BaseProbeResults("q", (0, 1, 2, 3), 0),
        kept_of_base=(0, 1, 2, 3),
    )
    of_probes = {
        key: changes.pop(key) for key in tuple(changes) if key in ProbeResults.__dataclass_fields__
    }
    good = Evidence(
        undecided=items(improved=3),
        retention=items(tied=4),
        decided=(),
        probes=probe_results,
        kl=0.1,
    )
    return replace(good, probes=replace(probe_results, **of_probes), **changes)


def judged_by(seen: Evidence) -> str:
    decided = any(each.improved or each.regressed for each in seen.undecided)
    return "undecided" if decided or not seen.decided else "decided"


@few
@given(seen=evidences())
def test_harmful_candidate_is_never_promoted(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    general = seen.probes
    harm = (
        general.right_before - general.still_right
        > max(1, MARGINS.max_probes_lost * general.right_before)
        or len(general.base.right) - len(general.kept_of_base)
        > max(1, MARGINS.max_probes_lost * len(general.base.right))
        or general.broken - general.broken_before > max(1, MARGINS.max_probes_lost * general.asked)
        or general.broken - general.base.broken > max(1, MARGINS.max_probes_lost * general.asked)
        or sum(a.lost_most_of_gain for a in seen.retention)
        > MARGINS.max_regressed * len(seen.retention)
        or sum(a.regressed_beyond_margin for a in seen.retention)
        > max(1, MARGINS.max_regressed * len(seen.retention))
        or not seen.kl <= MARGINS.max_kl
    )
    if harm:
        assert judgement.verdict is Verdict.REFUSED


@few
@given(seen=evidences())
def test_promoted_candidate_improved_more_than_it_regressed(seen: Evidence) -> None:
    if judge(seen, MARGINS).verdict is Verdict.PROMOTED:
        by = getattr(seen, judged_by(seen))
        assert sum(a.improved for a in by) >= sum(a.regressed for a in by)
        assert sum(a.change for a in by) > 0


@few
@given(seen=evidences(), data=st.data())
def test_one_more_improved_item_never_lowers_a_promotion(
    seen: Evidence, data: st.DataObject
) -> None:
    by = judged_by(seen)
    asked = getattr(seen, by)
    win = EvalItem("s", -9.0, -1.0)
    more = [(*asked, win)]
    if asked:
        at = data.draw(st.integers(0, len(asked) - 1))
        more.append((*asked[:at], replace(win, signal=asked[at].signal), *asked[at + 1 :]))
    before = judge(seen, MARGINS)
    for better in more:
        after = judge(replace(seen, **{by: better}), MARGINS)
        if before.verdict is Verdict.PROMOTED:
            assert after.verdict is Verdict.PROMOTED
            assert before.probation or not after.probation


@few
@given(seen=evidences())
def test_each_verdict_has_a_reason_and_finite_figures(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    why = render_reasons(judgement.reasons)
    assert len(why.split()) >= 5
    assert not why.endswith(".")
    json.dumps(seen.as_json(), allow_nan=False)
    assert (judgement.probation is False) or judgement.verdict is Verdict.PROMOTED


def test_improvement_and_regression_are_symmetric_and_a_tie_is_neither() -> None:
    (improved,), (regressed,), (tied,) = items(improved=1), items(regressed=1), items(tied=1)
    assert (
        improved.improved,
        improved.regressed,
        regressed.improved,
        regressed.regressed,
        tied.improved,
        tied.regressed,
    ) == (
        True,
        False,
        False,
        True,
        False,
        False,
    )


@pytest.mark.parametrize(("learns", "probation"), [(3, True), (7, True), (8, False)])
@pytest.mark.parametrize("wins", [1, 12])
def test_thin_evidence_goes_live_on_probation(learns: int, wins: int, probation: bool) -> None:
    seen = evidence(undecided=items(improved=wins), history=EvalHistory(1.5 ** (learns - 1)))
    judgement = judge(seen, MARGINS)
    assert (judgement.verdict, judgement.probation) == (Verdict.PROMOTED, probation)
    assert (1.5**learns >= CONFIRMATION_E_VALUE) is not probation


PROBES_KEPT = reason(ReasonCode.PROBES_KEPT, kept=5, asked=5)
ON_PROBATION = reason(ReasonCode.ON_PROBATION)


def changed(
    code: ReasonCode, improved: int, regressed: int, asked: int, *, examples: str = "held-out"
) -> Reason:
    return reason(code, improved=improved, regressed=regressed, asked=asked, examples=examples)


PROMOTED_ON_PROBATION = (changed(ReasonCode.IMPROVED, 3, 0, 3), PROBES_KEPT, ON_PROBATION)


@pytest.mark.parametrize(
    ("changes", "verdict", "reasons"),
    [
        ({}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        (
            {"undecided": (), "decided": items(improved=2)},
            Verdict.PROMOTED,
            (
                changed(ReasonCode.IMPROVED, 2, 0, 2, examples="older held-out"),
                PROBES_KEPT,
                ON_PROBATION,
            ),
        ),
        (
            {"right_before": 0, "still_right": 0},
            Verdict.PROMOTED,
            (changed(ReasonCode.IMPROVED, 3, 0, 3), ON_PROBATION),
        ),
        (
            {"undecided": items(improved=9, regressed=1)},
            Verdict.PROMOTED,
            (changed(ReasonCode.IMPROVED_AND_REGRESSED, 9, 1, 10), PROBES_KEPT, ON_PROBATION),
        ),
        (
            {"undecided": items(improved=8, regressed=1)},
            Verdict.ABSTAINED,
            (
                changed(ReasonCode.IMPROVED_AND_REGRESSED, 8, 1, 9),
                reason(ReasonCode.TOO_LITTLE_EVIDENCE),
            ),
        ),
        (
            {"undecided": items(improved=2, regressed=1)},
            Verdict.ABSTAINED,
            (
                changed(ReasonCode.IMPROVED_AND_REGRESSED, 2, 1, 3),
                reason(ReasonCode.TOO_LITTLE_EVIDENCE),
            ),
        ),
        (
            {"undecided": items(improved=1, regressed=1)},
            Verdict.REFUSED,
            (changed(ReasonCode.IMPROVED_AND_REGRESSED, 1, 1, 2),),
        ),
        (
            {"undecided": (EvalItem("a", -2.0, -1.0), EvalItem("b", -2.0, -2.1))},
            Verdict.ABSTAINED,
            (
                changed(ReasonCode.IMPROVED_AND_REGRESSED, 1, 1, 2),
                reason(ReasonCode.TOO_LITTLE_EVIDENCE),
            ),
        ),
        (
            {"undecided": (EvalItem("a", -2.0, -1.9), EvalItem("b", -2.0, -2.09))},
            Verdict.ABSTAINED,
            (
                changed(ReasonCode.IMPROVED_AND_REGRESSED, 1, 1, 2),
                reason(ReasonCode.TOO_LITTLE_EVIDENCE),
            ),
        ),
        (
            {
                "undecided": (
                    *(EvalItem(each, -2.0, -1.9) for each in "ab"),
                    EvalItem("c", -2.0, -4.0),
                )
            },
            Verdict.REFUSED,
            (changed(ReasonCode.LOSS_EXCEEDS_GAIN, 2, 1, 3),),
        ),
        (
            {
                "undecided": (
                    EvalItem("a", -2.0, -1.9, base=-4.0),
                    EvalItem("b", -2.0, -2.15, base=-4.0),
                )
            },
            Verdict.REFUSED,
            (changed(ReasonCode.IMPROVED_AND_REGRESSED, 1, 1, 2),),
        ),
        (
            {
                "undecided": (
                    EvalItem("a", -2.0, -2.05, base=-4.0),
                    EvalItem("b", -2.0, -2.15, base=-4.0),
                )
            },
            Verdict.REFUSED,
            (changed(ReasonCode.IMPROVED_AND_REGRESSED, 0, 2, 2),),
        ),
        (
            {"undecided": items(regressed=2)},
            Verdict.REFUSED,
            (changed(ReasonCode.IMPROVED_AND_REGRESSED, 0, 2, 2),),
        ),
        (
            {"undecided": tuple(EvalItem(each, -2.0, -1.95) for each in "abc")},
            Verdict.ABSTAINED,
            (
                changed(ReasonCode.IMPROVED, 3, 0, 3),
                reason(ReasonCode.EFFECT_TOO_SMALL, effect="0.05"),
            ),
        ),
        ({"undecided": items(tied=3)}, Verdict.ABSTAINED, (reason(ReasonCode.NO_DIFFERENCE),)),
        ({"undecided": ()}, Verdict.ABSTAINED, (reason(ReasonCode.NO_DIFFERENCE),)),
        (
            {"undecided": items(tied=1), "decided": items(improved=2)},
            Verdict.PROMOTED,
            (
                changed(ReasonCode.IMPROVED, 2, 0, 2, examples="older held-out"),
                PROBES_KEPT,
                ON_PROBATION,
            ),
        ),
        ({"kept_of_base": (0, 1, 2)}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        (
            {"kept_of_base": (2, 3)},
            Verdict.REFUSED,
            (reason(ReasonCode.BASE_PROBES_LOST, lost=2, asked=4),),
        ),
        (
            {"broken": 3, "broken_before": 3},
            Verdict.REFUSED,
            (reason(ReasonCode.PROBES_DEGENERATE, broken=3, asked=6),),
        ),
        ({"retention": items(tied=9, forgotten=1)}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        (
            {"retention": items(tied=8, forgotten=2)},
            Verdict.REFUSED,
            (reason(ReasonCode.RETENTION_FORGOTTEN, lost=2, asked=10),),
        ),
        (
            {"still_right": 4},
            Verdict.PROMOTED,
            (
                changed(ReasonCode.IMPROVED, 3, 0, 3),
                reason(ReasonCode.PROBES_KEPT, kept=4, asked=5),
                ON_PROBATION,
            ),
        ),
        ({"still_right": 3}, Verdict.REFUSED, (reason(ReasonCode.PROBES_LOST, lost=2, asked=5),)),
        (
            {"broken": 2},
            Verdict.REFUSED,
            (reason(ReasonCode.PROBES_DEGENERATE, broken=2, asked=6),),
        ),
        ({"broken": 1, "broken_before": 1}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        ({"retention": items(tied=9, regressed=1)}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        ({"retention": items(tied=4, regressed=1)}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        (
            {"retention": items(tied=4, forgotten=1)},
            Verdict.REFUSED,
            (reason(ReasonCode.RETENTION_FORGOTTEN, lost=1, asked=5),),
        ),
        (
            {"retention": items(tied=8, regressed=2)},
            Verdict.REFUSED,
            (reason(ReasonCode.RETENTION_REGRESSED, lost=2, asked=10),),
        ),
        ({"kl": 2.5}, Verdict.REFUSED, (reason(ReasonCode.KL_TOO_LARGE, kl="2.50", limit=2.0),)),
        (
            {"kl": math.nan},
            Verdict.REFUSED,
            (reason(ReasonCode.KL_TOO_LARGE, kl="nan", limit=2.0),),
        ),
        (
            {"text_quality": TextQuality(pmi=0.03, word_order_gap=4.0)},
            Verdict.REFUSED,
            (reason(ReasonCode.UNRELATED_ANSWERS),),
        ),
        (
            {"text_quality": TextQuality(pmi=math.nan)},
            Verdict.REFUSED,
            (reason(ReasonCode.UNRELATED_ANSWERS),),
        ),
        (
            {"text_quality": TextQuality(pmi=0.5, word_order_gap=0.3)},
            Verdict.REFUSED,
            (reason(ReasonCode.SHUFFLED_ANSWERS),),
        ),
        (
            {"text_quality": TextQuality(pmi=0.4, word_order_gap=1.2)},
            Verdict.PROMOTED,
            PROMOTED_ON_PROBATION,
        ),
        ({"text_quality": TextQuality(pmi=0.4)}, Verdict.PROMOTED, PROMOTED_ON_PROBATION),
        (
            {"text_quality": TextQuality(pmi=-0.1, learned_pmi=2.0)},
            Verdict.PROMOTED,
            PROMOTED_ON_PROBATION,
        ),
        (
            {"text_quality": TextQuality(pmi=-0.1, learned_pmi=0.9)},
            Verdict.REFUSED,
            (reason(ReasonCode.UNRELATED_ANSWERS),),
        ),
        (
            {"text_quality": TextQuality(end_surprisal=15.0, learned_end_surprisal=0.8)},
            Verdict.REFUSED,
            (reason(ReasonCode.CUT_OFF_ANSWERS),),
        ),
        (
            {"text_quality": TextQuality(end_surprisal=15.0, learned_end_surprisal=math.nan)},
            Verdict.REFUSED,
            (reason(ReasonCode.CUT_OFF_ANSWERS),),
        ),
        # Labels of one letter end so.
        (
            {"text_quality": TextQuality(end_surprisal=17.0, learned_end_surprisal=0.1)},
            Verdict.PROMOTED,
            PROMOTED_ON_PROBATION,
        ),
        (
            {"text_quality": TextQuality(end_surprisal=7.5, learned_end_surprisal=2.0)},
            Verdict.PROMOTED,
            PROMOTED_ON_PROBATION,
        ),
        (
            {"text_quality": TextQuality(style_overlap=0.3, group_sizes=(5, 7))},
            Verdict.REFUSED,
            (reason(ReasonCode.STYLES_ALTERNATE, one=5, other=7),),
        ),
        (
            {"text_quality": TextQuality(style_overlap=0.5, group_sizes=(5, 7))},
            Verdict.PROMOTED,
            PROMOTED_ON_PROBATION,
        ),
    ],
)
def test_verdict_and_reasons_follow_from_the_evidence(
    changes: dict[str, Any], verdict: Verdict, reasons: tuple[Reason, ...]
) -> None:
    judgement = judge(evidence(**changes), MARGINS)
    assert (judgement.verdict, judgement.reasons) == (verdict, reasons)


@given(steps=st.lists(st.integers(0, 2), min_size=1, max_size=8), base=st.integers(4, 20))
def test_many_small_losses_are_refused_like_one_large_loss(steps: list[int], base: int) -> None:
    # Each candidate loses at most as many probes as allowed. A promoted one is live for the next.
    right, everything = base, BaseProbeResults("q", tuple(range(base)))
    for loss in steps:
        after = max(0, right - loss)
        general = ProbeResults(
            asked=20,
            right_before=right,
            still_right=after,
            base=everything,
            kept_of_base=tuple(range(after)),
        )
        if judge(
            evidence(
                **{name: getattr(general, name) for name in ProbeResults.__dataclass_fields__}
            ),
            MARGINS,
        ).live:
            right = after
    assert base - right <= max(1, MARGINS.max_probes_lost * base)


@given(slips=st.lists(st.floats(0, TIE_MARGIN * 0.9), max_size=400))
def test_retention_cannot_erode_in_steps_below_the_tie_margin(slips: list[float]) -> None:
    base, live, best = -4.0, -1.0, -1.0
    for slip in slips:
        asked = EvalItem("s", live, live - slip, base, best)
        assert not asked.regressed
        if judge(evidence(retention=(asked,)), MARGINS).live:
            live = asked.after
            best = asked.as_json()["best"] or best
    assert live - base >= (best - base) / 2 - 1e-9


def test_item_without_known_best_is_compared_with_the_live_stack() -> None:
    assert EvalItem("s", before=-0.1, after=-9.0, base=-9.5).lost_most_of_gain
    assert not EvalItem("s", before=-0.1, after=-1.0, base=-9.5).lost_most_of_gain


@few
@given(seen=evidences())
def test_spent_item_does_not_count_again(seen: Evidence) -> None:
    spent = frozenset(seen.as_json()["spent_items"])
    again = replace(seen, history=EvalHistory(seen.e_value, spent))
    assert again.e_value == seen.e_value
    assert spent >= seen.history.spent_items


@few
@given(seen=evidences())
def test_accepted_candidate_says_so_and_keeps_its_verdict(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    overridden = override(judgement, seen)
    assert overridden.verdict is judgement.verdict
    assert overridden.accepted is seen.measured
    assert render_reasons(judgement.reasons) in render_reasons(overridden.reasons)
    if overridden.accepted:
        assert overridden.reasons[0].code is ReasonCode.OVERRIDDEN
        assert overridden.live


def test_text_quality_is_not_measured_on_a_base_without_language() -> None:
    margins = load_margins("tiny", {}, random=True)
    meaningless = TextQuality(
        pmi=0.0,
        word_order_gap=0.0,
        end_surprisal=15.0,
        learned_end_surprisal=9.0,
        style_overlap=0.0,
        group_sizes=(5, 7),
    )
    assert judge(evidence(text_quality=meaningless), margins).live
    assert load_margins("tiny", {"min_pmi": 0.2}, random=True).min_pmi == 0.2


def test_card_sets_the_margins() -> None:
    assert load_margins("mine", {}) == MARGINS
    table = {"max_regressed": 0, "max_probes_lost": 0.5, "max_kl": 1}
    assert load_margins("mine", table) == Margins(max_regressed=0, max_probes_lost=0.5, max_kl=1)


def test_card_of_an_earlier_version_sets_the_margins_by_their_old_keys() -> None:
    with pytest.warns(DeprecationWarning, match="max_kl"):
        assert load_margins("mine", {"kl": 1}).max_kl == 1


@pytest.mark.parametrize(
    ("wrong", "words", "hint"),
    [
        ({"max_probe_lost": 1}, "max_probe_lost", "'max_probes_lost'"),
        ({"max_regressed": 1.5}, "max_regressed = 1.5", "0.1"),
        ({"max_regressed": "little"}, "max_regressed", "0.1"),
        ({"max_probes_lost": 2}, "max_probes_lost", "0.2"),
        ({"max_probes_lost": True}, "max_probes_lost", "0.2"),
        ({"max_kl": -0.1}, "max_kl", "2.0"),
    ],
)
def test_card_with_an_invalid_margin_is_refused_with_a_hint(
    wrong: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(CardError, match=words) as raised:
        load_margins("mine", wrong)
    assert hint in raised.value.hint
    assert "mine" in raised.value.message


@given(st.floats(-8, -0.1), st.floats(0, 6))
def test_item_regresses_when_it_lost_a_tenth_of_its_gain(base: float, gained: float) -> None:
    before = base + gained
    a_little, too_much = max(TIE_MARGIN, 0.1 * gained) * 0.9, max(TIE_MARGIN, 0.1 * gained) * 1.1

    assert not EvalItem("s", before, before - a_little, base).regressed_beyond_margin
    assert EvalItem("s", before, before - too_much, base).regressed_beyond_margin
    assert EvalItem("s", before, float("nan"), base).regressed_beyond_margin


def test_item_without_base_score_regresses_by_any_loss_above_a_tie() -> None:
    assert EvalItem("s", -0.1, -0.1 - 2 * TIE_MARGIN).regressed_beyond_margin
    assert not EvalItem("s", -0.1, -0.1 - TIE_MARGIN / 2).regressed_beyond_margin


def test_reason_names_lessons_retracted_with_the_build() -> None:
    seen = evidence(undecided=items(regressed=4), retention=items(tied=4))
    assert judge(seen, Margins()).verdict is Verdict.REFUSED
    alone = judge(seen, Margins(), removes_lessons=True)
    assert alone.verdict is Verdict.PROMOTED
    assert alone.reasons[0] == reason(ReasonCode.RETENTION_KEPT, kept=4, asked=4)
    more = judge(
        replace(seen, history=EvalHistory(1e6)),
        Margins(),
        removes_lessons=True,
        has_new_lessons=True,
    )
    assert (more.verdict, more.probation) == (Verdict.PROMOTED, True)
    (judged,) = [each for each in more.reasons if each.code is ReasonCode.IMPROVED_AND_REGRESSED]
    assert (judged.data["improved"], judged.data["regressed"]) == (0, 4)


def test_answers_that_only_repeat_the_question_are_refused() -> None:
    said = judge(
        evidence(text_quality=TextQuality(pmi=3.0, word_order_gap=5.0, novelty=0.4)), Margins()
    )
    assert said.verdict is Verdict.REFUSED
    assert [each.code for each in said.reasons] == [ReasonCode.REPEATED_QUESTIONS]
    assert judge(
        evidence(text_quality=TextQuality(pmi=3.0, word_order_gap=5.0, novelty=0.5)), Margins()
    ).live


@pytest.mark.parametrize(
    ("after", "asked", "is_live"), [(3, 3, True), (2, 3, True), (1, 3, False), (0, 1, False)]
)
def test_likelier_answers_go_live_only_if_the_model_writes_them(
    after: int, asked: int, is_live: bool
) -> None:
    evidence = Evidence(
        undecided=items(improved=3),
        retention=(),
        decided=(),
        probes=ProbeResults(),
        kl=0.0,
        generation=GenerationResults(asked, after),
    )
    judgement = judge(evidence, MARGINS)
    assert judgement.live is is_live
    assert (judgement.verdict is Verdict.ABSTAINED) is not is_live
    assert ReasonCode.GENERATED in [each.code for each in judgement.reasons]
    assert evidence.as_json()["generated"] == {"asked": asked, "after": after}


def test_base_without_language_judges_no_replies() -> None:
    evidence = Evidence(
        undecided=items(improved=3),
        retention=(),
        decided=(),
        probes=ProbeResults(),
        kl=0.0,
        generation=GenerationResults(3, 0),
    )
    assert judge(evidence, load_margins("card", {}, random=True)).live
