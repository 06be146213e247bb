"""Select lessons of a user that stand in a prompt as examples.

A request that begins a conversation gets the lessons nearest to it as earlier turns, if it is as
similar to the lessons as these are to one another. How similar that is, a quantile of their
similarities, was chosen for each revision. A layer that learned a style follows it further
with examples. Replies later in a conversation follow the earlier ones anyway.

Invariants: examples are lessons that the attached revision was built from. So a rollback ends them,
and a bare base has none: it loops after them. The revision was measured to answer general questions
as well with examples. A user without such a revision causes no embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from personalpeft.backends.base import Backend
from personalpeft.chat.routing import ancestral_signals
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

QUANTILES = (0.25, 0.5, 0.75, 1.0)
"""What a request has to reach to get examples. The first is reached by requests that are as similar
to a lesson as three of four lessons are to another."""

# More of them cost time at the beginning of each conversation, and gained nothing.
_MAX_EXAMPLES = 2
# Examples take at most an eighth of the base's context.
_CONTEXT_SHARE = 8
_MAX_KNOWN_USERS = 64


class ExampleSelector:
    """Selects examples for the users of one home. Thread-safe.

    Args:
        store: The home.
        memory: Embeds requests, and caches the vectors of lessons.
        lessons: Returns the lessons of a user that may be examples, oldest first.
    """

    def __init__(
        self, store: Store, memory: Memory, lessons: Callable[[str], Sequence[PromptExample]]
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
        quantile = served_quantile(self._store.catalog.revision(user, head))
        if quantile is None:
            return ()
        system, (request,) = split_system(messages)
        lessons = [each for each in self._built_from(user, head) if each.system == system]
        if len(lessons) < MIN_LESSONS:
            return ()
        cached = self._memory.cached_vectors(
            user, {each.signal: [each.request] for each in lessons}
        )
        vectors = np.concatenate([cached[each.signal] for each in lessons])
        embedding = self._memory.embedder.embed([request.content])[0]
        if reached_quantile(vectors, embedding) < quantile:
            return ()
        return nearest_examples(lessons, vectors, embedding)

    def evict_user(self, user: str) -> None:
        """Drop the cached lessons of a user."""
        self._known.drop(lambda known: known == user)

    def _built_from(self, user: str, head: str) -> tuple[PromptExample, ...]:
        """Return the newest lessons that a revision was built from, held-out ones included."""
        # Before the lessons, so that one that is retracted between the two is read again.
        mark = self._store.ledger.signals_mark(user)
        known = self._known.get(user)
        if known is not None and known[:2] == (mark, head):
            return known[2]
        built_from = set(ancestral_signals(self._store, user, head))
        lessons = [each for each in self._lessons(user) if each.signal in built_from]
        newest = tuple(lessons[-MAX_LESSONS:])
        self._known.put(user, (mark, head, newest))
        return newest


def begins_conversation(messages: Sequence[Message]) -> bool:
    """Return whether a prompt is a user's first request, without tools. Others get no examples."""
    _, (first, *rest) = split_system(messages)
    return not (rest or first.role != "user" or first.tools or not first.content.strip())


def served_quantile(revision: Revision) -> float | None:
    """Return the quantile from which a style is served with examples; None if it never is."""
    measured = revision.scores.get(PROMPT_EXAMPLES, {})
    # Earlier versions stored no quantile.
    return measured.get("quantile", QUANTILES[0]) if measured.get(IS_SERVED) else None


def reached_quantile(lessons: Vectors, request: Vectors) -> float:
    """Return the highest of ``QUANTILES`` that a request reaches, or 0.

    Args:
        lessons: ``[n, size]``, the embeddings of the lessons' requests, each of length 1; at least
            ``MIN_LESSONS``.
        request: ``[size]``, the embedding of the request.
    """
    similarity = (lessons @ request).max()
    reached = (each for each in QUANTILES if similarity >= similarity_between(lessons, each))
    return max(reached, default=0.0)


def nearest_examples(
    lessons: Sequence[PromptExample], vectors: Vectors, request: Vectors
) -> tuple[PromptExample, ...]:
    """Return the lessons nearest to a request, the nearest last.

    Args:
        lessons: The lessons.
        vectors: ``[len(lessons), size]``, the embeddings of their requests, each of length 1.
        request: ``[size]``, the embedding of the request.
    """
    nearest = np.argsort(vectors @ request, kind="stable")[-_MAX_EXAMPLES:]
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
