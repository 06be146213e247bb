"""What a user said that acts at once: rules (a profile) and facts (items that are looked up), both brought into the
prompt.

Invariants: an item is a view of one ledger entry (its id is the signal's id); nothing here is stored that could not be
made again from the ledger; text reaches the prompt only between marks that call it the user's own words, and only
within the budget.
"""

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
    """One rule (from a comment) or one fact (from ``remember``)."""

    id: str
    kind: ItemKind
    text: str
    at: datetime


@dataclass(frozen=True, slots=True)
class Recall:
    """The messages as the base will see them, and the ids of the items that were added."""

    messages: tuple[Message, ...]
    used: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Embedding:
    """Texts as a model of meaning sees them: ``[texts, size]`` float32, each row of length 1; ``tokens`` were read for it."""

    model: str
    vectors: Vectors
    tokens: int


class Embedder(Protocol):
    """Turns texts into unit vectors, so that a dot product is the cosine of their meanings."""

    @property
    def name(self) -> str:
        """Says which model made a vector; vectors of different names are never compared."""
        ...

    @property
    def near(self) -> float:
        """The cosine from which a fact belongs to a question. It is a property of the model: each spreads its cosines
        differently.
        """
        ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``[len(texts), size]`` float32, each row of length 1."""
        ...

    def tokens(self, text: str) -> int:
        """How many tokens of a text are read."""
        ...
