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
    return InputBuffer(arrays, device).tensors


class InputBuffer:
    """Arrays at fixed places on a device, where a recorded step finds them.

    Attributes:
        tensors: The arrays on the device.
    """

    def __init__(self, arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> None:
        self._sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        self._bytes = torch.empty(sum(self._sizes), dtype=torch.uint8, device=device)
        self.tensors = [
            part[: array.nbytes]
            .view(torch.from_numpy(np.empty(0, array.dtype)).dtype)
            .view(array.shape)
            for array, part in zip(arrays, self._bytes.split(self._sizes), strict=True)
        ]
        self.fill(arrays)

    def fill(self, arrays: Sequence[npt.NDArray[Any]]) -> None:
        """Copy arrays of the same shapes in one transfer, for which nothing waits."""
        device = self._bytes.device
        # Torch keeps pinned memory until the copy is done.
        host = torch.zeros(len(self._bytes), dtype=torch.uint8, pin_memory=can_pin(device))
        for array, part in zip(arrays, host.split(self._sizes), strict=True):
            part.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes.copy_(host, non_blocking=True)


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
