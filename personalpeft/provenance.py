"""Provenance of a reply: the revisions that answered and the signals that each was built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from personalpeft.errors import Forgotten
from personalpeft.learning.report import excerpt, said
from personalpeft.learning.staleness import trained_on
from personalpeft.store.base import Store
from personalpeft.types import Revision, Signal, Turn


@dataclass(frozen=True, slots=True)
class Part:
    """One revision that answered, with the signals that it and those before it were trained on, oldest first."""

    revision: Revision
    weight: float
    signals: tuple[Signal, ...]


@dataclass(frozen=True, slots=True)
class Why:
    """Why a reply was as it was: ``parts`` from the stack, ``items`` (rules and facts) from the prompt, ``forgotten`` the ids
    of revisions that answered and were destroyed since. No parts and none forgotten: the bare base.
    """

    turn: Turn
    parts: tuple[Part, ...]
    items: tuple[Signal, ...]
    forgotten: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The account as plain data."""
        return {
            "turn": self.turn.id,
            "stack": self.turn.stack.digest,
            "base": self.turn.stack.base,
            "parts": [
                {
                    "layer": part.revision.layer,
                    "revision": part.revision.id,
                    "weight": part.weight,
                    "verdict": str(part.revision.verdict),
                    "reason": part.revision.reason,
                    "signals": [_signal(signal) for signal in part.signals],
                }
                for part in self.parts
            ],
            "items": [_signal(signal) for signal in self.items],
            "forgotten": list(self.forgotten),
        }

    def __str__(self) -> str:
        lines = [f"{self.turn.id}: {excerpt(self.turn.reply)}"]
        if not self.parts and not self.items and not self.forgotten:
            lines.append("  the bare base answered, with nothing of yours")
        for part in self.parts:
            revision = part.revision
            lines.append(
                f"  {revision.id} (weight {part.weight:g}): {revision.verdict}, {revision.reason}"
            )
            lines += [f"    {s.id[-6:]}  {s.kind:<13} {excerpt(said(s))}" for s in part.signals]
        lines += [f"  {revision}: it was forgotten" for revision in self.forgotten]
        if self.items:
            lines.append("  in the prompt")
            lines += [f"    {s.id[-6:]}  {s.kind:<13} {excerpt(said(s))}" for s in self.items]
        return "\n".join(lines)


def why(store: Store, turn: Turn) -> Why:
    """Follows a turn's stack to its revisions, and each revision and its parents to the signals."""
    parts = []
    everything = store.ledger.signals(turn.user, current=False)
    forgotten = []
    for entry in turn.stack.entries:
        try:
            revision = store.catalog.revision(turn.user, entry.revision)
        except Forgotten:
            forgotten.append(entry.revision)
            continue
        trained = trained_on(store, revision)
        parts.append(
            Part(
                revision,
                entry.weight,
                tuple(signal for signal in everything if signal.id in trained),
            )
        )
    return Why(
        turn,
        tuple(parts),
        tuple(store.ledger.signal(turn.user, signal) for signal in turn.used),
        tuple(forgotten),
    )


def _signal(signal: Signal) -> dict[str, Any]:
    return {
        "id": signal.id,
        "kind": str(signal.kind),
        "at": signal.at.isoformat(),
        "payload": dict(signal.payload),
    }
