"""Products of bfloat16 matrices with AMX, compiled from C++.

Invariant: a row has the same bits in any batch and with any number of threads (csrc/matmul.cpp).
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

# Inputs of a tile, and outputs of a panel of two tiles. Must equal INPUTS and PANEL in matmul.cpp.
_INPUTS, _PANEL = 32, 32


class PackedMatmul:
    """Call the C++ operation of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    @staticmethod
    def fits(inputs: int) -> bool:
        """Return whether products of rows with this many inputs can be computed."""
        return inputs % _INPUTS == 0

    def pack(self, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return ``[outputs, inputs]`` weights in the order of tiles.

        Args:
            weight: Its outputs or its inputs must be contiguous.
            out: Int32 that takes the result, with room for ``packed_size``; None makes it.

        Returns:
            Int32 ``[panels, inputs / 32, 2, 16 pairs of inputs, 16 outputs]``; each is a pair.
        """
        outputs, inputs = weight.shape
        if 1 not in weight.stride():
            weight = weight.contiguous()
        shape = (-(-outputs // _PANEL), inputs // _INPUTS, 2, _INPUTS // 2, _PANEL // 2)
        if out is None:
            out = torch.empty(math.prod(shape), dtype=torch.int32)
        packed = out[: math.prod(shape)].view(shape)
        self._library.pack_tiles(weight, *weight.stride(), packed, inputs, outputs)
        return packed

    @staticmethod
    def packed_size(inputs: int, outputs: int) -> int:
        """Return how many int32 the packed weights take."""
        return -(-outputs // _PANEL) * _PANEL * inputs // 2

    @staticmethod
    def unpack(packed: Tensor, outputs: int) -> Tensor:
        """Return the weights that were packed, ``[outputs, inputs]``."""
        panels, steps = packed.shape[:2]
        rows = packed.permute(0, 2, 4, 1, 3).reshape(panels * _PANEL, steps * _INPUTS // 2)
        return rows.view(torch.bfloat16)[:outputs]

    def __call__(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        outputs: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return ``[rows, outputs]`` of ``[rows, inputs]``, in ``out`` if given.

        Args:
            x: The rows.
            packed: The weights.
            bias: ``[outputs]``, or None.
            outputs: The number of outputs.
            out: Takes the result; only its rows must be contiguous.
        """
        if x.stride(1) != 1:
            x = x.contiguous()
        if out is None:
            out = x.new_empty((x.shape[0], outputs))
        self._library.matmul(x, x.stride(0), packed, bias, out, out.stride(0), *x.shape, outputs)
        return out
