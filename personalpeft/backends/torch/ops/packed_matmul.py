"""Products of bfloat16 matrices with AMX, compiled from C++.

Invariant: a row has the same bits in any batch and with any number of threads (csrc/matmul.cpp).
"""

from __future__ import annotations

import ctypes
import math
from typing import Self

import torch
from torch import Tensor

from personalpeft.backends.torch.ops.native_library import bind_functions

_P, _I = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES = {
    "supports_matmul": (),
    "matmul": (_P, _I, _P, _P, _P, _I, _I, _I, _I),
    "pack_tiles": (_P, _I, _I, _P, _I, _I),
}
# Inputs of a tile, and outputs of a panel of two tiles. Must equal INPUTS and PANEL in matmul.cpp.
_INPUTS, _PANEL = 32, 32


class PackedMatmul:
    """Call the C++ operation of a library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = bind_functions(library, _SIGNATURES)

    @classmethod
    def of_library(cls, library: ctypes.CDLL) -> Self | None:
        """Return the operation, or None if this processor or the library's dtype has none."""
        matmul = cls(library)
        supports = matmul._functions["supports_matmul"]
        supports.restype = ctypes.c_int32
        return matmul if supports() else None

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
        self._functions["pack_tiles"](
            weight.data_ptr(), *weight.stride(), packed.data_ptr(), inputs, outputs
        )
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
        self._functions["matmul"](
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            out.stride(0),
            x.shape[0],
            x.shape[1],
            outputs,
        )
        return out
