"""Select lessons of a user that stand in a prompt as examples.

A request that begins a conversation gets the lessons nearest to it as earlier turns, if it is as
similar to the lessons as these are to one another. A layer that learned a style follows it further
with examples. Replies later in a conversation follow the earlier ones anyway.

Invariants: examples are lessons that the attached revision was built from. So a rollback ends them,
and a bare base has none: it loops after them. The revision was measured to answer general questions
as well with examples. A user without such a revision causes no embedding. Personal data that was
replaced before the training is replaced in the examples, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from personalpeft.backends.base import Backend
from personalpeft.chat.routing import ancestral_signals
from personalpeft.errors import MissingPackage
from personalpeft.lru_cache import LRUCache
from personalpeft.memory.items import Memory
from personalpeft.memory.types import Vectors
from personalpeft.store.ledger import SignalsMark
from personalpeft.store.store import Store
from personalpeft.types import (
    IS_SERVED,
    PROMPT_EXAMPLES,
    Message,
    PromptExample,
    Revision,
    split_system,
)

MIN_LESSONS = 4
"""Fewer lessons do not show how similar they are to one another."""

MAX_LESSONS = 64
"""The newest lessons are compared with a request. A style shows in any of them."""

# More of them cost time at the beginning of each conversation, and gained nothing.
_MAX_EXAMPLES = 2
# Of four lessons three are at least so similar to another.
_QUANTILE = 0.25
# Examples take at most an eighth of the base's context.
_CONTEXT_SHARE = 8
_MAX_KNOWN_USERS = 64


class ExampleSelector:
    """Selects examples for the users of one home. Thread-safe.

    Args:
        store: The home.
        memory: Embeds requests, and caches the vectors of lessons.
        lessons: Returns the lessons of a user that may be examples, oldest first, without the
            personal data that the given countries name.
    """

    def __init__(
        self,
        store: Store,
        memory: Memory,
        lessons: Callable[[str, Sequence[str]], Sequence[PromptExample]],
    ) -> None:
        self._store = store
        self._memory = memory
        self._lessons = lessons
        self._known = LRUCache[str, tuple[SignalsMark, str, tuple[PromptExample, ...]]](
            _MAX_KNOWN_USERS
        )

    def select(
        self, user: str, head: str, messages: Sequence[Message]
    ) -> tuple[PromptExample, ...]:
        """Return the examples for a prompt, the nearest last.

        Args:
            user: The user.
            head: The attached revision.
            messages: The prompt.
        """
        if not begins_conversation(messages):
            return ()
        revision = self._store.catalog.revision(user, head)
        if not revision.scores.get(PROMPT_EXAMPLES, {}).get(IS_SERVED):
            return ()
        system, (request,) = split_system(messages)
        lessons = [each for each in self._built_from(user, revision) if each.system == system]
        if len(lessons) < MIN_LESSONS:
            return ()
        cached = self._memory.cached_vectors(
            user, {each.signal: [each.request] for each in lessons}
        )
        vectors = np.concatenate([cached[each.signal] for each in lessons])
        return nearest_examples(lessons, vectors, self._memory.embedder.embed([request.content])[0])

    def evict_user(self, user: str) -> None:
        """Drop the cached lessons of a user."""
        self._known.drop(lambda known: known == user)

    def _built_from(self, user: str, revision: Revision) -> tuple[PromptExample, ...]:
        """Return the newest lessons that a revision was built from, held-out ones included.

        None without the extra that finds personal data, where the revision needs it.
        """
        # Before the lessons, so that one that is retracted between the two is read again.
        mark = self._store.ledger.signals_mark(user)
        known = self._known.get(user)
        if known is not None and known[:2] == (mark, revision.id):
            return known[2]
        built_from = set(ancestral_signals(self._store, user, revision.id))
        lessons: Sequence[PromptExample] = ()
        with suppress(MissingPackage):
            lessons = self._lessons(user, revision.recipe.get("scrub", ()))
        newest = tuple(each for each in lessons if each.signal in built_from)[-MAX_LESSONS:]
        self._known.put(user, (mark, revision.id, newest))
        return newest


def begins_conversation(messages: Sequence[Message]) -> bool:
    """Return whether a prompt is a user's first request, without tools. Others get no examples."""
    _, (first, *rest) = split_system(messages)
    return not (rest or first.role != "user" or first.tools or not first.content.strip())


def nearest_examples(
    lessons: Sequence[PromptExample], vectors: Vectors, request: Vectors
) -> tuple[PromptExample, ...]:
    """Return the lessons nearest to a request, the nearest last; none if it is unlike them.

    Args:
        lessons: At least ``MIN_LESSONS`` lessons.
        vectors: ``[len(lessons), size]``, the embeddings of their requests, each of length 1.
        request: ``[size]``, the embedding of the request.
    """
    similarities = vectors @ request
    if similarities.max() < similarity_between(vectors, _QUANTILE):
        return ()
    nearest = np.argsort(similarities, kind="stable")[-_MAX_EXAMPLES:]
    return tuple(lessons[number] for number in nearest)


def is_short(turns: Sequence[Message], backend: Backend) -> bool:
    """Return whether examples leave enough of the context to the conversation."""
    budget = backend.base.card.context // _CONTEXT_SHARE
    return sum(len(backend.encode(each.content)) for each in turns) <= budget


def similarity_between(lessons: Vectors, quantile: float) -> float:
    """Return a quantile of the lessons' cosines to their nearest other lesson.

    Args:
        lessons: ``[n, size]``, the embeddings of the lessons' requests, each of length 1.
        quantile: From 0 to 1.
    """
    between = lessons @ lessons.T
    np.fill_diagonal(between, -1.0)
    return float(np.quantile(between.max(axis=1), quantile))
