"""Reference outputs, shared between sessions above the same stack.

Outputs are kept while a session uses them. Hidden states of the bare base for general continuations
are also cached in a file. Computing them again took a fifth of a learn.

Invariants: a reference is computed in its own pass. So its bits depend on the stack below and the
continuation alone. Nothing in the file belongs to a user. A file belongs to one base, one kind of
computation and one kind of CPU. So cached bits equal computed ones. A damaged file counts as
absent. Without write access nothing is stored.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from weakref import WeakValueDictionary

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from personalpeft.backends.base import Continuation
from personalpeft.backends.processor import instruction_sets
from personalpeft.backends.torch.lora_layers import ActiveLoRA
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.logprobs import ReferenceOutputs
from personalpeft.backends.torch.training.packing import pack
from personalpeft.host import write_file_atomically
from personalpeft.types import canonical_digest

_log = logging.getLogger(__name__)

# Raise this when the same weights would give other bits: stale values would silently enter
# revisions.
_FORMAT = 3
# Several times the number of general prompts.
_MAX_STORED = 512
_DIGEST = hashlib.sha256().digest_size


class ReferenceCache:
    """Reads reference outputs on one model. Thread-safe.

    Args:
        model: The base.
        computed: How the model computes.
        cache: The folder of caches; None stores nothing. The last process that saves wins.
    """

    def __init__(self, model: ModelRunner, computed: str, cache: Path | None) -> None:
        machine = [torch.__version__, version("transformers"), instruction_sets()]
        name = canonical_digest([_FORMAT, model.base.digest, computed, *machine])[:32]
        self._model = model
        self._file = cache / "generic" / name if cache else None
        # The model's lock guards all of these.
        self._outputs: WeakValueDictionary[tuple[str | None, Continuation], ReferenceOutputs] = (
            WeakValueDictionary()
        )
        self._general: dict[str, Tensor] | None = None
        self._num_stored = 0

    def read(
        self, items: Mapping[Continuation, bool], stack: str | None, active: ActiveLoRA | None
    ) -> dict[Continuation, ReferenceOutputs]:
        """Return the reference outputs of continuations.

        Args:
            items: The continuations, and whether each is general.
            stack: The key of the stack below; None for the bare base.
            active: That stack.
        """
        found = {}
        for item, is_general in items.items():
            with torch.no_grad(), self._model.exclusive(active):
                outputs = self._outputs.get((stack, item))
                if outputs is None:
                    is_shared = is_general and stack is None
                    hidden = self._general_hidden(item) if is_shared else self._hidden(item)
                    hidden = hidden.to(self._model.where.device)
                    tokens = torch.tensor(item.scored, device=hidden.device)
                    outputs = ReferenceOutputs(hidden, tokens, self._model)
                    self._outputs[stack, item] = outputs
                found[item] = outputs
        self._save()
        return found

    def _hidden(self, item: Continuation) -> Tensor:
        return self._model.hidden(pack([item]))

    def _general_hidden(self, item: Continuation) -> Tensor:
        if self._general is None:
            self._general = self._load()
            self._num_stored = len(self._general)
        name = canonical_digest([item.prompt, item.completion])
        hidden = self._general.get(name)
        if hidden is None:
            hidden = self._hidden(item)
            if len(self._general) < _MAX_STORED:
                self._general[name] = hidden.cpu()
        return hidden

    def _save(self) -> None:
        # A copy, to which another session adds nothing.
        known = dict(self._general or {})
        if self._file is None or len(known) == self._num_stored:
            return
        self._num_stored = len(known)
        data = safetensors.torch.save(known)
        try:
            write_file_atomically(self._file, hashlib.sha256(data).digest() + data)
        except OSError as error:
            reason = type(error).__name__
            _log.info("Reference outputs cannot be cached in %s: %s.", self._file, reason)

    def _load(self) -> dict[str, Tensor]:
        try:
            data = b"" if self._file is None else self._file.read_bytes()
            digest, tensors = data[:_DIGEST], data[_DIGEST:]
            if hashlib.sha256(tensors).digest() == digest:
                return safetensors.torch.load(tensors)
        except FileNotFoundError:
            pass
        except (OSError, SafetensorError) as error:
            _log.info(
                "Reference outputs cannot be read from %s (%s) and are computed again.",
                self._file,
                type(error).__name__,
            )
        return {}
