"""The inner operations of decoding, and which way of doing them suits this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.cpu_ops import CpuOps, NoCompiler
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps
from personalpeft.backends.torch.ops.self_test import find_wrong_kernel

__all__ = ["Ops", "choose_kernels"]


def choose_kernels(device: torch.device, dtype: torch.dtype, cache: Path | None) -> tuple[Ops, str]:
    """The fastest that this machine can run, and why; without a cache folder nothing is compiled for a processor."""
    if device.type == "cuda":
        return _for_cuda(device, dtype)
    if device.type != "cpu":
        return ReferenceOps(), f"plain kernels, slower: there are no others for {device.type}"
    if cache is None:
        return ReferenceOps(), "plain kernels"
    try:
        native = CpuOps(cache, dtype)
    except NoCompiler as why:
        return ReferenceOps(), f"plain kernels, slower: {why}"
    if wrong := find_wrong_kernel(native, dtype):
        return (
            ReferenceOps(),
            f"plain kernels, slower: compiled {wrong} computes something else here",
        )
    return native, "native kernels"


def _for_cuda(device: torch.device, dtype: torch.dtype) -> tuple[Ops, str]:
    try:
        from personalpeft.backends.torch.ops.triton_ops import NoTriton, try_triton_ops
    except ImportError as why:
        return ReferenceOps(), f"plain kernels, slower: Triton cannot be imported ({why})"
    try:
        return try_triton_ops(device, dtype), "triton kernels"
    except NoTriton as why:
        return ReferenceOps(), f"plain kernels, slower: {why}"
