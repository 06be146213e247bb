"""Feedback on a revision on probation confirms or withdraws it: seldom wrongly, once, and never
against the user's choice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import FakeTime, ask, correct, greedy, open_runtime

from personalpeft import Runtime, User
from personalpeft.learning.gate.evidence import CONFIRMATION_E_VALUE, IMPROVED_FACTOR
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.gate.probation import (
    FeedbackOutcome,
    confirmation_limit,
    sequential_test,
)
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import LearnOutcome, ReasonCode
from personalpeft.learning.report import from_json
from personalpeft.types import Verdict

LIKED, DISLIKED, CORRECTED = (
    FeedbackOutcome.LIKED,
    FeedbackOutcome.DISLIKED,
    FeedbackOutcome.CORRECTED,
)
OPINIONS = st.lists(st.sampled_from(list(FeedbackOutcome)), max_size=30)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def runtime(home: Path) -> Iterator[Runtime]:
    with open_runtime(home, clock=FakeTime().clock()) as runtime:
        yield runtime


@pytest.fixture
def ada(runtime: Runtime) -> User:
    """Return a user whose style is live on probation."""
    ada = runtime.user("ada")
    correct(ada, 5)
    report = ada.learn()
    assert (report.verdict, report.probation) == (Verdict.PROMOTED, True)
    return ada


@pytest.fixture
def bo(runtime: Runtime) -> User:
    """Return a user who liked no reply before a style went live on probation."""
    bo = runtime.user("bo")
    dislike(bo, 3)
    correct(bo, 5)
    assert bo.learn().probation
    return bo


LIKES_OF_BO = next(
    count
    for count in range(20)
    if sequential_test([DISLIKED] * 3 + [CORRECTED] * 5, [LIKED] * count, e_value=IMPROVED_FACTOR)
)
"""As many likes as end the probation."""


def dislike(user: User, count: int) -> None:
    for number in range(count):
        user.feedback(ask(user, f"later {number}"), rating=-1)


@given(before=OPINIONS, since=OPINIONS)
def test_likes_never_withdraw_and_dislikes_never_confirm_a_revision(
    before: list[FeedbackOutcome], since: list[FeedbackOutcome]
) -> None:
    if sequential_test(before, since) is None:
        for further, end in ((LIKED, "withdrawn"), (DISLIKED, "confirmed")):
            result = sequential_test(before, [*since, further])
            assert result is None or result.outcome != end


@given(before=OPINIONS, since=OPINIONS, further=OPINIONS)
def test_ended_probation_is_not_changed_by_later_feedback(
    before: list[FeedbackOutcome], since: list[FeedbackOutcome], further: list[FeedbackOutcome]
) -> None:
    result = sequential_test(before, since)
    assert result is None or sequential_test(before, [*since, *further]) == result


def test_without_history_four_dislikes_withdraw_and_constant_corrections_do_not() -> None:
    assert sequential_test([LIKED] * 9, [DISLIKED] * 3) is None
    outcome = sequential_test([LIKED] * 9, [DISLIKED] * 4)
    assert outcome is not None
    assert outcome.outcome == "withdrawn"
    assert (outcome.reason.data["bad"], outcome.reason.data["replies"]) == (4, 4)
    assert sequential_test([CORRECTED] * 12, [CORRECTED] * 60) is None
    assert sequential_test([CORRECTED] * 40, [CORRECTED] * 60) is None
    assert sequential_test([LIKED] * 40, [CORRECTED] * 12) is not None


def test_blind_comparisons_decide_on_their_own() -> None:
    for outcome, end, enough in (
        (FeedbackOutcome.WON, "confirmed", 10),
        (FeedbackOutcome.LOST, "withdrawn", 8),
    ):
        assert sequential_test([], [outcome] * (enough - 1)) is None
        result = sequential_test([], [outcome] * enough)
        assert result is not None
        assert result.outcome == end


def test_each_further_probation_of_a_layer_needs_more_evidence_to_be_confirmed() -> None:
    """A layer that learns often would otherwise be confirmed by chance in one of its probations."""
    limits = [confirmation_limit(number) for number in range(1, 1001)]
    assert sum(1 / limit for limit in limits) <= 1 / CONFIRMATION_E_VALUE
    won = [FeedbackOutcome.WON] * 10
    assert sequential_test([], won, number=1) is not None
    assert sequential_test([], won, number=2) is None


def test_disliked_revision_is_withdrawn_and_the_old_answers_return(
    home: Path,
) -> None:
    with open_runtime(home, clock=FakeTime().clock()) as runtime:
        ada = runtime.user("ada")
        before = greedy(ada)
        correct(ada, 5)
        learned = ada.learn()
        dislike(ada, 3)
        assert ada.stack().entries
        dislike(ada, 1)
        assert ada.stack().entries == ()
        assert greedy(ada) == before
        last = ada.history()[-1]
        assert (last.before, last.after, last.cause) == (learned.revision, None, "withdrawn")
        (revision,) = ada.revisions()
        assert (revision.verdict, revision.probation) == (Verdict.REFUSED, False)
        stored = ada.reports()[-1]
        (withdrawn,) = from_json(stored).reasons
        assert withdrawn.code is ReasonCode.WITHDRAWN
        assert (withdrawn.data["bad"], withdrawn.data["replies"]) == (4, 4)
        assert (stored["event"], stored["revision"], stored["reason"]) == (
            "withdrawn",
            revision.id,
            revision.reason,
        )
        assert runtime.verify() == ()


def test_second_revision_is_withdrawn_to_the_first_which_stays_on_probation(ada: User) -> None:
    first = ada.stack().entries[0].revision
    correct(ada, 3, first=10)
    assert ada.learn().revision != first
    dislike(ada, 4)
    assert ada.stack().entries[0].revision == first
    assert ada.revisions()[0].probation
    dislike(ada, 8)
    assert ada.stack().entries == ()


def test_dislikes_add_up_over_the_revisions_of_a_user_who_learns_each_night(ada: User) -> None:
    learned = [ada.stack().entries[0].revision]
    for night in range(1, 6):
        dislike(ada, 3)
        if not ada.stack().entries:
            break
        correct(ada, 2, first=10 * night)
        learned += [str(ada.learn().revision)]
    assert len(learned) == 2
    last = ada.history()[-1]
    assert (last.before, last.after, last.cause) == (learned[-1], None, "withdrawn")
    (reason,) = from_json(ada.reports()[-1]).reasons
    assert (reason.data["bad"], reason.data["replies"]) == (6, 8)


def test_likes_end_the_probation_and_move_no_head(bo: User) -> None:
    head = bo.stack()
    for number in range(LIKES_OF_BO):
        assert bo.revisions()[0].probation
        bo.feedback(ask(bo, f"later {number}"), rating=1)
    (revision,) = bo.revisions()
    assert (revision.verdict, revision.probation) == (Verdict.PROMOTED, False)
    assert revision.reason.startswith("confirmed: ")
    assert bo.stack() == head
    assert len(bo.history()) == 1
    assert bo.reports()[-1]["event"] == "confirmed"
    dislike(bo, 8)
    assert bo.stack() == head


def test_dislike_that_was_replaced_by_a_like_no_longer_counts(bo: User) -> None:
    disliked = [bo.feedback(ask(bo, f"sooner {number}"), rating=-1) for number in range(2)]
    for number in range(LIKES_OF_BO):
        bo.feedback(ask(bo, f"later {number}"), rating=1)
    assert bo.revisions()[0].probation
    for signal in disliked:
        bo.retract(signal)
    assert bo.revisions()[0].reason.startswith("confirmed: ")


def test_revision_accepted_by_name_is_never_withdrawn(ada: User) -> None:
    revision = ada.stack().entries[0].revision
    ada.rollback("style", None)
    ada.rollback("style", revision)
    dislike(ada, 10)
    assert ada.stack().entries[0].revision == revision


def test_undone_rollback_leaves_the_probation_as_it_was(ada: User) -> None:
    """Rolling back twice undoes the rollback, so the revision was not chosen by name."""
    revision = ada.stack().entries[0].revision
    ada.rollback("style")
    ada.rollback("style")
    assert ada.stack().entries[0].revision == revision
    assert [move.cause for move in ada.history()[-2:]] == ["rollback", "rollback_undone"]
    dislike(ada, 4)
    assert ada.stack().entries == ()
    assert ada.history()[-1].cause == "withdrawn"


def test_withdrawn_revision_returns_only_by_name(ada: User) -> None:
    revision = ada.stack().entries[0].revision
    dislike(ada, 4)
    again = ada.learn(start="scratch")
    assert (again.revision, again.verdict) == (revision, Verdict.REFUSED)
    assert again.reasons[-1].code is ReasonCode.WITHDRAWN_BEFORE
    assert ada.stack().entries == ()
    ada.rollback("style", revision)
    dislike(ada, 4)
    assert ada.stack().entries[0].revision == revision


def test_feedback_during_a_learn_counts_in_the_next_learn(ada: User) -> None:
    revision = ada.stack().entries[0].revision
    with ada._services.store.leases.acquire("learn-ada"):
        dislike(ada, 4)
        assert ada.stack().entries[0].revision == revision
    correct(ada, 2, first=20)
    report = ada.learn()
    assert report.previous_head is None
    assert [move.cause for move in ada.history()][:2] == ["learn", "withdrawn"]


def test_feedback_is_recorded_where_nothing_can_be_withdrawn(ada: User) -> None:
    first = ada.revisions()[0]
    correct(ada, 3, first=10)
    second = ada.learn().revision
    ada._services.store.blobs.path(first.digest).unlink()
    dislike(ada, 5)
    assert ada.stack().entries[0].revision == second
    assert sum(signal.payload.get("value") == -1 for signal in ada.signals()) == 5


def test_many_threads_withdraw_once(ada: User) -> None:
    replies = [ask(ada, f"later {number}") for number in range(6)]
    threads = [
        threading.Thread(target=ada.feedback, args=(reply,), kwargs={"rating": -1})
        for reply in replies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ada.feedback(ask(ada, "one more"), rating=-1)
    assert [move.cause for move in ada.history()] == ["learn", "withdrawn"]
    assert [report["event"] for report in ada.reports()] == ["learn", "withdrawn"]


def test_only_the_users_own_feedback_counts(ada: User) -> None:
    head = ada.stack()
    for number in range(8):
        turn = ask(ada, f"later {number}").turn_id
        kind = ada.signals()[0].kind.__class__("rating")
        ada._services.store.ledger.add_signal("ada", kind, {"value": -1}, turn=turn, source="app")
    ada.feedback(ask(ada), rating=1)
    assert ada.stack() == head


def test_late_feedback_on_older_replies_changes_nothing_of_a_probation(runtime: Runtime) -> None:
    """The replies to compare with are fixed when a revision goes live."""
    cy = runtime.user("cy")
    older = [ask(cy, f"older {number}") for number in range(30)]
    for reply in older[:15]:
        cy.feedback(reply, rating=1)
    correct(cy, 8, first=60)
    assert cy.learn().probation
    before = [LIKED] * 15 + [CORRECTED] * 8
    enough = next(n for n in range(20) if sequential_test(before, [DISLIKED] * n) is not None)
    for reply in older[15:]:
        cy.feedback(reply, rating=-1)
    dislike(cy, enough - 1)
    assert cy.stack().entries
    dislike(cy, 1)
    assert not cy.stack().entries


def test_evidence_accumulates_over_learns_and_ends_the_probation(runtime: Runtime) -> None:
    bo = runtime.user("bo")
    seen: set[str] = set()
    bets, asked = [], 0
    for _ in range(9):
        correct(bo, 6, first=asked)
        asked += 6
        report = bo.learn()
        assert report.verdict is Verdict.PROMOTED, report.reason
        bets.append(report.scores["e_value"])
        counted = set(report.scores["decided_items"])
        assert seen <= counted
        seen = counted
        if not report.probation:
            break
    assert bets == sorted(bets)
    assert bets[-1] >= CONFIRMATION_E_VALUE
    assert not report.probation
    correct(bo, 6, first=asked)
    assert bo.learn().scores["e_value"] < CONFIRMATION_E_VALUE


def test_learning_the_same_again_keeps_the_verdict_of_the_head(ada: User) -> None:
    before = ada.revisions()
    report = ada.learn(start="scratch")
    assert (report.outcome, report.verdict) == (LearnOutcome.UNCHANGED, None)
    assert report.reasons[-1].code is ReasonCode.SAME_AS_LIVE
    assert (ada.revisions(), len(ada.history())) == (before, 1)


def test_accepting_by_name_makes_a_refused_candidate_live_and_says_so(
    ada: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict = replace(
        Learner.from_services(ada._services), margins=Margins.model_construct(max_kl=-1.0)
    )
    monkeypatch.setattr(Learner, "from_services", lambda services: strict)
    correct(ada, 3, first=10)
    report = ada.learn(accept=True)
    assert (report.verdict, report.accepted, report.live) == (Verdict.REFUSED, True, True)
    codes = [each.code for each in report.reasons]
    assert codes[:2] == [ReasonCode.OVERRIDDEN, ReasonCode.KL_TOO_LARGE]
    assert ada.stack().entries[0].revision == report.revision
    assert ada.history()[-1].cause == "accepted"
    assert ada.revisions()[-1].reason == report.reason
    assert "personalpeft rollback style" in str(report)
    dislike(ada, 8)
    assert ada.stack().entries[0].revision == report.revision


def test_learn_that_ran_out_of_time_is_in_the_reports(ada: User) -> None:
    correct(ada, 8, first=10)
    report = ada.learn(seconds=1e-9)
    assert report.revision is None
    stored = ada.reports()[-1]
    assert (stored["outcome"], stored["verdict"]) == ("unfinished", None)
    assert stored["steps"] == report.steps > 0
    (budget,) = from_json(stored).reasons
    assert (budget.code, budget.data["step"]) == (ReasonCode.TIME_BUDGET, report.steps)


def test_each_item_keeps_its_best_score(ada: User) -> None:
    correct(ada, 4, first=10)
    pins = ada.learn().scores["items"]
    held = {s for r in ada.revisions() for s, role in r.signals.items() if role == "held_out"}
    assert set(pins) == held
    assert all(each["best"] >= each["after"] >= each["base"] for each in pins.values())


def test_dislikes_count_against_the_newest_layer_of_the_reply(ada: User) -> None:
    style = ada.stack().entries[0].revision
    for number in range(6):
        ada.teach(f"write an email number {number}", f"Dear {number}, regards", skill="email")
    skill = ada.learn(accept=True).revision
    for number in range(4):
        reply = ask(ada, f"write an email number {number}0")
        assert [entry.layer for entry in reply.stack.entries] == ["style", "skill.email"]
        ada.feedback(reply, rating=-1)
    assert [entry.revision for entry in ada.stack().entries] == [style]
    assert (ada.history()[-1].before, ada.history()[-1].cause) == (skill, "withdrawn")


@pytest.mark.parametrize(("value", "moves"), [(-0.4, 1), (-0.5, 2)])
def test_neutral_reward_says_nothing_against_a_revision(
    ada: User, value: float, moves: int
) -> None:
    for number in range(5):
        ada.feedback(ask(ada, f"later {number}"), reward=value)
    assert len(ada.history()) == moves
