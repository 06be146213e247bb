"""Which stacks the server has been told of, where their folders lie, and when they are taken away again.

Invariants: a server is told of nothing before it was found to have the base, and the bare stack's name is the sign of that: it is
told that name only then, and one that is started anew has lost it. A name always means the same numbers, and its folder is there as
long as the server may read it: it is taken away only after the server was told to forget the name, that only after the last row on
it has ended, and a moment after any row was cancelled (a server that looks for the folder of a row in its queue and finds none ends
itself). What one program registers is called after it too, so that no other program's end takes it away. All but ``row_cancelled``
runs on the wire's thread.
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
from personalpeft.backends.vllm.client import Server, UnknownName
from personalpeft.backends.vllm.model_check import Check
from personalpeft.backends.vllm.transport import Lost, Unreachable
from personalpeft.base_models.types import Base
from personalpeft.errors import PersonalPeftError, ServingFailed, format_origin
from personalpeft.settings import VllmServer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which a server has certainly heard that a row was cancelled.
_GRACE = 2.0
_AT_ONCE = 4
# How often a server may be started anew while it is told of one stack.
_TRIES = 3


@dataclass(frozen=True, slots=True)
class Told:
    """A stack that the server was told of, under this name; ``composed`` is what it is made of."""

    name: str
    folder: PublishedAdapter
    composed: AdapterStack


def staged(composed: AdapterStack, base: Base) -> PublishedAdapter:
    """A stack's folder. Raises ``AdapterError``."""
    return build_published_adapter(composed, base)


def nothing(base: Base) -> AdapterStack:
    """A stack that changes nothing, for rows on the bare base.

    Where a batch has rows with stacks, vLLM on a processor (0.32) computes rows without one as if they had that in its last slot,
    since it looks stacks up by number and their number is -1. So a row without a stack would be answered with somebody else's,
    and nothing would tell. No row is ever sent without one.
    """
    projection, (inputs, outputs) = min(base.architecture.projections.items())
    blocks = base.architecture.blocks
    pair = LoRAWeights(
        np.zeros((blocks, 1, inputs), np.float16), np.zeros((blocks, outputs, 1), np.float16)
    )
    return AdapterStack(1, {projection: (ScaledLoRA(pair, 1.0),)})


class Stacks:
    """What one program has a server serve. Nothing is before ``right``."""

    def __init__(
        self,
        server: Server,
        check: Check,
        folders: PublishedAdapterFolder,
        settings: VllmServer,
        base: Base,
    ) -> None:
        self._server, self._check, self._folders, self._settings = server, check, folders, settings
        changes_nothing = nothing(base)
        self.bare = self._named(staged(changes_nothing, base), changes_nothing)
        # What the server was told of by name, and how often it was.
        self._told: dict[str, Told] = {}
        self._times: Counter[str] = Counter()
        # How often the server was told again of a name that it had lost.
        self._again: Counter[str] = Counter()
        # One for each name, as long as somebody is at it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        # What goes on beside, whoever asked for it: what is given up at the end, and what is waited for.
        self._coming: set[asyncio.Task[Any]] = set()
        self._leaving: set[asyncio.Task[Any]] = set()
        self._look: asyncio.Task[None] | None = None
        self._cancelled = -_GRACE
        # Whether another server may answer by now, of those that resolve names and so never lose one.
        self._lost = False

    async def right(self) -> None:
        """Sees to it that the server which is there now has the base, and knows the bare stack; one look for all who ask meanwhile.
        Raises ``BaseMismatch``, ``InvalidInput`` where the base is called otherwise, ``ServingFailed``; then there is nothing of ours.
        """
        if self._look is None:
            self._look = _beside(self._looked(), self._coming)
            self._look.add_done_callback(self._look_ended)
        # Whoever asked may go away meanwhile, and others wait for the same.
        await asyncio.shield(self._look)

    async def tell(self, folder: PublishedAdapter, composed: AdapterStack) -> Told:
        """Has the server know a stack. Raises as ``right`` does; then there is nothing of it."""
        told = self._named(folder, composed)
        async with self._turn(told.name):
            try:
                await self._registered(told)
            except BaseException:
                # Of one whose answer was lost the server may know.
                if not self._times[told.name]:
                    await asyncio.shield(_beside(self._gone(told), self._leaving))
                raise
            self._told[told.name] = told
            self._times[told.name] += 1
        return told

    async def with_name(self, told: Told, ask: Callable[[str], Awaitable[T]]) -> T:
        """Asks something by a stack's name, and once more where the server has lost it. Raises what ``ask`` and ``right`` raise, and
        ``ServingFailed`` where it does not find the stack.
        """
        seen = self._again[told.name]
        if self._lost:
            await self.right()
        with suppress(UnknownName):
            return await self._asked(told, ask)
        # Whoever asked may go away meanwhile, and others may wait for the same.
        await asyncio.shield(_beside(self._tell_again(told, seen), self._coming))
        try:
            return await self._asked(told, ask)
        except UnknownName as error:
            raise _unresolved(self._settings, error) from error

    async def take_back(self, told: Told) -> None:
        """Has the server forget a stack that no row is on, unless it was told of it anew."""
        await asyncio.shield(_beside(self._taken_back(told), self._leaving))

    async def take_back_all(self) -> None:
        """Has the server forget everything; no row may be on any of it."""
        for task in self._coming:
            task.cancel()
        await asyncio.gather(*self._coming, *self._leaving, return_exceptions=True)
        await asyncio.sleep(self._cancelled + _GRACE - time.monotonic())
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def gone(told: Told) -> None:
            async with at_once:
                await self._gone(told)

        told, self._told = tuple(self._told.values()), {}
        self._times.clear()
        await asyncio.gather(*map(gone, told))

    def row_cancelled(self) -> None:
        """Notes that a row was ended while the server was still writing it. From any thread."""
        self._cancelled = time.monotonic()

    async def clear_up(self) -> None:
        """Takes away what programs that are gone have left behind: their names on the server, and then their folders."""
        for own in await asyncio.to_thread(self._folders.incomplete):
            with suppress(PersonalPeftError, OSError):
                for each in await self._server.listed():
                    if not each.is_base and each.name.endswith(f":{own}"):
                        await self._server.forget(each.name)
                await asyncio.to_thread(self._folders.sweep, own)

    async def _asked(self, told: Told, ask: Callable[[str], Awaitable[T]]) -> T:
        try:
            return await ask(told.name)
        except Lost:
            self._lost = self._settings.resolves
            raise

    async def _tell_again(self, told: Told, seen: int) -> None:
        """Once for all who found it lost: ``seen`` is how often that was done before they asked."""
        # Before its turn, so that all of them wait for the same look.
        await self.right()
        async with self._turn(told.name):
            # What was taken back meanwhile nobody may be answered with any more.
            if self._times[told.name] and self._again[told.name] == seen:
                log.info("the vLLM server has lost a stack; it is told again")
                await self._registered(told)
                self._again[told.name] += 1

    async def _registered(self, told: Told) -> None:
        path = await self._put(told.folder)
        for _ in range(_TRIES):
            await self.right()
            if self._settings.resolves or told.name == self.bare.name:
                return
            await self._server.load(told.name, path)
            if await self._knows(self.bare.name):
                return
            # It was started anew meanwhile, and nobody has looked at what it has now.
            await self._forgotten(told.name, told.folder)
        raise _restless()

    async def _looked(self) -> None:
        if self.bare.name in self._told:
            if await self._is_the_same():
                return
            log.info("the vLLM server may have been started anew; its base is looked at again")
        called = (await self._check.found()).name
        path = await self._put(self.bare.folder)
        try:
            if self._settings.resolves:
                await self._check.numbers(called, self.bare.name)
            else:
                await self._tried(called, path)
        except UnknownName as error:
            raise _unresolved(self._settings, error) from error
        self._lost = False
        self._told[self.bare.name] = self.bare
        self._times[self.bare.name] = max(1, self._times[self.bare.name])

    async def _is_the_same(self) -> bool:
        """Whether the server is the one that was looked at, as far as can be known: one that resolves names never loses any."""
        return not self._lost if self._settings.resolves else await self._knows(self.bare.name)

    async def _tried(self, called: str, path: str) -> None:
        """Looks at the base by a name that no row has, and gives the bare stack its own only then."""
        trial = f"{self.bare.folder.name}:trial:{self._folders.own}"
        try:
            await self._server.load(trial, path)
            await self._check.numbers(called, trial)
            await self._server.load(self.bare.name, path)
            if not await self._knows(trial):
                await self._forgotten(self.bare.name, self.bare.folder)
                raise _restless()
        finally:
            await self._forgotten(trial, self.bare.folder)

    def _look_ended(self, _: asyncio.Task[None]) -> None:
        self._look = None

    async def _taken_back(self, told: Told) -> None:
        try:
            # Before its turn: who comes with the same stack meanwhile need not wait.
            await asyncio.sleep(self._cancelled + _GRACE - time.monotonic())
            async with self._turn(told.name):
                self._times[told.name] -= 1
                if not self._times[told.name]:
                    self._again.pop(told.name, None)
                    await self._gone(self._told.pop(told.name))
        except Exception as bug:  # noqa: BLE001 - no caller is left to raise it to
            log.error(
                "a stack could not be taken back from the vLLM server: %s", format_origin(bug)
            )

    async def _gone(self, told: Told) -> None:
        if self._settings.resolves or await self._forgotten(told.name, told.folder):
            await asyncio.to_thread(self._folders.remove, told.folder.digest)

    async def _forgotten(self, name: str, folder: PublishedAdapter) -> bool:
        """Has the server forget a name; False where it may know it yet. Then the folder stays, which it may look for."""
        try:
            await self._server.forget(name)
        except Unreachable:
            log.info("the vLLM server is gone, and all that it knew with it")
        except PersonalPeftError as error:
            log.warning("the name of a stack stays on the vLLM server: %s", format_origin(error))
            self._folders.keep(folder.digest)
            return False
        return True

    def _named(self, folder: PublishedAdapter, composed: AdapterStack) -> Told:
        # Servers that resolve names have to know them by the digest alone, whoever asks.
        name = folder.name if self._settings.resolves else f"{folder.name}:{self._folders.own}"
        return Told(name, folder, composed)

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _knows(self, name: str) -> bool:
        return any(each.name == name for each in await self._server.listed())

    async def _put(self, folder: PublishedAdapter) -> str:
        """Has a folder there, and says where, as the server sees it."""
        try:
            path = await asyncio.to_thread(self._folders.put, folder)
        except OSError as error:
            raise ServingFailed(
                f"A stack cannot be written to {self._folders.place}: {error.strerror or error}.",
                hint="Make room there, or open the home again where the folder is gone; PERSONALPEFT_VLLM_FOLDER names another.",
            ) from error
        if self._settings.folder_there is None:
            return str(path)
        return f"{self._settings.folder_there.rstrip('/')}/{path.relative_to(self._folders.place).as_posix()}"


def _beside(work: Coroutine[Any, Any, T], among: set[asyncio.Task[Any]]) -> asyncio.Task[T]:
    """Begins something that goes on whoever waits for it goes away, and notes it as long as it does."""

    def ended(task: asyncio.Task[T]) -> None:
        among.discard(task)
        # Then nobody may want to hear of it.
        if not task.cancelled():
            task.exception()

    task = asyncio.create_task(work)
    among.add(task)
    task.add_done_callback(ended)
    return task


def _unresolved(settings: VllmServer, error: UnknownName) -> ServingFailed:
    if settings.resolves:
        return ServingFailed(
            f"No vLLM server finds the stack by its name: {error}",
            hint="Install plugins/vllm_resolver where they run, and let them see this folder or this home's HTTP address. Where they do, "
            "their log says why: a token, a cache that is full.",
        )
    return ServingFailed(
        f"The vLLM server forgets the stack at once: {error}", hint="Its log may say why."
    )


def _restless() -> ServingFailed:
    return ServingFailed(
        "The vLLM server was started anew again and again.", hint="Its log may say why."
    )
