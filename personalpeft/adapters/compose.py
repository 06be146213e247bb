"""A stack of adapters as one: layers of LoRA add up, so their A and their scaled B are concatenated along the rank.

Invariant: for each projection ``B @ A`` of the result is the sum over the parts of ``weight * scaling * B @ A``. A part that does not adapt
a projection adds no rank to it, so ranks may differ between projections; ``Composed.rank`` is the largest, which is what a slot must hold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from personalpeft.adapters.base import Adapter, Composed, Matrix, Pair
from personalpeft.adapters.strict import fault
from personalpeft.adapters.validate import short
from personalpeft.errors import InvalidInput


def compose(parts: Sequence[tuple[Adapter, float]]) -> Composed:
    """The stack of (adapter, weight) as one LoRA of scaling 1; arrays are read-only. Weight 0 leaves a part out; no parts: rank 0.

    Raises ``InvalidInput`` for a weight that is not finite, ``AdapterError`` for parts that are not for the same base or shapes, or whose
    product with weight and scaling is too large for float32.
    """
    for adapter, weight in parts:
        if not math.isfinite(weight):
            raise InvalidInput(
                f"Layer {adapter.manifest.layer} has the weight {weight}.",
                hint="A weight is a finite number, usually 0 to 1.",
            )
    used = [(adapter, weight) for adapter, weight in parts if weight != 0]
    _check_same_base([adapter for adapter, _ in used])
    pairs = {name: _sum(name, used) for name in sorted({name for adapter, _ in used for name in adapter.pairs})}
    return Composed(max((pair.a.shape[1] for pair in pairs.values()), default=0), pairs)


def _check_same_base(adapters: Sequence[Adapter]) -> None:
    for adapter in adapters[1:]:
        first = adapters[0].manifest
        if adapter.manifest.base != first.base:
            raise fault(
                f"layer {adapter.manifest.layer}",
                f"is for base {short(adapter.manifest.base)}, layer {first.layer} for {short(first.base)}.",
                hint="Stack only layers that were built on one base.",
            )


def _sum(name: str, parts: Sequence[tuple[Adapter, float]]) -> Pair:
    """The pair of one projection over the parts that adapt it."""
    having = [(part, weight) for part, weight in parts if name in part.pairs]
    sizes = {(pair.a.shape[0], pair.a.shape[2], pair.b.shape[1]) for pair in (part.pairs[name] for part, _ in having)}
    if len(sizes) != 1:
        layers = ", ".join(part.manifest.layer for part, _ in having)
        raise fault(f"layers {layers}", f"{name} has different sizes in them.", hint="Stack only layers of one base.")
    with np.errstate(over="ignore", invalid="ignore"):
        b = [part.pairs[name].b * np.float32(weight * part.manifest.scaling) for part, weight in having]
    for (part, weight), scaled in zip(having, b, strict=True):
        if not (np.isfinite(scaled.min()) and np.isfinite(scaled.max())):
            what = f"{name} times scaling {part.manifest.scaling} and weight {weight} is too large for float32."
            raise fault(f"layer {part.manifest.layer}", what, hint="Lower the weight, or roll the layer back.")
    a = [part.pairs[name].a for part, _ in having]
    return Pair(_frozen(np.concatenate(a, axis=1)), _frozen(np.concatenate(b, axis=2)))


def _frozen(matrix: Matrix) -> Matrix:
    matrix.flags.writeable = False
    return matrix
