"""What a lineage hands on: its evidence, each lesson once, and the best that its questions ever were."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate.gate import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    NO_PROBE_RESULTS,
    REGRESSED_FACTOR,
    BaseProbeResults,
    EvalHistory,
    EvalItem,
    Evidence,
    Margins,
    ProbeResults,
    eval_history,
    judge,
)
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
    signals={"s_1": "pinned", "s_2": "train"},
    scores={},
    verdict=Verdict.PROMOTED,
    reason="",
    probation=True,
    at=datetime(2026, 1, 2, tzinfo=UTC),
    seconds=1.0,
)


def judged(evidence: Evidence, **changes: Any) -> Revision:
    """The revision that such evidence makes live."""
    judgement = judge(evidence, Margins())
    return replace(REVISION, scores=evidence.as_json(), probation=judgement.probation, **changes)


NOTHING = EvalHistory()


def evidence(target: list[EvalItem], lineage: EvalHistory = NOTHING) -> Evidence:
    return Evidence(
        tuple(target),
        (),
        (),
        ProbeResults(),
        0.0,
        lineage.prior_e_value,
        lineage.spent_items,
        lineage.decided_items,
    )


def won(*signals: str) -> list[EvalItem]:
    return [EvalItem(signal, -3.0, -1.0, -4.0) for signal in signals]


def tied(*signals: str) -> list[EvalItem]:
    return [EvalItem(signal, -1.0, -1.0, -4.0) for signal in signals]


def test_without_a_head_there_is_nothing_to_take_over() -> None:
    assert eval_history([], "style") == EvalHistory()
    other = replace(judged(evidence(won("s_1"))), layer="skill.email")
    lineage = eval_history([other], "style")
    assert (lineage.prior_e_value, lineage.spent_items) == (1.0, frozenset())
    assert (lineage.base, lineage.best) == ({"s_1": -4.0}, {"s_1": -1.0})


def test_the_stake_of_a_revision_on_probation_goes_on_and_a_spent_one_does_not() -> None:
    thin = eval_history([judged(evidence(won("a", "b", "c")))], "style")
    assert thin.prior_e_value == IMPROVED_FACTOR**3
    assert thin.spent_items == {"a", "b", "c"}
    more = evidence(won("a", "b", "d"), thin)
    assert more.e_value == IMPROVED_FACTOR**4
    enough = judged(evidence(won(*"defgh"), thin))
    assert not enough.probation
    spent = eval_history([enough], "style")
    assert (spent.prior_e_value, spent.spent_items) == (1.0, frozenset("abcdefgh"))


def test_a_tie_has_not_counted_yet() -> None:
    lineage = eval_history([judged(evidence([*won("a"), *tied("b")]))], "style")
    assert lineage.spent_items == {"a"}
    assert evidence(won("b"), lineage).e_value == IMPROVED_FACTOR**2


def test_what_an_earlier_version_kept_is_read_as_having_counted() -> None:
    older = replace(REVISION, scores={"bet": 2.25, "canaries": {"asked": 6}})
    assert eval_history([older], "style") == EvalHistory(
        2.25, frozenset({"s_1"}), frozenset({"s_1"})
    )


def test_what_the_base_said_is_asked_once() -> None:
    said = BaseProbeResults("questions", (1, 3), 2)
    seen = replace(evidence(won("a")), probes=ProbeResults(asked=6, base=said, kept_of_base=(1, 3)))
    assert eval_history([judged(seen)], "skill.email").base_probes == said
    assert eval_history([REVISION], "style").base_probes == NO_PROBE_RESULTS


def test_what_somebody_accepted_by_name_is_not_held_against_those_who_follow() -> None:
    said = BaseProbeResults("questions", (1, 2, 3), 0)
    worse = EvalItem("s_1", -1.0, -3.0, -4.0, -1.0)
    seen = replace(
        evidence([]), retention=(worse,), probes=ProbeResults(asked=6, base=said, kept_of_base=(2,))
    )
    refused = judged(seen, verdict=Verdict.REFUSED)
    lineage = eval_history([refused], "style")
    assert lineage.best == {"s_1": -3.0}
    assert lineage.base_probes == replace(said, right=(2,))
    assert eval_history([replace(refused, verdict=Verdict.PROMOTED)], "style").best == {"s_1": -1.0}


@given(learns=st.lists(st.lists(st.sampled_from("WLT"), max_size=4), max_size=10))
def test_over_any_learns_each_lesson_is_bet_on_once_whatever_the_verdict(
    learns: list[list[str]],
) -> None:
    head: Revision | None = None
    judged_before: list[Revision] = []
    pending: list[EvalItem] = []
    outcomes = {"W": (-3.0, -1.0), "L": (-1.0, -3.0), "T": (-1.0, -1.0)}
    expected = 1.0
    for number, learn in enumerate(learns):
        history = eval_history([head] if head else [], "style", judged_before)
        pending += [EvalItem(f"{number}.{i}", *outcomes[each]) for i, each in enumerate(learn)]
        # What a refused candidate was judged by is asked again, and not bet on again.
        seen = evidence([x for x in pending if x.signal not in history.decided_items], history)
        for outcome in learn:
            expected *= {"W": IMPROVED_FACTOR, "L": REGRESSED_FACTOR, "T": 1.0}[outcome]
        assert abs(seen.e_value / expected - 1) < 1e-3
        verdict = judge(seen, Margins()).verdict
        candidate = judged(seen, verdict=verdict, at=REVISION.at + timedelta(number))
        judged_before.append(candidate)
        if verdict is Verdict.PROMOTED:
            head = candidate
        if expected >= CONFIRMATION_E_VALUE:
            expected = 1.0


def test_a_lineage_that_teaches_nothing_is_confirmed_in_one_of_twenty_at_most() -> None:
    # The chance of each number of wins after each lesson, as long as the stake was never enough.
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


def test_no_candidate_is_held_to_what_somebody_took_out_of_the_stack() -> None:
    strong = judged(evidence([EvalItem("s_1", -8.0, -5.0, -8.0)]))
    lineage = eval_history([strong], "memory")
    assert lineage.baseline("s_1", -5.0) == -5.0
    # The live stack says it less well than when it was last judged, and no learn came in between.
    assert lineage.baseline("s_1", -7.8) is None
    assert lineage.baseline("s_2", -7.8) is None


def test_what_learns_lost_little_by_little_is_held_to_the_best_it_ever_was() -> None:
    first = judged(evidence([EvalItem("s_1", -8.0, -5.0, -8.0)]))
    lineage = eval_history([first], "memory")
    lost = EvalItem("s_1", -5.0, -6.0, -8.0, lineage.baseline("s_1", -5.0))
    second = judged(
        replace(evidence([]), retention=(lost,)), layer="memory", at=REVISION.at + timedelta(1)
    )
    lineage = eval_history([second, first], "memory")
    assert lineage.baseline("s_1", -6.0) == -5.0
    assert EvalItem("s_1", -6.0, -6.6, -8.0, lineage.baseline("s_1", -6.0)).forgotten
