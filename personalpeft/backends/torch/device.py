"""Choose the device that computes, and the dtype of the base there."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from personalpeft.backends.torch.batch_invariant_matmul import (
    ProductKind,
    ProductShape,
    is_usable,
)
from personalpeft.base_models.resolve import unpacked_bytes
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput
from personalpeft.settings import LearningDevice, WeightsMode

# For activations, adapters and everything else that learning needs beside the weights.
_LEARNING_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Device and dtype of the base, and the reason, a line for ``doctor``."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose_device(*, gpu: bool = True) -> DeviceChoice:
    """Return a GPU if there is one, else the CPU, with bfloat16 if the hardware multiplies it.

    Args:
        gpu: Whether a GPU may be chosen.
    """
    if gpu and torch.cuda.is_available():
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


def choose_learning_device(
    base: Base, mode: LearningDevice = "auto", weights: WeightsMode = "auto"
) -> DeviceChoice:
    """Return the device that learns beside another backend, which serves the base.

    ``auto`` is a GPU if that backend left enough of its memory free, else the CPU. Weights that
    stay in their file are a CPU's.

    Args:
        base: The base.
        mode: The user's choice.
        weights: Where the base's weights are kept.

    Raises:
        InvalidInput: The user chose a GPU, and there is none.
    """
    if mode == "cuda" and not torch.cuda.is_available():
        raise InvalidInput(
            "The learning device is cuda, and torch finds no GPU.",
            hint="Set PERSONALPEFT_LEARNING_DEVICE=auto, or install a CUDA build of torch.",
        )
    if mode == "auto" and weights != "mapped" and torch.cuda.is_available():
        needed = unpacked_bytes(base) + _LEARNING_BYTES
        fits = memory_to_plan(torch.device("cuda")) >= needed
        return choose_device(gpu=fits)
    return choose_device(gpu=mode == "cuda")


def memory_to_plan(device: torch.device) -> int:
    """Return the bytes that plans may divide: a GPU's free memory, or all memory of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().total)


def release_memory() -> None:
    """Return a GPU's memory that nothing uses to the other programs on it."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _multiplies_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16, and the libraries do it correctly."""
    # PyTorch for macOS is built without this library.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return supported() and is_usable(
        ProductKind.PACKED, ProductShape(512, 512, torch.bfloat16, bias=False)
    )
