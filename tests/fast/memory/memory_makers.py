"""Test data for memory: a store in a temporary home, and words as tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from personalpeft.memory.embedder import HashEmbedder
from personalpeft.memory.items import Memory
from personalpeft.memory.types import AugmentedPrompt, Embedder, Vectors
from personalpeft.store.home import open_store
from personalpeft.store.store import Store
from personalpeft.types import Message, Signal, SignalKind


class CountingEmbedder:
    """The fake embedder, which records each text."""

    def __init__(self) -> None:
        self._inner = HashEmbedder()
        self.name = self._inner.name
        self.min_similarity = self._inner.min_similarity
        self.clear_similarity = self._inner.clear_similarity
        self.clear_statement_similarity = self._inner.clear_statement_similarity
        self.asked: list[str] = []

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.asked.extend(texts)
        return self._inner.embed(texts)

    def similarity(self, queries: Vectors, texts: Vectors) -> Vectors:
        return self._inner.similarity(queries, texts)

    def impersonal_discount(self, queries: Vectors) -> Vectors:
        return self._inner.impersonal_discount(queries)

    def is_english(self, vector: Vectors) -> bool:
        return self._inner.is_english(vector)


class Home:
    """A store and its memory, with short methods for the tests."""

    def __init__(self, store: Store, embedder: Embedder) -> None:
        self.store = store
        self.memory = Memory(store.ledger, store.catalog, embedder)

    def fact(
        self, user: str, text: str, *, questions: Sequence[str] = (), answer: str | None = None
    ) -> Signal:
        payload = {"text": text, "questions": list(questions), "answer": answer}
        return self.store.ledger.add_signal(user, SignalKind.FACT, payload)

    def rule(self, user: str, text: str) -> Signal:
        return self.store.ledger.add_signal(user, SignalKind.COMMENT, {"text": text})

    def ask(
        self, user: str, *prompts: str, budget: int = 10_000, system: str | None = None
    ) -> AugmentedPrompt:
        return self.recall(
            user, [Message("user", text) for text in prompts], budget=budget, system=system
        )

    def recall(
        self,
        user: str,
        messages: Sequence[Message],
        *,
        budget: int = 10_000,
        system: str | None = None,
    ) -> AugmentedPrompt:
        return self.memory.add_to_prompt(
            user, messages, budget_tokens=budget, count_tokens=count_words, system=system
        )


@contextmanager
def opened(folder: Path, embedder: Embedder | None = None) -> Iterator[Home]:
    ticks = itertools.count()
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def entropy(size: int) -> bytes:
        return next(ticks).to_bytes(size)

    with open_store(
        folder, now=lambda: start + timedelta(seconds=next(ticks)), entropy=entropy
    ) as store:
        yield Home(store, embedder or HashEmbedder())


def count_words(text: str) -> int:
    return len(text.split())


def joined_text(recall: AugmentedPrompt) -> str:
    return "\n".join(message.content for message in recall.messages)
