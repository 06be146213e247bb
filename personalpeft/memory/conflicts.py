"""Resolve facts that contradict each other. Pure.

Two facts conflict when they answer the same question differently; bare sentences never conflict.
The later fact wins, but a fact from the user wins over one from any other source. A superseded fact
stays in the ledger and is neither looked up nor learned.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence

from personalpeft.types import USER_SOURCE, Signal

# Signs that belong to a word at its edge: C and C#, A and A*, 5 and -5 are two things.
_NO_PUNCTUATION = "#%&@/\\*"
_MORE_PUNCTUATION = "`´"
_DECIMAL_MARKS = ".,"


def normalize(text: str) -> str:
    """Return a text's words without case, spacing and the punctuation around them.

    A text of punctuation alone is returned without case and spacing only.
    """
    words = unicodedata.normalize("NFKC", text).casefold().split()
    around = "".join(filter(_is_around_words, set("".join(words))))
    return " ".join(word for each in words if (word := _bare(each, around))) or " ".join(words)


def _bare(word: str, around: str) -> str:
    """Return a word without the punctuation around it, nothing for punctuation alone."""
    right = word.rstrip(around)
    bare = right.lstrip(around)
    # In .5 the point belongs to the number.
    before = right[: len(right) - len(bare)][-1:]
    if before in _DECIMAL_MARKS and bare[:1].isdigit():
        return before + bare
    return "" if all(map(_is_dash, bare)) else bare


def _is_around_words(character: str) -> bool:
    if character in _NO_PUNCTUATION or _is_dash(character):
        return False
    return unicodedata.category(character)[0] == "P" or character in _MORE_PUNCTUATION


def _is_dash(character: str) -> bool:
    return unicodedata.category(character) == "Pd"


def normalized_questions(fact: Signal) -> list[str]:
    """Return the questions that a fact answers, normalized."""
    return [normalize(question) for question in fact.payload.get("questions") or ()]


def superseded_facts(facts: Sequence[Signal]) -> Mapping[str, Signal]:
    """Return, by the id of each superseded fact, the fact that contradicts it.

    ``facts`` are current, oldest first.
    """
    winners: dict[str, Signal] = {}
    superseded: dict[str, Signal] = {}
    newest_first = list(reversed(facts))
    # The user's facts come first: a fact yields to any rival before it in this order.
    for fact in sorted(newest_first, key=lambda fact: fact.source != USER_SOURCE):
        answer: str = fact.payload.get("answer") or ""
        questions = normalized_questions(fact) if answer else []
        for rival in (winners[question] for question in questions if question in winners):
            if normalize(rival.payload["answer"]) != normalize(answer):
                superseded[fact.id] = rival
                break
        # A superseded fact still supersedes older ones, or a value corrected twice would return.
        winners |= {question: fact for question in questions if question not in winners}
    return superseded
