"""The operations of decoding, and the choice of their implementation."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from personalpeft.backends.torch.ops import self_test
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.native_library import NoCompiler, passed_file
from personalpeft.backends.torch.ops.reference_ops import ReferenceOps

__all__ = ["Ops", "choose_ops"]


def choose_ops(device: torch.device, dtype: torch.dtype, cache: Path | None) -> tuple[Ops, str]:
    """Return the fastest operations that this machine can run, and a line for ``doctor``.

    Args:
        device: Where tensors are.
        dtype: Of the base.
        cache: Where compiled kernels are kept; without it none are compiled for a CPU.
    """
    if device.type == "cuda":
        return _triton_ops(device, dtype)
    if device.type != "cpu":
        return ReferenceOps(), f"plain kernels, slower: there are no others for {device.type}"
    if cache is None:
        return ReferenceOps(), "plain kernels"
    try:
        ops = CpuOps(cache, dtype)
    except NoCompiler as error:
        return ReferenceOps(), f"plain kernels, slower: {error}"
    if wrong := _find_wrong_kernel_once(ops, dtype, cache):
        return ReferenceOps(), f"plain kernels, slower: compiled {wrong} gives wrong results here"
    return ops, "native kernels"


def _find_wrong_kernel_once(ops: CpuOps, dtype: torch.dtype, cache: Path) -> str | None:
    """Test compiled kernels, unless the same ones passed on this machine before."""
    test = str(dtype).encode() + Path(self_test.__file__).read_bytes()
    passed = passed_file(cache, ("decode.cpp", "training.cpp"), test)
    if passed is not None and passed.exists():
        return None
    wrong = self_test.find_wrong_kernel(ops, dtype)
    if wrong is None and passed is not None:
        with suppress(OSError):
            passed.touch(mode=0o600)
    return wrong


def _triton_ops(device: torch.device, dtype: torch.dtype) -> tuple[Ops, str]:
    try:
        from personalpeft.backends.torch.ops.triton_ops import NoTriton, try_triton_ops
    except ImportError as error:
        return ReferenceOps(), f"plain kernels, slower: Triton cannot be imported ({error})"
    try:
        return try_triton_ops(device, dtype), "triton kernels"
    except NoTriton as error:
        return ReferenceOps(), f"plain kernels, slower: {error}"
