"""Provenance of a reply: the revisions that answered and the signals that each was built from."""

from __future__ import annotations

from dataclasses import dataclass

from personalpeft.backends.choice import describe_choice
from personalpeft.errors import Forgotten
from personalpeft.formatting import HasJson
from personalpeft.learning.layers import trained_on
from personalpeft.learning.report import excerpt, format_leakage, signal_text
from personalpeft.store.store import Store
from personalpeft.types import Revision, Signal, SignalKind, Turn


@dataclass(frozen=True, slots=True)
class RevisionProvenance:
    """One revision that answered, and the signals of it and its ancestors, oldest first."""

    revision: Revision
    weight: float
    signals: tuple[Signal, ...]


@dataclass(frozen=True, slots=True)
class Provenance(HasJson):
    """Where a reply came from. Without parts and forgotten revisions: the bare base.

    Attributes:
        turn: The turn of the reply.
        parts: The revisions of its stack, lowest first.
        items: The rules, facts and examples in its prompt.
        forgotten: Ids of revisions of its stack that were erased since.
    """

    turn: Turn
    parts: tuple[RevisionProvenance, ...]
    items: tuple[Signal, ...]
    forgotten: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.turn.id}: {excerpt(self.turn.reply)}"]
        if self.turn.backend is not None:
            lines.append(f"  from {describe_choice(self.turn.backend, self.turn.backend_reason)}")
        if not self.parts and not self.items and not self.forgotten:
            lines.append("  the bare base answered, without your feedback")
        for part in self.parts:
            revision = part.revision
            lines.append(
                f"  {revision.id} (weight {part.weight:g}): {revision.verdict}, {revision.reason}"
            )
            if leakage := format_leakage(revision.scores):
                lines.append(f"    leakage: {'; '.join(leakage)}")
            lines += [_line(signal, signal.kind) for signal in part.signals]
        lines += [f"  {revision}: it was forgotten" for revision in self.forgotten]
        if self.items:
            lines.append("  in the prompt")
        for item in self.items:
            is_example = item.kind not in (SignalKind.COMMENT, SignalKind.FACT)
            lines.append(_line(item, "example" if is_example else item.kind))
        return "\n".join(lines)


def build_provenance(store: Store, turn: Turn) -> Provenance:
    """Follow a turn's stack to its revisions, and each revision and its ancestors to signals."""
    parts: list[RevisionProvenance] = []
    forgotten: list[str] = []
    signals = store.ledger.signals(turn.user, current=False)
    for entry in turn.stack.entries:
        try:
            revision = store.catalog.revision(turn.user, entry.revision)
        except Forgotten:
            forgotten.append(entry.revision)
            continue
        trained = trained_on(store, revision)
        own = tuple(signal for signal in signals if signal.id in trained)
        parts.append(RevisionProvenance(revision, entry.weight, own))
    items = tuple(store.ledger.signal(turn.user, signal) for signal in turn.used)
    return Provenance(turn, tuple(parts), items, tuple(forgotten))


def _line(signal: Signal, kind: str) -> str:
    return f"    {signal.id[-6:]}  {kind:<13} {excerpt(signal_text(signal))}"
