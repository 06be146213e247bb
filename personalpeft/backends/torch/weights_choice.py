"""Choose whether the base's weights are loaded into memory or stay in its file.

Invariant: weights that are loaded in float32 are the file's own numbers, not rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from personalpeft.backends.torch.device import DeviceChoice
from personalpeft.base_models.mapped_weights import MappedWeights, map_weights
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, WeightsError
from personalpeft.settings import WeightsMode
from personalpeft.types import Progress

# For activations, adapters and everything else.
_OTHER_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """Where weights are kept.

    Attributes:
        mapped: The weights in the base's file; None for loaded ones.
        folder: The folder with the base's config, and with weights to load.
        reason: A line for ``doctor``, or empty.
    """

    mapped: MappedWeights | None
    folder: Path
    reason: str = ""


def choose_weights(
    base: Base, where: DeviceChoice, mode: WeightsMode, progress: Progress
) -> WeightsChoice:
    """Return where weights are kept.

    ``auto`` loads them if they and their transposed copy, which learning makes, fit into the free
    memory.

    Args:
        base: The base.
        where: The device.
        mode: The user's choice.
        progress: Called with the stage and its progress, 0 to 1, while weights are unpacked.

    Raises:
        WeightsError: They cannot stay in their file, and the mode says so; or cannot be unpacked.
        InvalidInput: They cannot stay in their file on a GPU, and the mode says so.
    """
    if mode == "loaded":
        return load_weights(base, where, progress)
    if where.device.type != "cpu":
        if mode == "auto":
            return load_weights(base, where, progress)
        raise InvalidInput(
            "Weights can stay in their file on a processor only, and this machine has a GPU.",
            hint="Set PERSONALPEFT_WEIGHTS=auto, or hide the GPU with CUDA_VISIBLE_DEVICES=''.",
        )
    try:
        mapped = map_weights(base)
    except WeightsError:
        if mode == "mapped":
            raise
        return load_weights(base, where, progress)
    needed = 2 * mapped.parameters * where.dtype.itemsize + _OTHER_BYTES
    if mode == "auto" and psutil.virtual_memory().available >= needed:
        return load_weights(base, where, progress)
    formats = ", ".join(mapped.formats)
    return WeightsChoice(mapped, base.folder, f"weights as in the file ({formats})")


def load_weights(base: Base, where: DeviceChoice, progress: Progress) -> WeightsChoice:
    """Return the weights to load, unpacked to the numbers that the device computes with.

    The arguments and errors are those of ``choose_weights``.
    """
    full = where.dtype is torch.float32
    folder = unpacked_folder(base, full=full, progress=progress)
    is_unpacked = folder != base.folder
    return WeightsChoice(
        None, folder, "weights unpacked to float32" if is_unpacked and full else ""
    )
