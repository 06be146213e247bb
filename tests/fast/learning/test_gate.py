"""The gate never lets harm through, never holds good work against a candidate, and always says why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.errors import CardError
from personalpeft.learning.evaluate.measures import TextQuality
from personalpeft.learning.gate.gate import (
    CONFIRMATION_E_VALUE,
    TIE_MARGIN,
    BaseProbeResults,
    EvalItem,
    Evidence,
    Judgement,
    Margins,
    ProbeResults,
    judge,
    load_margins,
    override,
)
from personalpeft.learning.outcomes import ReasonCode, reason
from personalpeft.types import Verdict

MARGINS = Margins()
NATS = st.floats(-20, 0)
SCORE = NATS | st.just(math.nan) | st.just(-math.inf)
ASKED = st.builds(EvalItem, st.uuids().map(str), NATS, SCORE, st.none() | NATS, st.none() | NATS)
SOME = st.lists(ASKED, max_size=12).map(tuple)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    asked = draw(st.integers(0, 10))
    right = draw(st.integers(0, asked))
    of_base = draw(st.sets(st.integers(0, 9), max_size=asked))
    target = draw(SOME)
    return Evidence(
        target=target,
        retention=draw(SOME),
        trained_examples=draw(SOME),
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
        prior_e_value=draw(st.floats(0.01, CONFIRMATION_E_VALUE)),
        spent_items=draw(st.frozensets(st.sampled_from([each.signal for each in target])))
        if target
        else frozenset(),
    )


def answers(*, won: int = 0, lost: int = 0, same: int = 0, undone: int = 0) -> tuple[EvalItem, ...]:
    better, worse, equal = (-3.0, -1.0), (-1.0, -3.0), (-1.0, -1.0 + TIE_MARGIN / 2)
    gone = (-3.0, -3.0, -4.0, -1.0)
    kinds = (better,) * won + (worse,) * lost + (equal,) * same + (gone,) * undone
    return tuple(EvalItem(f"s_{number}", *figures) for number, figures in enumerate(kinds))


def evidence(**changes: Any) -> Evidence:
    canaries = ProbeResults(
        asked=6,
        right_before=5,
        still_right=5,
        base=BaseProbeResults("q", (0, 1, 2, 3), 0),
        kept_of_base=(0, 1, 2, 3),
    )
    of_canaries = {
        key: changes.pop(key) for key in tuple(changes) if key in ProbeResults.__dataclass_fields__
    }
    good = Evidence(
        target=answers(won=3),
        retention=answers(same=4),
        trained_examples=(),
        probes=canaries,
        kl=0.1,
    )
    return replace(good, probes=replace(canaries, **of_canaries), **changes)


def judged_by(seen: Evidence) -> str:
    decided = any(each.improved or each.regressed for each in seen.target)
    return "target" if decided or not seen.trained_examples else "trained_examples"


@given(seen=evidences())
def test_nothing_harmful_is_ever_promoted(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    general = seen.probes
    harm = (
        general.right_before - general.still_right
        > max(1, MARGINS.max_probes_lost * general.right_before)
        or len(general.base.right) - len(general.kept_of_base)
        > max(1, MARGINS.max_probes_lost * len(general.base.right))
        or general.broken - general.broken_before > max(1, MARGINS.max_probes_lost * general.asked)
        or general.broken - general.base.broken > max(1, MARGINS.max_probes_lost * general.asked)
        or sum(a.forgotten for a in seen.retention) > MARGINS.max_regressed * len(seen.retention)
        or sum(a.regressed_beyond_margin for a in seen.retention)
        > max(1, MARGINS.max_regressed * len(seen.retention))
        or not seen.kl <= MARGINS.max_kl
    )
    if harm:
        assert judgement.verdict is Verdict.REFUSED


@given(seen=evidences())
def test_what_is_promoted_did_more_good_than_harm(seen: Evidence) -> None:
    if judge(seen, MARGINS).verdict is Verdict.PROMOTED:
        by = getattr(seen, judged_by(seen))
        assert sum(a.improved for a in by) >= sum(a.regressed for a in by)
        assert sum(a.change for a in by) > 0


@given(seen=evidences(), data=st.data())
def test_one_more_win_never_turns_a_promotion_into_anything_less(
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


@given(seen=evidences())
def test_every_verdict_has_a_reason_and_figures_that_can_be_kept(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    assert len(judgement.reason.split()) >= 5
    assert not judgement.reason.endswith(".")
    json.dumps(seen.as_json(), allow_nan=False)
    assert (judgement.probation is False) or judgement.verdict is Verdict.PROMOTED


def test_a_win_and_a_loss_are_opposites_and_a_tie_is_neither() -> None:
    (won,), (lost,), (same,) = answers(won=1), answers(lost=1), answers(same=1)
    assert (
        won.improved,
        won.regressed,
        lost.improved,
        lost.regressed,
        same.improved,
        same.regressed,
    ) == (
        True,
        False,
        False,
        True,
        False,
        False,
    )


@pytest.mark.parametrize(("wins", "probation"), [(3, True), (7, True), (8, False)])
def test_thin_evidence_goes_live_on_probation(wins: int, probation: bool) -> None:
    judgement = judge(evidence(target=answers(won=wins)), MARGINS)
    assert (judgement.verdict, judgement.probation) == (Verdict.PROMOTED, probation)
    assert (1.5**wins >= CONFIRMATION_E_VALUE) is not probation


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        (
            {},
            Verdict.PROMOTED,
            "3 of 3 answers held back got better; 5 of 5 general answers stayed right; on probation",
        ),
        (
            {"target": (), "trained_examples": answers(won=2)},
            Verdict.PROMOTED,
            "2 of 2 answers just learned got better",
        ),
        (
            {"right_before": 0, "still_right": 0},
            Verdict.PROMOTED,
            "3 of 3 answers held back got better; on probation",
        ),
        (
            {"target": answers(won=3, lost=1)},
            Verdict.PROMOTED,
            "3 of 4 answers held back got better, 1 got worse",
        ),
        (
            {"target": answers(won=2, lost=1)},
            Verdict.ABSTAINED,
            "2 of 3 answers held back got better, 1 got worse; that is too little",
        ),
        (
            {"target": answers(won=1, lost=1)},
            Verdict.REFUSED,
            "1 of 2 answers held back got better, 1 got worse",
        ),
        (
            {"target": (EvalItem("a", -2.0, -1.0), EvalItem("b", -2.0, -2.1))},
            Verdict.ABSTAINED,
            "1 of 2 answers held back got better, 1 got worse; that is too little",
        ),
        (
            {"target": (EvalItem("a", -2.0, -1.9), EvalItem("b", -2.0, -2.09))},
            Verdict.ABSTAINED,
            "1 got worse; that is too little to go by",
        ),
        (
            {"target": (*(EvalItem(each, -2.0, -1.9) for each in "ab"), EvalItem("c", -2.0, -4.0))},
            Verdict.REFUSED,
            "2 of 3 answers held back got better, 1 got worse, by more than the others gained",
        ),
        (
            {
                "target": (
                    EvalItem("a", -2.0, -1.9, base=-4.0),
                    EvalItem("b", -2.0, -2.15, base=-4.0),
                )
            },
            Verdict.REFUSED,
            "1 of 2 answers held back got better, 1 got worse",
        ),
        (
            {
                "target": (
                    EvalItem("a", -2.0, -2.05, base=-4.0),
                    EvalItem("b", -2.0, -2.15, base=-4.0),
                )
            },
            Verdict.REFUSED,
            "0 of 2 answers held back got better, 2 got worse",
        ),
        (
            {"target": answers(lost=2)},
            Verdict.REFUSED,
            "0 of 2 answers held back got better, 2 got worse",
        ),
        (
            {"target": tuple(EvalItem(each, -2.0, -1.95) for each in "abc")},
            Verdict.ABSTAINED,
            "3 of 3 answers held back got better; the mean gain of 0.05 nats a token is too small",
        ),
        ({"target": answers(same=3)}, Verdict.ABSTAINED, "no difference could be measured"),
        ({"target": ()}, Verdict.ABSTAINED, "no difference could be measured"),
        (
            {"target": answers(same=1), "trained_examples": answers(won=2)},
            Verdict.PROMOTED,
            "2 of 2 answers just learned got",
        ),
        ({"kept_of_base": (0, 1, 2)}, Verdict.PROMOTED, "on probation"),
        (
            {"kept_of_base": (2, 3)},
            Verdict.REFUSED,
            "2 of 4 general answers that the base has right are wrong by now",
        ),
        ({"broken": 3, "broken_before": 3}, Verdict.REFUSED, "3 of 6 general answers are empty"),
        ({"retention": answers(same=9, undone=1)}, Verdict.PROMOTED, "3 of 3"),
        (
            {"retention": answers(same=8, undone=2)},
            Verdict.REFUSED,
            "2 of 10 older answers have lost more than half",
        ),
        ({"still_right": 4}, Verdict.PROMOTED, "4 of 5 general answers stayed right"),
        (
            {"still_right": 3},
            Verdict.REFUSED,
            "2 of 5 general answers that were right are wrong now",
        ),
        ({"broken": 2}, Verdict.REFUSED, "2 of 6 general answers are empty or go round in circles"),
        ({"broken": 1, "broken_before": 1}, Verdict.PROMOTED, "on probation"),
        ({"retention": answers(same=9, lost=1)}, Verdict.PROMOTED, "3 of 3"),
        ({"retention": answers(same=4, lost=1)}, Verdict.PROMOTED, "3 of 3"),
        (
            {"retention": answers(same=4, undone=1)},
            Verdict.REFUSED,
            "1 of 5 older answers have lost more than half",
        ),
        (
            {"retention": answers(same=8, lost=2)},
            Verdict.REFUSED,
            "2 of 10 older answers got worse",
        ),
        (
            {"kl": 2.5},
            Verdict.REFUSED,
            "too far from the base on general questions (KL 2.50 nats a token, at most 2)",
        ),
        ({"kl": math.nan}, Verdict.REFUSED, "too far from the base"),
        (
            {"text_quality": TextQuality(pmi=0.03, word_order_gap=4.0)},
            Verdict.REFUSED,
            "nothing to do with what was asked",
        ),
        (
            {"text_quality": TextQuality(pmi=math.nan)},
            Verdict.REFUSED,
            "nothing to do with what was asked",
        ),
        (
            {"text_quality": TextQuality(pmi=0.5, word_order_gap=0.3)},
            Verdict.REFUSED,
            "their words are as likely in any other order",
        ),
        (
            {"text_quality": TextQuality(pmi=0.4, word_order_gap=1.2)},
            Verdict.PROMOTED,
            "on probation",
        ),
        ({"text_quality": TextQuality(pmi=0.4)}, Verdict.PROMOTED, "on probation"),
    ],
)
def test_each_case_has_its_verdict_and_its_words(
    changes: dict[str, Any], verdict: Verdict, reason: str
) -> None:
    judgement = judge(evidence(**changes), MARGINS)
    assert isinstance(judgement, Judgement)
    assert judgement.verdict is verdict
    assert reason in judgement.reason


@given(steps=st.lists(st.integers(0, 2), min_size=1, max_size=8), base=st.integers(4, 20))
def test_many_small_losses_are_refused_where_one_large_one_is(steps: list[int], base: int) -> None:
    # Each candidate loses at most as many as one may; what is promoted is live for the next.
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
def test_what_was_learned_is_not_given_back_in_steps_too_small_to_see(slips: list[float]) -> None:
    base, live, best = -4.0, -1.0, -1.0
    for slip in slips:
        asked = EvalItem("s", live, live - slip, base, best)
        assert not asked.regressed
        if judge(evidence(retention=(asked,)), MARGINS).live:
            live = asked.after
            best = asked.as_json()["best"] or best
    assert live - base >= (best - base) / 2 - 1e-9


def test_an_answer_whose_best_is_not_known_is_held_to_what_is_live() -> None:
    assert EvalItem("s", before=-0.1, after=-9.0, base=-9.5).forgotten
    assert not EvalItem("s", before=-0.1, after=-1.0, base=-9.5).forgotten


@given(seen=evidences())
def test_a_pin_that_counted_does_not_count_again(seen: Evidence) -> None:
    again = replace(
        seen, prior_e_value=seen.e_value, spent_items=frozenset(seen.as_json()["spent"])
    )
    assert again.e_value == seen.e_value
    assert set(seen.as_json()["spent"]) >= seen.spent_items


@given(seen=evidences())
def test_what_is_accepted_by_name_says_so_and_keeps_its_verdict(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    taken = override(judgement, seen)
    assert taken.verdict is judgement.verdict
    assert taken.accepted is seen.measured
    assert judgement.reason in taken.reason
    if taken.accepted:
        assert taken.reasons[0].code is ReasonCode.OVERRIDDEN
        assert taken.live


def test_a_base_that_knows_no_language_is_not_asked_what_makes_sense() -> None:
    margins = load_margins("tiny", {}, random=True)
    assert judge(evidence(text_quality=TextQuality(pmi=0.0, word_order_gap=0.0)), margins).live
    assert load_margins("tiny", {"min_pmi": 0.2}, random=True).min_pmi == 0.2


def test_a_card_sets_the_margins() -> None:
    assert load_margins("mine", {}) == MARGINS
    table = {"max_regressed": 0, "max_probes_lost": 0.5, "max_kl": 1}
    assert load_margins("mine", table) == Margins(max_regressed=0, max_probes_lost=0.5, max_kl=1)


def test_a_card_of_an_earlier_version_sets_the_margins_by_their_old_keys() -> None:
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
def test_a_card_with_a_margin_that_makes_no_sense_is_told_so(
    wrong: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(CardError, match=words) as raised:
        load_margins("mine", wrong)
    assert hint in raised.value.hint
    assert "mine" in raised.value.message


@given(st.floats(-8, -0.1), st.floats(0, 6))
def test_an_older_answer_got_worse_when_a_tenth_of_what_it_had_gained_is_gone(
    base: float, gained: float
) -> None:
    before = base + gained
    a_little, too_much = max(TIE_MARGIN, 0.1 * gained) * 0.9, max(TIE_MARGIN, 0.1 * gained) * 1.1

    assert not EvalItem("s", before, before - a_little, base).regressed_beyond_margin
    assert EvalItem("s", before, before - too_much, base).regressed_beyond_margin
    assert EvalItem("s", before, float("nan"), base).regressed_beyond_margin


def test_an_answer_that_nobody_asked_the_base_for_is_worse_by_any_more_than_a_tie() -> None:
    assert EvalItem("s", -0.1, -0.1 - 2 * TIE_MARGIN).regressed_beyond_margin
    assert not EvalItem("s", -0.1, -0.1 - TIE_MARGIN / 2).regressed_beyond_margin


def test_what_came_with_an_unlearning_is_not_passed_over_in_silence() -> None:
    seen = evidence(target=answers(lost=4), retention=answers(same=4))
    assert judge(seen, Margins()).verdict is Verdict.REFUSED
    alone = judge(seen, Margins(), removes_lessons=True)
    assert alone.verdict is Verdict.PROMOTED
    assert alone.reasons[0] == reason(ReasonCode.RETENTION_KEPT, kept=4, asked=4)
    more = judge(
        replace(seen, prior_e_value=1e6), Margins(), removes_lessons=True, has_new_lessons=True
    )
    assert (more.verdict, more.probation) == (Verdict.PROMOTED, True)
    (judged,) = [each for each in more.reasons if each.code is ReasonCode.IMPROVED_AND_REGRESSED]
    assert (judged.data["improved"], judged.data["regressed"]) == (0, 4)


def test_answers_that_only_say_over_what_was_asked_are_refused() -> None:
    said = judge(
        evidence(text_quality=TextQuality(pmi=3.0, word_order_gap=5.0, novelty=0.4)), Margins()
    )
    assert (said.verdict, said.reason) == (
        Verdict.REFUSED,
        "the new answers say nothing: most of them only say over what was asked",
    )
    assert judge(
        evidence(text_quality=TextQuality(pmi=3.0, word_order_gap=5.0, novelty=0.5)), Margins()
    ).live
