"""The vLLM backend: an OpenAI-compatible server elsewhere serves the base and everybody's stacks, torch learns here."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from personalpeft.adapters.formats.published import Served, ServedFolders
from personalpeft.adapters.types import Composed
from personalpeft.backends.base import (
    Continuation,
    Occupancy,
    Piece,
    Row,
    Score,
    Session,
    SessionSpec,
    Staged,
    Loss,
)
from personalpeft.backends.batch_invariance import BatchInvariance
from personalpeft.backends.attached_stacks import AttachedStacks
from personalpeft.backends.tokenizer import Speaks
from personalpeft.backends.training_backend import LearningSide
from personalpeft.backends.vllm.adapter_registry import Stacks, Told, staged
from personalpeft.backends.vllm.batch import Batch
from personalpeft.backends.vllm.client import Listed, Server
from personalpeft.backends.vllm.model_check import Check, Said, slots_there
from personalpeft.backends.vllm.transport import Wire
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, ServingFailed
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
    batch_invariance = BatchInvariance.NONE
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
        self._process = os.getpid()
        self._salt = entropy(16)
        with ExitStack() as ends:
            self._wire = Wire(server)
            ends.callback(self._wire.close)
            self._learning = LearningSide(base, cache=cache)
            ends.callback(self._learning.close)
            folders = _folders(server.folder or cache / "served", entropy(8).hex())
            ends.callback(folders.close)
            called = Server(self._wire)
            self._check = Check(
                self._wire,
                called,
                base,
                self._text,
                salt=lambda: self._salted(""),
                reference=self._torchs,
                kept=cache / "vllm" / f"{base.digest}.json",
            )
            self._stacks = Stacks(called, self._check, folders, server, base)
            ends.callback(lambda: self._wire.wait(self._stacks.take_back_all()))
            there, room = self._open()
            self.slots = slots if room is None else min(slots, room - 1)
            self.longest = min(there.longest or base.card.context, base.card.context)
            held = (
                f"holds up to {room} stacks at once"
                if room
                else "does not say how many stacks it holds"
            )
            self.description = f"vLLM at {server.url}, which calls the base {there.name} and {held}"
            self._attached = AttachedStacks[Told](self.slots)
            # What is being loaded, by key.
            self._loading: dict[str, Future[Told]] = {}
            self._batch = Batch(
                self._wire,
                called,
                self._stacks,
                self._attached,
                self._text,
                self._salted,
                rows=rows,
                longest=self.longest,
            )
            ends.callback(self._batch.close)
            self._ends = ends.pop_all()

    def _open(self) -> tuple[Listed, int | None]:
        """Finds the base there and that all of the server works which is needed."""
        there = self._wire.wait(self._check.found())
        self._wire.wait(self._stacks.clear_up())
        self._wire.wait(self._stacks.right())
        # Only now: it says so after the first reply.
        room = self._wire.wait(slots_there(self._wire))
        if room == 1:
            raise ServingFailed(
                f"The vLLM server at {self._wire.server.url} has room for one stack at once, and the bare base takes that.",
                hint="Start it with --max-loras 2 or more.",
            )
        return there, room

    def stage(self, adapter: Composed) -> Staged:
        return _Staged(staged(adapter, self.base), adapter)

    def attach(self, key: str, staged: Staged) -> None:
        if not isinstance(staged, _Staged):
            raise TypeError("this was staged for another backend")
        self._attached.put(key, lambda: self._told(key, staged))

    def detach(self, key: str) -> None:
        """See ``Backend.detach``. A load of the key ends at once: the server may be slow with it, or say nothing."""
        if self._batch.uses(key):
            raise RuntimeError("a row of the batch uses this stack")
        if loading := self._loading.get(key):
            loading.cancel()
        if gone := self._attached.drop(key):
            self._wire.start(self._stacks.take_back(gone))

    def admit(self, row: Row) -> int | None:
        return self._batch.admit(row)

    def step(self) -> Sequence[Piece]:
        return self._batch.step()

    def remove(self, number: int) -> None:
        self._batch.remove(number)

    def forget(self) -> None:
        """What the server keeps cannot be overwritten from here; under another salt nobody finds it any more."""
        self._salt = self._entropy(16)

    def occupancy(self) -> Occupancy:
        return self._batch.occupancy()

    def check_integrity(self) -> None:
        """What lies on the server cannot be seen from here."""

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        """In torch's numbers: a server tells of a few tokens in each place, and is not to be asked for those of a prompt."""
        return self._learning.score(
            items, None if stack is None else self._attached.get(stack).composed, kl=kl
        )

    def session(self, spec: SessionSpec) -> Session:
        return self._learning.session(
            spec, None if spec.below is None else self._attached.get(spec.below).composed
        )

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        return self._learning.advance(sessions, terms, rates)

    def fingerprint(self) -> str:
        """Of what the server's base writes after a fixed text: the weights themselves it shows nobody."""
        said = self._wire.wait(self._stacks.with_name(self._stacks.bare, self._check.said))
        return hashlib.sha256(repr([token for token, _ in said]).encode()).hexdigest()

    def close(self) -> None:
        """Has the server forget all stacks that it was told of, and takes their folders away. Closing twice is fine; a process that
        was forked from the one that opened it has nothing to close.
        """
        if os.getpid() == self._process:
            self._ends.close()

    def _told(self, key: str, staged: _Staged) -> Told:
        loading = self._loading[key] = self._wire.start(
            self._stacks.tell(staged.folder, staged.composed)
        )
        try:
            return loading.result()
        except CancelledError as error:
            raise ServingFailed("The load of a stack was given up.", hint="Ask again.") from error
        finally:
            # Does nothing but where whoever waits was interrupted.
            loading.cancel()
            del self._loading[key]

    def _torchs(self, asked: Continuation) -> Said:
        return tuple(
            zip(asked.completion, self._learning.score([asked], None)[0].tokens, strict=True)
        )

    def _salted(self, owner: str) -> str:
        """What an owner's prompts are kept under on the server: of no use to anybody else, not even to guess the owner."""
        return hashlib.blake2b(owner.encode(), key=self._salt, digest_size=16).hexdigest()


def _folders(place: Path, program: str) -> ServedFolders:
    # The machine's name may stand in a path and in a stack's name.
    machine = re.sub("[^a-z0-9-]", "-", platform.node().casefold())[:63] or "here"
    try:
        return ServedFolders(place, f"{machine}.{program}")
    except OSError as error:
        raise InvalidInput(
            f"{place} cannot be a folder for stacks: {error.strerror or error}.",
            hint="PERSONALPEFT_VLLM_FOLDER is a folder that can be written to.",
        ) from error
