"""What an adapter is, away from any device: named pairs of matrices and a manifest that says what they were built from.

Invariants, held by every ``Adapter`` that this package makes or reads: each projection has both halves; A is ``[blocks,
rank, inputs]``, B is ``[blocks, outputs, rank]``, float16 or float32, finite; all projections share blocks and rank; every
projection is one that the base's ``Architecture`` has, with its sizes. The change an adapter makes to a projection is
``scaling * B @ A``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.types import Json

Matrix: TypeAlias = npt.NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a packed file says of itself. ``signals`` is the digest of the ledger entries it was built from."""

    base: str
    layer: str
    rank: int
    scaling: float
    targets: tuple[str, ...]
    recipe: Json
    signals: str
    below: tuple[str, ...] = ()
    parent: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """The two halves of one projection, stacked over the model's blocks."""

    a: Matrix
    b: Matrix


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA: its manifest and, for each projection, its pair."""

    manifest: Manifest
    pairs: Mapping[str, Pair]


@dataclass(frozen=True, slots=True)
class Share:
    """What one layer of a stack adds to a projection: ``factor * B @ A``, with the layer's weight and scaling as
    factor.
    """

    pair: Pair
    factor: float


@dataclass(frozen=True, slots=True)
class Composed:
    """A whole stack as one LoRA, without copying it: for each projection the shares whose ranks add up.

    Projections may have fewer ranks than ``rank``, the largest among them: each has those of the layers that adapt it.
    """

    rank: int
    shares: Mapping[str, tuple[Share, ...]]
