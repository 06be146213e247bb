"""A stack of adapters as one: layers of LoRA add up, so their A and their scaled B are concatenated along the rank.

Invariant: for each projection ``B @ A`` of the result is the sum over the parts of ``weight * scaling * B @ A``. A part that does not adapt
a projection adds no rank to it, so ranks may differ between projections; ``Composed.rank`` is the largest, which is what a slot must hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from personalpeft.adapters.safe_io import fault
from personalpeft.adapters.types import Adapter, Composed, Matrix, Pair, Share
from personalpeft.adapters.validate import is_finite, short
from personalpeft.errors import AdapterError, InvalidInput


def compose(parts: Sequence[tuple[Adapter, float]]) -> Composed:
    """The stack of (adapter, weight) as one LoRA of scaling 1. Weight 0 leaves a part out; no parts: rank 0.

    Raises ``InvalidInput`` for a weight that is not finite, ``AdapterError`` for parts that are not for the same base or shapes.
    """
    for adapter, weight in parts:
        if not math.isfinite(weight):
            raise InvalidInput(
                f"Layer {adapter.manifest.layer} has the weight {weight}.",
                hint="A weight is a finite number, usually 0 to 1.",
            )
    used = [(adapter, weight) for adapter, weight in parts if weight != 0]
    _check_same_base([adapter for adapter, _ in used])
    shares = {
        name: _shares(name, used)
        for name in sorted({name for adapter, _ in used for name in adapter.pairs})
    }
    ranks = (sum(share.pair.a.shape[1] for share in having) for having in shares.values())
    return Composed(max(ranks, default=0), shares)


def merged(composed: Composed) -> dict[str, Pair]:
    """The one LoRA as matrices of its own, float32 and read-only: A concatenated, B scaled and concatenated.

    Raises ``AdapterError`` where a factor makes a B too large for float32.
    """
    return {name: _sum(name, shares) for name, shares in composed.shares.items()}


def as_one(composed: Composed) -> tuple[Mapping[str, Pair], float]:
    """The one LoRA as pairs, and what scales all of them: a layer alone as it lies, and else ``merged``. Raises as that."""
    alone = [shares[0] for shares in composed.shares.values() if len(shares) == 1]
    factors = {share.factor for share in alone}
    ranks = {share.pair.a.shape[1] for share in alone}
    # File formats keep it in a float32, in which 0 could mean full strength; ``merged`` checks what is beyond.
    if (
        len(alone) == len(composed.shares)
        and len(factors) == len(ranks) == 1
        and 1e-6 < min(factors) < 1e6
    ):
        return {name: shares[0].pair for name, shares in composed.shares.items()}, factors.pop()
    return merged(composed), 1.0


def narrow(matrix: Matrix) -> Matrix:
    """In half precision, which is what packed files are in, unless a weight took it beyond."""
    if matrix.dtype == np.float16:
        return matrix
    with np.errstate(over="ignore"):
        half = matrix.astype(np.float16)
    return half if is_finite(half) else np.asarray(matrix, np.float32)


def too_large(name: str) -> AdapterError:
    """The error for a projection whose factor takes it beyond float32."""
    return fault(
        "the stack",
        f"{name} times scaling and weight is too large for float32.",
        hint="Lower a weight, or roll a layer back.",
    )


def _check_same_base(adapters: Sequence[Adapter]) -> None:
    for adapter in adapters[1:]:
        first = adapters[0].manifest
        if adapter.manifest.base != first.base:
            raise fault(
                f"layer {adapter.manifest.layer}",
                f"is for base {short(adapter.manifest.base)}, layer {first.layer} for {short(first.base)}.",
                hint="Stack only layers that were built on one base.",
            )


def _shares(name: str, parts: Sequence[tuple[Adapter, float]]) -> tuple[Share, ...]:
    """The shares of one projection, from the parts that adapt it."""
    having = [(part, weight) for part, weight in parts if name in part.pairs]
    sizes = {
        (pair.a.shape[0], pair.a.shape[2], pair.b.shape[1])
        for pair in (part.pairs[name] for part, _ in having)
    }
    if len(sizes) != 1:
        layers = ", ".join(part.manifest.layer for part, _ in having)
        raise fault(
            f"layers {layers}",
            f"{name} has different sizes in them.",
            hint="Stack only layers of one base.",
        )
    return tuple(Share(part.pairs[name], weight * part.manifest.scaling) for part, weight in having)


def _sum(name: str, shares: Sequence[Share]) -> Pair:
    a = np.concatenate([share.pair.a for share in shares], axis=1, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = [
            np.multiply(share.pair.b, np.float32(share.factor), dtype=np.float32)
            for share in shares
        ]
    b = np.concatenate(scaled, axis=2)
    if not (np.isfinite(b.min()) and np.isfinite(b.max())):
        raise too_large(name)
    return Pair(_frozen(a), _frozen(b))


def _frozen(matrix: Matrix) -> Matrix:
    matrix.flags.writeable = False
    return matrix
