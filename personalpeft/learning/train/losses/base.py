"""What the terms of a step are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Backend, Continuation
from personalpeft.learning.data.response_template import Manner
from personalpeft.learning.train.config import Recipe
from personalpeft.types import Message

BEGINNING = 16
"""As many tokens of a reply as are read where it is only to be told apart from another."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is the same for all lessons of a build: ``manner`` is what they share, be it what they teach or what lies
    below them.
    """

    backend: Backend
    recipe: Recipe
    manner: Manner


def around(backend: Backend, manner: Manner, request: str) -> tuple[int, int]:
    """How many tokens of an answer to this request are the manner's: before its own words, and after them."""
    said = manner.to(request)
    # The space before a word is a part of that word's token.
    return len(backend.encode(said.opening.rstrip())), len(backend.encode(said.closing))


def continuation(
    backend: Backend, messages: Sequence[Message], answer: str, longest: int, *, ended: bool = True
) -> Continuation:
    """An answer after its messages, ended as the base ends a turn; cut, and then not ended, where it is longer than
    ``longest`` tokens. One that had not ``ended`` is not ended here: to break off is not to be learned.
    """
    tokens = backend.encode(answer) + (backend.end_of_turn if ended else ())
    return Continuation(backend.render(messages), tokens[:longest])
