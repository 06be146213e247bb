"""What a revision knows, and what of it was taken back since.

Invariant: what was taken back is a reason to learn until it was answered: by a build without it in the head's place, or by what lay
under all that the layer had learned. The answer stands until the head is learned once more, and, where the gate refused it, as
long as it would be the same build. Whoever went back to the head after it had the last word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from personalpeft.errors import NotFound
from personalpeft.learning.data.assignment import Assignment, rejected_lessons_for, lessons_for
from personalpeft.learning.gate.probation import ACCEPTED, LEARNED
from personalpeft.learning.report import LEARNED_USES, learns
from personalpeft.memory.conflicts import questions_in, same_words
from personalpeft.store.base import Store
from personalpeft.types import Revision, Signal, SignalKind, Verdict

TAKEN_BACK = "taken back"
"""The cause of a head's move to what lay under all that it had learned, when nothing of that is left."""

_Said: TypeAlias = tuple[object, ...]

_THUMBS = (SignalKind.RATING, SignalKind.REWARD)


def trained_on(store: Store, revision: Revision | None) -> set[str]:
    """All signals that the revision and those it was built on were trained on."""
    trained: set[str] = set()
    while revision is not None:
        trained |= {signal for signal, role in revision.signals.items() if role == "train"}
        revision = (
            store.catalog.revision(revision.user, revision.parent) if revision.parent else None
        )
    return trained


def practised_since(store: Store, revision: Revision, ground: Revision | None) -> bool:
    """Whether a revision, or what it was built on above some ``ground`` (None: the bare base), was practised. No build from
    lessons brings that back.
    """
    at: Revision | None = revision
    while at is not None and (ground is None or at.id != ground.id):
        if "practice" in at.recipe:
            return True
        at = store.catalog.revision(at.user, at.parent) if at.parent else None
    return False


def ground_of(store: Store, head: Revision) -> Revision | None:
    """What a head was built on in the end, where that is of no signals: somebody gave it, or it was practised. No build from
    lessons would bring it back.
    """
    while head.parent is not None:
        head = store.catalog.revision(head.user, head.parent)
    return head if not head.signals else None


def said_anew(
    store: Store, user: str, known: Collection[str], routings: Sequence[Assignment]
) -> set[str]:
    """What of the ``known`` signals no longer counts and yet need not be unlearned: facts of which every question has another
    answer now, since to learn that is to unlearn the old one; and what was said once more, and is a lesson in these words.
    """
    answering = {
        r.signal.id: set(questions_in(r.signal))
        for r in routings
        if r.signal.kind is SignalKind.FACT and r.extra_examples
    }
    lessons = {_said(r.signal) for r in routings if r.lesson is not None or r.extra_examples}
    current = {routing.signal.id for routing in routings}
    anew = {
        signal.id
        for signal in _signals(store, user, set(known) - current)
        if _said(signal) in lessons
    }
    for routing in routings:
        heir = routing.superseded_by if routing.superseded_by in answering else routing.signal.id
        older = routing.signal if heir != routing.signal.id else None
        while heir in answering:
            if older is not None and answering[heir].issuperset(questions_in(older)):
                anew.add(older.id)
            before = (older or routing.signal).supersedes
            if before is None:
                break
            older = store.ledger.signal(user, before)
    return anew


def taken_back(
    store: Store, user: str, head: Revision, routings: Sequence[Assignment]
) -> frozenset[str]:
    """What a head was trained on that was retracted or said otherwise since, and not said anew; also a like that gave way to a
    dislike, and a fact of which it is no longer known what it answers. What else only became no lesson, since later ones say
    otherwise, came with those and goes with them.
    """
    known = trained_on(store, head)
    current = {routing.signal.id: routing for routing in routings}
    undone = {signal for signal in known & current.keys() if _is_undone(current[signal], current)}
    return frozenset(known - current.keys() - said_anew(store, user, known, routings) | undone)


def answer_to(
    store: Store, head: Revision, gone: frozenset[str], routings: Sequence[Assignment]
) -> Revision | None:
    """The last that was built in a head's place without what is ``gone``; None where nothing was since the head was learned, or
    where it was refused and what would be built now is something else.
    """
    built = {
        revision.id: revision for revision in store.catalog.revisions(head.user, layer=head.layer)
    }
    lessons = {
        lesson.signal for of in (lessons_for, rejected_lessons_for) for lesson in of(routings, head.layer)
    }
    answer = None
    # By the reports, since these say in whose place: a build may come out as a revision that is older than the head.
    for report in learns(store.catalog.reports(head.user)):
        made = built.get(report.get("revision") or "")
        if made is None or not report.get("steps"):
            continue
        went_live = report["verdict"] == Verdict.PROMOTED or bool(report.get("accepted"))
        if made.id == head.id and went_live:
            answer = None
        elif report.get("before") == head.id != made.parent:
            learned = {
                source["signal"]
                for source in report.get("sources", ())
                if source["use"] in LEARNED_USES
            }
            if not gone & learned and (went_live or made.id == head.id or learned <= lessons):
                answer = made
    return answer


def was_let_go(store: Store, head: Revision) -> bool:
    """Whether all that a head had learned was taken back before, and it is live since somebody went back to it."""
    let_go = False
    for move in store.catalog.history(head.user, layer=head.layer):
        if move.before == head.id and move.cause == TAKEN_BACK:
            let_go = True
        elif move.after == head.id and move.cause in (LEARNED, ACCEPTED):
            let_go = False
    return let_go


def _signals(store: Store, user: str, ids: Collection[str]) -> list[Signal]:
    found = []
    for each in ids:
        try:
            found.append(store.ledger.signal(user, each))
        except NotFound:
            # It was forgotten, and so nothing says that it was said anew.
            continue
    return found


def _said(signal: Signal) -> _Said:
    """What a signal says as a lesson: what is the same of two is one lesson, whoever counts."""
    payload = signal.payload
    match signal.kind:
        case SignalKind.RATING | SignalKind.REWARD:
            return ("thumb", signal.turn, payload["value"] > 0)
        case SignalKind.EDIT | SignalKind.PREFERENCE:
            return ("answer", signal.turn, payload["text"])
        case SignalKind.FACT:
            return (
                "fact",
                frozenset(questions_in(signal)),
                same_words(payload.get("answer") or ""),
                payload["text"],
            )
    return (str(signal.kind), *sorted((key, str(value)) for key, value in payload.items()))


def _is_undone(routing: Assignment, current: Mapping[str, Assignment]) -> bool:
    """Whether what is no lesson any more has no later one in its place that brings a build."""
    if routing.superseded_by is None:
        return routing.signal.kind is SignalKind.FACT and not routing.extra_examples
    while routing.superseded_by is not None:
        routing = current[routing.superseded_by]
    # A dislike is no lesson where there are too few.
    return (
        routing.signal.kind in _THUMBS
        and routing.lesson is None
        and routing.signal.payload["value"] < 0
    )
