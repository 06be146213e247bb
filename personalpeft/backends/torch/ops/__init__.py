"""The inner operations of decoding, and which way of doing them suits this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from personalpeft.backends.torch.ops.base import Kernels
from personalpeft.backends.torch.ops.cpu_ops import NativeKernels, NoCompiler
from personalpeft.backends.torch.ops.reference_ops import PlainKernels
from personalpeft.backends.torch.ops.self_test import wrong_kernel

__all__ = ["Kernels", "choose_kernels"]


def choose_kernels(
    device: torch.device, dtype: torch.dtype, cache: Path | None
) -> tuple[Kernels, str]:
    """The fastest that this machine can run, and why; without a cache folder nothing is compiled for a processor."""
    if device.type == "cuda":
        return _for_cuda(device, dtype)
    if device.type != "cpu":
        return PlainKernels(), f"plain kernels, slower: there are no others for {device.type}"
    if cache is None:
        return PlainKernels(), "plain kernels"
    try:
        native = NativeKernels(cache, dtype)
    except NoCompiler as why:
        return PlainKernels(), f"plain kernels, slower: {why}"
    if wrong := wrong_kernel(native, dtype):
        return (
            PlainKernels(),
            f"plain kernels, slower: compiled {wrong} computes something else here",
        )
    return native, "native kernels"


def _for_cuda(device: torch.device, dtype: torch.dtype) -> tuple[Kernels, str]:
    try:
        from personalpeft.backends.torch.ops.triton_ops import NoTriton, tried_kernels
    except ImportError as why:
        return PlainKernels(), f"plain kernels, slower: Triton cannot be imported ({why})"
    try:
        return tried_kernels(device, dtype), "triton kernels"
    except NoTriton as why:
        return PlainKernels(), f"plain kernels, slower: {why}"
