"""Backends: the only code that touches tensors on a device and model code."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.errors import InvalidInput
from personalpeft.extras import extra_required
from personalpeft.settings import DEFAULT_SLOTS

if TYPE_CHECKING:
    from personalpeft.backends.base import Backend
    from personalpeft.base_models.types import Base
    from personalpeft.settings import LearningDevice, VllmServer, WeightsMode
    from personalpeft.types import Progress

__all__ = ["BACKENDS", "load_backend"]

BACKENDS = ("torch", "llamacpp", "vllm", "fake")


def load_backend(
    name: str,
    base: Base,
    *,
    slots: int | None,
    rows: int,
    cache: Path,
    vllm: VllmServer | None,
    entropy: Callable[[int], bytes],
    weights: WeightsMode = "auto",
    learning_device: LearningDevice = "auto",
    serves: bool = True,
    progress: Progress = lambda stage, done: None,
) -> Backend:
    """Load a base into a backend, and import the backend's libraries.

    Args:
        name: One of ``BACKENDS``; see ``choice.check_backend``.
        base: The base.
        slots: How many stacks can be attached at once; None for what suits the backend.
        rows: How many sequences the batch can hold.
        cache: The folder for what is built for this machine.
        vllm: The server of the backend ``vllm``.
        entropy: Returns that many random bytes.
        weights: Where torch keeps the base's weights.
        learning_device: Where torch learns for a base that another backend serves.
        serves: Whether the backend serves. Otherwise it learns beside the one that does.
        progress: Called with a stage and its progress, 0 to 1, while torch unpacks weights.

    Returns:
        The backend. Close it when it is not needed any more.

    Raises:
        InvalidInput: The backend is ``vllm``, and no server is set.
        MissingPackage: The backend's package is not installed.
    """
    if name == "torch":
        with _collection_paused():
            from personalpeft.backends.torch.backend import TorchBackend
            from personalpeft.backends.torch.device import choose_learning_device
            from personalpeft.base_models.resolve import unpacked_bytes

            where = None
            if not serves:
                size = unpacked_bytes(base)
                where = choose_learning_device(size, learning_device, weights)
            return TorchBackend(
                base,
                slots=slots,
                rows=rows,
                where=where,
                cache=cache,
                weights=weights,
                progress=progress,
            )
    if name == "llamacpp":
        with extra_required():
            from personalpeft.backends.llamacpp.backend import LlamaCppBackend

            return LlamaCppBackend(base, slots=slots or DEFAULT_SLOTS, rows=rows, cache=cache)
    if name == "vllm":
        with extra_required():
            from personalpeft.backends.vllm.backend import VllmBackend

        if vllm is None:
            raise InvalidInput(
                "The backend vllm must have a server, and none is set.",
                hint="Set PERSONALPEFT_VLLM_URL to its address; see docs/how-to/engines.md.",
            )
        return VllmBackend(
            base,
            slots=slots or max(DEFAULT_SLOTS, rows),
            rows=rows,
            cache=cache,
            server=vllm,
            entropy=entropy,
            weights=weights,
        )
    from personalpeft.backends.fake import FakeBackend

    return FakeBackend(base, slots=slots or DEFAULT_SLOTS, rows=rows)


@contextmanager
def _collection_paused() -> Iterator[None]:
    """Pause the garbage collector. It takes a fifth of the time of imports this large."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
