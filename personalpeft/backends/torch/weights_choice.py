"""Choose whether the base's weights are loaded into memory or stay in its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from personalpeft import host
from personalpeft.backends.torch.device import DeviceChoice
from personalpeft.base_models.mapped_weights import MappedWeights, bytes_to_load
from personalpeft.errors import InvalidInput, WeightsError
from personalpeft.settings import WeightsMode

_GIB = 2**30


class WeightsReason(StrEnum):
    """Why weights are loaded, or stay in their file."""

    REQUESTED = "requested"
    GPU = "gpu"
    FITS = "fits"
    TOO_LARGE = "too_large"
    NOT_MAPPABLE = "not_mappable"


_TEXTS = {
    WeightsReason.REQUESTED: "PERSONALPEFT_WEIGHTS says so",
    WeightsReason.GPU: "a GPU has them in its own memory",
    WeightsReason.FITS: "learning on them needs {needed:.1f} GiB, and {free:.1f} GiB are free",
    WeightsReason.TOO_LARGE: "loaded ones need {needed:.1f} GiB, and {free:.1f} GiB are free",
    WeightsReason.NOT_MAPPABLE: "they cannot be read as their file stores them",
}


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Where weights are kept, and why.

    Attributes:
        mapped: The weights in their file; None for loaded ones.
        reason: Why.
        needed: Bytes that loading takes, where the memory decided.
        free: Bytes that were free.
    """

    mapped: MappedWeights | None
    reason: WeightsReason
    needed: int = 0
    free: int = 0

    @property
    def description(self) -> str:
        """A part of the backend's description, which is empty for loaded weights."""
        if self.mapped is None:
            return ""
        return f"weights as in the file ({', '.join(self.mapped.formats)})"

    def __str__(self) -> str:
        where = self.description or "weights loaded"
        why = _TEXTS[self.reason].format(needed=self.needed / _GIB, free=self.free / _GIB)
        return f"{where}, since {why}"


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
        return WeightsChoice(None, WeightsReason.REQUESTED)
    if where.device.type != "cpu":
        if mode == "auto":
            return WeightsChoice(None, WeightsReason.GPU)
        raise InvalidInput(
            "Weights can stay in their file on a processor only, and this machine has a GPU.",
            hint="Set PERSONALPEFT_WEIGHTS=auto, or hide the GPU with CUDA_VISIBLE_DEVICES=''.",
        )
    try:
        mapped = map_file()
    except WeightsError:
        if mode == "mapped":
            raise
        return WeightsChoice(None, WeightsReason.NOT_MAPPABLE)
    if mode == "mapped":
        return WeightsChoice(mapped, WeightsReason.REQUESTED)
    needed = bytes_to_load(mapped.parameters, where.dtype.itemsize)
    free = host.free_memory()
    if free >= needed:
        return WeightsChoice(None, WeightsReason.FITS, needed, free)
    return WeightsChoice(mapped, WeightsReason.TOO_LARGE, needed, free)
