"""Choose the backend that serves.

torch serves many users at once, and trains. llama.cpp answers one user two to three times as fast
on a processor, with a quarter of the memory. The choice depends on the base, the limits and the
machine. It is made once, when the model is loaded, and never depends on the load. So the same
request gets the same reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec

from personalpeft import host
from personalpeft.backends import BACKENDS
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import MissingPackage, NotFound, WeightsError, suggest_nearest
from personalpeft.formatting import pluralize
from personalpeft.settings import DEFAULT_BATCH

AUTO = "auto"

_GPU_BATCH = 128
# On a CPU. A step of 32 rows with adapters takes 54 ms, and one of 16 rows 44 ms (with AMX).
_TORCH_BATCH = 32
# llama.cpp reads each row in a call of its own. From three rows on torch is faster together
# (docs/benchmarks/index.md).
FEW = 2
"""The most users, and replies at once, that llama.cpp serves by default."""


class ChoiceReason(StrEnum):
    """Why a backend serves."""

    REQUESTED = "requested"
    FEW_ROWS = "few_rows"
    MANY_ROWS = "many_rows"
    NO_GGUF = "no_gguf"
    NOT_INSTALLED = "not_installed"
    NOT_LOADABLE = "not_loadable"
    GPU = "gpu"
    UNSUPPORTED = "unsupported"


_TEXTS: Mapping[str, str] = {
    ChoiceReason.REQUESTED: "it was requested",
    ChoiceReason.FEW_ROWS: "it answers one or two users fastest, and takes the least memory",
    ChoiceReason.MANY_ROWS: "it answers more than two users at once fastest",
    ChoiceReason.NO_GGUF: "the base does not come as a GGUF file",
    ChoiceReason.NOT_INSTALLED: "llama-cpp-python is not installed",
    ChoiceReason.NOT_LOADABLE: "the library of llama-cpp-python cannot be loaded here",
    ChoiceReason.GPU: "it uses the GPU of this machine",
    ChoiceReason.UNSUPPORTED: "llama.cpp does not support the base",
}


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend that serves, the reason, and how many replies it generates at once."""

    name: str
    reason: ChoiceReason
    max_batch: int

    @property
    def trains(self) -> bool:
        """Whether the backend also trains. Otherwise torch does, beside it."""
        return self.name not in ("llamacpp", "vllm")

    def __str__(self) -> str:
        at_once = pluralize(self.max_batch, "reply", "replies")
        return f"{describe_choice(self.name, self.reason)}; {at_once} at once"


def describe_choice(name: str, reason: str | None) -> str:
    """Return a backend and why it was chosen, as far as the reason is known here.

    It is a ``ChoiceReason``, another text of a later version, or None.
    """
    text = _TEXTS.get(reason or "")
    return f"{name}, since {text}" if text else name


TORCH = BackendChoice("torch", ChoiceReason.REQUESTED, _TORCH_BATCH)
"""The backend that trains where the one that serves does not."""


def check_backend(name: str) -> str:
    """Return a name that ``choose_backend`` accepts. Raises ``NotFound``."""
    names = (AUTO, *BACKENDS)
    if name not in names:
        raise NotFound(
            f"There is no backend {name!r}.", hint=suggest_nearest(name, names, what="backend")
        )
    return name


def choose_backend(
    name: str,
    card: ModelCard,
    max_batch: int | None,
    *,
    users: int = 1,
    base: Base | None = None,
) -> BackendChoice:
    """Choose the backend for a base on this machine.

    Args:
        name: One of ``BACKENDS``, or "auto".
        card: The card of the base.
        max_batch: Replies that may be generated at once; None for what suits users and backend.
        users: Users who may ask at once.
        base: The base; None where it is not prepared yet. Then its architecture is not checked.
    """
    if name != AUTO:
        return BackendChoice(name, ChoiceReason.REQUESTED, max_batch or default_batch(name))
    if (max_batch or users) > FEW:
        many = max_batch or default_batch("torch")
        return BackendChoice("torch", ChoiceReason.MANY_ROWS, many)
    problem = _why_not_llamacpp(card, base)
    if problem is not None:
        return BackendChoice("torch", problem, max_batch or default_batch("torch"))
    return BackendChoice("llamacpp", ChoiceReason.FEW_ROWS, max_batch or FEW)


def default_batch(name: str) -> int:
    """Return how many replies a backend generates at once by default.

    On a GPU the free memory limits them first: rows wait while the cache has no block for them. A
    vLLM server needs no torch here that uses the GPU.
    """
    on_gpu = host.has_gpu() if name == "torch" else name == "vllm" and host.cuda_of_driver() > 0
    if on_gpu:
        return _GPU_BATCH
    return _TORCH_BATCH if name == "torch" else DEFAULT_BATCH


def _why_not_llamacpp(card: ModelCard, base: Base | None) -> ChoiceReason | None:
    if card.source.kind not in ("package", "gguf"):
        return ChoiceReason.NO_GGUF
    if find_spec("llama_cpp") is None:
        return ChoiceReason.NOT_INSTALLED
    if host.has_gpu():
        return ChoiceReason.GPU
    from personalpeft.backends.llamacpp.binding import load_library

    try:
        load_library()
        if base is not None:
            gguf_names(base)
    except MissingPackage:
        return ChoiceReason.NOT_LOADABLE
    except WeightsError:
        return ChoiceReason.UNSUPPORTED
    return None
