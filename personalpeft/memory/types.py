"""The values of memory: rules and facts of a user, and how texts become vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.types import Message

Vectors: TypeAlias = npt.NDArray[np.float32]
ItemKind: TypeAlias = Literal["rule", "fact"]


@dataclass(frozen=True, slots=True)
class Item:
    """One rule (from a comment) or fact (from ``remember``). ``id`` is that of its signal."""

    id: str
    kind: ItemKind
    text: str
    at: datetime


@dataclass(frozen=True, slots=True)
class AugmentedPrompt:
    """The messages as the base reads them.

    Attributes:
        messages: The messages with the items.
        item_ids: The ids of the items that were added to them.
        demonstrated: Whether demonstrations of a fact were added.
    """

    messages: tuple[Message, ...]
    item_ids: tuple[str, ...]
    demonstrated: bool = False


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embedded texts: ``[texts, size]`` float32, each row of length 1. ``tokens`` were read."""

    model: str
    vectors: Vectors
    tokens: int


class Embedder(Protocol):
    """Turns texts into unit vectors, whose dot product is the cosine similarity of the texts.

    Attributes:
        name: The model that makes the vectors. Vectors of different names are never compared.
        min_similarity: The ``similarity`` from which a fact is relevant to a question. Each model
            has its own.
        clear_similarity: The ``similarity``, less the ``impersonal_discount``, from which a request
            asks for a fact, rather than being on its topic.
        clear_statement_similarity: The same for the text of a fact, apart from the questions that
            were stated with it.
    """

    name: str
    min_similarity: float
    clear_similarity: float
    clear_statement_similarity: float

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return ``[len(texts), size]`` float32, each row of length 1."""

    def similarity(self, queries: Vectors, texts: Vectors) -> Vectors:
        """Return ``[len(queries), len(texts)]`` similarities on one scale for all languages."""

    def impersonal_discount(self, queries: Vectors) -> Vectors:
        """Return ``[len(queries)]``: what an impersonal request is less similar to facts."""

    def is_english(self, vector: Vectors) -> bool:
        """Return whether a text is English, by its vector ``[size]``. A doubtful one is not."""

    def tokens(self, text: str) -> int:
        """Return how many tokens of ``text`` the model reads."""
