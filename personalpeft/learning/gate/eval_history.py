"""What a candidate takes over from the revisions that it would follow: the evidence so far, and what it may not undo.

A candidate is compared with the live stack, whose head was compared with what was live before it, and so on. That chain
is its lineage. The bets of a lineage multiply: if no step made any unseen lesson likelier, each bet is worth at most its
stake on average, so the product reaches ``ENOUGH`` (20) in at most one lineage of twenty, however often one looks (Ville
1939). Three rules keep that true:

- Only lessons that were never trained on are bet on.
- A lesson counts once in a lineage, by the first time that it was won or lost; asked again it is retention.
- A stake that came to ``ENOUGH`` is spent: the next candidate begins with 1.

The guarantee is for one lineage. A rollback begins another one, on which the same lessons may count again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from personalpeft.learning.gate.gate import NO_PROBE_RESULTS, TIE_MARGIN, BaseProbeResults
from personalpeft.types import Revision, Verdict


@dataclass(frozen=True, slots=True)
class EvalHistory:
    """``stake`` and ``counted`` as ``Evidence`` has them. ``base``, ``last`` and ``best`` are the log-probs of known pins
    under the bare base, when the newest of the live revisions was judged, and the best that they ever were. ``of_base``: what
    the base said to the general questions, where it was asked already.
    """

    prior_e_value: float = 1.0
    spent_items: frozenset[str] = frozenset()
    base: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    base_probes: BaseProbeResults = NO_PROBE_RESULTS

    def baseline(self, signal: str, live: float) -> float | None:
        """The best that a pin ever was, where that is still asked for: a candidate is to undo none of it. But where the ``live``
        stack answers less well than when it was last judged, no learn did that: somebody went back, switched a layer off or
        weighed it less. None then, as where nothing is known: no candidate is held to what is no longer there.
        """
        last = self.last.get(signal)
        return None if last is not None and live < last - TIE_MARGIN else self.best.get(signal)


def eval_history(heads: Sequence[Revision], layer: str) -> EvalHistory:
    """What a candidate for ``layer`` takes over from the live heads of all layers."""
    base: dict[str, float] = {}
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    of_base = NO_PROBE_RESULTS
    # Each revision was asked what was pinned for all layers, and took over the best from those that were live then. So the
    # newest that was asked has the last word of a pin.
    for head in sorted(heads, key=lambda head: head.at):
        # Who made a refused revision live has accepted what it lost: later ones are held to what is left.
        agreed = head.verdict is Verdict.REFUSED
        general = head.scores.get("canaries", {})
        if said := general.get("base"):
            right = said["right"] if not agreed else general["kept_of_base"]
            of_base = BaseProbeResults(said["questions"], tuple(right), said["broken"])
        for signal, known in _pins(head).items():
            for of, reached in (
                (base, known.get("base")),
                (last, known.get("after")),
                (best, known.get("after" if agreed else "best")),
            ):
                if reached is not None:
                    of[signal] = reached
    own = next((head for head in heads if head.layer == layer), None)
    if own is None:
        return EvalHistory(base=base, last=last, best=best, base_probes=of_base)
    # A revision that was judged before this was kept had asked all that was pinned for it.
    pinned = [signal for signal, role in own.signals.items() if role == "pinned"]
    counted = frozenset(own.scores.get("counted", pinned))
    stake = float(own.scores.get("bet", 1.0)) if own.probation else 1.0
    return EvalHistory(stake, counted, base, last, best, of_base)


def _pins(head: Revision) -> Mapping[str, Any]:
    pins: Mapping[str, Any] = head.scores.get("pins", {})
    return pins
