"""A cache on disk of the base's hidden states for general continuations.

Reading them again took a fifth of a learn. Invariants: only results of the bare base on general
prompts, so nothing here belongs to a user. A file belongs to one base, one way to compute and one
kind of CPU, so its bits are those that were computed. A damaged file counts as absent. Without
write access nothing is cached.
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

# Raise this when the same weights would give other bits: stale values would silently enter
# revisions.
_FORMAT = 2
# Several times the number of general prompts.
_MOST = 512
_DIGEST = hashlib.sha256().digest_size


class ReferenceCache:
    """Hidden states ``[completion tokens, size]`` by continuation, in ``<cache>/generic/<name>``.

    Thread-safe. The last process that saves wins. Without a cache folder they are kept in memory.
    """

    def __init__(self, base: str, computed: str, cache: Path | None) -> None:
        machine = [torch.__version__, transformers.__version__, instruction_sets()]
        name = canonical_digest([_FORMAT, base, computed, *machine])[:32]
        self._place = cache / "generic" / name if cache else None
        self._turn = threading.Lock()
        self._known: dict[str, Tensor] | None = None
        self._saved = 0

    def get(self, item: Continuation) -> Tensor | None:
        """Return the hidden states in host memory, None if absent."""
        with self._turn:
            return self._all().get(_name(item))

    def add(self, item: Continuation, hidden: Tensor) -> None:
        """Store hidden states in memory; ``save`` writes them."""
        with self._turn:
            known = self._all()
            if len(known) < _MOST:
                known[_name(item)] = hidden.detach().cpu()

    def save(self) -> None:
        """Write new entries to disk, all or none."""
        with self._turn:
            known = self._all()
            if self._place is None or len(known) == self._saved:
                return
            self._saved = len(known)
            data = safetensors.torch.save(known)
            try:
                self._place.parent.mkdir(parents=True, exist_ok=True)
                # In a temporary folder, so that a full disk leaves no partial file.
                with tempfile.TemporaryDirectory(dir=self._place.parent) as folder:
                    part = Path(folder, self._place.name)
                    part.write_bytes(hashlib.sha256(data).digest() + data)
                    part.replace(self._place)
            except OSError as error:
                _log.info(
                    "Reference outputs cannot be cached in %s: %s.",
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
            "Reference outputs cannot be read from %s (%s) and are computed again.",
            place,
            type(error).__name__,
        )
        return {}


def _name(item: Continuation) -> str:
    return canonical_digest([item.prompt, item.completion])
