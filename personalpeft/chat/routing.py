"""Select which of a user's layers a request is served with.

A layer's scope is "always", "never" or "near". A "near" layer is attached when the request is
similar to the lessons that its head was built from. The threshold is calibrated per layer: it lies
between the similarity that general prompts reach and the similarity of one lesson with the nearest
other one. When the two ranges overlap, keeping general prompts out comes first.

Invariants: a layer is only left out, never added or reordered. A user without a live "near" layer
causes no embedding. A request with the same words as a lesson always matches. A layer without
lessons (an imported one) matches every request.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from personalpeft.memory.items import Memory, fact_texts
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.store.store import Store
from personalpeft.types import Message, Signal, SignalKind, Stack, default_scope

# One in twenty general prompts may match: a user may well have taught one of them.
_GENERAL_QUANTILE = 0.95
# One in ten lessons may be an outlier that does not lower the threshold.
_LESSON_QUANTILE = 0.1
_MAX_THRESHOLD = 0.95
_MAX_REGIONS = 256


@dataclass(frozen=True, slots=True)
class SimilarityRegion:
    """The prompts of a layer's lessons, ``[n, size]``, and the least cosine that matches one."""

    vectors: Vectors
    threshold: float


class AdapterRouter:
    """Selects layers for the users of one home. Thread-safe.

    Args:
        store: The home.
        memory: Embeds requests and caches the vectors of lessons.
        general_prompts: Returns prompts that belong to no user, for calibration.
    """

    def __init__(
        self, store: Store, memory: Memory, general_prompts: Callable[[], Sequence[str]]
    ) -> None:
        self._store = store
        self._memory = memory
        self._general_prompts = general_prompts
        self._general_vectors: Vectors | None = None
        self._lock = threading.Lock()
        # The lessons of a revision never change, so its region is computed once.
        self._regions: OrderedDict[tuple[str, str], SimilarityRegion | None] = OrderedDict()

    def select(self, user: str, stack: Stack, messages: Sequence[Message]) -> Stack:
        """Return the part of a live stack that serves these messages."""
        if not stack.entries:
            return stack
        layers = {layer.name: layer for layer in self._store.catalog.layers(user)}

        def attached(name: str) -> bool:
            layer = layers[name]
            if layer.scope != "near" or layer.head is None:
                return layer.scope != "never"
            return self._matches(self._region(user, layer.head), messages)

        return replace(stack, entries=tuple(e for e in stack.entries if attached(e.layer)))

    def select_each(
        self,
        user: str,
        stack: Stack,
        questions: Sequence[str],
        built_from: Mapping[str, Collection[str]],
    ) -> tuple[Stack, ...]:
        """Return, for each question, the part of a stack that would serve it.

        Args:
            user: Id of the user.
            stack: A live stack, or one with a candidate in it.
            questions: Prompts of one message each.
            built_from: By layer, the signals of a candidate that is in no catalog yet.
        """
        scopes = {layer.name: layer.scope for layer in self._store.catalog.layers(user)}
        excluded: dict[str, set[str]] = {}
        for entry in stack.entries:
            scope = scopes.get(entry.layer) or default_scope(entry.layer)
            if scope == "near":
                signals = built_from.get(entry.layer)
                region = (
                    self._region(user, entry.revision)
                    if signals is None
                    else self._calibrate(user, signals)
                )
                excluded[entry.layer] = {
                    q for q in questions if not self._matches(region, [Message("user", q)])
                }
            elif scope == "never":
                excluded[entry.layer] = set(questions)
        return tuple(
            replace(
                stack,
                entries=tuple(e for e in stack.entries if q not in excluded.get(e.layer, ())),
            )
            for q in questions
        )

    def evict_user(self, user: str) -> None:
        """Drop the cached regions of a user's layers."""
        with self._lock:
            for key in [key for key in self._regions if key[0] == user]:
                del self._regions[key]

    def _matches(self, region: SimilarityRegion | None, messages: Sequence[Message]) -> bool:
        return (
            region is None or self._memory.similarity(region.vectors, messages) >= region.threshold
        )

    def _region(self, user: str, revision: str) -> SimilarityRegion | None:
        key = (user, revision)
        with self._lock:
            if key in self._regions:
                self._regions.move_to_end(key)
                return self._regions[key]
        region = self._calibrate(user, self._ancestral_signals(user, revision))
        with self._lock:
            self._regions[key] = region
            if len(self._regions) > _MAX_REGIONS:
                self._regions.popitem(last=False)
        return region

    def _calibrate(self, user: str, signals: Iterable[str]) -> SimilarityRegion | None:
        ids = set(signals)
        lessons = self._store.ledger.signals(user, current=False) if ids else ()
        texts = {each.id: self._prompts(each) for each in lessons if each.id in ids}
        texts = {signal: prompts for signal, prompts in texts.items() if prompts}
        if not texts:
            return None
        vectors = self._memory.cached_vectors(user, texts)
        embedder = self._memory.embedder
        return calibrate_region(
            list(vectors.values()), self._general(embedder), embedder.min_similarity
        )

    def _ancestral_signals(self, user: str, revision: str | None) -> Iterator[str]:
        """Yield the signals of a revision and its ancestors, held-out ones included."""
        while revision is not None:
            found = self._store.catalog.revision(user, revision)
            yield from found.signals
            revision = found.parent

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

    def _general(self, embedder: Embedder) -> Vectors:
        if self._general_vectors is None:
            self._general_vectors = embedder.embed(self._general_prompts())
        return self._general_vectors


def calibrate_region(
    lessons: Sequence[Vectors], general: Vectors, min_threshold: float
) -> SimilarityRegion:
    """Return the region of one or more lessons.

    Args:
        lessons: ``[k, size]`` for each lesson, its ``k`` prompts.
        general: ``[n, size]``, prompts that belong to no user.
        min_threshold: The cosine below which nothing matches, a property of the embedder.
    """
    vectors = np.concatenate(lessons)
    general_reach = float(np.quantile((general @ vectors.T).max(axis=1), _GENERAL_QUANTILE))
    threshold = max(min_threshold, general_reach)
    if len(lessons) > 1:
        owner = np.repeat(np.arange(len(lessons)), [len(rows) for rows in lessons])
        nearest_other = [
            float((rows @ vectors[owner != number].T).max()) for number, rows in enumerate(lessons)
        ]
        lesson_reach = float(np.quantile(nearest_other, _LESSON_QUANTILE))
        if lesson_reach > general_reach:
            threshold = max(min_threshold, (lesson_reach + general_reach) / 2)
    return SimilarityRegion(vectors, min(threshold, _MAX_THRESHOLD))
