"""What a revision knows, and what of it was taken back since.

Invariant: what was taken back is a reason to learn until one build without it was made in the head's place, or the base answered.
After that it is none: where the build was refused another would be too, and whoever went back to the head had the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from personalpeft.learning.lessons import Routing
from personalpeft.learning.report import LEARNED, learns
from personalpeft.store.base import Store
from personalpeft.telling import same_words
from personalpeft.types import Revision, Signal, SignalKind

TAKEN_BACK = "taken back"
"""The cause of a head's move to the base when nothing is left of what it had learned."""


def trained_on(store: Store, revision: Revision | None) -> set[str]:
    """All signals that the revision and those it was built on were trained on."""
    trained: set[str] = set()
    while revision is not None:
        trained |= {signal for signal, role in revision.signals.items() if role == "train"}
        revision = store.catalog.revision(revision.user, revision.parent) if revision.parent else None
    return trained


def said_anew(store: Store, user: str, routings: Sequence[Routing]) -> set[str]:
    """What no longer counts and yet need not be unlearned: facts of which every question has another answer now, since to learn
    that is to unlearn the old one; and what was said a second time in the same words, and is a lesson in these.
    """
    answering = {r.signal.id: _questions(r.signal) for r in routings if r.signal.kind is SignalKind.FACT and r.beside}
    anew: set[str] = set()
    for routing in routings:
        if routing.lesson is not None:
            anew |= _repeated(store, user, routing.signal)
        heir = routing.instead if routing.instead in answering else routing.signal.id
        older = routing.signal if heir != routing.signal.id else None
        while heir in answering:
            if older is not None and _questions(older) <= answering[heir]:
                anew.add(older.id)
            before = (older or routing.signal).supersedes
            if before is None:
                break
            older = store.ledger.signal(user, before)
    return anew


def taken_back(store: Store, user: str, head: Revision, routings: Sequence[Routing]) -> frozenset[str]:
    """What a head was trained on that was retracted or said otherwise since, and not said anew; a like that gave way to a
    dislike too. What else only became no lesson, since later ones say otherwise, came with those and goes with them.
    """
    known = trained_on(store, head)
    current = {routing.signal.id: routing for routing in routings}
    disliked = {signal for signal in known & current.keys() if _gave_way_to_a_dislike(current[signal], current)}
    return frozenset(known - current.keys() - said_anew(store, user, routings) | disliked)


def answer_to(store: Store, head: Revision, gone: frozenset[str]) -> Revision | None:
    """What was built from nothing in a head's place without what is ``gone``, whatever became of it; None where nothing was."""
    built = {revision.id: revision for revision in store.catalog.revisions(head.user, layer=head.layer)}
    # By the reports, since these say in whose place: a build may come out as a revision that is older than the head.
    for report in learns(store.catalog.reports(head.user)):
        made = built.get(report["revision"])
        if made is None or report["before"] != head.id or not report["steps"] or made.parent is not None:
            continue
        if not gone & {source["signal"] for source in report["sources"] if source["use"] in LEARNED}:
            return made
    return None


def was_let_go(store: Store, head: Revision) -> bool:
    """Whether the base took this head's place before, since all that it had learned was taken back."""
    moves = store.catalog.history(head.user, layer=head.layer)
    return any(move.before == head.id and move.cause == TAKEN_BACK for move in moves)


def _repeated(store: Store, user: str, signal: Signal) -> set[str]:
    older: set[str] = set()
    before = signal.supersedes
    while before is not None:
        former = store.ledger.signal(user, before)
        if (former.kind, former.payload) != (signal.kind, signal.payload):
            break
        older.add(former.id)
        before = former.supersedes
    return older


def _gave_way_to_a_dislike(routing: Routing, current: Mapping[str, Routing]) -> bool:
    """A dislike that is no lesson (there are too few) brings no build by itself."""
    if routing.instead is None:
        return False
    while routing.instead is not None:
        routing = current[routing.instead]
    thumb = routing.signal.kind in (SignalKind.RATING, SignalKind.REWARD)
    return thumb and routing.lesson is None and routing.signal.payload["value"] < 0


def _questions(fact: Signal) -> set[str]:
    return {same_words(question) for question in fact.payload.get("questions") or ()}
