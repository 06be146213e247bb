"""The vLLM backend: a remote OpenAI-compatible server serves. It does not train."""

from __future__ import annotations

import gc
import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from pathlib import Path

from personalpeft.adapters.formats.published import (
    PublishedAdapterFolder,
    build_published_adapter,
)
from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.base import Continuation, Score, StagedStack
from personalpeft.backends.batch_backend import BatchBackend
from personalpeft.backends.vllm.adapter_registry import AdapterRegistry, Registration
from personalpeft.backends.vllm.batch import Batch
from personalpeft.backends.vllm.client import ServedModel, VllmClient
from personalpeft.backends.vllm.model_check import LogprobTrace, ModelCheck
from personalpeft.backends.vllm.transport import Transport
from personalpeft.base_models.types import Base
from personalpeft.errors import ServingFailed, map_write_errors
from personalpeft.settings import VllmServer, WeightsMode

# Mean nats per token: other sequences in the server's batch change its rounding.
_LOGPROB_TOLERANCE = 0.1


class VllmBackend(BatchBackend):
    """See ``personalpeft.backends.base.Backend``.

    ``cache`` keeps what is known of the base, and the stacks' folders unless the server's settings
    name another folder.

    Raises:
        ServingFailed: The server failed.
        BaseMismatch: The server has another base.
        InvalidInput: A setting is wrong.
    """

    name = "vllm"
    _batch: Batch
    batch_invariant = False
    logprob_tolerance = _LOGPROB_TOLERANCE

    def __init__(
        self,
        base: Base,
        *,
        slots: int = 8,
        rows: int = 16,
        cache: Path,
        server: VllmServer,
        entropy: Callable[[int], bytes],
        weights: WeightsMode = "auto",
    ) -> None:
        super().__init__(base)
        self.rows = rows
        self._cache, self._weights = cache, weights
        self._entropy = entropy
        self._process = os.getpid()
        self._salt_key = entropy(16)
        with ExitStack() as cleanup:
            self._transport = Transport(server)
            cleanup.callback(self._transport.close)
            folders = _open_folders(server.folder or cache / "served", entropy(8).hex())
            cleanup.callback(folders.close)
            client = self._client = VllmClient(self._transport)
            self._check = ModelCheck(
                client,
                base,
                self._tokenizer,
                salt=lambda: self._salt(""),
                reference=self._reference_logprobs,
                cache_file=cache / "vllm" / f"{base.digest}.json",
            )
            self._registry = AdapterRegistry(client, self._check, folders, base)
            cleanup.callback(lambda: self._transport.wait(self._registry.unregister_all()))
            model, max_loras = self._connect()
            self.slots = slots if max_loras is None else min(slots, max_loras - 1)
            self.max_length = min(model.max_model_len or base.card.context, base.card.context)
            room = f"up to {max_loras}" if max_loras else "an unknown number of"
            self.description = f"vLLM at {server.url}, base {model.name}, {room} stacks at once"
            self._attached = dict[str, Registration]()
            self._loading: dict[str, Future[Registration]] = {}
            self._batch = Batch(
                client,
                self._registry,
                self._attached,
                self._tokenizer,
                self._salt,
                rows=rows,
                max_length=self.max_length,
            )
            cleanup.callback(self._batch.close)
            self._cleanup = cleanup.pop_all()

    def _connect(self) -> tuple[ServedModel, int | None]:
        """Find the base, and check that the server has all that is needed."""
        model = self._transport.wait(self._check.find_base())
        self._transport.wait(self._registry.remove_leftovers())
        self._transport.wait(self._registry.ensure_checked())
        # Last: the server reports it after its first reply.
        max_loras = self._transport.wait(self._client.read_max_loras())
        if max_loras == 1:
            raise ServingFailed(
                f"The vLLM server at {self._transport.server.url} must have room for two stacks: "
                "the bare base takes one.",
                hint="Start it with --max-loras 2 or more.",
            )
        return model, max_loras

    def stage(self, adapter: AdapterStack) -> StagedStack:
        folder = build_published_adapter(adapter, self.base)
        return self._registry.make_registration(folder, adapter)

    def attach(self, key: str, staged: StagedStack) -> None:
        if not isinstance(staged, Registration):
            raise TypeError("the stack was staged for another backend")
        loading = self._loading[key] = self._transport.start(self._registry.register(staged))
        try:
            self._attached[key] = loading.result()
        except CancelledError as error:
            raise ServingFailed("The load of a stack was cancelled.", hint="Try again.") from error
        finally:
            # Has an effect only if this thread was interrupted.
            loading.cancel()
            del self._loading[key]

    def detach(self, key: str) -> None:
        # A load of the key is cancelled: the server may be slow.
        if loading := self._loading.get(key):
            loading.cancel()
        if registration := self._attached.pop(key, None):
            self._transport.start(self._registry.unregister(registration))

    def clear_cache(self) -> None:
        """Change the salt, so that the server's cached prompts are never found again."""
        self._salt_key = self._entropy(16)

    def check_integrity(self) -> None:
        """The server's memory cannot be checked from here."""

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False, top: int = 0
    ) -> tuple[Score, ...]:
        """See ``Backend.score``. Scored by torch, since the server's prompt log-probs crash it.

        Each call loads torch. A learn scores on the engine that learns.
        """
        from personalpeft.backends.torch.backend import TorchBackend

        torch = TorchBackend(self.base, slots=1, rows=1, cache=self._cache, weights=self._weights)
        try:
            if stack is not None:
                torch.attach(stack, torch.stage(self._attached[stack].stack))
            return torch.score(items, stack, kl=kl, top=top)
        finally:
            torch.close()
            # The model's modules reference each other in cycles.
            del torch
            gc.collect()

    def close(self) -> None:
        """Unregister all stacks and delete their folders. Closing twice is allowed.

        Does nothing in a process that was forked from the one that opened it.
        """
        if os.getpid() == self._process:
            self._cleanup.close()

    def _reference_logprobs(self, item: Continuation) -> LogprobTrace:
        (score,) = self.score([item], None)
        return tuple(zip(item.completion, score.token_logprobs, strict=True))

    def _salt(self, owner: str) -> str:
        """Return the key of an owner's prefix cache. It does not reveal the owner."""
        return hashlib.blake2b(owner.encode(), key=self._salt_key, digest_size=16).hexdigest()


def _open_folders(place: Path, process: str) -> PublishedAdapterFolder:
    # The machine's name becomes part of a path and of stacks' names.
    machine = re.sub("[^a-z0-9-]", "-", platform.node().casefold())[:63] or "here"
    with map_write_errors(place, hint="Set PERSONALPEFT_VLLM_FOLDER to a folder."):
        return PublishedAdapterFolder(place, f"{machine}.{process}")
