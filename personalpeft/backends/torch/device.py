"""Choose the device that computes, and the dtype of the base there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from personalpeft.backends.torch.batch_invariant_matmul import (
    ProductKind,
    ProductShape,
    is_usable,
)


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Device and dtype of the base, and the reason, a line for ``doctor``."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose_device() -> DeviceChoice:
    """Return a GPU if there is one, else the CPU, with bfloat16 if the hardware multiplies it."""
    if torch.cuda.is_available():
        # Older GPUs emulate bfloat16. float16 is fast there, but activations can overflow it.
        if torch.cuda.get_device_capability() >= (8, 0):
            dtype, name = torch.bfloat16, "bfloat16"
        else:
            dtype, name = torch.float32, "float32"
        reason = f"{name} on {torch.cuda.get_device_name()}"
        return DeviceChoice(torch.device("cuda"), dtype, reason)
    threads = torch.get_num_threads()
    if _multiplies_bfloat16():
        reason = f"bfloat16 on the processor, {threads} threads"
        return DeviceChoice(torch.device("cpu"), torch.bfloat16, reason)
    reason = f"float32 on the processor, {threads} threads (it does not multiply bfloat16)"
    return DeviceChoice(torch.device("cpu"), torch.float32, reason)


def _multiplies_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16, and the libraries do it correctly."""
    # PyTorch for macOS is built without this library.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return supported() and is_usable(
        ProductKind.PACKED, ProductShape(512, 512, torch.bfloat16, bias=False)
    )
