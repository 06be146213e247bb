"""Copies from host memory to the device. On a GPU no step waits for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Where each array of a transfer begins. Triton compiles a kernel again for other alignments.
_ALIGNMENT = 16


def to_device(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Copy arrays to the device in one transfer, from pinned memory, so nothing waits for it.

    On a CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    packed, sizes = _pack(arrays)
    # Torch keeps the pinned memory until the copy is done.
    return _unpack(_host_memory(packed, device).to(device, non_blocking=True), arrays, sizes)


class InputBuffer:
    """Arrays at fixed places on a device, where a recorded step finds them.

    Attributes:
        tensors: The arrays on the device.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> None:
        packed, sizes = _pack(arrays)
        self._bytes = torch.zeros(len(packed), dtype=torch.uint8, device=device)
        self.tensors = _unpack(self._bytes, arrays, sizes)
        self.fill(arrays)

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy arrays of the same shapes in one transfer, for which nothing waits."""
        packed, _ = _pack(arrays)
        self._bytes.copy_(_host_memory(packed, self._bytes.device), non_blocking=True)


def _pack(arrays: Sequence[npt.NDArray[Any]]) -> tuple[npt.NDArray[np.uint8], list[int]]:
    """Return the bytes of all arrays, and how many bytes each one takes there."""
    sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
    packed = np.zeros(sum(sizes), np.uint8)
    for array, part in zip(arrays, np.split(packed, np.cumsum(sizes)[:-1]), strict=True):
        part[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return packed, sizes


def _unpack(
    packed: Tensor, arrays: Sequence[npt.NDArray[Any]], sizes: Sequence[int]
) -> list[Tensor]:
    """Return views of the bytes, of the arrays' dtypes and shapes."""
    return [
        part[: array.nbytes]
        .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
        .view(array.shape)
        for array, part in zip(arrays, packed.split(sizes), strict=True)
    ]


def _host_memory(packed: npt.NDArray[np.uint8], device: torch.device) -> Tensor:
    host = torch.from_numpy(packed)
    return host.pin_memory() if can_pin(device) else host


def can_pin(device: torch.device) -> bool:
    """Return whether copies from pinned memory to the device need no wait."""
    return device.type == "cuda" and torch.cuda.is_available()


class CopyStream:
    """Copies to a GPU beside the steps that run there. On a CPU they are plain copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if can_pin(device) else None

    @contextmanager
    def after_queued(self) -> Iterator[None]:
        """Queue what the body copies after the steps queued so far, and wait for it at the end.

        Steps that are queued meanwhile do not wait.
        """
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
