"""The only part that touches tensors on a device and model code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from personalpeft.errors import NotFound, nearest

if TYPE_CHECKING:
    from personalpeft.backends.base import Backend
    from personalpeft.bases.base import Base

__all__ = ["BACKENDS", "load_backend"]

BACKENDS = ("torch", "llamacpp", "fake")


def load_backend(name: str, base: Base, *, slots: int, rows: int, cache: Path) -> Backend:
    """Loads a base into the backend of that name, with room for so many stacks and rows; its libraries are imported now,
    and what it compiles for this machine is kept in the cache folder.

    Raises ``NotFound`` for an unknown name.
    """
    if name == "torch":
        from personalpeft.backends.torch.backend import TorchBackend

        return TorchBackend(base, slots=slots, rows=rows, cache=cache)
    if name == "llamacpp":
        from personalpeft.backends.llamacpp.backend import LlamaCppBackend

        return LlamaCppBackend(base, slots=slots, rows=rows, cache=cache)
    if name == "fake":
        from personalpeft.backends.fake import FakeBackend

        return FakeBackend(base, slots=slots, rows=rows)
    raise NotFound(f"There is no backend called {name!r}.", hint=nearest(name, BACKENDS, what="backend"))
