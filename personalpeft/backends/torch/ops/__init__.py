"""The operations of decoding, and the choice of their implementation."""

from __future__ import annotations

from pathlib import Path

import torch

from personalpeft.backends.torch.ops.base import NoKernels, Ops
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.self_test import find_wrong_kernel


def choose_ops(device: torch.device, dtype: torch.dtype, cache: Path | None) -> tuple[Ops, str]:
    """Return the fastest operations that this machine can run, and a line for ``doctor``.

    Args:
        device: Where tensors are.
        dtype: Of the base.
        cache: Where compiled kernels are kept; without it none are compiled for a CPU.
    """
    plain = Ops(device, dtype)
    try:
        if device.type == "cuda":
            from personalpeft.backends.torch.ops.triton_ops import try_triton_ops

            return try_triton_ops(device, dtype), "triton kernels"
        if device.type == "cpu" and cache is not None:
            ops = CpuOps(cache, dtype)
            if wrong := find_wrong_kernel(ops):
                raise NoKernels(f"compiled {wrong} gives wrong results here")
            return ops, "native kernels" if ops.matmul is None else "native kernels with AMX"
    except ImportError as error:
        return plain, f"plain kernels, slower: Triton cannot be imported ({error})"
    except NoKernels as error:
        return plain, f"plain kernels, slower: {error}"
    return plain, "plain kernels"
