"""Order a user's layers, read their heads and held-out lessons, and decide if a head is stale.

One rule: a revision is stale if it was trained on a signal that is no longer a lesson, or if the
stack below its layer is another one. A signal counts by its content, so one that was given again is
a lesson still. A head that was revalidated is valid on that stack too.

Nothing is built twice. A stale head is built again once. That build may be live, refused or rolled
back: while it is not stale itself, only other lessons or another stack below cause another build.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_assignment import (
    Assignment,
    lessons_for,
    load_assignments,
    scrub_assignments,
)
from personalpeft.learning.outcomes import LearnOutcome
from personalpeft.learning.report import LearnReport, from_json, outcome_reports
from personalpeft.memory.conflicts import normalized_questions
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import (
    TRAINS,
    Revision,
    Signal,
    SignalKind,
    SignalRole,
    Stack,
    StackEntry,
    canonical_digest,
)

VALID_ON = "holds_on"
"""Stored key in a revision's scores: digests of the stacks below on which it was found valid."""


def layer_order(layer: str) -> int:
    """Return the height of a layer. Layers of one height are not built on one another."""
    return {"style": 0, "memory": 2}.get(layer, 1)


def known_layers(store: Store, user: str, assignments: Sequence[Assignment]) -> tuple[str, ...]:
    """Return all layers that have lessons or were built, lowest first; "style" if there is none.

    Args:
        store: The open home.
        user: The user.
        assignments: All assignments of the user.
    """
    built = [layer.name for layer in store.catalog.layers(user)]
    taught = [each.layer for each in assignments if each.layer is not None]
    names = list(dict.fromkeys((*built, *taught))) or ["style"]
    return tuple(sorted(names, key=layer_order))


def stack_below(store: Store, user: str, live: Stack, layer: str) -> Stack:
    """Return the part of a stack that a layer is built on.

    Style lies below skills, and skills below memory. A layer that is switched off or attached to
    some prompts only is left out. Otherwise no user would get the stack that was trained on.

    Args:
        store: The open home.
        user: The user.
        live: The stack.
        layer: The layer.
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


@dataclass(frozen=True)
class LayerState:
    """The current state of a layer in a stack of its user: its head, and whether that is stale.

    ``assignments`` are all of the user. What follows from them is read once, when it is asked for.
    """

    store: Store
    user: str
    layer: str
    live: Stack
    assignments: tuple[Assignment, ...]

    @cached_property
    def head(self) -> Revision | None:
        """The layer's revision in the stack."""
        return self._head_of(self.layer)

    @cached_property
    def below(self) -> Stack:
        """The part of the stack below the layer."""
        return stack_below(self.store, self.user, self.live, self.layer)

    @cached_property
    def outdated(self) -> frozenset[str]:
        """The signals that the head was trained on and that are no longer lessons."""
        return self._outdated_in(self.head)

    @property
    def is_below_changed(self) -> bool:
        """Whether the head is not valid on the stack below. One that outlived a build is."""
        is_valid = self.head is None or is_valid_on(self.head, self.below)
        return not is_valid and self.outcome is None

    @cached_property
    def outcome(self) -> LearnReport | None:
        """The report of the last build to replace a stale head that is not stale itself.

        If no lesson was left, that is the report that the layer was cleared. What was built before
        the head was last learned does not count.
        """
        head = self.head
        if head is None or (not self.outdated and is_valid_on(head, self.below)):
            return None
        catalog = self.store.catalog
        built = {each.id: each for each in catalog.revisions(self.user, layer=self.layer)}
        # Only reports name the replaced head: a build may equal a revision older than the head.
        for report in map(from_json, reversed(outcome_reports(catalog.reports(self.user)))):
            is_head, revision = report.revision == head.id, built.get(report.revision or "")
            if is_head and report.outcome is LearnOutcome.RETRACTED:
                return report
            if revision is None or not report.steps:
                continue
            if is_head and report.live:
                return None
            is_in_place = report.previous_head == head.id != revision.parent and is_valid_on(
                revision, self.below
            )
            # A build that equals the head shows that no other is to be had.
            if is_in_place and (is_head or not self._outdated_in(revision)):
                return report
        return None

    @property
    def is_stale(self) -> bool:
        """Whether the head cannot be built on."""
        return bool(self.outdated) or self.is_below_changed

    @property
    def is_due(self) -> bool:
        """Whether the head is stale and nothing was built in its place yet."""
        return self.is_stale and self.outcome is None

    @property
    def holdout(self) -> tuple[Lesson, ...]:
        """The held-out lessons of the layer, and the test questions of facts that its head learned.

        They are scrubbed as the head's lessons were.
        """
        return self._holdout_of(self.layer)

    @property
    def holdout_beside(self) -> tuple[Lesson, ...]:
        """The same of all other layers of the live stack."""
        others = [entry.layer for entry in self.live.entries if entry.layer != self.layer]
        return tuple(lesson for layer in others for lesson in self._holdout_of(layer))

    def _holdout_of(self, layer: str) -> tuple[Lesson, ...]:
        head = self._head_of(layer)
        held_out = set(self.store.catalog.holdout(self.user, layer))
        learned = trained_on(self.store, head)
        countries = head.recipe.get("scrub", ()) if head else ()
        return tuple(
            lesson
            for lesson in lessons_for(scrub_assignments(self.assignments, layer, countries), layer)
            if lesson.signal in held_out or (lesson.is_test and lesson.signal in learned)
        )

    @property
    def repeated_signals(self) -> frozenset[str]:
        """The signals that teach only what the head was trained on as other signals."""
        learned = trained_on(self.store, self.head)
        if not learned:
            return frozenset()
        contents = {
            each
            for signal in self.store.ledger.signals(self.user, current=False)
            if signal.id in learned
            for each in _contents(signal)
        }
        signals = (each.signal for each in self.assignments)
        return frozenset(each.id for each in signals if _contents(each) <= contents) - learned

    def _head_of(self, layer: str) -> Revision | None:
        entry = next((entry for entry in self.live.entries if entry.layer == layer), None)
        return self.store.catalog.revision(self.user, entry.revision) if entry else None

    def _outdated_in(self, revision: Revision | None) -> frozenset[str]:
        """Return the signals that a revision was trained on and that are no longer lessons.

        One whose contents later lessons have is not among them.
        """
        current = {each.signal.id for each in self.assignments if each.layer == self.layer}
        outdated = trained_on(self.store, revision) - current
        if not outdated:
            return frozenset()
        later, found = set[str](), set[str]()
        for signal in reversed(self.store.ledger.signals(self.user, current=False)):
            if signal.id in current:
                later |= _contents(signal)
            elif signal.id in outdated and not _contents(signal) <= later:
                found.add(signal.id)
        return frozenset(found)


def inspect_live_layer(services: Services, user: str, layer: str) -> LayerState:
    """Read the ledger, and return the state of a layer in the user's live stack.

    Args:
        services: The wired parts.
        user: The user.
        layer: The layer.

    Raises:
        NotFound: The user is unknown.
        BaseMismatch: The live stack is of another base.
    """
    store = services.store
    live = store.catalog.stack(user, services.base.digest)
    return LayerState(store, user, layer, live, load_assignments(store, user))


def _contents(signal: Signal) -> set[str]:
    """Return what a signal teaches, for comparison.

    Of a fact these are its questions: to learn another answer to them is to unlearn the fact.
    """
    if signal.kind is SignalKind.FACT and signal.payload.get("questions"):
        return set(normalized_questions(signal))
    payload = {key: value for key, value in signal.payload.items() if key != TRAINS}
    return {canonical_digest([signal.kind, signal.turn, payload])}


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


def root_revision(store: Store, head: Revision) -> Revision | None:
    """Return the oldest ancestor where it has no signals: it was imported, or practiced.

    No build from lessons brings it back.
    """
    *_, root = ancestors(store, head)
    return None if root.signals else root


def held_out_signals(
    store: Store, user: str, layer: str, assignments: Sequence[Assignment]
) -> set[str]:
    """Return the signals that a layer holds out, with all that replaced them.

    Args:
        store: The open home.
        user: The user.
        layer: The layer.
        assignments: All assignments of the user.
    """
    newer: dict[str | None, str | None] = {
        each.supersedes: each.id for each in store.ledger.signals(user, current=False)
    }
    newer |= {each.signal.id: each.superseded_by for each in assignments if each.superseded_by}
    found = set(store.catalog.holdout(user, layer))
    for signal in tuple(found):
        while (replacement := newer.get(signal)) is not None and replacement not in found:
            found.add(replacement)
            signal = replacement
    return found
