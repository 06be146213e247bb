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
    a = np.concatenate([part.pairs[name].a for part, _ in having], axis=1)
    b: Matrix = np.empty((a.shape[0], having[0][0].pairs[name].b.shape[1], a.shape[1]), np.float32)
    column = 0
    for part, weight in having:
        # Scaled into its place, so that B is in memory once and not twice while a stack is being switched to.
        place = b[:, :, column : column + part.manifest.rank]
        with np.errstate(over="ignore", invalid="ignore"):
            np.multiply(part.pairs[name].b, np.float32(weight * part.manifest.scaling), out=place)
        column += part.manifest.rank
    if not (np.isfinite(b.min()) and np.isfinite(b.max())):
        raise fault(
            f"layers {', '.join(part.manifest.layer for part, _ in having)}",
            f"{name} times scaling and weight is too large for float32.",
            hint="Lower a weight, or roll a layer back.",
        )
    return Pair(_frozen(a), _frozen(b))


def _frozen(matrix: Matrix) -> Matrix:
    matrix.flags.writeable = False
    return matrix
