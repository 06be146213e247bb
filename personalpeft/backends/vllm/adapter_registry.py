"""Stacks that are registered on the server: their names, folders and removal.

Invariants:

- Nothing is registered on a server before its base was checked. The neutral stack is registered
  only after the check, so its name marks a checked server. A restarted server has lost it.
- A name always means the same weights. A stack's folder exists as long as the server may read it.
  After its last sequence the name is unloaded, then the folder is deleted. A cancelled request
  delays that for a moment. A server exits if the folder of a queued request is missing.
- Names carry the id of this process, so that the end of another process does not remove them.

All methods but ``note_cancelled_request`` and ``make_registration`` run on the transport's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from personalpeft.adapters.formats.published import (
    PublishedAdapter,
    PublishedAdapterFolder,
    build_published_adapter,
)
from personalpeft.adapters.types import AdapterStack, LoRAWeights, ScaledLoRA
from personalpeft.backends.vllm.client import UnknownModel, VllmClient
from personalpeft.backends.vllm.model_check import ModelCheck
from personalpeft.backends.vllm.transport import ConnectionLost, Unreachable
from personalpeft.base_models.types import Base
from personalpeft.errors import PersonalPeftError, ServingFailed, format_origin
from personalpeft.settings import VllmServer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which a server has seen that a request was cancelled.
_CANCEL_GRACE = 2.0
_MAX_PARALLEL_REMOVALS = 4
# Restarts of the server that one registration survives.
_MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Registration:
    """A stack under a name on the server, with its folder and its weights."""

    name: str
    folder: PublishedAdapter
    stack: AdapterStack

    @property
    def nbytes(self) -> int:
        """The bytes of the folder's files and of the stack's weights."""
        return self.folder.nbytes + self.stack.nbytes


def neutral_stack(base: Base) -> AdapterStack:
    """Return a stack that changes nothing, for sequences on the bare base.

    No request is sent without a stack. In a batch with LoRA, vLLM 0.32 on a CPU would silently give
    it the stack of its last slot.
    """
    projection, (inputs, outputs) = min(base.architecture.projections.items())
    blocks = base.architecture.blocks
    weights = LoRAWeights(
        np.zeros((blocks, 1, inputs), np.float16), np.zeros((blocks, outputs, 1), np.float16)
    )
    return AdapterStack(1, {projection: (ScaledLoRA(weights, 1.0),)})


class AdapterRegistry:
    """The stacks that this process has registered on a server. Call ``ensure_checked`` first."""

    def __init__(
        self,
        client: VllmClient,
        check: ModelCheck,
        folders: PublishedAdapterFolder,
        base: Base,
    ) -> None:
        self._client, self._check, self._folders = client, check, folders
        self._settings = client.transport.server
        stack = neutral_stack(base)
        self.bare_base = self.make_registration(build_published_adapter(stack, base), stack)
        # By name: the registration, its uses, and its restorations after the server lost it.
        self._registered: dict[str, Registration] = {}
        self._num_uses: Counter[str] = Counter()
        self._num_restored: Counter[str] = Counter()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # Background tasks: those cancelled on close, and those awaited.
        self._loading: set[asyncio.Task[Any]] = set()
        self._removing: set[asyncio.Task[Any]] = set()
        self._check_task: asyncio.Task[None] | None = None
        self._last_cancel = -_CANCEL_GRACE
        # Whether the server may be another one now, for servers that resolve names themselves.
        self._connection_lost = False

    async def ensure_checked(self) -> None:
        """Check the server unless it was checked, and register the neutral stack.

        Raises:
            BaseMismatch: The server has another base.
            InvalidInput: The server has no base of the configured name.
            ServingFailed: The server failed.
        """
        if self._check_task is None:
            self._check_task = _start_task(self._check_server(), self._loading)
            self._check_task.add_done_callback(self._on_check_done)
        # Shielded: one caller may be cancelled while others wait for the same task.
        await asyncio.shield(self._check_task)

    def make_registration(self, folder: PublishedAdapter, stack: AdapterStack) -> Registration:
        """Name a stack. ``register`` makes the name known to the server."""
        # A server that resolves names knows a stack by its digest alone.
        name = folder.name if self._settings.resolves else f"{folder.name}:{self._folders.process}"
        return Registration(name, folder, stack)

    async def register(self, registration: Registration) -> Registration:
        """Register a stack. Raises as ``ensure_checked``; then nothing stays registered."""
        async with self._lock(registration.name):
            try:
                await self._load(registration)
            except BaseException:
                # The server may have loaded it although the response was lost.
                if not self._num_uses[registration.name]:
                    await asyncio.shield(_start_task(self._delete(registration), self._removing))
                raise
            self._registered[registration.name] = registration
            self._num_uses[registration.name] += 1
        return registration

    async def call_with_name(
        self, registration: Registration, request: Callable[[str], Awaitable[T]]
    ) -> T:
        """Send a request with a stack's name, and once more if the server has lost the stack.

        Raises what ``request`` and ``ensure_checked`` raise, and ``ServingFailed`` if the server
        does not find the stack.
        """
        num_restored = self._num_restored[registration.name]
        if self._connection_lost:
            await self.ensure_checked()
        with suppress(UnknownModel):
            return await self._call(registration, request)
        # Shielded: one caller may be cancelled while others wait for the same task.
        restore = self._restore(registration, num_restored)
        await asyncio.shield(_start_task(restore, self._loading))
        try:
            return await self._call(registration, request)
        except UnknownModel as error:
            raise _unresolved(self._settings, error) from error

    async def unregister(self, registration: Registration) -> None:
        """Remove a stack that no sequence uses, unless it was registered again."""
        await asyncio.shield(_start_task(self._unregister(registration), self._removing))

    async def unregister_all(self) -> None:
        """Remove all stacks. No sequence may use one."""
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*self._loading, *self._removing, return_exceptions=True)
        await self._wait_for_cancelled()
        limit = asyncio.Semaphore(_MAX_PARALLEL_REMOVALS)

        async def delete(registration: Registration) -> None:
            async with limit:
                await self._delete(registration)

        registered, self._registered = tuple(self._registered.values()), {}
        self._num_uses.clear()
        await asyncio.gather(*map(delete, registered))

    def note_cancelled_request(self) -> None:
        """Note that a request was cancelled during its reply. Called from any thread."""
        self._last_cancel = time.monotonic()

    async def remove_leftovers(self) -> None:
        """Remove the names of processes that have ended, and then their folders."""
        for process in await asyncio.to_thread(self._folders.dead_processes):
            with suppress(PersonalPeftError, OSError):
                for model in await self._client.list_models():
                    if not model.is_base and model.name.endswith(f":{process}"):
                        await self._client.unload_adapter(model.name)
                await asyncio.to_thread(self._folders.sweep, process)

    async def _call(self, registration: Registration, request: Callable[[str], Awaitable[T]]) -> T:
        try:
            return await request(registration.name)
        except ConnectionLost:
            self._connection_lost = self._settings.resolves
            raise

    async def _restore(self, registration: Registration, num_restored: int) -> None:
        """Register again, once for all callers that saw this ``num_restored``."""
        # Before the lock, so that all of them share one check.
        await self.ensure_checked()
        name = registration.name
        async with self._lock(name):
            # A stack that was unregistered meanwhile must not be served.
            if self._num_uses[name] and self._num_restored[name] == num_restored:
                log.info("the vLLM server has lost a stack; it is registered again")
                await self._load(registration)
                self._num_restored[name] += 1

    async def _load(self, registration: Registration) -> None:
        path = await self._write_folder(registration.folder)
        for _ in range(_MAX_ATTEMPTS):
            await self.ensure_checked()
            if self._settings.resolves or registration.name == self.bare_base.name:
                return
            await self._client.load_adapter(registration.name, path)
            if await self._is_listed(self.bare_base.name):
                return
            # The server was restarted meanwhile, and its base is unchecked.
            await self._unload(registration.name, registration.folder)
        raise _restarting()

    async def _check_server(self) -> None:
        bare = self.bare_base
        if bare.name in self._registered:
            if await self._is_same_server():
                return
            log.info("the vLLM server may have been restarted; its base is checked again")
        base_name = (await self._check.find_base()).name
        path = await self._write_folder(bare.folder)
        try:
            if self._settings.resolves:
                await self._check.compare_logprobs(base_name, bare.name)
            else:
                await self._check_with_trial_name(base_name, path)
        except UnknownModel as error:
            raise _unresolved(self._settings, error) from error
        self._connection_lost = False
        self._registered[bare.name] = bare
        self._num_uses[bare.name] = max(1, self._num_uses[bare.name])

    async def _is_same_server(self) -> bool:
        # A server that resolves names never loses one.
        if self._settings.resolves:
            return not self._connection_lost
        return await self._is_listed(self.bare_base.name)

    async def _check_with_trial_name(self, base_name: str, path: str) -> None:
        """Check the base under a name that no sequence uses, then register the neutral stack."""
        bare = self.bare_base
        trial = f"{bare.folder.name}:trial:{self._folders.process}"
        try:
            await self._client.load_adapter(trial, path)
            await self._check.compare_logprobs(base_name, trial)
            await self._client.load_adapter(bare.name, path)
            if not await self._is_listed(trial):
                await self._unload(bare.name, bare.folder)
                raise _restarting()
        finally:
            await self._unload(trial, bare.folder)

    def _on_check_done(self, _: asyncio.Task[None]) -> None:
        self._check_task = None

    async def _unregister(self, registration: Registration) -> None:
        name = registration.name
        try:
            # Before the lock: a new registration of the stack need not wait.
            await self._wait_for_cancelled()
            async with self._lock(name):
                self._num_uses[name] -= 1
                if not self._num_uses[name]:
                    self._num_restored.pop(name, None)
                    await self._delete(self._registered.pop(name))
        except Exception as bug:  # noqa: BLE001 - there is no caller to raise it to
            log.error("a stack could not be unregistered from vLLM: %s", format_origin(bug))

    async def _wait_for_cancelled(self) -> None:
        await asyncio.sleep(self._last_cancel + _CANCEL_GRACE - time.monotonic())

    async def _delete(self, registration: Registration) -> None:
        folder = registration.folder
        if self._settings.resolves or await self._unload(registration.name, folder):
            await asyncio.to_thread(self._folders.remove, folder.digest)

    async def _unload(self, name: str, folder: PublishedAdapter) -> bool:
        """Unload a name. Return False, and keep the folder, if the server may still have it."""
        try:
            await self._client.unload_adapter(name)
        except Unreachable:
            log.info("the vLLM server is gone, with all that it had loaded")
        except PersonalPeftError as error:
            log.warning("a stack stays loaded on the vLLM server: %s", format_origin(error))
            self._folders.keep(folder.digest)
            return False
        return True

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _is_listed(self, name: str) -> bool:
        return any(model.name == name for model in await self._client.list_models())

    async def _write_folder(self, folder: PublishedAdapter) -> str:
        """Write a stack's folder, and return its path as the server sees it."""
        place = self._folders.root
        try:
            path = await asyncio.to_thread(self._folders.put, folder)
        except OSError as error:
            raise ServingFailed(
                f"A stack cannot be written to {place}: {error.strerror or error}.",
                hint="Free space there, or open the home again if the folder is gone. "
                "PERSONALPEFT_VLLM_FOLDER sets another folder.",
            ) from error
        if self._settings.folder_there is None:
            return str(path)
        return f"{self._settings.folder_there.rstrip('/')}/{path.relative_to(place).as_posix()}"


def _start_task(work: Coroutine[Any, Any, T], tasks: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Start a task that outlives its callers, and keep it in ``tasks`` while it runs."""

    def on_done(task: asyncio.Task[T]) -> None:
        tasks.discard(task)
        # Marks the exception as seen: all callers may have been cancelled.
        if not task.cancelled():
            task.exception()

    task = asyncio.create_task(work)
    tasks.add(task)
    task.add_done_callback(on_done)
    return task


def _unresolved(settings: VllmServer, error: UnknownModel) -> ServingFailed:
    if settings.resolves:
        return ServingFailed(
            f"No vLLM server finds the stack by its name: {error}",
            hint="Install plugins/vllm_resolver on the servers, and give them access to this "
            "folder or this home's HTTP address. Their log has the reason.",
        )
    return ServingFailed(
        f"The vLLM server lost the stack at once: {error}", hint="Its log may have the reason."
    )


def _restarting() -> ServingFailed:
    return ServingFailed("The vLLM server keeps restarting.", hint="Its log may have the reason.")
