"""Select which of a user's layers a request is served with.

A layer's scope is "always", "never" or "near". A "near" layer is attached when the request is
similar to the lessons that its head was built from. Each layer has its own threshold. It lies
between two similarities: that of general prompts, and that of a lesson to its nearest other lesson.
When the two ranges overlap, keeping general prompts out comes first.

Invariants: a layer is only left out, never added or reordered. A user without a live "near" layer
causes no embedding. A request with the same words as a lesson always matches. A layer without
lessons (an imported one) matches every request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from personalpeft.backends.processor import instruction_sets
from personalpeft.file_system import read_checked_file, write_checked_file
from personalpeft.lru_cache import LRUCache
from personalpeft.memory.embedder import asking_similarity
from personalpeft.memory.items import Memory, fact_texts
from personalpeft.memory.types import Vectors
from personalpeft.store.store import Store
from personalpeft.types import Message, Signal, SignalKind, Stack, canonical_digest, default_scope

# One in twenty general prompts may match: a user may well have taught one of them.
_GENERAL_QUANTILE = 0.95
# One in ten lessons may be an outlier that does not lower the threshold.
_LESSON_QUANTILE = 0.1
_MAX_THRESHOLD = 0.95
_MAX_REGIONS = 256


@dataclass(frozen=True, slots=True)
class SimilarityRegion:
    """The prompts of a layer's lessons, ``[n, size]``, and the least similarity that matches.

    ``are_facts``: a request matches if it asks for one of these facts. Their topic is not enough.
    """

    vectors: Vectors
    threshold: float
    are_facts: bool = False


class AdapterRouter:
    """Selects layers for the users of one home. Thread-safe.

    Args:
        store: The home.
        memory: Embeds requests and caches the vectors of lessons.
        general_prompts: Returns prompts that belong to no user, for calibration.
        cache: The folder of caches, where the vectors of general prompts are kept.
    """

    def __init__(
        self,
        store: Store,
        memory: Memory,
        general_prompts: Callable[[], Sequence[str]],
        cache: Path,
    ) -> None:
        self._store = store
        self._memory = memory
        self._general_prompts = general_prompts
        self._cache = cache
        self._general_vectors: dict[str, Vectors] | None = None
        # The lessons of a revision never change, so its region is computed once. By user and
        # revision; a layer without lessons has none.
        self._regions = LRUCache[tuple[str, str], tuple[SimilarityRegion | None]](_MAX_REGIONS)

    def select(self, user: str, stack: Stack, messages: Sequence[Message]) -> Stack:
        """Return the part of a user's stack that serves a request."""
        (selected,) = self.select_each(user, stack, [messages], {})
        return selected

    def select_each(
        self,
        user: str,
        stack: Stack,
        requests: Sequence[Sequence[Message]],
        built_from: Mapping[str, Collection[str]],
    ) -> tuple[Stack, ...]:
        """Return, for each request, the part of a stack that would serve it.

        ``built_from`` has, by layer, the signals of a candidate that is in no catalog yet.
        """
        if not stack.entries:
            return (stack,) * len(requests)
        scopes = {layer.name: layer.scope for layer in self._store.catalog.layers(user)}
        attached: dict[str, list[bool]] = {}
        for layer, revision in ((each.layer, each.revision) for each in stack.entries):
            scope = scopes.get(layer) or default_scope(layer)
            if scope != "near":
                attached[layer] = [scope == "always"] * len(requests)
                continue
            region = (
                self._calibrate(user, built_from[layer])
                if layer in built_from
                else self._region(user, revision)
            )
            attached[layer] = [
                region is None
                or self._memory.similarity(region.vectors, messages, are_facts=region.are_facts)
                >= region.threshold
                for messages in requests
            ]
        return tuple(
            replace(stack, entries=tuple(e for e in stack.entries if attached[e.layer][number]))
            for number in range(len(requests))
        )

    def embed_general(self, prompts: Sequence[str]) -> Vectors:
        """Return the vectors of general prompts, ``[len(prompts), size]``. They are kept."""
        # Two threads may compute the same vector; it is the same each time.
        known = self._general_vectors = self._general_vectors or self._read_vectors()
        missing = [each for each in dict.fromkeys(prompts) if _name(each) not in known]
        if missing:
            known.update(
                zip(map(_name, missing), self._memory.embedder.embed(missing), strict=True)
            )
            # A cache that cannot be written costs the next process the embedding, nothing else.
            with suppress(OSError):
                write_checked_file(self._file, safetensors.numpy.save(dict(known)))
        return np.stack([known[_name(each)] for each in prompts])

    @property
    def _file(self) -> Path:
        # Another processor or library may give other bits.
        computed = [self._memory.embedder.name, instruction_sets(), version("torch")]
        return self._cache / "general_vectors" / canonical_digest(computed)[:32]

    def _read_vectors(self) -> dict[str, Vectors]:
        with suppress(OSError, SafetensorError):
            if (data := read_checked_file(self._file)) is not None:
                return safetensors.numpy.load(data)
        return {}

    def evict_user(self, user: str) -> None:
        """Drop the cached regions of a user's layers."""
        self._regions.drop(lambda key: key[0] == user)

    def _region(self, user: str, revision: str) -> SimilarityRegion | None:
        known = self._regions.get((user, revision))
        if known is None:
            known = (self._calibrate(user, ancestral_signals(self._store, user, revision)),)
            self._regions.put((user, revision), known)
        return known[0]

    def _calibrate(self, user: str, signals: Iterable[str]) -> SimilarityRegion | None:
        ids = set(signals)
        lessons = self._store.ledger.signals(user, current=False) if ids else ()
        texts = {each.id: self._prompts(each) for each in lessons if each.id in ids}
        texts = {signal: prompts for signal, prompts in texts.items() if prompts}
        if not texts:
            return None
        vectors, embedder = self._memory.cached_vectors(user, texts), self._memory.embedder
        # Everyday requests touch on the topics of facts. A memory would answer them with a fact.
        are_facts = any(each.kind is SignalKind.FACT for each in lessons if each.id in texts)
        region = calibrate_region(
            list(vectors.values()),
            self.embed_general(self._general_prompts()),
            partial(asking_similarity, embedder) if are_facts else embedder.similarity,
            embedder.clear_similarity if are_facts else embedder.min_similarity,
        )
        return replace(region, are_facts=are_facts)

    def _prompts(self, signal: Signal) -> list[str]:
        """Return the prompts that a lesson is about."""
        if signal.kind is SignalKind.DEMONSTRATION:
            return [signal.payload["prompt"]]
        if signal.kind is SignalKind.FACT:
            return fact_texts(signal)
        if signal.turn is None:
            return []
        messages = self._store.ledger.turn(signal.user, signal.turn).messages
        return [message.content for message in messages if message.role == "user"][-1:]


def ancestral_signals(store: Store, user: str, revision: str | None) -> Iterator[str]:
    """Yield the signals of a revision and its ancestors, held-out ones included."""
    while revision is not None:
        found = store.catalog.revision(user, revision)
        yield from found.signals
        revision = found.parent


def calibrate_region(
    lessons: Sequence[Vectors],
    general: Vectors,
    similarity: Callable[[Vectors, Vectors], Vectors],
    least: float,
) -> SimilarityRegion:
    """Return the region of one or more lessons.

    Args:
        lessons: ``[k, size]`` for each lesson, its ``k`` prompts.
        general: ``[n, size]``, prompts that belong to no user.
        similarity: Returns ``[requests, texts]``, given the vectors of both.
        least: The least similarity that matches.
    """
    vectors = np.concatenate(lessons)
    reaches = similarity(general, vectors).max(axis=1)
    general_reach = float(np.quantile(reaches, _GENERAL_QUANTILE))
    threshold = max(least, general_reach)
    if len(lessons) > 1:
        owner = np.repeat(np.arange(len(lessons)), [len(rows) for rows in lessons])
        nearest_other = [
            float(similarity(rows, vectors[owner != number]).max())
            for number, rows in enumerate(lessons)
        ]
        lesson_reach = float(np.quantile(nearest_other, _LESSON_QUANTILE))
        if lesson_reach > general_reach:
            threshold = max(least, (lesson_reach + general_reach) / 2)
    return SimilarityRegion(vectors, min(threshold, _MAX_THRESHOLD))


def _name(prompt: str) -> str:
    return hashlib.sha256(prompt.encode()).hexdigest()
