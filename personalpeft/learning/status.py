"""What became of every signal. No model is loaded.

Invariant: one status for each signal, in the order of the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.learning.data.assignment import (
    Assignment,
    load_assignments,
)
from personalpeft.learning.outcomes import (
    Placement,
    Reason,
    ReasonCode,
    SignalUse,
    reason,
)
from personalpeft.learning.plan import inherited_holdout
from personalpeft.learning.report import from_json, outcome_reports
from personalpeft.learning.staleness import (
    ancestors,
)
from personalpeft.store.store import Store
from personalpeft.types import Signal


@dataclass(frozen=True, slots=True)
class SignalStatus:
    """One signal: where it is placed and why, and its use so far.

    ``layer`` is set where a layer may learn from it. ``revision`` is the live one that first
    learned it, else the last that was trained on it; for a held-out signal the one that held it
    out, and None for a successor of one.
    """

    json_properties = ("use", "why", "pinned")

    signal: Signal
    place: Placement
    layer: str | None
    reason: Reason
    use_code: SignalUse
    revision: str | None = None

    @property
    def use(self) -> str:
        """The use in words."""
        return self.use_code.text

    @property
    def why(self) -> str:
        """The reason in words."""
        return str(self.reason)

    @property
    def pinned(self) -> bool:
        """Whether it is held out to judge by, and never trained on."""
        return self.use_code is SignalUse.HELD_OUT


def list_signal_status(store: Store, user: str, *, current: bool) -> tuple[SignalStatus, ...]:
    """Return the status of each signal, oldest first. Raises ``NotFound``."""
    assignments = load_assignments(store, user)
    builds = _Builds(store, user, assignments)
    status = {
        each.signal.id: SignalStatus(
            each.signal, each.place, each.layer, each.reason, *_use_of(each, builds)
        )
        for each in assignments
    }
    if current:
        return tuple(status.values())
    signals = store.ledger.signals(user, current=False)
    newer = {signal.supersedes: signal.id for signal in signals if signal.supersedes}
    return tuple(
        status.get(each.id) or _former_status(each, newer.get(each.id), builds) for each in signals
    )


class _Builds:
    """Which revisions were trained on a signal or hold it out, by layer and signal."""

    def __init__(self, store: Store, user: str, assignments: Sequence[Assignment]) -> None:
        self.live: dict[str, str] = {}
        self.tried: dict[tuple[str, str], str] = {}
        self.held_out: dict[tuple[str, str], str | None] = {}
        self.excluded: frozenset[str] = frozenset()
        for revision in store.catalog.revisions(user):
            for signal, role in revision.signals.items():
                if role == "pinned":
                    self.held_out.setdefault((revision.layer, signal), revision.id)
                else:
                    self.tried[revision.layer, signal] = revision.id
        for layer in store.catalog.layers(user):
            pinned = set(store.catalog.holdout(user, layer.name))
            for signal in inherited_holdout(store, user, assignments, pinned):
                self.held_out.setdefault((layer.name, signal), None)
            head = store.catalog.revision(user, layer.head) if layer.head else None
            for revision in ancestors(store, head):
                trained = (s for s, role in revision.signals.items() if role == "train")
                self.live |= dict.fromkeys(trained, revision.id)
        reports = [
            data for data in outcome_reports(store.catalog.reports(user)) if data.get("room")
        ]
        # The last report of a layer with a capacity decides; only one layer has one.
        for report in map(from_json, reports[-1:]):
            self.excluded = frozenset(
                each.signal for each in report.sources if each.use_code is SignalUse.NO_CAPACITY
            )


def _use_of(assignment: Assignment, builds: _Builds) -> tuple[SignalUse, str | None]:
    signal, layer = assignment.signal.id, assignment.layer
    if layer is None and assignment.place in (Placement.PROFILE, Placement.MEMORY):
        return SignalUse.IN_PROMPT, None
    if layer is None:
        return SignalUse.UNUSED, builds.live.get(signal)
    if (layer, signal) in builds.held_out:
        return SignalUse.HELD_OUT, builds.held_out[layer, signal]
    if signal in builds.live:
        return SignalUse.LEARNED, builds.live[signal]
    if signal in builds.excluded:
        return SignalUse.NO_CAPACITY, None
    if (layer, signal) in builds.tried:
        return SignalUse.LEARNED_NOT_LIVE, builds.tried[layer, signal]
    return SignalUse.PENDING, None


def _former_status(signal: Signal, newer: str | None, builds: _Builds) -> SignalStatus:
    revision = builds.live.get(signal.id)
    why, use = Reason(ReasonCode.RETRACTED), SignalUse.RETRACTED
    if newer:
        why, use = reason(ReasonCode.REPLACED, signal=newer), SignalUse.SUPERSEDED
    return SignalStatus(signal, Placement.HISTORY, None, why, use, revision)
