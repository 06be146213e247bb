"""The common part of backends: numbered sequences in a batch, and a tokenizer beside it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, TypeVar

from personalpeft.backends.base import Occupancy
from personalpeft.backends.detokenizer import Decoder
from personalpeft.backends.sequence import OutputChunk, SequenceState, Tokens
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.base_models.types import Base
from personalpeft.types import Message

S = TypeVar("S")


class SequenceBatch(ABC, Generic[S]):
    """Up to ``rows`` sequences of up to ``max_length`` tokens. The methods are of ``Backend``.

    Not thread-safe: one thread runs it. A subclass keeps an ``S`` for each running sequence.
    """

    def __init__(self, decoder: Decoder, *, rows: int, max_length: int) -> None:
        self.rows, self.max_length = rows, max_length
        self._decoder = decoder
        self._running: dict[int, S] = {}
        self._numbers = itertools.count()

    def admit(self, sequence: SequenceState) -> int | None:
        """See ``Backend.admit``."""
        if sequence.max_length > self.max_length:
            raise ValueError(
                f"a sequence must have at most {self.max_length} tokens, got {sequence.max_length}"
            )
        if len(self._running) >= self.rows:
            return None
        sequence.start(next(self._numbers), self._decoder)
        running = self._allocate(sequence)
        if running is None:
            return None
        self._running[sequence.number] = running
        return sequence.number

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        running = self._running.pop(number, None)
        if running is not None:
            self._release(running)

    @abstractmethod
    def step(self) -> Sequence[OutputChunk]:
        """See ``Backend.step``."""

    @abstractmethod
    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``."""

    @abstractmethod
    def _allocate(self, sequence: SequenceState) -> S | None:
        """Take what a sequence needs; None without room."""

    def _release(self, running: S) -> None:
        """Free what a sequence took."""


class BatchBackend:
    """The methods of ``Backend`` for text and sequences. A subclass sets ``_batch``.

    Args:
        base: The base.
        lock: Held by all calls of the batch.
    """

    _batch: SequenceBatch[Any]

    def __init__(self, base: Base, *, lock: AbstractContextManager[object] | None = None) -> None:
        self.base = base
        self._batch_lock = lock or nullcontext()
        self._tokenizer = ChatTokenizer(base)
        self.bos_tokens = self._tokenizer.bos_tokens
        self.end_of_turn = self._tokenizer.end_of_turn

    def render(self, messages: Sequence[Message]) -> Tokens:
        return self._tokenizer.render(messages)

    def encode(self, text: str) -> Tokens:
        return self._tokenizer.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def admit(self, sequence: SequenceState) -> int | None:
        with self._batch_lock:
            return self._batch.admit(sequence)

    def step(self) -> Sequence[OutputChunk]:
        with self._batch_lock:
            return self._batch.step()

    def remove(self, number: int) -> None:
        with self._batch_lock:
            self._batch.remove(number)

    def occupancy(self) -> Occupancy:
        with self._batch_lock:
            return self._batch.occupancy()
