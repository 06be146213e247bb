"""The llama.cpp backend: the base's own GGUF serves, torch learns. For one user on a small machine, and some more."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from personalpeft.adapters.formats.gguf import write_gguf_lora
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
from personalpeft.backends.llamacpp.adapters import Loras
from personalpeft.backends.llamacpp.batch import Batch
from personalpeft.backends.llamacpp.binding import Model, Shape
from personalpeft.backends.llamacpp.context_pool import PART, Lanes, Room
from personalpeft.backends.llamacpp.cpu_probe import Choice, choose
from personalpeft.backends.llamacpp.scoring import Scorer
from personalpeft.backends.tokenizer import Speaks
from personalpeft.backends.training_backend import LearningSide
from personalpeft.base_models.gguf.file import gguf_file
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.types import Base

# How far a reply's log-probs may be from its scores: activations are rounded to 8 bits a block, so a number may change with
# how many tokens are computed in one call, and a score reads as a prompt what the reply wrote token by token.
_TOLERANCE = 0.1
# Of the memory, which is shared with everything else, an eighth for all lanes.
_MEMORY_SHARE = 1 / 8
# Tokens that a row of a usual length has, and that a lane has room for where memory is short.
_USUAL, _FEWEST = 512, 256
# Tokens and distributions in one call of scoring: so many rows of the vocabulary lie in memory at once.
_READ_AT_ONCE, _SCORED_AT_ONCE = 256, 32
# What holds of promise 4, for ``doctor``.


@dataclass(frozen=True, slots=True)
class _Staged:
    stack: Composed

    @property
    def nbytes(self) -> int:
        return sum(
            s.pair.a.nbytes + s.pair.b.nbytes
            for shares in self.stack.shares.values()
            for s in shares
        )


class LlamaCppBackend(Speaks):
    """See ``personalpeft.backends.base.Backend``. Works for the architectures that ``gguf_names`` knows."""

    name = "llamacpp"
    tolerance = _TOLERANCE
    batch_invariance = BatchInvariance.HOLDS

    def __init__(
        self, base: Base, *, slots: int = 8, rows: int = 16, cache: Path, threads: int | None = None
    ) -> None:
        super().__init__(base)
        self.base = base
        self.slots, self.rows = slots, rows
        names = gguf_names(base)
        self._file = gguf_file(base, names, cache)
        choice = choose(self._file, cache)
        self._model = Model(self._file, extra=choice.extra)
        threads = threads or _processors()
        shape = Shape(_FEWEST, PART, 1, threads, names.full)
        room = _room(names, self._model.vocabulary, shape, wanted=base.card.context + rows * _USUAL)
        self.longest = min(room.places, base.card.context)
        self.description = _described(choice, threads)
        self._turn = threading.Lock()
        self._loras = Loras(slots, partial(write_gguf_lora, names), self._model.lora)
        lanes = Lanes(room, shape, self._model.context, idle=slots)
        self._batch = Batch(lanes, self._loras, self._text, rows=rows, longest=self.longest)
        one = Shape(self.longest, _READ_AT_ONCE, _SCORED_AT_ONCE, threads, names.full)
        self._scorer = Scorer(one, self._model.context, self._turn)
        self._learning = LearningSide(base, cache=cache)

    def stage(self, adapter: Composed) -> Staged:
        return _Staged(adapter)

    def attach(self, key: str, staged: Staged) -> None:
        if not isinstance(staged, _Staged):
            raise TypeError("this was staged for another backend")
        self._loras.attach(key, staged.stack)

    def detach(self, key: str) -> None:
        with self._turn:
            self._batch.detach(key)

    def admit(self, row: Row) -> int | None:
        with self._turn:
            return self._batch.admit(row)

    def step(self) -> Sequence[Piece]:
        with self._turn:
            return self._batch.step()

    def remove(self, number: int) -> None:
        with self._turn:
            self._batch.remove(number)

    def forget(self) -> None:
        with self._turn:
            self._batch.forget()
        self._scorer.forget()

    def occupancy(self) -> Occupancy:
        with self._turn:
            return self._batch.occupancy()

    def check_integrity(self) -> None:
        with self._turn:
            self._batch.check_integrity()

    def score(
        self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
    ) -> tuple[Score, ...]:
        lora = None if stack is None else self._loras.get(stack).lora
        return self._scorer.score(items, lora, kl=kl)

    def session(self, spec: SessionSpec) -> Session:
        return self._learning.session(
            spec, None if spec.below is None else self._loras.get(spec.below).stack
        )

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        return self._learning.advance(sessions, terms, rates)

    def fingerprint(self) -> str:
        """Of the file, which the library maps to be read alone; what it copies into an order of its own it gives nobody to see."""
        digest = hashlib.sha256()
        with self._file.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def close(self) -> None:
        """Lets go of the model and of all contexts."""
        self._learning.close()
        self._scorer.close()
        with self._turn:
            self._batch.close()
            for loaded in self._loras.clear():
                loaded.lora.close()
            self._model.close()


def _room(names: GgufNames, vocabulary: int, shape: Shape, *, wanted: int) -> Room:
    """What all lanes have room for: so many tokens as are wanted, if there is memory, and one short lane where there is not."""
    memory = (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if hasattr(os, "sysconf")
        else 2**33
    )
    place, lane = memory_of(names, vocabulary, shape)
    memory = max(int(memory * _MEMORY_SHARE), lane + _FEWEST * place)
    most = Room(wanted, memory, place, lane).left([])
    return Room(most, memory, place, lane)


def memory_of(names: GgufNames, vocabulary: int, shape: Shape) -> tuple[int, int]:
    """Bytes that a context takes for each of its places, and besides. The library tells nobody but its log; what it says there
    is a little less.
    """
    # Distributions lie there twice, where they are computed and where they are read; beside them what goes through a block.
    distributions = 2 * shape.asked * vocabulary
    widths = 3 * int(names.config["hidden_size"]) + 4 * int(names.config["intermediate_size"])
    # What each token of a call finds at each place: whether it may look there, and step by step (in float32) what it sees there.
    seen = shape.batch * (3 + int(names.config["num_attention_heads"]) if shape.full else 1)
    return names.bytes_per_token + 4 * seen, 4 * (distributions + shape.batch * widths)


def _processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _described(choice: Choice, threads: int) -> str:
    return f"llama.cpp on the processor, threads: {threads}; {choice.why}"
