"""The inner operations of decoding, and which way of doing them suits this machine."""

from __future__ import annotations

from pathlib import Path

import torch

from personalpeft.backends.torch.kernels.base import Kernels
from personalpeft.backends.torch.kernels.native import NativeKernels, NoCompiler
from personalpeft.backends.torch.kernels.plain import PlainKernels

__all__ = ["Kernels", "choose_kernels"]


def choose_kernels(device: torch.device, dtype: torch.dtype, cache: Path | None) -> tuple[Kernels, str]:
    """The fastest that this machine can run, and why; without a cache folder nothing is compiled."""
    if device.type != "cpu":
        return PlainKernels(), "plain kernels"
    if cache is None:
        return PlainKernels(), "plain kernels"
    try:
        return NativeKernels(cache, dtype), "native kernels"
    except NoCompiler as why:
        return PlainKernels(), f"plain kernels, slower: {why}"
