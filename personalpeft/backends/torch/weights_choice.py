"""Choose whether the base's weights are loaded into memory or stay in its file."""

from __future__ import annotations

from dataclasses import dataclass

from personalpeft import host
from personalpeft.backends.torch.device import DeviceChoice
from personalpeft.base_models.mapped_weights import MappedWeights, map_weights
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, WeightsError
from personalpeft.settings import WeightsMode

# For activations, adapters and everything else.
_OTHER_BYTES = 3 * 2**30


@dataclass(frozen=True, slots=True)
class WeightsChoice:
    """``mapped`` is None for loaded weights; ``reason`` is a line for ``doctor``, or empty."""

    mapped: MappedWeights | None
    reason: str = ""


def choose_weights(base: Base, where: DeviceChoice, mode: WeightsMode) -> WeightsChoice:
    """Return where weights are kept.

    ``auto`` loads them if they and their transposed copy, which learning makes, fit into the free
    memory.

    Args:
        base: The base.
        where: The device.
        mode: The user's choice.

    Raises:
        WeightsError: They cannot stay in their file, and the mode says so.
        InvalidInput: The same on a GPU.
    """
    if mode == "loaded":
        return WeightsChoice(None)
    if where.device.type != "cpu":
        if mode == "auto":
            return WeightsChoice(None)
        raise InvalidInput(
            "Weights can stay in their file on a processor only, and this machine has a GPU.",
            hint="Set PERSONALPEFT_WEIGHTS=auto, or hide the GPU with CUDA_VISIBLE_DEVICES=''.",
        )
    try:
        mapped = map_weights(base)
    except WeightsError:
        if mode == "mapped":
            raise
        return WeightsChoice(None)
    needed = 2 * mapped.parameters * where.dtype.itemsize + _OTHER_BYTES
    if mode == "auto" and host.free_memory() >= needed:
        return WeightsChoice(None)
    return WeightsChoice(mapped, f"weights as in the file ({', '.join(mapped.formats)})")
