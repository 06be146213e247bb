"""The gate never lets harm through, never holds good work against a candidate, and always says why."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate import ENOUGH, TIE, Asked, Evidence, Judgement, Margins, judge
from personalpeft.types import Verdict

MARGINS = Margins()
NATS = st.floats(-20, 0)
ASKED = st.builds(Asked, st.just("sig_1"), NATS, NATS | st.just(math.nan) | st.just(-math.inf))
SOME = st.lists(ASKED, max_size=12).map(tuple)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    canaries = draw(st.integers(0, 10))
    right = draw(st.integers(0, canaries))
    return Evidence(
        target=draw(SOME),
        retention=draw(SOME),
        trained=draw(SOME),
        canaries=canaries,
        right_before=right,
        still_right=draw(st.integers(0, right)),
        broken=draw(st.integers(0, canaries)),
        broken_before=draw(st.integers(0, canaries)),
        kl=draw(st.floats(0, 10) | st.just(math.nan)),
    )


def answers(*, won: int = 0, lost: int = 0, same: int = 0) -> tuple[Asked, ...]:
    better, worse, equal = Asked("s", -3.0, -1.0), Asked("s", -1.0, -3.0), Asked("s", -1.0, -1.0 + TIE / 2)
    return (better,) * won + (worse,) * lost + (equal,) * same


def evidence(**changes: Any) -> Evidence:
    good = Evidence(
        target=answers(won=3),
        retention=answers(same=4),
        trained=(),
        canaries=6,
        right_before=5,
        still_right=5,
        broken=0,
        broken_before=0,
        kl=0.1,
    )
    return replace(good, **changes)


@given(seen=evidences())
def test_nothing_harmful_is_ever_promoted(seen: Evidence) -> None:
    judgement = judge(seen, MARGINS)
    harm = (
        seen.right_before - seen.still_right > MARGINS.canaries
        or seen.broken - seen.broken_before > MARGINS.canaries
        or sum(not a.after >= a.before - TIE for a in seen.retention) > MARGINS.retention * len(seen.retention)
        or not seen.kl <= MARGINS.kl
    )
    if harm:
        assert judgement.verdict is Verdict.REFUSED


@given(seen=evidences())
def test_what_is_promoted_did_more_good_than_harm(seen: Evidence) -> None:
    if judge(seen, MARGINS).verdict is Verdict.PROMOTED:
        judged_by = seen.target or seen.trained
        assert sum(a.won for a in judged_by) > sum(a.lost for a in judged_by)


@given(seen=evidences(), data=st.data())
def test_one_more_win_never_turns_a_promotion_into_anything_less(seen: Evidence, data: st.DataObject) -> None:
    judged_by = "target" if seen.target else "trained"
    asked = getattr(seen, judged_by)
    win = Asked("s", -9.0, -1.0)
    more = [(*asked, win)]
    if asked:
        at = data.draw(st.integers(0, len(asked) - 1))
        more.append((*asked[:at], win, *asked[at + 1 :]))
    before = judge(seen, MARGINS)
    for better in more:
        after = judge(replace(seen, **{judged_by: better}), MARGINS)
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
    assert (won.won, won.lost, lost.won, lost.lost, same.won, same.lost) == (True, False, False, True, False, False)


@pytest.mark.parametrize(("wins", "probation"), [(3, True), (7, True), (8, False)])
def test_thin_evidence_goes_live_on_probation(wins: int, probation: bool) -> None:
    judgement = judge(evidence(target=answers(won=wins)), MARGINS)
    assert (judgement.verdict, judgement.probation) == (Verdict.PROMOTED, probation)
    assert (1.5**wins >= ENOUGH) is not probation


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        (
            {},
            Verdict.PROMOTED,
            "3 of 3 answers held back got better; 5 of 5 general answers stayed right; on probation",
        ),
        ({"target": (), "trained": answers(won=2)}, Verdict.PROMOTED, "2 of 2 answers just learned got better"),
        ({"right_before": 0, "still_right": 0}, Verdict.PROMOTED, "3 of 3 answers held back got better; on probation"),
        ({"target": answers(won=2, lost=1)}, Verdict.PROMOTED, "2 of 3 answers held back got better, 1 got worse"),
        ({"target": answers(won=1, lost=1)}, Verdict.REFUSED, "1 of 2 answers held back got better, 1 got worse"),
        ({"target": answers(lost=2)}, Verdict.REFUSED, "0 of 2 answers held back got better, 2 got worse"),
        ({"target": answers(same=3)}, Verdict.ABSTAINED, "no difference could be measured"),
        ({"target": ()}, Verdict.ABSTAINED, "no difference could be measured"),
        ({"still_right": 4}, Verdict.PROMOTED, "4 of 5 general answers stayed right"),
        ({"still_right": 2}, Verdict.REFUSED, "3 of 5 general answers that were right are wrong now"),
        ({"broken": 3}, Verdict.REFUSED, "3 of 6 general answers are empty or go round in circles"),
        ({"broken": 2, "broken_before": 1}, Verdict.PROMOTED, "on probation"),
        ({"retention": answers(same=9, lost=1)}, Verdict.PROMOTED, "3 of 3"),
        ({"retention": answers(same=8, lost=2)}, Verdict.REFUSED, "2 of 10 older answers got worse"),
        ({"kl": 2.5}, Verdict.REFUSED, "too far from the base on general questions (KL 2.50 nats a token, at most 2)"),
        ({"kl": math.nan}, Verdict.REFUSED, "too far from the base"),
    ],
)
def test_each_case_has_its_verdict_and_its_words(changes: dict[str, Any], verdict: Verdict, reason: str) -> None:
    judgement = judge(evidence(**changes), MARGINS)
    assert isinstance(judgement, Judgement)
    assert judgement.verdict is verdict
    assert reason in judgement.reason
