"""What became of every signal: where the write policy puts it and why, and what the builds have made of it.

Invariant: one account for each signal, in the order of the ledger; nothing is decided here that ``lessons.route`` and the
catalog do not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from personalpeft.learning.data.assignment import Place, Assignment, load_assignments
from personalpeft.learning.plan import still_pinned
from personalpeft.learning.report import NO_ROOM
from personalpeft.store.base import Store
from personalpeft.types import Layer, Revision, Signal

Use: TypeAlias = Literal[
    "acts now",
    "to be learned",
    "learned",
    "learned, not live",
    "held back to judge by",
    "left out: the layer is full",
    "only kept",
    "superseded",
    "taken back",
]


@dataclass(frozen=True, slots=True)
class Account:
    """One signal: its ``place`` (with the ``layer``, where it is one; "history" for what is no longer current) and
    ``why``, and its ``use`` so far. ``revision`` is the one that first learned it among those that are live, else the last
    that tried, else None; for what is held back, the one that pinned it, and None for what takes the place of such a one.
    """

    signal: Signal
    place: Place | Literal["history"]
    layer: str | None
    why: str
    use: Use
    revision: str | None = None

    @property
    def pinned(self) -> bool:
        """Whether it is a question that judges, and never trained on."""
        return self.use == "held back to judge by"


def accounts(store: Store, user: str, *, current: bool) -> tuple[Account, ...]:
    """Oldest first; with ``current=False`` also what was superseded or taken back. Raises
    ``NotFound`` for an unknown user.
    """
    ledger = store.ledger
    routings = load_assignments(store, user)
    built = _Built(store, user, routings)
    told = {routing.signal.id: _of(routing, built) for routing in routings}
    if current:
        return tuple(told.values())
    everything = ledger.signals(user, current=False)
    heirs = {signal.supersedes: signal.id for signal in everything if signal.supersedes}
    return tuple(
        told.get(signal.id) or _former(signal, heirs.get(signal.id), built) for signal in everything
    )


class _Built:
    """What a user's revisions have learned and pinned, by layer and signal."""

    def __init__(self, store: Store, user: str, routings: Sequence[Assignment]) -> None:
        revisions = {revision.id: revision for revision in store.catalog.revisions(user)}
        self.live: dict[str, str] = {}
        self.tried: dict[tuple[str, str], str] = {}
        self.pinned: dict[tuple[str, str], str | None] = {}
        self.left_out: frozenset[str] = frozenset()
        for revision in revisions.values():
            for signal, role in revision.signals.items():
                if role == "pinned":
                    self.pinned.setdefault((revision.layer, signal), revision.id)
                else:
                    self.tried[revision.layer, signal] = revision.id
        for layer in store.catalog.layers(user):
            for signal in still_pinned(
                store, user, routings, set(store.catalog.pinned(user, layer.name))
            ):
                self.pinned.setdefault((layer.name, signal), None)
            for revision in _line(layer, revisions):
                self.live |= {
                    signal: revision.id
                    for signal, role in revision.signals.items()
                    if role == "train"
                }
        for report in store.catalog.reports(user):
            if report.get("room"):
                # The last word of a layer that can be full; only one of them can.
                self.left_out = frozenset(
                    s["signal"] for s in report["sources"] if s["use"] == NO_ROOM
                )


def _line(layer: Layer, revisions: dict[str, Revision]) -> Iterator[Revision]:
    """The head and those that it was built on, newest first."""
    at = layer.head
    while at is not None:
        yield revisions[at]
        at = revisions[at].parent


def _of(routing: Assignment, built: _Built) -> Account:
    signal, layer = routing.signal, routing.layer
    use, revision = _use(routing, built)
    return Account(signal, routing.place, layer, routing.why, use, revision)


def _use(routing: Assignment, built: _Built) -> tuple[Use, str | None]:
    signal, layer = routing.signal.id, routing.layer
    if layer is None and routing.place in ("profile", "memory"):
        return "acts now", None
    if layer is None:
        return "only kept", built.live.get(signal)
    if (layer, signal) in built.pinned:
        return "held back to judge by", built.pinned[layer, signal]
    if signal in built.live:
        return "learned", built.live[signal]
    if signal in built.left_out:
        return "left out: the layer is full", None
    if (layer, signal) in built.tried:
        return "learned, not live", built.tried[layer, signal]
    return "to be learned", None


def _former(signal: Signal, heir: str | None, built: _Built) -> Account:
    why = f"{heir} came in its place" if heir else "it was taken back"
    return Account(
        signal,
        "history",
        None,
        why,
        "superseded" if heir else "taken back",
        built.live.get(signal.id),
    )
