"""What a lineage hands on: its evidence, each lesson once, and the best that its questions ever were."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from personalpeft.learning.gate.eval_history import Lineage, lineage_of
from personalpeft.learning.gate.gate import (
    ENOUGH,
    LOSS,
    NOT_ASKED,
    WIN,
    Asked,
    Canaries,
    Evidence,
    Margins,
    OfBase,
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


NOTHING = Lineage()


def evidence(target: list[Asked], lineage: Lineage = NOTHING) -> Evidence:
    return Evidence(tuple(target), (), (), Canaries(), 0.0, lineage.stake, lineage.counted)


def won(*signals: str) -> list[Asked]:
    return [Asked(signal, -3.0, -1.0, -4.0) for signal in signals]


def tied(*signals: str) -> list[Asked]:
    return [Asked(signal, -1.0, -1.0, -4.0) for signal in signals]


def test_without_a_head_there_is_nothing_to_take_over() -> None:
    assert lineage_of([], "style") == Lineage()
    other = replace(judged(evidence(won("s_1"))), layer="skill.email")
    lineage = lineage_of([other], "style")
    assert (lineage.stake, lineage.counted) == (1.0, frozenset())
    assert (lineage.base, lineage.best) == ({"s_1": -4.0}, {"s_1": -1.0})


def test_the_stake_of_a_revision_on_probation_goes_on_and_a_spent_one_does_not() -> None:
    thin = lineage_of([judged(evidence(won("a", "b", "c")))], "style")
    assert thin.stake == WIN**3
    assert thin.counted == {"a", "b", "c"}
    more = evidence(won("a", "b", "d"), thin)
    assert more.bet == WIN**4
    enough = judged(evidence(won(*"defgh"), thin))
    assert not enough.probation
    spent = lineage_of([enough], "style")
    assert (spent.stake, spent.counted) == (1.0, frozenset("abcdefgh"))


def test_a_tie_has_not_counted_yet() -> None:
    lineage = lineage_of([judged(evidence([*won("a"), *tied("b")]))], "style")
    assert lineage.counted == {"a"}
    assert evidence(won("b"), lineage).bet == WIN**2


def test_what_an_earlier_version_kept_is_read_as_having_counted() -> None:
    older = replace(REVISION, scores={"bet": 2.25, "canaries": {"asked": 6}})
    assert lineage_of([older], "style") == Lineage(2.25, frozenset({"s_1"}))


def test_what_the_base_said_is_asked_once() -> None:
    said = OfBase("questions", (1, 3), 2)
    seen = replace(evidence(won("a")), canaries=Canaries(asked=6, base=said, kept_of_base=(1, 3)))
    assert lineage_of([judged(seen)], "skill.email").of_base == said
    assert lineage_of([REVISION], "style").of_base == NOT_ASKED


def test_what_somebody_accepted_by_name_is_not_held_against_those_who_follow() -> None:
    said = OfBase("questions", (1, 2, 3), 0)
    worse = Asked("s_1", -1.0, -3.0, -4.0, -1.0)
    seen = replace(
        evidence([]), retention=(worse,), canaries=Canaries(asked=6, base=said, kept_of_base=(2,))
    )
    refused = judged(seen, verdict=Verdict.REFUSED)
    lineage = lineage_of([refused], "style")
    assert lineage.best == {"s_1": -3.0}
    assert lineage.of_base == replace(said, right=(2,))
    assert lineage_of([replace(refused, verdict=Verdict.PROMOTED)], "style").best == {"s_1": -1.0}


@given(learns=st.lists(st.lists(st.sampled_from("WLT"), max_size=4), max_size=10))
def test_over_any_learns_each_lesson_is_bet_on_once(learns: list[list[str]]) -> None:
    heads: list[Revision] = []
    signals: list[Asked] = []
    outcomes = {"W": (-3.0, -1.0), "L": (-1.0, -3.0), "T": (-1.0, -1.0)}
    expected, spent = 1.0, 1.0
    for number, learn in enumerate(learns):
        lineage = lineage_of(heads, "style")
        new = [Asked(f"{number}.{i}", *outcomes[outcome]) for i, outcome in enumerate(learn)]
        seen = evidence([*signals, *new], lineage)
        for outcome in learn:
            expected *= {"W": WIN, "L": LOSS, "T": 1.0}[outcome]
        assert abs(seen.bet / (expected / spent) - 1) < 1e-3
        if judge(seen, Margins()).verdict is Verdict.PROMOTED:
            head = judged(seen)
            heads = [head]
            signals += new
            if not head.probation:
                spent = expected
        else:
            expected = spent * lineage.stake


def test_a_lineage_that_teaches_nothing_is_confirmed_in_one_of_twenty_at_most() -> None:
    # The chance of each number of wins after each lesson, as long as the stake was never enough.
    chances, confirmed = {0: 1.0}, 0.0
    for step in range(1, 200):
        after: dict[int, float] = {}
        for wins, chance in chances.items():
            for more in (0, 1):
                if WIN ** (wins + more) * LOSS ** (step - wins - more) >= ENOUGH:
                    confirmed += chance / 2
                else:
                    after[wins + more] = after.get(wins + more, 0.0) + chance / 2
        chances = after
    assert confirmed <= 1 / ENOUGH


def test_no_candidate_is_held_to_what_somebody_took_out_of_the_stack() -> None:
    strong = judged(evidence([Asked("s_1", -8.0, -5.0, -8.0)]))
    lineage = lineage_of([strong], "memory")
    assert lineage.held_to("s_1", -5.0) == -5.0
    # The live stack says it less well than when it was last judged, and no learn came in between.
    assert lineage.held_to("s_1", -7.8) is None
    assert lineage.held_to("s_2", -7.8) is None


def test_what_learns_lost_little_by_little_is_held_to_the_best_it_ever_was() -> None:
    first = judged(evidence([Asked("s_1", -8.0, -5.0, -8.0)]))
    lineage = lineage_of([first], "memory")
    lost = Asked("s_1", -5.0, -6.0, -8.0, lineage.held_to("s_1", -5.0))
    second = judged(
        replace(evidence([]), retention=(lost,)), layer="memory", at=REVISION.at + timedelta(1)
    )
    lineage = lineage_of([second, first], "memory")
    assert lineage.held_to("s_1", -6.0) == -5.0
    assert Asked("s_1", -6.0, -6.6, -8.0, lineage.held_to("s_1", -6.0)).undone
