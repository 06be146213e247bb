"""What a candidate inherits from the revisions before it: their evidence, and what it may not undo.

A candidate is compared with the live stack, whose head was compared with the one before it, and so
on. The e-values along this chain multiply. If no step made an unseen lesson likelier, the product
reaches ``CONFIRMATION_E_VALUE`` (20) in at most one chain of twenty, however often one looks (Ville
1939). Three rules keep that true:

- Only lessons that were never trained on count.
- A lesson counts once in a chain, when it first improved or regressed. Later it is retention.
- An e-value that reached the threshold is spent: the next candidate starts with 1.

The guarantee is for one chain. A rollback starts another, on which the same lessons count again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from personalpeft.learning.gate.gate import NO_PROBE_RESULTS, TIE_MARGIN, BaseProbeResults
from personalpeft.types import Revision, Verdict


@dataclass(frozen=True, slots=True)
class EvalHistory:
    """Evidence of the live revisions.

    ``prior_e_value`` and ``spent_items`` are as in ``Evidence``. ``base``, ``last`` and ``best``
    are log-probs per token of held-out items: under the bare base, when the newest live revision
    was judged, and the highest ever. ``base_probes`` are the base's answers to the probes.
    """

    prior_e_value: float = 1.0
    spent_items: frozenset[str] = frozenset()
    base: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    base_probes: BaseProbeResults = NO_PROBE_RESULTS

    def baseline(self, item: str, live: float) -> float | None:
        """Return the best log-prob that a candidate must not undo, or None.

        Where the ``live`` log-prob is below the one at the last judgement, no learn caused that:
        the user rolled back, or lowered a layer's weight. No candidate has to make up for it.
        """
        last = self.last.get(item)
        return None if last is not None and live < last - TIE_MARGIN else self.best.get(item)


def eval_history(heads: Sequence[Revision], layer: str) -> EvalHistory:
    """Return what a candidate for ``layer`` inherits from the live heads of all layers."""
    base: dict[str, float] = {}
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    base_probes = NO_PROBE_RESULTS
    # Each revision was judged by the items of all layers and took over the best of those before
    # it, so the newest that scored an item decides.
    for head in sorted(heads, key=lambda head: head.at):
        # Users who made a refused revision live accepted its losses: the baseline is what is left.
        is_accepted = head.verdict is Verdict.REFUSED
        probes = head.scores.get("canaries", {})
        if of_base := probes.get("base"):
            right = probes["kept_of_base"] if is_accepted else of_base["right"]
            base_probes = BaseProbeResults(of_base["questions"], tuple(right), of_base["broken"])
        for item, scores in head.scores.get("pins", {}).items():
            reached = scores.get("after" if is_accepted else "best")
            for known, value in (
                (base, scores.get("base")),
                (last, scores.get("after")),
                (best, reached),
            ):
                if value is not None:
                    known[item] = value
    own = next((head for head in heads if head.layer == layer), None)
    if own is None:
        return EvalHistory(base=base, last=last, best=best, base_probes=base_probes)
    # Revisions of early versions do not store what was spent; they were judged by all their items.
    held_out = [signal for signal, role in own.signals.items() if role == "pinned"]
    spent = frozenset(own.scores.get("counted", held_out))
    e_value = float(own.scores.get("bet", 1.0)) if own.probation else 1.0
    return EvalHistory(e_value, spent, base, last, best, base_probes)
