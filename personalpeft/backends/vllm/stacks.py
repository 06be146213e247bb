"""Which stacks the server has been told of, where their folders lie, and when they are taken away again.

Invariants: a name always means the same numbers, and its folder is there as long as the server may read it: it is taken away only
after the server was told to forget the name, that only after the last row on it has ended, and a moment after any row was
cancelled (a server that looks for the folder of a row in its queue and finds none ends itself). What one program registers is
called after it too, so that no other program's end takes it away. All but ``row_cancelled`` runs on the wire's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from personalpeft.adapters.base import Composed, Pair, Share
from personalpeft.adapters.served_folder import Served, ServedFolders, served
from personalpeft.backends.vllm.server import Listed, Server, UnknownName
from personalpeft.backends.vllm.wire import Unreachable
from personalpeft.bases.base import Base
from personalpeft.errors import PersonalPeftError, ServingFailed
from personalpeft.settings import VllmServer

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds after which a server has certainly heard that a row was cancelled.
_GRACE = 2.0
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Told:
    """A stack that the server was told of, under this name; ``composed`` is what it is made of."""

    name: str
    folder: Served
    composed: Composed


def staged(composed: Composed, base: Base) -> Served:
    """A stack's folder. Raises ``AdapterError``."""
    return served(composed, base)


def nothing(base: Base) -> Composed:
    """A stack that changes nothing, for rows on the bare base.

    Where a batch has rows with stacks, vLLM on a processor (0.32) computes rows without one as if they had that in its last slot,
    since it looks stacks up by number and their number is -1. So a row without a stack would be answered with somebody else's,
    and nothing would tell. No row is ever sent without one.
    """
    projection, (inputs, outputs) = min(base.architecture.projections.items())
    blocks = base.architecture.blocks
    pair = Pair(np.zeros((blocks, 1, inputs), np.float16), np.zeros((blocks, outputs, 1), np.float16))
    return Composed(1, {projection: (Share(pair, 1.0),)})


class Stacks:
    """What one program has a server serve."""

    def __init__(self, server: Server, folders: ServedFolders, settings: VllmServer) -> None:
        self._server, self._folders, self._settings = server, folders, settings
        # What the server was told of by name, and how often it was.
        self._told: dict[str, Told] = {}
        self._times: Counter[str] = Counter()
        # How often the server was told again of a name that it had lost.
        self._again: Counter[str] = Counter()
        # One for each name, as long as somebody is at it.
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._taking_back: set[asyncio.Task[Any] | None] = set()
        self._cancelled = -_GRACE

    async def tell(self, folder: Served, composed: Composed) -> Told:
        """Has the server know a stack. Raises ``ServingFailed``, ``OSError``; then there is nothing of it."""
        # Servers that resolve names have to know them by the digest alone, whoever asks.
        name = folder.name if self._settings.resolves else f"{folder.name}:{self._folders.own}"
        told = Told(name, folder, composed)
        async with self._turn(name):
            try:
                await self._registered(told)
            except BaseException:
                # Of one whose answer was lost the server may know.
                if not self._times[name]:
                    await asyncio.shield(self._gone(told))
                raise
            self._told[name] = told
            self._times[name] += 1
        return told

    async def with_name(self, told: Told, ask: Callable[[str], Awaitable[T]]) -> T:
        """Asks something by a stack's name, and once more where the server has lost it. Raises what ``ask`` raises, and
        ``ServingFailed`` where it does not find the stack.
        """
        seen = self._again[told.name]
        with suppress(UnknownName):
            return await ask(told.name)
        # Whoever asked may go away meanwhile, and others may wait for the same.
        await asyncio.shield(self._tell_again(told, seen))
        try:
            return await ask(told.name)
        except UnknownName as error:
            raise _unresolved(self._settings, error) from error

    async def take_back(self, told: Told) -> None:
        """Has the server forget a stack that no row is on, unless it was told of it anew."""
        self._taking_back.add(task := asyncio.current_task())
        try:
            # Before its turn: who comes with the same stack meanwhile need not wait.
            await asyncio.sleep(self._cancelled + _GRACE - time.monotonic())
            async with self._turn(told.name):
                self._times[told.name] -= 1
                if not self._times[told.name]:
                    self._again.pop(told.name, None)
                    await self._gone(self._told.pop(told.name))
        except Exception:
            # Nobody waits for this who could hear of it.
            log.exception("a stack could not be taken back from the vLLM server")
        finally:
            self._taking_back.discard(task)

    async def take_back_all(self) -> None:
        """Has the server forget everything; no row may be on any of it."""
        await asyncio.gather(*filter(None, self._taking_back))
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

    async def clear_up(self, listed: list[Listed]) -> None:
        """Takes away what programs that are gone have left behind: their names among those listed, and then their folders."""
        for own in await asyncio.to_thread(self._folders.left_behind):
            with suppress(PersonalPeftError):
                for each in listed:
                    if not each.is_base and each.name.endswith(f":{own}"):
                        await self._server.forget(each.name)
                await asyncio.to_thread(self._folders.sweep, own)

    async def _tell_again(self, told: Told, seen: int) -> None:
        """Once for all who found it lost: ``seen`` is how often that was done before they asked."""
        async with self._turn(told.name):
            # What was taken back meanwhile nobody may be answered with any more.
            if self._times[told.name] and self._again[told.name] == seen:
                log.info("the vLLM server has lost a stack; it is told again")
                await self._registered(told)
                self._again[told.name] += 1

    async def _gone(self, told: Told) -> None:
        if not self._settings.resolves:
            try:
                await self._server.forget(told.name)
            except Unreachable:
                log.info("the vLLM server is gone, and all that it knew with it")
            except PersonalPeftError as error:
                log.warning("the name of a stack stays on the vLLM server: %s", error)
                # It may still look for the folder.
                self._folders.keep(told.folder.digest)
                return
        await asyncio.to_thread(self._folders.take, told.folder.digest)

    def _turn(self, name: str) -> asyncio.Lock:
        return self._turns.setdefault(name, asyncio.Lock())

    async def _registered(self, told: Told) -> None:
        path = await asyncio.to_thread(self._folders.put, told.folder)
        if not self._settings.resolves:
            await self._server.load(told.name, self._there(path))

    def _there(self, path: Path) -> str:
        """A folder's path as the server sees it."""
        if self._settings.folder_there is None:
            return str(path)
        return f"{self._settings.folder_there.rstrip('/')}/{path.relative_to(self._folders.place).as_posix()}"


def _unresolved(settings: VllmServer, error: UnknownName) -> ServingFailed:
    if settings.resolves:
        return ServingFailed(
            f"No vLLM server finds the stack by its name: {error}",
            hint="Install plugins/vllm_resolver where they run, and let them see this folder or this home's HTTP address. Where they do, "
            "their log says why: a token, a cache that is full.",
        )
    return ServingFailed(f"The vLLM server forgets the stack at once: {error}", hint="Its log may say why.")
