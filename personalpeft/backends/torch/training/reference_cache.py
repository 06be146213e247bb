"""Reference outputs, shared between sessions above the same stack.

Outputs are kept while a session uses them. Hidden states of the bare base for general continuations
are also cached in a file. Computing them again took a fifth of a learn.

Invariants: the bits of a reference depend on the stack below and the continuation alone. So it has
a pass of its own, unless they are the same in any pass. Nothing in the file belongs to a user. A
file belongs to one base, one kind of computation and one kind of CPU. So cached bits equal computed
ones. A damaged file counts as absent. Without write access nothing is stored.
"""

from __future__ import annotations

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
from personalpeft.backends.torch.training.logprobs import TorchOutputs
from personalpeft.backends.torch.training.packing import group_by_prefix, pack
from personalpeft.file_system import read_checked_file, write_checked_file
from personalpeft.types import canonical_digest

_log = logging.getLogger(__name__)

# Raise this when the same weights would give other bits: stale values would silently enter
# revisions.
_FORMAT = 3
# New tokens of one pass. Steps of users wait for one block of it.
_PASS_TOKENS = 1024
# Several times the number of general prompts.
_MAX_STORED = 512


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
        self._outputs = WeakValueDictionary[tuple[str | None, Continuation], TorchOutputs]()
        self._general: dict[str, Tensor] | None = None

    def read(
        self, items: Mapping[Continuation, bool], stack: str | None, active: ActiveLoRA | None
    ) -> dict[Continuation, TorchOutputs]:
        """Return the reference outputs of continuations.

        Args:
            items: The continuations, and whether each is general.
            stack: The key of the stack below; None for the bare base.
            active: That stack.
        """
        found = {}
        names = {
            item: canonical_digest([item.prompt, item.completion])
            for item, is_general in items.items()
            if is_general and stack is None
        }
        with self._model.exclusive():
            if self._general is None:
                self._general = self._load()
            general = self._general
            for item in items:
                outputs = self._outputs.get((stack, item))
                hidden = general.get(names.get(item, ""))
                if outputs is None and hidden is not None:
                    outputs = self._keep(stack, item, hidden)
                if outputs is not None:
                    found[item] = outputs
        missing = [item for item in items if item not in found]
        has_new = False
        limit = _PASS_TOKENS if self._model.packing_invariant else 0
        for places in group_by_prefix(missing, limit, limit):
            group = [missing[place] for place in places]
            with torch.no_grad(), self._model.exclusive(active):
                states = self._model.hidden(pack(group))
                counts = [len(item.completion) for item in group]
                for item, hidden in zip(group, states.split(counts), strict=True):
                    # A copy, which does not hold the whole pass in memory.
                    found[item] = self._keep(stack, item, hidden.clone())
                    if item in names and len(general) < _MAX_STORED:
                        general[names[item]] = found[item].source.cpu()
                        has_new = True
        if has_new:
            self._save(dict(general))
        return found

    def _keep(self, stack: str | None, item: Continuation, hidden: Tensor) -> TorchOutputs:
        hidden = hidden.to(self._model.where.device)
        tokens = torch.tensor(item.scored, device=hidden.device)
        outputs = self._outputs[stack, item] = TorchOutputs(
            hidden, tokens, self._model, is_reference=True
        )
        return outputs

    def _save(self, known: dict[str, Tensor]) -> None:
        if self._file is None:
            return
        try:
            write_checked_file(self._file, safetensors.torch.save(known))
        except OSError as error:
            reason = type(error).__name__
            _log.info("Reference outputs cannot be cached in %s: %s.", self._file, reason)

    def _load(self) -> dict[str, Tensor]:
        try:
            data = None if self._file is None else read_checked_file(self._file)
            if data is not None:
                return safetensors.torch.load(data)
        except (OSError, SafetensorError) as error:
            reason = type(error).__name__
            _log.info("Reference outputs cannot be read from %s: %s.", self._file, reason)
        return {}
