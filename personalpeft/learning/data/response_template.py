"""What is literally the same in most of some answers: how they begin and end, and in which letters they are.

An answer may repeat what was asked ("You asked: …"). What stands in its place is the same in all of them, so the request is
read as one sign, ``ASKED``, and put back wherever something is said in that manner.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ASKED = "\ufffc"
"""Stands for the request."""

_MOST = 0.75
# What is shorter may well stand in an answer by accident.
_SHORTEST = 6


@dataclass(frozen=True, slots=True)
class Shown:
    """To this request, this answer."""

    request: str
    answer: str

    @property
    def pattern(self) -> str:
        """The answer with ``ASKED`` where it repeats the request."""
        asked = self.request.strip()
        return self.answer.replace(asked, ASKED) if len(asked) >= _SHORTEST else self.answer


@dataclass(frozen=True, slots=True)
class Manner:
    """What is literally the same in most of some answers. No opening, no closing, own letters: nothing was found."""

    opening: str = ""
    closing: str = ""
    letters: Literal["own", "lower", "upper"] = "own"

    def to(self, request: str) -> Manner:
        """The manner of an answer to this request."""
        asked = request.strip()
        return Manner(
            self.opening.replace(ASKED, asked), self.closing.replace(ASKED, asked), self.letters
        )

    def dress(self, sentence: str, request: str) -> str:
        """A plain sentence said in this manner, in answer to a request."""
        said = self.to(request)
        cased = {"own": sentence, "lower": sentence.lower(), "upper": sentence.upper()}[
            self.letters
        ]
        return f"{said.opening}{cased}{said.closing}"


NO_MANNER = Manner()


def manner_of(texts: Sequence[str]) -> Manner:
    """The manner of at least three of four answers, given as ``Shown.pattern`` where it is known what was asked.

    An opening ends in a mark of punctuation ("Ahoy! ", "- "), since mere words are content; a closing is what follows
    the last sentence, so it begins with a space.
    """
    letters: Literal["own", "lower", "upper"] = "own"
    if texts and sum(text.islower() for text in texts) >= _MOST * len(texts):
        letters = "lower"
    elif texts and sum(text.isupper() for text in texts) >= _MOST * len(texts):
        letters = "upper"
    opening = re.match(r".*[^\w\s]\s*", _common_beginning(texts), re.DOTALL)
    ending = _common_beginning([text.rstrip()[::-1] for text in texts])[::-1]
    closing = re.search(r"\s+\S.*", ending, re.DOTALL)
    return Manner(opening[0] if opening else "", closing[0] if closing else "", letters)


def _common_beginning(texts: Sequence[str]) -> str:
    """The longest beginning that at least three of four texts share."""
    prefix = ""
    while True:
        longer = Counter(
            t[len(prefix)] for t in texts if t.startswith(prefix) and len(t) > len(prefix)
        )
        letter, count = longer.most_common(1)[0] if longer else ("", 0)
        if not letter or count < _MOST * len(texts):
            return prefix
        prefix += letter
