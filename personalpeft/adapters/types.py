"""LoRA adapters independent of any device: weights by projection, and a manifest.

An adapter adds ``scaling * B @ A`` to the weight of a projection (LoRA, arXiv 2106.09685, eq. 3).

Invariants of every ``Adapter`` that this package makes or reads:

- Each projection has both matrices: A ``[blocks, rank, inputs]`` and B ``[blocks, outputs, rank]``.
- Numbers are float16 or float32, and finite.
- All projections have the same number of blocks and the same rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, ConfigDict, Field, with_config

from personalpeft.ids import LAYER_NAME
from personalpeft.types import Json

Matrix: TypeAlias = npt.NDArray[np.floating[Any]]

RANK_LIMIT = 1024
_TEXT_LIMIT = 256
_FLOAT32_MAX = math.ldexp(2 - 2**-23, 127)


def _require(holds: Callable[[Any], object]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError("out of bounds")
        return value

    return AfterValidator(check)


_Text: TypeAlias = Annotated[
    str, Field(min_length=1, max_length=_TEXT_LIMIT), _require(str.isprintable)
]


# ``manifest`` checks these bounds through pydantic.
@with_config(ConfigDict(strict=True, defer_build=True))
@dataclass(frozen=True, slots=True)
class Manifest:
    """What an adapter was built from. ``signals`` is the digest of its ledger entries."""

    base: _Text
    layer: Annotated[str, _require(LAYER_NAME.fullmatch)]
    rank: Annotated[int, Field(ge=1, le=RANK_LIMIT)]
    scaling: Annotated[float, Field(gt=0, le=_FLOAT32_MAX)]
    targets: Annotated[tuple[_Text, ...], _require(lambda names: len(set(names)) == len(names))]
    recipe: Json
    signals: _Text
    below: tuple[_Text, ...] = ()
    parent: _Text | None = None

    @property
    def stored_recipe(self) -> Json:
        """The recipe with the keys that a learn on top of the adapter reads its shape from."""
        alpha = self.scaling * self.rank
        return {
            **self.recipe,
            "rank": self.rank,
            "alpha": alpha,
            "target_modules": list(self.targets),
        }


@dataclass(frozen=True, slots=True)
class LoRAWeights:
    """A and B of one projection, stacked over the blocks of the model."""

    a: Matrix
    b: Matrix

    def padded(self, rank: int) -> LoRAWeights:
        """Return the same LoRA with zeros up to a larger rank."""
        missing = (0, rank - self.a.shape[1])
        a = np.pad(self.a, ((0, 0), missing, (0, 0)))
        return LoRAWeights(a, np.pad(self.b, ((0, 0), (0, 0), missing)))


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA: its manifest and the weights of each projection."""

    manifest: Manifest
    weights: Mapping[str, LoRAWeights]


@dataclass(frozen=True, slots=True)
class ScaledLoRA:
    """What one layer of a stack adds to a projection: ``factor * B @ A``.

    ``factor`` is the layer's weight in the stack times its scaling.
    """

    weights: LoRAWeights
    factor: float


@dataclass(frozen=True, slots=True)
class AdapterStack:
    """A stack of layers as one LoRA, without copies: the layers' parts of each projection.

    ``rank`` is the largest total rank of a projection. A layer that does not adapt a projection
    adds no rank to it.
    """

    rank: int
    loras: Mapping[str, tuple[ScaledLoRA, ...]]

    @property
    def nbytes(self) -> int:
        """The bytes of all its weights."""
        scaled = (each for parts in self.loras.values() for each in parts)
        return sum(each.weights.a.nbytes + each.weights.b.nbytes for each in scaled)
