"""What the history of a layer hands on: its e-value, spent items, and the best score of each item."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate.evidence import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
    TIE_MARGIN,
    BaseProbeResults,
    EvalHistory,
    EvalItem,
    Evidence,
    ProbeResults,
    eval_history,
)
from personalpeft.learning.gate.gate import Margins, judge
from personalpeft.types import Revision, Verdict

REVISION = Revision(
    id="style@0123456789ab",
    user="ada",
    layer="style",
    digest="0" * 64,
    base="b",
    parent=None,
    below=(),
    recipe={},
    inputs="",
    signals={"s_1": "held_out", "s_2": "trained"},
    scores={},
    verdict=Verdict.PROMOTED,
    reason="",
    probation=True,
    at=datetime(2026, 1, 2, tzinfo=UTC),
    seconds=1.0,
)


def judged(evidence: Evidence, **changes: Any) -> Revision:
    """Return the revision that this evidence makes live."""
    judgement = judge(evidence, Margins())
    return replace(REVISION, scores=evidence.as_json(), probation=judgement.probation, **changes)


NOTHING = EvalHistory()


def evidence(undecided: list[EvalItem], history: EvalHistory = NOTHING) -> Evidence:
    return Evidence(tuple(undecided), (), (), ProbeResults(), 0.0, history)


def improved(*signals: str) -> list[EvalItem]:
    return [EvalItem(signal, -3.0, -1.0, -4.0) for signal in signals]


def tied(*signals: str) -> list[EvalItem]:
    return [EvalItem(signal, -1.0, -1.0, -4.0) for signal in signals]


def test_layer_without_a_head_has_an_empty_history() -> None:
    assert eval_history([], "style") == EvalHistory()
    other = replace(judged(evidence(improved("s_1"))), layer="skill.email")
    history = eval_history([other], "style")
    assert (history.prior_e_value, history.spent_items) == (1.0, frozenset())
    assert (history.base, history.best) == ({"s_1": -4.0}, {"s_1": -1.0})


def test_e_value_of_a_revision_on_probation_carries_over_and_a_spent_one_does_not() -> None:
    thin = eval_history([judged(evidence(improved("a", "b", "c")))], "style")
    assert thin.prior_e_value == IMPROVED_FACTOR
    assert thin.spent_items == {"a", "b", "c"}
    more = evidence(improved("a", "b", "d"), thin)
    assert more.e_value == IMPROVED_FACTOR**2
    almost = replace(thin, prior_e_value=IMPROVED_FACTOR**7)
    enough = judged(evidence(improved(*"defgh"), almost))
    assert not enough.probation
    spent = eval_history([enough], "style")
    assert (spent.prior_e_value, spent.spent_items) == (1.0, frozenset("abcdefgh"))


@given(st.lists(st.sampled_from("WLT"), min_size=1, max_size=6))
def test_items_of_one_learn_that_mirror_one_another_leave_a_mean_e_value_of_one(
    outcomes: list[str],
) -> None:
    """All items share a candidate. Whatever they do together, its mirror image is as likely."""
    figures = {"W": (-3.0, -1.0), "L": (-1.0, -3.0), "T": (-1.0, -1.0)}
    mirrored = {"W": "L", "L": "W", "T": "T"}

    def e_value(drawn: list[str]) -> float:
        return evidence([EvalItem(str(n), *figures[x]) for n, x in enumerate(drawn)]).e_value

    assert abs(e_value(outcomes) + e_value([mirrored[each] for each in outcomes]) - 2) < 1e-9


def test_e_value_of_a_revision_confirmed_by_feedback_is_spent() -> None:
    thin = judged(evidence(improved("a", "b", "c")))
    confirmed = replace(thin, probation=False)
    assert eval_history([confirmed], "style").prior_e_value == 1.0
    refused = replace(thin, verdict=Verdict.REFUSED, probation=False)
    assert eval_history([], "style", [refused]).prior_e_value == IMPROVED_FACTOR


def test_clock_set_back_spends_no_item_twice() -> None:
    first = judged(evidence(improved("a")))
    second = judged(evidence(improved("b"), eval_history([], "style", [first])))
    earlier = replace(second, at=first.at - timedelta(days=1))
    assert eval_history([], "style", [first, earlier]).spent_items == {"a", "b"}


def test_tied_item_is_not_spent() -> None:
    history = eval_history([judged(evidence([*improved("a"), *tied("b")]))], "style")
    assert history.spent_items == {"a"}
    assert history.prior_e_value == (IMPROVED_FACTOR + 1) / 2
    assert evidence(improved("b"), history).e_value == history.prior_e_value * IMPROVED_FACTOR


def test_scores_of_an_earlier_version_are_read_as_spent() -> None:
    older = replace(REVISION, scores={"e_value": 2.25, "probes": {"asked": 6}})
    assert eval_history([older], "style") == EvalHistory(
        2.25, frozenset({"s_1"}), frozenset({"s_1"})
    )


def test_probe_results_of_the_base_are_reused() -> None:
    base_results = BaseProbeResults("questions", (1, 3), 2)
    seen = replace(
        evidence(improved("a")),
        probes=ProbeResults(asked=6, base=base_results, kept_of_base=(1, 3)),
    )
    assert eval_history([judged(seen)], "skill.email").base_probes == base_results
    assert eval_history([REVISION], "style").base_probes == BaseProbeResults()


def test_loss_accepted_by_name_lowers_the_baseline_of_later_candidates() -> None:
    base_results = BaseProbeResults("questions", (1, 2, 3), 0)
    worse = EvalItem("s_1", -1.0, -3.0, -4.0, -1.0)
    seen = replace(
        evidence([]),
        retention=(worse,),
        probes=ProbeResults(asked=6, base=base_results, kept_of_base=(2,)),
    )
    refused = judged(seen, verdict=Verdict.REFUSED)
    history = eval_history([refused], "style")
    assert history.best == {"s_1": -3.0}
    assert history.base_probes == replace(base_results, right=(2,))
    assert eval_history([replace(refused, verdict=Verdict.PROMOTED)], "style").best == {"s_1": -1.0}


@given(learns=st.lists(st.lists(st.sampled_from("WLT"), max_size=4), max_size=10))
def test_each_item_is_spent_once_over_any_sequence_of_learns(
    learns: list[list[str]],
) -> None:
    head: Revision | None = None
    judged_before: list[Revision] = []
    pending: list[EvalItem] = []
    unspent: list[str] = []
    outcomes = {"W": (-3.0, -1.0), "L": (-1.0, -3.0), "T": (-1.0, -1.0)}
    factors = {"W": IMPROVED_FACTOR, "L": REGRESSED_FACTOR, "T": 1.0}
    expected = 1.0
    for number, learn in enumerate(learns):
        history = eval_history([head] if head else [], "style", judged_before)
        pending += [EvalItem(f"{number}.{i}", *outcomes[each]) for i, each in enumerate(learn)]
        unspent += learn
        # Items that judged a refused candidate are evaluated again but not spent again.
        seen = evidence([x for x in pending if x.signal not in history.decided_items], history)
        if unspent:
            expected *= sum(factors[each] for each in unspent) / len(unspent)
        # A tied item is asked again.
        unspent = [each for each in unspent if each == "T"]
        assert abs(seen.e_value / expected - 1) < 1e-3
        verdict = judge(seen, Margins()).verdict
        candidate = judged(seen, verdict=verdict, at=REVISION.at + timedelta(number))
        judged_before.append(candidate)
        if verdict is Verdict.PROMOTED:
            head = candidate
        if expected >= CONFIRMATION_E_VALUE:
            expected = 1.0


def test_layer_without_effect_is_confirmed_in_at_most_one_of_twenty() -> None:
    # The probability of each number of improved items, while the e-value is below the limit.
    chances, confirmed = {0: 1.0}, 0.0
    for step in range(1, 200):
        after: dict[int, float] = {}
        for wins, chance in chances.items():
            for more in (0, 1):
                if (
                    IMPROVED_FACTOR ** (wins + more) * REGRESSED_FACTOR ** (step - wins - more)
                    >= CONFIRMATION_E_VALUE
                ):
                    confirmed += chance / 2
                else:
                    after[wins + more] = after.get(wins + more, 0.0) + chance / 2
        chances = after
    assert confirmed <= 1 / CONFIRMATION_E_VALUE


def test_score_removed_from_the_stack_by_the_user_is_no_baseline() -> None:
    strong = judged(evidence([EvalItem("s_1", -8.0, -5.0, -8.0)]))
    history = eval_history([strong], "memory")
    assert history.baseline("s_1", -5.0, TIE_MARGIN) == -5.0
    # The live stack scores lower than in its last evaluation, and no learn came between.
    assert history.baseline("s_1", -7.8, TIE_MARGIN) is None
    assert history.baseline("s_2", -7.8, TIE_MARGIN) is None


def test_gradual_loss_is_compared_with_the_best_score() -> None:
    first = judged(evidence([EvalItem("s_1", -8.0, -5.0, -8.0)]))
    history = eval_history([first], "memory")
    lost = EvalItem("s_1", -5.0, -6.0, -8.0, history.baseline("s_1", -5.0, TIE_MARGIN))
    second = judged(
        replace(evidence([]), retention=(lost,)), layer="memory", at=REVISION.at + timedelta(1)
    )
    history = eval_history([second, first], "memory")
    assert history.baseline("s_1", -6.0, TIE_MARGIN) == -5.0
    assert EvalItem(
        "s_1", -6.0, -6.6, -8.0, history.baseline("s_1", -6.0, TIE_MARGIN)
    ).lost_most_of_gain
