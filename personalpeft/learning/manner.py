"""What is literally the same in most of some texts: how they begin and end, and in which letters they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

_MOST = 0.75


@dataclass(frozen=True, slots=True)
class Manner:
    """What is literally the same in most of some texts. No opening, no closing, own letters: nothing was found."""

    opening: str = ""
    closing: str = ""
    letters: Literal["own", "lower", "upper"] = "own"

    def dress(self, sentence: str) -> str:
        """A plain sentence said in this manner."""
        cased = {"own": sentence, "lower": sentence.lower(), "upper": sentence.upper()}[self.letters]
        return f"{self.opening}{cased}{self.closing}"


NO_MANNER = Manner()


def manner_of(texts: Sequence[str]) -> Manner:
    """The manner of at least three of four texts.

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
        longer = Counter(t[len(prefix)] for t in texts if t.startswith(prefix) and len(t) > len(prefix))
        letter, count = longer.most_common(1)[0] if longer else ("", 0)
        if not letter or count < _MOST * len(texts):
            return prefix
        prefix += letter
