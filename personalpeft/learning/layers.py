"""Order a user's layers, read their heads, and decide whether a head is stale.

One rule: a revision is stale if one of its inputs is no longer current. Its inputs are the signals
that it and its ancestors were trained on, and the stack below it. A signal counts by its content,
so one that was given again is current.

Nothing is built twice. A build in the head's place answers a retraction if it is valid by the same
rule. It may be live, refused or rolled back by the user. The answer is valid until the head is
learned again. The head's mark ``VALID_ON`` answers a change of the stack below. It says that the
head's lessons still pass on that stack. A head gets it if the build in its place did not go live.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from personalpeft.learning.data.training_examples import (
    Assignment,
    lessons_for,
    undesirable_lessons_for,
)
from personalpeft.learning.outcomes import FORBIDDEN_CODES, TRAINED_USES, LearnOutcome
from personalpeft.learning.report import LearnReport, from_json, outcome_reports
from personalpeft.memory.conflicts import normalize, normalized_questions
from personalpeft.store.store import Store
from personalpeft.types import (
    TRAINS,
    Revision,
    Signal,
    SignalKind,
    SignalRole,
    Stack,
    StackEntry,
)

VALID_ON = "holds_on"
"""Key in a revision's scores: digests of the stacks below on which it was found valid."""


def layer_order(layer: str) -> int:
    """Return the height of a layer. Layers of one height are not built on one another."""
    return {"style": 0, "memory": 2}.get(layer, 1)


def known_layers(store: Store, user: str, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    """Return all layers that have lessons or were built, lowest first; "style" if there is none."""
    built = [layer.name for layer in store.catalog.layers(user)]
    taught = [each.layer for each in assignments if each.layer is not None]
    names = list(dict.fromkeys((*built, *taught))) or ["style"]
    return tuple(sorted(names, key=layer_order))


def live_revision(store: Store, user: str, layer: str, live: Stack) -> Revision | None:
    """Return the live revision of a layer, or None."""
    entry = next((entry for entry in live.entries if entry.layer == layer), None)
    return store.catalog.revision(user, entry.revision) if entry is not None else None


def stack_below(store: Store, user: str, live: Stack, layer: str) -> Stack:
    """Return the part of a stack that a layer is built on.

    Style lies below skills, and skills below memory. A layer that is switched off or attached to
    some prompts only is left out. Otherwise no user would get the stack that was trained on.
    """
    scopes = {each.name: each.scope for each in store.catalog.layers(user)}
    order = layer_order(layer)
    entries = (
        entry
        for entry in live.entries
        if layer_order(entry.layer) < order and scopes[entry.layer] == "always" and entry.weight
    )
    return replace(live, entries=tuple(entries))


def replace_layer(stack: Stack, entry: StackEntry) -> Stack:
    """Return a stack with ``entry`` as its layer, above those that it may be built on."""
    rest = [each for each in stack.entries if each.layer != entry.layer]
    under = sum(layer_order(each.layer) < layer_order(entry.layer) for each in rest)
    return replace(stack, entries=(*rest[:under], entry, *rest[under:]))


def is_valid_on(revision: Revision, below: Stack) -> bool:
    """Return whether a revision was built on a stack, or revalidated on it."""
    built_on = Stack(below.base, revision.below).digest
    return below.digest in (built_on, *valid_stacks(revision))


def valid_stacks(revision: Revision) -> tuple[str, ...]:
    """Return the digests of the stacks below on which a revision was found valid."""
    stored = revision.scores.get(VALID_ON, ())
    # Earlier versions stored the last one only.
    return (stored,) if isinstance(stored, str) else tuple(stored)


@dataclass(frozen=True, slots=True)
class LayerState:
    """The current state of a layer: its head, and which inputs of the head are outdated.

    - ``live``: the user's stack; ``below`` is the part of it below the layer.
    - ``assignments``: all of the user.
    - ``outdated``: signals that the head was trained on and that are no longer lessons.
    - ``retracted``: those of them that no current signal replaced. Only they are a reason to learn.
      The others are unlearned when their replacement is learned.
    - ``current``: the signals that are lessons of the layer.
    """

    user: str
    layer: str
    live: Stack
    below: Stack
    assignments: tuple[Assignment, ...]
    head: Revision | None
    outdated: frozenset[str]
    retracted: frozenset[str]
    current: frozenset[str]

    @property
    def is_below_changed(self) -> bool:
        """Whether the head was neither built nor validated on the stack that is below it now."""
        return self.head is not None and not is_valid_on(self.head, self.below)

    @property
    def is_stale(self) -> bool:
        """Whether an input of the head is no longer current."""
        return bool(self.outdated) or self.is_below_changed


def inspect_layer(
    store: Store, user: str, layer: str, live: Stack, assignments: tuple[Assignment, ...]
) -> LayerState:
    """Return the state of a layer.

    Args:
        store: The open home.
        user: The user.
        layer: The layer.
        live: The user's live stack.
        assignments: All assignments of the user.
    """
    head = live_revision(store, user, layer, live)
    lessons = (*lessons_for(assignments, layer), *undesirable_lessons_for(assignments, layer))
    current = frozenset(lesson.signal for lesson in lessons)
    outdated = trained_on(store, head) - current
    retracted = outdated
    if outdated:
        replacements = _Replacements(store, user, assignments, current)
        outdated = {each for each in outdated if not replacements.is_restated(each)}
        retracted = {each for each in outdated if not replacements.is_replaced(each)}
    return LayerState(
        user,
        layer,
        live,
        stack_below(store, user, live, layer),
        assignments,
        head,
        frozenset(outdated),
        frozenset(retracted),
        current,
    )


def find_answer(store: Store, state: LayerState) -> LearnReport | None:
    """Return the report that answers the retractions of a head, or None while they are due.

    That is the last report of a build in the head's place without the retracted signals. A refused
    build answers nothing if one of its signals is no longer a lesson: a new build would differ. If
    no lesson was left, the answer is the report that the layer was cleared. A user who rolled back
    to the head since then keeps it.
    """
    head, answer = state.head, None
    if head is None:
        return None
    parents = {
        each.id: each.parent for each in store.catalog.revisions(head.user, layer=head.layer)
    }
    # Only reports name the replaced head: a build may equal a revision older than the head.
    for report in map(from_json, outcome_reports(store.catalog.reports(head.user))):
        revision = report.revision
        if revision == head.id and report.outcome is LearnOutcome.RETRACTED:
            answer = report
        elif revision not in parents or not report.steps or report.outcome.is_event:
            continue
        elif revision == head.id and report.live:
            answer = None
        elif report.before == head.id != parents[revision]:
            trained = {each.signal for each in report.sources if each.use_code in TRAINED_USES}
            is_valid = report.live or revision == head.id or trained <= state.current
            if is_valid and not trained & state.retracted:
                answer = report
    return answer


def ancestors(store: Store, revision: Revision | None) -> Iterator[Revision]:
    """Yield a revision and those that it was built on, newest first."""
    while revision is not None:
        yield revision
        parent = revision.parent
        revision = store.catalog.revision(revision.user, parent) if parent else None


def trained_on(store: Store, revision: Revision | None) -> set[str]:
    """Return all signals that a revision and its ancestors were trained on."""
    return {
        signal
        for each in ancestors(store, revision)
        for signal, role in each.signals.items()
        if role == SignalRole.TRAINED
    }


def has_practice_since(store: Store, revision: Revision, root: Revision | None) -> bool:
    """Return whether a revision or an ancestor above ``root`` was practised.

    No build from lessons brings practice back.
    """
    for each in ancestors(store, revision):
        if root is not None and each.id == root.id:
            return False
        if "practice" in each.recipe:
            return True
    return False


def root_revision(store: Store, head: Revision) -> Revision | None:
    """Return the oldest ancestor where it has no signals: it was imported, or practised.

    No build from lessons brings it back.
    """
    *_, root = ancestors(store, head)
    return None if root.signals else root


class _Replacements:
    """Finds the current signals that replaced signals which are no longer lessons."""

    def __init__(
        self,
        store: Store,
        user: str,
        assignments: Sequence[Assignment],
        current: Collection[str],
    ) -> None:
        self._assignments = {each.signal.id: each for each in assignments}
        self._signals = {each.id: each for each in store.ledger.signals(user, current=False)}
        self._newer = {each.supersedes: each.id for each in self._signals.values()}
        self._contents = {_content(self._signals[signal]) for signal in current}

    def is_restated(self, signal: str) -> bool:
        """Return whether a lesson in the same words is current, or a fact with other answers.

        To learn another answer to all questions of a fact is to unlearn the fact.
        """
        old, newest = self._signals[signal], self._newest(signal)
        if _content(old) in self._contents:
            return True
        is_fact = newest is not None and newest.signal.kind is SignalKind.FACT
        if newest is None or not is_fact or not newest.extra_examples:
            return False
        return set(normalized_questions(old)) <= set(normalized_questions(newest.signal))

    def is_replaced(self, signal: str) -> bool:
        """Return whether a current signal gave way to a later one that causes a build.

        A fact without known questions has no successor. Too few dislikes are no lesson. Nothing is
        built from a signal that training is not allowed on.
        """
        newest = self._newest(signal) if signal in self._assignments else None
        if newest is None or newest.reason.code in FORBIDDEN_CODES:
            return False
        if newest.signal.id == signal:
            return newest.signal.kind is not SignalKind.FACT
        is_rating = newest.signal.kind in (SignalKind.RATING, SignalKind.REWARD)
        return not is_rating or newest.lesson is not None or newest.signal.payload["value"] >= 0

    def _newest(self, signal: str) -> Assignment | None:
        """Return the signal that finally replaced a signal, or None if that was retracted."""
        newer: str | None = signal
        while newer is not None:
            signal = newer
            known = self._assignments.get(signal)
            newer = known.superseded_by if known is not None else self._newer.get(signal)
        return self._assignments.get(signal)


def _content(signal: Signal) -> tuple[object, ...]:
    """Return what a signal teaches: signals of the same content are one lesson."""
    payload = signal.payload
    match signal.kind:
        case SignalKind.RATING | SignalKind.REWARD:
            return "rating", signal.turn, payload["value"] > 0
        case SignalKind.EDIT | SignalKind.PREFERENCE:
            return "answer", signal.turn, payload["text"]
        case SignalKind.FACT:
            questions = frozenset(normalized_questions(signal))
            return "fact", questions, normalize(payload.get("answer") or ""), payload["text"]
    rest = (item for item in payload.items() if item[0] != TRAINS)
    return str(signal.kind), *sorted((key, str(value)) for key, value in rest)
