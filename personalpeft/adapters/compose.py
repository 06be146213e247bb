"""Compose a stack of adapters into one LoRA by concatenating along the rank.

Invariant: for each projection, ``B @ A`` of the result is the sum over the layers of
``weight * scaling * B @ A``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from personalpeft.adapters.types import Adapter, AdapterStack, LoRAWeights, Matrix, ScaledLoRA
from personalpeft.adapters.validate import check_base, is_finite
from personalpeft.errors import AdapterError


def compose(parts: Sequence[tuple[Adapter, float]]) -> AdapterStack:
    """Compose adapters with their weights into one LoRA of scaling 1.

    A weight of 0 leaves an adapter out. Without adapters the rank is 0.
    """
    used = [(adapter, weight) for adapter, weight in parts if weight != 0]
    for adapter, _ in used:
        check_base(adapter.manifest, used[0][0].manifest.base)
    loras = {
        name: _scaled_loras(name, used)
        for name in sorted({name for adapter, _ in used for name in adapter.weights})
    }
    ranks = (sum(lora.weights.a.shape[1] for lora in each) for each in loras.values())
    return AdapterStack(max(ranks, default=0), loras)


def concatenate(composed: AdapterStack) -> dict[str, LoRAWeights]:
    """Return the stack's LoRA as new read-only float32 matrices.

    A is concatenated; B is scaled and concatenated.
    """
    return {name: _sum(name, loras) for name, loras in composed.loras.items()}


def as_single_lora(composed: AdapterStack) -> tuple[Mapping[str, LoRAWeights], float]:
    """Return the stack's LoRA and the scaling of all its weights.

    A single layer is returned without a copy, anything else as by ``add_stacks``.
    """
    single = [loras[0] for loras in composed.loras.values() if len(loras) == 1]
    factors = {lora.factor for lora in single}
    ranks = {lora.weights.a.shape[1] for lora in single}
    # Some file formats store the scaling in a float32, in which a rounded 0 means full strength.
    if (
        len(single) == len(composed.loras)
        and len(factors) == len(ranks) == 1
        and 1e-6 < min(factors) < 1e6
    ):
        return {name: loras[0].weights for name, loras in composed.loras.items()}, factors.pop()
    return concatenate(composed), 1.0


def in_half(weights: Mapping[str, LoRAWeights]) -> dict[str, LoRAWeights]:
    """Convert to float16 every matrix whose numbers are in its range."""
    return {name: LoRAWeights(_to_half(pair.a), _to_half(pair.b)) for name, pair in weights.items()}


def _to_half(matrix: Matrix) -> Matrix:
    if matrix.dtype == np.float16:
        return matrix
    with np.errstate(over="ignore", under="ignore"):
        half = matrix.astype(np.float16)
    return half if is_finite(half) else np.asarray(matrix, np.float32)


def overflow_error(name: str) -> AdapterError:
    """Return the error for a projection whose factor exceeds float32."""
    return AdapterError(
        f"the stack: {name} times scaling and weight is too large for float32.",
        hint="Lower a weight, or roll a layer back.",
    )


def _scaled_loras(name: str, parts: Sequence[tuple[Adapter, float]]) -> tuple[ScaledLoRA, ...]:
    adapting = [(part, weight) for part, weight in parts if name in part.weights]
    sizes = {
        (pair.a.shape[0], pair.a.shape[2], pair.b.shape[1])
        for pair in (part.weights[name] for part, _ in adapting)
    }
    if len(sizes) != 1:
        layers = ", ".join(part.manifest.layer for part, _ in adapting)
        raise AdapterError(
            f"layers {layers}: {name} has different sizes in them.",
            hint="Stack only layers of one base.",
        )
    return tuple(
        ScaledLoRA(part.weights[name], weight * part.manifest.scaling) for part, weight in adapting
    )


def _sum(name: str, loras: Sequence[ScaledLoRA]) -> LoRAWeights:
    a = np.concatenate([lora.weights.a for lora in loras], axis=1, dtype=np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = [
            np.multiply(lora.weights.b, np.float32(lora.factor), dtype=np.float32) for lora in loras
        ]
    b = np.concatenate(scaled, axis=2)
    if not (np.isfinite(b.min()) and np.isfinite(b.max())):
        raise overflow_error(name)
    return LoRAWeights(_frozen(a), _frozen(b))


def _frozen(matrix: Matrix) -> Matrix:
    matrix.flags.writeable = False
    return matrix
