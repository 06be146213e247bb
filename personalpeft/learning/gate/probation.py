"""Whether a revision that is live on thin evidence stays: what people said of its replies since decides.

Both directions are bets, as in ``gate.py``. For it: each reply that was liked multiplies the stake that its lessons won
by 1.5, each that was not by 0.5; at ``ENOUGH`` (20) the probation ends. Against it, and separately for replies that were
disliked and replies that were corrected: how large was their share among the replies that were judged before it? One
stakes on half of the rest going wrong too. At 20 the revision is withdrawn. Where the true share has not grown, that
happens to at most one revision of twenty by each of the two bets, so to at most one of ten, however often one looks
(Ville 1939). A share counts as a quarter at least, so it takes four dislikes, and somebody who corrects every reply
anyway says nothing against a revision by going on.

Of several revisions that gave a reply together nobody can tell whose fault it is; it counts for the one that was built
last, since what grew worse did so by what changed.

Invariants: only a person's own acts count, one for each turn; who chose between two revisions has said something of these and of
nothing that both had part in; only a revision that a learn made live is withdrawn, never
one that somebody named; the same ledger gives the same outcome, and looking again changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Literal

from personalpeft.learning.data.ratings import liking_of
from personalpeft.learning.gate.gate import CONFIRMATION_E_VALUE, LOSS, WIN, Judgement
from personalpeft.learning.report import LearnReport
from personalpeft.store.base import Store
from personalpeft.types import PERSON, HeadMove, Revision, Signal, SignalKind, Verdict

LEARNED, WITHDRAWN = "learn", "withdrawn"
"""Causes of a head's move. A head that came by one of them may be on probation."""

ACCEPTED = "accepted"
"""That of a revision that the user wanted although the gate refused."""

ROLLBACK, UNDONE = "rollback", "rollback undone"
"""What a person moved by hand. A head that came back since its rollback was undone is what it was before."""

_SMALLEST_SHARE = 0.25
_MOST_SIGNALS = 400


class FeedbackOutcome(StrEnum):
    """What a person made of one reply."""

    LIKED = "liked"
    DISLIKED = "disliked"
    CORRECTED = "corrected"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a probation, and why."""

    end: Literal["withdrawn", "confirmed"]
    reason: str


def sequential_test(
    before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], e_value: float = 1.0
) -> Outcome | None:
    """The end of a probation, or None while it goes on. ``before`` are opinions of replies from before the revision was
    live, ``since`` of its own; ``stake`` is what its lessons won.
    """
    bets = {kind: _bet(before, kind) for kind in (FeedbackOutcome.DISLIKED, FeedbackOutcome.CORRECTED)}
    stakes = dict.fromkeys(bets, 1.0)
    # After each reply, and not at the end alone, so that it does not matter when somebody looks.
    for count, opinion in enumerate(since, 1):
        for kind, (won, lost) in bets.items():
            stakes[kind] *= won if opinion is kind else lost
            if stakes[kind] >= CONFIRMATION_E_VALUE:
                earlier = f", {before.count(kind)} of {len(before)} before it" if before else ""
                return Outcome(
                    "withdrawn",
                    f"{since[:count].count(kind)} of {count} replies were {kind}{earlier}",
                )
        e_value *= WIN if opinion is FeedbackOutcome.LIKED else LOSS
        if e_value >= CONFIRMATION_E_VALUE:
            return Outcome(
                "confirmed", f"{since[:count].count(FeedbackOutcome.LIKED)} of {count} replies were liked"
            )
    return None


def withdrawal_e_value(before: Sequence[FeedbackOutcome], since: Sequence[FeedbackOutcome], kind: FeedbackOutcome) -> float:
    """What one unit has become that was staked on a larger share of ``kind`` than before."""
    won, lost = _bet(before, kind)
    bad = since.count(kind)
    return won**bad * lost ** (len(since) - bad)


def _bet(before: Sequence[FeedbackOutcome], kind: FeedbackOutcome) -> tuple[float, float]:
    """What a stake becomes by a reply of ``kind``, and by another."""
    # As if there had been one reply more of each sort, since few replies say little of a share.
    share = max(_SMALLEST_SHARE, (before.count(kind) + 1) / (len(before) + 2))
    feared = (1 + share) / 2
    return feared / share, (1 - feared) / (1 - share)


def review_probation_locked(store: Store, user: str, now: Callable[[], datetime]) -> tuple[LearnReport, ...]:
    """Decides, under the user's learn lease, about what is on probation; quick where nothing is. Raises ``Busy`` while a
    learn runs, which will look itself.
    """
    if not _on_probation(store, user):
        return ()
    with store.lease(f"learn-{user}"):
        return review_probation(store, user, now)


def review_probation(store: Store, user: str, now: Callable[[], datetime]) -> tuple[LearnReport, ...]:
    """As ``look_again``, for who holds the lease."""
    reports = []
    for revision in _on_probation(store, user):
        moves = [
            move
            for move in store.catalog.history(user, layer=revision.layer)
            if move.after == revision.id
        ]
        learned = [move for move in moves if move.cause == LEARNED]
        came = [move.cause for move in moves if move.cause != UNDONE]
        if not learned or came[-1] not in (LEARNED, WITHDRAWN):
            continue
        before, since = _opinions(store, revision, learned[0].at)
        outcome = sequential_test(before, since, float(revision.scores.get("bet", 1.0)))
        if outcome is None:
            continue
        report = _ended(store, revision, outcome, learned[-1].before, now())
        if report is not None:
            reports.append(report)
    return tuple(reports)


def refuse_withdrawn(store: Store, user: str, revision: str, judgement: Judgement) -> Judgement:
    """A judgement that does not promote the very revision that was live and has been withdrawn."""
    withdrawn = any(
        move.before == revision and move.cause == WITHDRAWN for move in store.catalog.history(user)
    )
    if judgement.verdict is Verdict.PROMOTED and withdrawn:
        return Judgement(
            Verdict.REFUSED, "it is the revision that was withdrawn, and nothing new has come since"
        )
    return judgement


def _on_probation(store: Store, user: str) -> list[Revision]:
    heads = [layer.head for layer in store.catalog.layers(user) if layer.head is not None]
    revisions = [store.catalog.revision(user, head) for head in heads]
    return [revision for revision in revisions if revision.probation]


def _ended(
    store: Store, revision: Revision, outcome: Outcome, back: str | None, at: datetime
) -> LearnReport | None:
    """Records the end; None where the head has moved meanwhile."""
    withdrawn = outcome.end == "withdrawn"
    if back is not None and store.catalog.revision(revision.user, back).base != revision.base:
        back = None
    judged = replace(
        revision,
        verdict=Verdict.REFUSED if withdrawn else Verdict.PROMOTED,
        reason=f"{outcome.end}: {outcome.reason}",
        probation=False,
    )
    report = LearnReport(
        user=revision.user,
        layer=revision.layer,
        verdict=judged.verdict,
        reason=judged.reason,
        at=at,
        seconds=0.0,
        revision=revision.id,
        before=back,
        event=outcome.end,
    )
    move = HeadMove(
        revision.user,
        revision.layer,
        revision.id,
        back if withdrawn else revision.id,
        WITHDRAWN,
        at,
    )
    return report if store.catalog.judge_again(judged, report.as_json(), move=move) else None


def _opinions(
    store: Store, revision: Revision, live_since: datetime
) -> tuple[list[FeedbackOutcome], list[FeedbackOutcome]]:
    """Opinions of replies from before the revision was live, and of its own, one for each turn; oldest first."""
    kinds = (SignalKind.RATING, SignalKind.EDIT, SignalKind.PREFERENCE, SignalKind.REWARD)
    said: dict[str, list[Signal]] = {}
    for signal in store.ledger.signals(revision.user, kinds=kinds)[-_MOST_SIGNALS:]:
        if signal.turn is not None and signal.source == PERSON:
            said.setdefault(signal.turn, []).append(signal)
    before, since = [], []
    built = {each.id: place for place, each in enumerate(store.catalog.revisions(revision.user))}
    for turn_id, every in said.items():
        signals = [
            signal
            for signal in every
            if signal.payload.get("layer", revision.layer) == revision.layer
        ]
        turn = store.ledger.turn(revision.user, turn_id)
        chosen = any(signal.payload.get("revision") == revision.id for signal in signals)
        compared = any("revision" in signal.payload for signal in signals)
        gave = [
            entry.revision
            for entry in turn.stack.entries
            if entry.weight and entry.revision in built
        ]
        own = (
            revision.id in gave
            if compared
            else revision.id == max(gave, key=built.__getitem__, default=None)
        )
        opinion = FeedbackOutcome.LIKED if chosen else _opinion(signals)
        if opinion is not None and (own or chosen):
            since.append(opinion)
        elif opinion is not None and turn.at < live_since and turn.stack.base == revision.base:
            before.append(opinion)
    return before, since


def _opinion(signals: Sequence[Signal]) -> FeedbackOutcome | None:
    """Of one reply: a dislike says more than a correction, and that more than a like. Who chose another revision's answer
    in a blind comparison has disliked this one.
    """
    values = [liking_of(signal) for signal in signals]
    if min(values, default=0) < 0 or any("revision" in signal.payload for signal in signals):
        return FeedbackOutcome.DISLIKED
    if any(signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE) for signal in signals):
        return FeedbackOutcome.CORRECTED
    return FeedbackOutcome.LIKED if max(values, default=0) > 0 else None
