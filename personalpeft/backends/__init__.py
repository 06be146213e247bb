"""The only part that touches tensors on a device and model code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.errors import InvalidInput, NotFound, suggest_nearest

if TYPE_CHECKING:
    from personalpeft.backends.base import Backend
    from personalpeft.base_models.types import Base
    from personalpeft.settings import VllmServer

__all__ = ["BACKENDS", "load_backend"]

BACKENDS = ("torch", "llamacpp", "vllm", "fake")


def load_backend(
    name: str,
    base: Base,
    *,
    slots: int,
    rows: int,
    cache: Path,
    vllm: VllmServer | None,
    entropy: Callable[[int], bytes],
) -> Backend:
    """Loads a base into the backend of that name, with room for so many stacks and rows; its libraries are imported now,
    and what it makes for this machine is kept in the cache folder. ``vllm`` is the server that the backend of that name speaks to.

    Raises ``NotFound`` for an unknown name, ``InvalidInput`` for vllm without a server.
    """
    if name == "torch":
        from personalpeft.backends.torch.backend import TorchBackend

        return TorchBackend(base, slots=slots, rows=rows, cache=cache)
    if name == "llamacpp":
        from personalpeft.backends.llamacpp.backend import LlamaCppBackend

        return LlamaCppBackend(base, slots=slots, rows=rows, cache=cache)
    if name == "vllm":
        from personalpeft.backends.vllm.backend import VllmBackend

        if vllm is None:
            raise InvalidInput(
                "The backend vllm speaks to a server, and none is named.",
                hint="Set PERSONALPEFT_VLLM_URL to its address; docs/engines.md says how to start one.",
            )
        return VllmBackend(base, slots=slots, rows=rows, cache=cache, server=vllm, entropy=entropy)
    if name == "fake":
        from personalpeft.backends.fake import FakeBackend

        return FakeBackend(base, slots=slots, rows=rows)
    raise NotFound(
        f"There is no backend called {name!r}.",
        hint=suggest_nearest(name, BACKENDS, what="backend"),
    )
