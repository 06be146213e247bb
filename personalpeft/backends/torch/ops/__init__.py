"""The operations of decoding, and the choice of their implementation."""

from __future__ import annotations

from pathlib import Path

import torch

from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.native_library import NoCompiler
from personalpeft.backends.torch.ops.self_test import find_wrong_kernel


def choose_ops(device: torch.device, dtype: torch.dtype, cache: Path | None) -> tuple[Ops, str]:
    """Return the fastest operations that this machine can run, and a line for ``doctor``.

    Args:
        device: Where tensors are.
        dtype: Of the base.
        cache: Where compiled kernels are kept; without it none are compiled for a CPU.
    """
    plain = Ops(device, dtype)
    if device.type == "cuda":
        try:
            from personalpeft.backends.torch.ops.triton_ops import NoTriton, try_triton_ops
        except ImportError as error:
            return plain, f"plain kernels, slower: Triton cannot be imported ({error})"
        try:
            return try_triton_ops(device, dtype), "triton kernels"
        except NoTriton as error:
            return plain, f"plain kernels, slower: {error}"
    if device.type != "cpu" or cache is None:
        return plain, "plain kernels"
    try:
        ops = CpuOps(cache, dtype)
    except NoCompiler as error:
        return plain, f"plain kernels, slower: {error}"
    if wrong := find_wrong_kernel(ops):
        return plain, f"plain kernels, slower: compiled {wrong} gives wrong results here"
    return ops, "native kernels" if ops.matmul is None else "native kernels with AMX"
