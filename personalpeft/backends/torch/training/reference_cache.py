"""What the bare base says of generic continuations, kept in the cache from one process to the next: every learn on it is
held to the same, and reading it took a fifth of a learn.

Invariants: only the bare base's, and only of terms that call themselves generic, so nothing here is anybody's own. Bits come
back as they were computed: a file belongs to one base, one way to compute and one kind of processor. A file that is not
whole, or was changed, is no file. Who cannot write goes on without.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
import threading
from pathlib import Path

import safetensors.torch
import torch
import transformers
from safetensors import SafetensorError
from torch import Tensor

from personalpeft.backends.base import Continuation
from personalpeft.backends.torch.processor import instruction_sets
from personalpeft.types import canonical_digest

_log = logging.getLogger(__name__)

# To be raised whenever the same weights would give other bits: what was kept before would go unnoticed into revisions.
_FORMAT = 2
# Several times the questions that there are; what more there is, is read again.
_MOST = 512
_DIGEST = hashlib.sha256().digest_size


class ReferenceCache:
    """Hidden states ``[tokens of the completion, size]`` by continuation, in the file ``<cache>/generic/<name>``. Safe to use
    from several threads; of several processes the last that saves wins. Without a cache they last as long as this does.
    """

    def __init__(self, base: str, computed: str, cache: Path | None) -> None:
        machine = [torch.__version__, transformers.__version__, instruction_sets()]
        name = canonical_digest([_FORMAT, base, computed, *machine])[:32]
        self._place = cache / "generic" / name if cache else None
        self._turn = threading.Lock()
        self._known: dict[str, Tensor] | None = None
        self._saved = 0

    def get(self, item: Continuation) -> Tensor | None:
        """The hidden states, where they are known; on the processor."""
        with self._turn:
            return self._all().get(_name(item))

    def add(self, item: Continuation, hidden: Tensor) -> None:
        """Notes them; ``save`` keeps them."""
        with self._turn:
            known = self._all()
            if len(known) < _MOST:
                known[_name(item)] = hidden.detach().cpu()

    def save(self) -> None:
        """Keeps what is new, all or nothing."""
        with self._turn:
            known = self._all()
            if self._place is None or len(known) == self._saved:
                return
            self._saved = len(known)
            data = safetensors.torch.save(known)
            try:
                self._place.parent.mkdir(parents=True, exist_ok=True)
                # A folder of its own, which goes whatever happens: what a full disk cuts off is not left lying.
                with tempfile.TemporaryDirectory(dir=self._place.parent) as folder:
                    part = Path(folder, self._place.name)
                    part.write_bytes(hashlib.sha256(data).digest() + data)
                    part.replace(self._place)
            except OSError as error:
                _log.info(
                    "What the base says of generic answers is not kept in %s: %s.",
                    self._place,
                    type(error).__name__,
                )

    def _all(self) -> dict[str, Tensor]:
        if self._known is None:
            self._known = _read(self._place) if self._place else {}
            self._saved = len(self._known)
        return self._known


def _read(place: Path) -> dict[str, Tensor]:
    try:
        data = place.read_bytes()
        digest, tensors = data[:_DIGEST], data[_DIGEST:]
        return safetensors.torch.load(tensors) if hashlib.sha256(tensors).digest() == digest else {}
    except FileNotFoundError:
        return {}
    except (OSError, SafetensorError) as error:
        _log.info(
            "What the base says of generic answers cannot be read from %s (%s); it is asked again.",
            place,
            type(error).__name__,
        )
        return {}


def _name(item: Continuation) -> str:
    return canonical_digest([item.prompt, item.completion])
