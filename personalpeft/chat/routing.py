"""Which of a user's live layers a request is answered with.

A layer's scope says: "always", "never", or "near", which is when the request is near the lessons that its head was built
from. What those are never changes for a revision, so it is worked out once for each and kept in memory; the vectors of the
lessons lie in the home beside those of the facts.

Invariants: a layer is only ever left out, never added or reordered; nothing is embedded for a user of whom no live layer
is "near"; a layer whose head was built from no lessons (one that was imported) is near to everything, since nobody can
say what it is about.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from personalpeft.memory.items import Memory
from personalpeft.memory.similarity import Region, calibrated
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.store.base import Store
from personalpeft.types import Layer, Message, Signal, SignalKind, Stack, usual_scope

_MOST_KEPT = 256
# By the name of the embedder, which says which model made a vector.
_GENERAL: dict[str, Vectors] = {}


class AdapterRouter:
    """The scopes of all users of one home. Safe to use from several threads."""

    def __init__(
        self, store: Store, memory: Memory, general_prompts: Callable[[], Sequence[str]]
    ) -> None:
        self._store = store
        self._memory = memory
        self._general_prompts = general_prompts
        self._turn = threading.Lock()
        self._regions: OrderedDict[tuple[str, str], Region | None] = OrderedDict()

    def select(self, user: str, stack: Stack, messages: Sequence[Message]) -> Stack:
        """The part of a live stack that these messages are answered with."""
        if not stack.entries:
            return stack
        layers = {layer.name: layer for layer in self._store.catalog.layers(user)}
        entries = tuple(
            entry for entry in stack.entries if self._attached(user, layers[entry.layer], messages)
        )
        return replace(stack, entries=entries)

    def select_each(
        self,
        user: str,
        stack: Stack,
        questions: Sequence[str],
        built_from: Mapping[str, Collection[str]],
    ) -> tuple[Stack, ...]:
        """The part of a stack that each of some questions would be answered with. ``built_from`` has, by layer, the signals
        of a revision in the stack that is in no catalog yet.
        """
        scopes = {layer.name: layer.scope for layer in self._store.catalog.layers(user)}
        far: dict[str, set[str]] = {}
        for entry in stack.entries:
            scope = scopes.get(entry.layer) or usual_scope(entry.layer)
            if scope == "near":
                signals = built_from.get(entry.layer)
                region = (
                    self._region(user, entry.revision)
                    if signals is None
                    else self._calibrated(user, signals)
                )
                far[entry.layer] = {
                    q for q in questions if region is not None and not self._is_near(region, q)
                }
            elif scope == "never":
                far[entry.layer] = set(questions)
        return tuple(
            replace(
                stack,
                entries=tuple(e for e in stack.entries if question not in far.get(e.layer, ())),
            )
            for question in questions
        )

    def forget(self, user: str) -> None:
        """Lets go of what is known of a user's lessons; it is worked out again when it is asked for."""
        with self._turn:
            for key in [key for key in self._regions if key[0] == user]:
                del self._regions[key]

    def _is_near(self, region: Region, question: str) -> bool:
        return self._memory.similarity(region, [Message("user", question)]) >= region.least

    def _attached(self, user: str, layer: Layer, messages: Sequence[Message]) -> bool:
        if layer.scope != "near" or layer.head is None:
            return layer.scope != "never"
        region = self._region(user, layer.head)
        return region is None or self._memory.similarity(region, messages) >= region.least

    def _region(self, user: str, head: str) -> Region | None:
        with self._turn:
            if (user, head) in self._regions:
                self._regions.move_to_end((user, head))
                return self._regions[user, head]
        region = self._calibrated(user, self._built_from(user, head))
        with self._turn:
            self._regions[user, head] = region
            if len(self._regions) > _MOST_KEPT:
                self._regions.popitem(last=False)
        return region

    def _calibrated(self, user: str, signals: Iterable[str]) -> Region | None:
        built_from = set(signals)
        said = self._store.ledger.signals(user, current=False) if built_from else ()
        asked = {signal.id: self._asked(signal) for signal in said if signal.id in built_from}
        asked = {signal: texts for signal, texts in asked.items() if texts}
        if not asked:
            return None
        embedder = self._memory.embedder
        lessons = self._memory.vectors(user, asked)
        return calibrated(list(lessons.values()), self._general_vectors(embedder), embedder.near)

    def _built_from(self, user: str, head: str) -> Iterator[str]:
        """The signals of a revision and of those that it was built on, held back ones too."""
        revision_id: str | None = head
        while revision_id is not None:
            revision = self._store.catalog.revision(user, revision_id)
            yield from revision.signals
            revision_id = revision.parent

    def _asked(self, signal: Signal) -> list[str]:
        """What a request says that this lesson is about."""
        if signal.kind is SignalKind.DEMONSTRATION:
            return [signal.payload["prompt"]]
        if signal.kind is SignalKind.FACT:
            return [signal.payload["text"], *(signal.payload.get("questions") or ())]
        if signal.turn is None:
            return []
        messages = self._store.ledger.turn(signal.user, signal.turn).messages
        return [message.content for message in messages if message.role == "user"][-1:]

    def _general_vectors(self, embedder: Embedder) -> Vectors:
        """Return the vectors of the general prompts. They belong to no user: once a process."""
        known = _GENERAL.get(embedder.name)
        if known is None:
            known = _GENERAL[embedder.name] = embedder.embed(self._general_prompts())
        return known
