"""The common part of backends that have their own tokenizer and batch.

Invariant: all calls of the batch hold the backend's lock, if it has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from personalpeft.backends.base import Occupancy, OutputChunk, SequenceState, Tokens
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.base_models.types import Base
from personalpeft.types import Message


class Batch(Protocol):
    """The batch of a backend; the methods are those of ``Backend``."""

    def admit(self, state: SequenceState, /) -> int | None: ...

    def step(self) -> Sequence[OutputChunk]: ...

    def remove(self, number: int) -> None: ...

    def uses(self, key: str) -> bool:
        """Return whether a sequence of the batch uses a stack."""
        ...

    def occupancy(self) -> Occupancy: ...


class BatchBackend:
    """The methods of ``Backend`` for text, sequences and stacks. A subclass sets ``_batch``."""

    _batch: Batch

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

    def detach(self, key: str) -> None:
        with self._batch_lock:
            if self._batch.uses(key):
                raise RuntimeError("a sequence of the batch uses this stack; remove it first")
            self._drop(key)

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

    def _drop(self, key: str) -> None:
        """Free the slot of a stack that no sequence uses."""
        raise NotImplementedError
