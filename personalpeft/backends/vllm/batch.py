"""The batch of a server elsewhere: each row is a reply that it writes, and a step brings what has come meanwhile.

Invariants: a row's stack is not taken away before the row has ended here; what fails for one row ends that row alone; a row that
leaves drops its connection, by which the server stops writing it. Not thread-safe but for what the wire's thread brings: one
thread runs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from personalpeft.backends.base import Occupancy, Piece, Row
from personalpeft.backends.attached_stacks import AttachedStacks
from personalpeft.backends.sequence_output import Writing
from personalpeft.backends.tokenizer import Text
from personalpeft.backends.vllm.adapter_registry import Stacks, Told
from personalpeft.backends.vllm.client import Server, Written
from personalpeft.backends.vllm.transport import Wire
from personalpeft.errors import InvalidInput, ServingFailed

# How long a step waits for the next token of any row, in seconds: as long, nobody who left or came is noticed.
_STEP = 0.05

# The highest temperature that it does not refuse.
_HOTTEST = 2.0

News: TypeAlias = tuple[int, Written | Exception]


@dataclass(frozen=True, slots=True)
class _Live:
    row: Row
    writing: Writing
    reply: Future[Any]


class Batch:
    """Up to ``rows`` rows of up to ``longest`` tokens. ``salt`` is what an owner's prompts are kept under."""

    def __init__(
        self,
        wire: Wire,
        server: Server,
        stacks: Stacks,
        attached: AttachedStacks[Told],
        text: Text,
        salt: Callable[[str], str],
        *,
        rows: int,
        longest: int,
    ) -> None:
        self._wire, self._server, self._stacks, self._attached = wire, server, stacks, attached
        self._text, self._salt = text, salt
        self._rows, self._longest = rows, longest
        self._live: dict[int, _Live] = {}
        self._numbers = itertools.count()
        self._news = SimpleQueue[News]()

    def admit(self, row: Row) -> int | None:
        """See ``Backend.admit``."""
        if (room := len(row.tokens) + row.sampling.max_tokens) > self._longest:
            raise ValueError(
                f"a row of {room} tokens is longer than the {self._longest} that the server has room for"
            )
        if row.sampling.temperature > _HOTTEST:
            raise InvalidInput(
                f"The temperature {row.sampling.temperature:g} is more than vLLM takes.",
                hint=f"Give 0 to {_HOTTEST:g}.",
            )
        if len(self._live) >= self._rows:
            return None
        told = self._stacks.bare if row.stack is None else self._attached.get(row.stack)
        number = next(self._numbers)
        reply = self._wire.start(self._written(number, row, told))
        self._live[number] = _Live(row, Writing.of(number, row, self._text), reply)
        return number

    def step(self) -> Sequence[Piece]:
        """See ``Backend.step``."""
        if not self._live:
            return ()
        return [piece for number, news in self._come() for piece in self._pieces(number, news)]

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        if number in self._live:
            self._remove(number, cancel=True)

    def uses(self, stack: str) -> bool:
        """Return whether a row of the batch uses a stack."""
        return any(live.row.stack == stack for live in self._live.values())

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``. What the server keeps for later prompts it does not say."""
        live = tuple(self._live.values())
        used = sum(len(each.row.tokens) + each.writing.written for each in live)
        return Occupancy(len(live), used, 0, self._rows * self._longest, 0)

    def close(self) -> None:
        """Drops all rows."""
        for number in tuple(self._live):
            self._remove(number, cancel=True)

    async def _written(self, number: int, row: Row, told: Told) -> None:
        async def ask(name: str) -> None:
            salt, stop = self._salt(row.owner), sorted(self._text.stop_tokens)
            async with aclosing(self._server.write(row, name, salt, stop)) as pieces:
                async for written in pieces:
                    self._news.put((number, written))
            # Does nothing where the row has ended; else nobody knows whether this was all of it.
            self._news.put(
                (number, ServingFailed("vLLM ended a reply without saying why.", hint="Try again."))
            )

        try:
            await self._stacks.with_name(told, ask)
        except Exception as error:  # noqa: BLE001 - whatever it is, the one whose row it is must hear it
            self._news.put((number, error))

    def _come(self) -> Iterator[News]:
        """What has come since the last step; waits a moment for the first of it."""
        try:
            yield self._news.get(timeout=_STEP)
            while True:
                yield self._news.get_nowait()
        except Empty:
            return

    def _pieces(self, number: int, news: Written | Exception) -> Iterator[Piece]:
        live = self._live.get(number)
        if live is None:
            # It left while this was on its way.
            return
        if isinstance(news, Exception):
            yield Piece(number, "", (), failed=news)
            return
        for token, known in itertools.zip_longest(news.tokens, news.known):
            piece = live.writing.take(token, known)
            if piece.finish is not None:
                self._remove(number, cancel=news.finish is None)
            yield piece
            if piece.finish is not None:
                return
        if news.finish is not None:
            # By a stop token that the base's card does not name, or where its context ends.
            self._remove(number, cancel=False)
            yield live.writing.end(news.finish)

    def _remove(self, number: int, *, cancel: bool) -> None:
        """Takes a row out; ``cancel`` where the server still writes it."""
        live = self._live.pop(number)
        if cancel and live.reply.cancel():
            self._stacks.row_cancelled()
