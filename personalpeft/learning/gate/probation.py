"""Decide by later feedback whether a revision that went live on thin evidence stays live.

The tests are in ``sequential_testing``.

Invariants: only a user's own acts count, one for each turn, and only those that training is allowed
on. If several revisions gave a reply together, its feedback counts for the one built last. The last
change explains a change for the worse. A choice between two revisions counts for these alone. A
revision is withdrawn only if a learn made it live, never if the user chose it. The same ledger
gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from personalpeft.learning.gate.sequential_testing import (
    FeedbackOutcome,
    ProbationResult,
    RunFeedback,
    sequential_test,
)
from personalpeft.learning.outcomes import LearnOutcome, MoveCause
from personalpeft.learning.report import LearnReport
from personalpeft.services import Services
from personalpeft.store.locks import learn_lease
from personalpeft.store.store import Store
from personalpeft.types import USER_SOURCE, HeadMove, Revision, Signal, SignalKind, Turn, Verdict

_MAX_SIGNALS = 400
"""How many signals are read before the revision went live, and how many since."""


def review_probation_with_lease(services: Services, user: str) -> tuple[LearnReport, ...]:
    """Take the user's learn lease, and ``review_probation``. Raises ``Busy`` if a learn runs."""
    store = services.store
    if not _heads_on_probation(store, user):
        return ()
    with store.leases.acquire(learn_lease(user)):
        return review_probation(services, user)


def review_probation(services: Services, user: str) -> tuple[LearnReport, ...]:
    """Record the probations of a user that end, and return their reports.

    The caller holds the user's learn lease.
    """
    store = services.store
    reports = []
    for revision in _heads_on_probation(store, user):
        history = store.catalog.head_moves(user, layer=revision.layer)
        moves = [move for move in history if move.after == revision.id]
        learned = [move for move in moves if move.cause == MoveCause.LEARN]
        causes = [move.cause for move in moves if move.cause != MoveCause.ROLLBACK_UNDONE]
        if not learned or causes[-1] not in (MoveCause.LEARN, MoveCause.WITHDRAWN):
            continue
        before, rated, since = _load_feedback(store, revision, {revision.id}, learned[0])
        run, began = _probation_run(store, revision, history)
        of_run = _load_run(store, revision, run, began, list(rated)) if len(run) > 1 else None
        e_value = float(revision.scores.get("e_value", 1.0))
        number = _probation_number(store, revision, history)
        result = sequential_test(before, since, e_value, number, of_run)
        if result is None:
            continue
        previous = began.before if result.is_of_run else learned[-1].before
        report = _end_probation(store, revision, result, previous, services.clock.now())
        reports += [report] if report is not None else []
    return tuple(reports)


def _heads_on_probation(store: Store, user: str) -> list[Revision]:
    heads = [layer.head for layer in store.catalog.layers(user) if layer.head is not None]
    revisions = [store.catalog.revision(user, head) for head in heads]
    return [revision for revision in revisions if revision.probation]


def _probation_run(
    store: Store, revision: Revision, history: Sequence[HeadMove]
) -> tuple[set[str], HeadMove]:
    """Return the revisions on probation that led to one, itself included, and the first's move."""
    run: set[str] = set()
    learned = {move.after: move for move in reversed(history) if move.cause == MoveCause.LEARN}
    at, began = revision, learned[revision.id]
    while True:
        run.add(at.id)
        began = learned[at.id]
        if began.before is None or began.before not in learned or began.before in run:
            return run, began
        at = store.catalog.revision(revision.user, began.before)
        if not at.probation or at.base != revision.base:
            return run, began


def _probation_number(store: Store, revision: Revision, history: Sequence[HeadMove]) -> int:
    """Return which probation of its layer a revision is on since the last confirmed one, from 1."""
    revisions = store.catalog.revisions(revision.user, layer=revision.layer)
    final = {
        each.id for each in revisions if each.verdict is Verdict.PROMOTED and not each.probation
    }
    learned = list(dict.fromkeys(x.after for x in history if x.cause == MoveCause.LEARN))
    number = 0
    for each in learned[: learned.index(revision.id) + 1]:
        number = 0 if each in final else number + 1
    return number


def _end_probation(
    store: Store, revision: Revision, result: ProbationResult, previous: str | None, at: datetime
) -> LearnReport | None:
    """Record the end; return None where the head has moved meanwhile."""
    is_withdrawn = result.outcome is LearnOutcome.WITHDRAWN
    if previous and store.catalog.revision(revision.user, previous).base != revision.base:
        previous = None
    report = LearnReport(
        user=revision.user,
        layer=revision.layer,
        outcome=result.outcome,
        reasons=(result.reason,),
        at=at,
        seconds=0.0,
        revision=revision.id,
        previous_head=previous,
    )
    verdict = Verdict.REFUSED if is_withdrawn else Verdict.PROMOTED
    judged = replace(revision, verdict=verdict, reason=report.reason, probation=False)
    is_recorded = store.catalog.switch_heads(
        revision.user,
        {revision.layer: previous if is_withdrawn else revision.id},
        expected={revision.layer: revision.id},
        judged=[(judged, report.as_json())],
        base=revision.base,
        cause=MoveCause.WITHDRAWN,
    )
    return report if is_recorded else None


def _load_run(
    store: Store, revision: Revision, run: set[str], began: HeadMove, own: Sequence[str]
) -> RunFeedback:
    """Return the feedback on a run of revisions. ``own``: the rated turns of the live one."""
    before, rated, _ = _load_feedback(store, revision, run, began)
    numbers = {turn: number for number, turn in enumerate(rated, 1)}
    # Feedback beyond the limit of a run changes its e-value no more.
    seen = [numbers.get(turn, len(rated)) for turn in own]
    return RunFeedback(before, list(rated.values()), seen)


def _load_feedback(
    store: Store, revision: Revision, run: set[str], learned: HeadMove
) -> tuple[list[FeedbackOutcome], dict[str, FeedbackOutcome], list[FeedbackOutcome]]:
    """Return the feedback on replies before a run of revisions, and on their own by turn.

    The third part adds the blind comparisons of ``revision``, the live one, to the second. What
    came before is fixed when the first revision goes live. A window that slid would be another test
    each time that one looks.
    """
    kinds = (SignalKind.RATING, SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.REWARD)
    signals = store.ledger.signals(revision.user, kinds=kinds)
    first = sum(each.at < learned.at for each in signals)
    by_turn: dict[str, list[Signal]] = {}
    for signal in signals[max(0, first - _MAX_SIGNALS) : first + _MAX_SIGNALS]:
        if signal.turn is not None and signal.source == USER_SOURCE and signal.is_trainable:
            by_turn.setdefault(signal.turn, []).append(signal)
    before: list[FeedbackOutcome] = []
    rated: dict[str, FeedbackOutcome] = {}
    since: list[FeedbackOutcome] = []
    order = {each.id: n for n, each in enumerate(store.catalog.revisions(revision.user))}
    for turn_id, on_turn in by_turn.items():
        turn = store.ledger.turn(revision.user, turn_id)
        if choices := [each for each in on_turn if "revision" in each.payload]:
            outcome = _outcome_of_choice(revision, learned.before, choices[-1], turn)
            since += [outcome] if outcome is not None else []
            continue
        outcome = _outcome_of(on_turn)
        if outcome is None:
            continue
        gave = [
            entry.revision
            for entry in turn.stack.entries
            if entry.weight and entry.revision in order
        ]
        if max(gave, key=order.__getitem__, default=None) in run:
            rated[turn_id] = outcome
            since.append(outcome)
        elif on_turn[0].at < learned.at and turn.stack.base == revision.base:
            before.append(outcome)
    return before, rated, since


def _outcome_of_choice(
    revision: Revision, previous: str | None, choice: Signal, turn: Turn
) -> FeedbackOutcome | None:
    """Return what a blind comparison says; None unless it is with the revision before.

    A win over the bare base, or over a refused revision, does not say that the layer got better.
    """
    if choice.payload.get("layer", revision.layer) != revision.layer:
        return None
    rejected = [each.revision for each in turn.stack.entries if each.layer == revision.layer]
    # Where the layer was left out, the bare base answered.
    chosen = choice.payload["revision"]
    before = [previous] if previous is not None else []
    if chosen == revision.id and rejected == before:
        return FeedbackOutcome.WON
    is_before = chosen == previous if previous else "@" not in chosen
    return FeedbackOutcome.LOST if rejected == [revision.id] and is_before else None


def _outcome_of(signals: Sequence[Signal]) -> FeedbackOutcome | None:
    """Return what the feedback on one reply says.

    A dislike outweighs a correction, and that a like.
    """
    values = [signal.rating for signal in signals]
    if min(values, default=0) < 0:
        return FeedbackOutcome.DISLIKED
    if any(signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE) for signal in signals):
        return FeedbackOutcome.CORRECTED
    return FeedbackOutcome.LIKED if max(values, default=0) > 0 else None
