"""The vLLM backend: an OpenAI-compatible server elsewhere serves the base and everybody's stacks, torch learns here."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from personalpeft.adapters.base import Composed
from personalpeft.adapters.served_folder import Served, ServedFolders, served
from personalpeft.backends.base import (
    Continuation,
    Occupancy,
    Piece,
    Row,
    Score,
    Session,
    SessionSpec,
    Staged,
    Term,
)
from personalpeft.backends.learning_side import LearningSide
from personalpeft.backends.residents import Residents
from personalpeft.backends.text import Speaks
from personalpeft.backends.vllm.batch import Batch
from personalpeft.backends.vllm.check import check_base, listed, slots_there, the_base
from personalpeft.backends.vllm.server import Server
from personalpeft.backends.vllm.stacks import Stacks, Told
from personalpeft.backends.vllm.wire import Wire
from personalpeft.bases.base import Base
from personalpeft.settings import VllmServer

# How far a reply may be from a cold run of itself, in nats a token: what else is in the server's batch moves its rounding.
_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class _Staged:
    folder: Served
    composed: Composed

    @property
    def nbytes(self) -> int:
        arrays = (share.pair for shares in self.composed.shares.values() for share in shares)
        return self.folder.nbytes + sum(pair.a.nbytes + pair.b.nbytes for pair in arrays)


class VllmBackend(Speaks):
    """See ``personalpeft.backends.base.Backend``. ``cache`` keeps what can be made again: the stacks' folders, unless the server's
    settings name a place, and what is known of the base.

    Raises ``ServingFailed`` for a server that cannot be asked, ``BaseMismatch`` for one with another base, ``InvalidInput``.
    """

    name = "vllm"
    tolerance = _TOLERANCE

    def __init__(
        self,
        base: Base,
        *,
        slots: int = 8,
        rows: int = 16,
        cache: Path,
        server: VllmServer,
        entropy: Callable[[int], bytes],
    ) -> None:
        super().__init__(base)
        self.base, self.rows = base, rows
        self._entropy = entropy
        self._salt = entropy(16)
        self._wire = Wire(server)
        self._learning = LearningSide(base, slots=slots, cache=cache)
        try:
            models = self._wire.wait(listed(self._wire))
            there = the_base(models, server.model, server.url)
            self._server = Server(self._wire, there.name)
            check_base(
                self._wire, self._server, base, self._text, cache / "vllm" / f"{base.digest}.json", self._by_torch
            )
            room = self._wire.wait(slots_there(self._wire))
            self._folders = ServedFolders(server.folder or cache / "served", entropy(8).hex())
        except BaseException:
            self._wire.close()
            self._learning.close()
            raise
        self.slots = slots if room is None else min(slots, room)
        self.longest = min(there.longest or base.card.context, base.card.context)
        self.description = f"vLLM at {server.url}, which calls the base {there.name} and holds " + (
            f"{room} stacks at once" if room else "as many stacks at once as it says to nobody"
        )
        self._stacks = Stacks(self._server, self._folders, server)
        self._residents = Residents[Told](self.slots)
        self._batch = Batch(
            self._wire,
            self._server,
            self._stacks,
            self._residents,
            self._text,
            self._salted,
            rows=rows,
            longest=self.longest,
        )
        self._wire.wait(self._stacks.clear_up(models))

    def stage(self, adapter: Composed) -> Staged:
        made = served(adapter, self.base.architecture, base_name=f"{self.base.card.name}@{self.base.digest}")
        return _Staged(made, adapter)

    def attach(self, key: str, staged: Staged) -> None:
        if not isinstance(staged, _Staged):
            raise TypeError("this was staged for another backend")
        self._residents.put(key, lambda: self._wire.wait(self._stacks.tell(staged.folder, staged.composed)))

    def detach(self, key: str) -> None:
        if gone := self._residents.drop(key):
            self._wire.start(self._stacks.take_back(gone))

    def admit(self, row: Row) -> int | None:
        return self._batch.admit(row)

    def step(self) -> Sequence[Piece]:
        return self._batch.step()

    def leave(self, number: int) -> Piece | None:
        return self._batch.leave(number)

    def forget(self) -> None:
        """What the server keeps cannot be overwritten from here; under another salt nobody finds it any more."""
        self._salt = self._entropy(16)

    def occupancy(self) -> Occupancy:
        return self._batch.occupancy()

    def score(self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False) -> tuple[Score, ...]:
        resident = self._residents.point(stack)
        try:
            if kl:
                # A server tells of a few tokens in each place, and the divergence is one of all of them.
                return self._learning.score(items, resident.held.composed if resident else None, kl=True)

            async def ask(name: str | None) -> list[tuple[float, ...]]:
                return await asyncio.gather(*(self._server.score(item, name, self._salted("")) for item in items))

            said = self._wire.wait(self._stacks.with_name(resident.held if resident else None, ask))
            return tuple(Score(sum(tokens) / max(1, len(tokens)), None, tokens) for tokens in said)
        finally:
            if gone := self._residents.let_go(resident):
                self._wire.start(self._stacks.take_back(gone))

    def session(self, spec: SessionSpec) -> Session:
        return self._learning.session(spec, None if spec.below is None else self._residents.held(spec.below).composed)

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Term]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        return self._learning.advance(sessions, terms, rates)

    def fingerprint(self) -> str:
        """Of what the server's base finds likeliest in each place of a text: the weights themselves it shows nobody."""
        likeliest = self._wire.wait(self._server.likeliest(self._text.encode(self.base.card.title * 8)))
        return hashlib.sha256(repr(likeliest).encode()).hexdigest()

    def close(self) -> None:
        """Has the server forget all stacks that it was told of, and takes their folders away. Closing twice is fine."""
        self._batch.close()
        for told in self._residents.clear():
            self._wire.wait(self._stacks.take_back(told))
        self._wire.close()
        self._folders.close()
        self._learning.close()

    def _salted(self, owner: str) -> str:
        """What an owner's prompts are kept under on the server: of no use to anybody else, not even to guess the owner."""
        return hashlib.blake2b(owner.encode(), key=self._salt, digest_size=16).hexdigest()

    def _by_torch(self, items: Sequence[Continuation]) -> Sequence[tuple[float, ...]]:
        return [score.tokens for score in self._learning.score(items, None)]
