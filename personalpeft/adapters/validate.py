"""Check the invariants of an ``Adapter`` (see ``types.py``) before it is used or written."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping

import numpy as np

from personalpeft.adapters.safe_io import Fault, safe_repr
from personalpeft.adapters.types import RANK_LIMIT, Adapter, LoRAWeights, Manifest, Matrix
from personalpeft.errors import AdapterError, suggest_nearest
from personalpeft.types import Architecture

BLOCKS_LIMIT = 1024
PROJECTION_LIMIT = 200
# Finite numbers may still overflow when they are multiplied. Adapters change weights by less than 1.
_MOST_CHANGE = 1e15
PROJECTION = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*")

_OTHER_BASE = (
    "An adapter works only on the base it was built for. "
    "Open that base, or rebuild the layer on this one."
)


def check_adapter(
    adapter: Adapter,
    *,
    architecture: Architecture | None = None,
    base: str | None = None,
    numbers: bool = True,
) -> None:
    """Check an adapter.

    Args:
        adapter: The adapter.
        architecture: The shapes that it must fit, if any.
        base: Digest of the base that it must be for, if any.
        numbers: Whether to check that all numbers are finite.

    Raises:
        Fault: A check failed.
    """
    manifest = adapter.manifest
    if base is not None:
        check_base(manifest, base)
    rank = check_weights(adapter.weights, architecture, numbers=numbers)
    if manifest.rank != rank:
        raise Fault(f"the manifest says rank {manifest.rank}, the tensors have {rank}.")
    if sorted(manifest.targets) != sorted(adapter.weights):
        raise Fault(
            f"the manifest names {safe_repr(sorted(manifest.targets))}, the tensors differ."
        )


def check_base(manifest: Manifest, base: str) -> None:
    """Raise ``Fault`` unless an adapter is for a base, given by its digest."""
    if manifest.base != base:
        raise Fault(
            f"layer {manifest.layer} was built for base {shorten(manifest.base)}, "
            f"the base in use is {shorten(base)}.",
            hint=_OTHER_BASE,
        )


def is_finite(matrix: Matrix) -> bool:
    """Return whether the matrix holds neither NaN nor infinity."""
    if matrix.dtype == np.float16:
        # Compare bits: NumPy has no fast arithmetic for float16.
        return bool((matrix.view(np.uint16) & 0x7C00).max() < 0x7C00)
    # The extremes propagate NaN and infinity, and need no second array as isfinite() does.
    return bool(np.isfinite(matrix.min()) and np.isfinite(matrix.max()))


def shorten(digest: str) -> str:
    """Return the first 12 characters of a digest, without the name of its hash."""
    return ascii(digest.removeprefix("sha256:")[:12])[1:-1]


def match_tensors(
    names: Iterable[str], pattern: re.Pattern[str], modules: Container[str]
) -> dict[str, tuple[str, str]]:
    """Return the module and the half ("A" or "B") of each tensor of a file, by its name.

    Args:
        names: The names of the tensors.
        pattern: Finds module and half in a name.
        modules: The projections of the base's blocks, as the file names them.
    """
    found = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None or match[1] not in modules:
            raise Fault(
                f"{safe_repr(name)} is no LoRA matrix of a projection of the base.",
                hint="Only LoRA on the projections that the base's card names is taken, without "
                "biases and magnitudes (DoRA). Open its base, or train it again on those alone.",
            )
        found[name] = match[1], match[2].upper()
    return found


def stack_blocks(
    halves: Mapping[tuple[str, str], Mapping[int, Matrix]], blocks: int
) -> dict[str, LoRAWeights]:
    """Stack matrices over the blocks of the model.

    Args:
        halves: The matrices by projection and half ("A" or "B"), then by block.
        blocks: How many blocks the model has. Each must have both halves of each projection.
    """

    def stack(projection: str, half: str) -> Matrix:
        matrices = halves.get((projection, half), {})
        missing = next((block for block in range(blocks) if block not in matrices), None)
        if missing is not None:
            raise Fault(
                f"lora_{half} of {projection} is missing in block {missing}.",
                hint="Adapters must adapt the same projections in every block.",
            )
        if len({matrix.shape for matrix in matrices.values()}) != 1 or matrices[0].ndim != 2:
            raise Fault(
                f"lora_{half} of {projection} is no matrix of the same size in every block."
            )
        stacked = np.stack([matrices[block] for block in range(blocks)])
        stacked.flags.writeable = False
        return stacked

    projections = sorted({projection for projection, _ in halves})
    return {name: LoRAWeights(stack(name, "A"), stack(name, "B")) for name in projections}


def check_weights(
    weights: Mapping[str, LoRAWeights], architecture: Architecture | None, *, numbers: bool
) -> int:
    """Check matrices as ``check_adapter`` does, and return their rank."""
    if not weights:
        raise Fault("has no projections.")
    shared = next(iter(weights.values())).a.shape[:2]
    for name, pair in weights.items():
        if len(name) > PROJECTION_LIMIT or PROJECTION.fullmatch(name) is None:
            raise Fault(f"{safe_repr(name)} cannot be the name of a projection.")
        for half, matrix in (("A", pair.a), ("B", pair.b)):
            _check_matrix(matrix, f"{name}.{half}", numbers=numbers)
        blocks, rank, _ = pair.a.shape
        if (pair.b.shape[0], pair.b.shape[2]) != (blocks, rank):
            raise Fault(f"A and B of {name} do not match: {pair.a.shape} and {pair.b.shape}.")
        if (blocks, rank) != shared:
            raise Fault(f"{name} has (blocks, rank) {(blocks, rank)}, others have {shared}.")
        if rank > RANK_LIMIT or blocks > BLOCKS_LIMIT:
            raise Fault(f"rank {rank} and {blocks} blocks exceed {RANK_LIMIT} and {BLOCKS_LIMIT}.")
        if architecture is not None:
            _check_sizes(name, pair, architecture)
    return int(shared[1])


def check_change(adapter: Adapter, source: str) -> None:
    """Raise ``AdapterError`` if the products of an imported adapter may overflow."""
    for name, pair in adapter.weights.items():
        change = adapter.manifest.rank * _largest(pair.a) * _largest(pair.b)
        if change > _MOST_CHANGE:
            raise AdapterError(
                f"{source}: {name} would change weights by up to {change:.0e}.",
                hint="The training that made it has diverged, or the file is damaged.",
            )


def _largest(matrix: Matrix) -> float:
    """Return a bound of the absolute numbers. NumPy has no fast arithmetic for float16."""
    if matrix.dtype == np.float16:
        return float(np.finfo(np.float16).max) if matrix.size else 0.0
    return max(float(matrix.max()), -float(matrix.min()))


def _check_matrix(matrix: Matrix, name: str, *, numbers: bool) -> None:
    if matrix.dtype not in (np.float16, np.float32) or matrix.ndim != 3 or matrix.size == 0:
        wanted = "float16 or float32 [blocks, rows, columns]"
        raise Fault(f"{name} is {matrix.dtype} of shape {matrix.shape}, not {wanted}.")
    if numbers and not is_finite(matrix):
        hint = "The training that made it has diverged, or the file is damaged; build it again."
        raise Fault(f"{name} holds NaN or infinity.", hint=hint)


def _check_sizes(name: str, pair: LoRAWeights, architecture: Architecture) -> None:
    if name not in architecture.projections:
        raise Fault(
            f"adapts {safe_repr(name)}, which the base ({architecture.model_type}) lacks.",
            hint=suggest_nearest(name, architecture.projections, what="projection"),
        )
    found = (pair.a.shape[0], pair.a.shape[2], pair.b.shape[1])
    expected = (architecture.blocks, *architecture.projections[name])
    if found != expected:
        raise Fault(
            f"{name} has (blocks, inputs, outputs) {found}, the base has {expected}.",
            hint=_OTHER_BASE,
        )
