"""Choose the device that computes, the dtype of the base there, and where its weights are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from personalpeft import host
from personalpeft.backends.torch.batch_invariant_matmul import (
    ProductKind,
    ProductShape,
    is_usable,
)
from personalpeft.base_models.mapped_weights import MappedWeights, bytes_to_load
from personalpeft.errors import InvalidInput, WeightsError
from personalpeft.settings import LearningDevice, WeightsMode

# For activations, adapters and everything else that learning needs beside the weights.
_LEARNING_BYTES = 3 * 2**30
_GIB = 2**30
_REQUESTED = "PERSONALPEFT_WEIGHTS says so"
NOT_MAPPABLE = "they cannot be read as their file stores them"
"""Why weights are loaded that would rather stay in their file."""


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Device and dtype of the base.

    Attributes:
        device: The device.
        dtype: The dtype of the base there.
        reason: Both in words. Builds record it.
        note: Why an existing GPU does not compute, or empty. Builds do not record it.
    """

    device: torch.device
    dtype: torch.dtype
    reason: str
    note: str = ""

    def __str__(self) -> str:
        return "; ".join(filter(None, (self.reason, self.note)))


def choose_device(*, gpu: bool = True) -> DeviceChoice:
    """Return a GPU, where there is one and ``gpu`` allows it, else the CPU.

    The dtype is bfloat16 if the hardware multiplies it.
    """
    if gpu and torch.cuda.is_available():
        # Older GPUs emulate bfloat16. float16 is fast there, but activations can overflow it.
        is_new = torch.cuda.get_device_capability() >= (8, 0)
        dtype, name = (torch.bfloat16, "bfloat16") if is_new else (torch.float32, "float32")
        reason = f"{name} on {torch.cuda.get_device_name()}"
        return DeviceChoice(torch.device("cuda"), dtype, reason)
    where = f"on the processor, {torch.get_num_threads()} threads"
    if _multiplies_bfloat16():
        dtype, reason = torch.bfloat16, f"bfloat16 {where}"
    else:
        dtype, reason = torch.float32, f"float32 {where} (it does not multiply bfloat16)"
    return DeviceChoice(torch.device("cpu"), dtype, reason, _why_not_gpu() if gpu else "")


def choose_learning_device(
    size: int, mode: LearningDevice = "auto", weights: WeightsMode = "auto"
) -> DeviceChoice:
    """Return the device that learns beside another backend, which serves the base.

    ``auto`` is a GPU if that backend left enough of its memory free, else the CPU. Weights that
    stay in their file are a CPU's.

    Args:
        size: Bytes of the base's weights.
        mode: The user's choice.
        weights: Where the base's weights are kept.

    Raises:
        InvalidInput: The user chose a GPU, and there is none.
    """
    found = torch.cuda.is_available()
    if mode == "cuda" and not found:
        raise InvalidInput(
            "The learning device is cuda, and torch finds no GPU.",
            hint="Set PERSONALPEFT_LEARNING_DEVICE=auto, or install a CUDA build of torch.",
        )
    if not found or mode == "cuda":
        return choose_device()
    if mode == "cpu":
        note = "PERSONALPEFT_LEARNING_DEVICE says so"
    elif weights == "mapped":
        note = "PERSONALPEFT_WEIGHTS keeps the weights in their file, off the GPU"
    elif memory_to_plan(torch.device("cuda")) < size + _LEARNING_BYTES:
        note = "too little of the GPU's memory is free"
    else:
        return choose_device()
    return replace(choose_device(gpu=False), note=note)


def memory_to_plan(device: torch.device) -> int:
    """Return the bytes that plans may divide: a GPU's free memory, or all memory of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host.total_memory()


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Where weights are kept.

    Attributes:
        mapped: The weights in their file; None for loaded ones.
        reason: Why, in words.
    """

    mapped: MappedWeights | None
    reason: str

    @property
    def description(self) -> str:
        """A part of the backend's description, which is empty for loaded weights."""
        if self.mapped is None:
            return ""
        return f"weights as in the file ({', '.join(self.mapped.formats)})"

    def __str__(self) -> str:
        return f"{self.description or 'weights loaded'}, since {self.reason}"


def choose_weights(
    map_file: Callable[[], MappedWeights], where: DeviceChoice, mode: WeightsMode
) -> WeightsChoice:
    """Return where weights are kept.

    ``auto`` loads them if they and their transposed copy, which learning makes, fit into the free
    memory.

    Args:
        map_file: Maps the base's file, or raises ``WeightsError``.
        where: The device.
        mode: The user's choice.

    Raises:
        WeightsError: They cannot stay in their file, and the mode says so.
        InvalidInput: They cannot stay in their file on a GPU, and the mode says so.
    """
    if mode == "loaded":
        return WeightsChoice(None, _REQUESTED)
    if where.device.type != "cpu":
        if mode == "auto":
            return WeightsChoice(None, "a GPU has them in its own memory")
        raise InvalidInput(
            "Weights can stay in their file on a processor only, and this machine has a GPU.",
            hint="Set PERSONALPEFT_WEIGHTS=auto, or hide the GPU with CUDA_VISIBLE_DEVICES=''.",
        )
    try:
        mapped = map_file()
    except WeightsError:
        if mode == "mapped":
            raise
        return WeightsChoice(None, NOT_MAPPABLE)
    if mode == "mapped":
        return WeightsChoice(mapped, _REQUESTED)
    needed = bytes_to_load(mapped.parameters, where.dtype.itemsize)
    free = host.free_memory()
    sizes = f"{needed / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB are free"
    if free >= needed:
        return WeightsChoice(None, f"learning on them needs {sizes}")
    return WeightsChoice(mapped, f"loaded ones need {sizes}")


def _why_not_gpu() -> str:
    """Return why torch cannot use the NVIDIA GPU of this machine, or "" without one."""
    driver, needed = host.cuda_of_driver(), host.cuda_of_torch()
    if not driver:
        return ""
    if not needed:
        return "torch is built without CUDA and does not use the NVIDIA GPU"
    if needed > driver:
        return f"the driver of the NVIDIA GPU is too old for CUDA {needed}, which torch uses"
    return "torch cannot use the NVIDIA GPU"


def _multiplies_bfloat16() -> bool:
    """Return whether the CPU multiplies bfloat16, and the libraries do it correctly."""
    # PyTorch for macOS is built without this library.
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    return supported() and is_usable(
        ProductKind.PACKED, ProductShape(512, 512, torch.bfloat16, bias=False)
    )
