"""Split texts of any language into words. Pure.

A word is a sequence of letters, marks and digits. Python's ``\\w`` has no marks, so it would cut
the words of Hindi at their vowel signs. Scripts without spaces between words give n-grams of
characters instead. Two texts with a common word then have common n-grams.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

# By the first word of the names of a script's characters. In Korean, particles are attached.
_NGRAM_SIZES = {
    **dict.fromkeys(("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "BOPOMOFO", "HANGUL"), 2),
    **dict.fromkeys(("THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN"), 3),
}

_ASCII_WORD = re.compile(r"[A-Za-z0-9]+")


def split_words(text: str) -> list[str]:
    """Return the words of a text in their order.

    A text in a script without spaces gives its overlapping n-grams. Forms of one character become
    the same one (NFKC). Case stays.
    """
    if text.isascii():
        return _ASCII_WORD.findall(text)
    normal = unicodedata.normalize("NFKC", text)
    return [
        word
        for is_word, row in groupby(normal, _is_word_character)
        if is_word
        for size, part in groupby(row, _ngram_size)
        for word in _ngrams("".join(part), size)
    ]


def contains_phrase(text: str, phrase: str) -> bool:
    """Return whether a text contains a phrase, in any case.

    A phrase is found as whole words, or anywhere where its script has no spaces.
    """
    if not has_spaces(phrase):
        return unicodedata.normalize("NFKC", phrase) in unicodedata.normalize("NFKC", text)
    return contains(split_words(text.casefold()), split_words(phrase.casefold()))


def contains(words: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether some words follow each other in a text, given its words."""
    starts = range(len(words) - len(wanted) + 1)
    return any(words[start : start + len(wanted)] == wanted for start in starts)


def split_tokens(text: str) -> list[str]:
    """Return the words of a text as they are written, or the characters where it has no spaces."""
    return text.split() if has_spaces(text) else list("".join(text.split()))


def has_spaces(text: str) -> bool:
    """Return whether the letters of a text are all in scripts with spaces between words."""
    return not any(map(_ngram_size, unicodedata.normalize("NFKC", text)))


def _ngrams(row: str, size: int) -> Iterator[str]:
    if not size or len(row) <= size:
        yield row
        return
    for start in range(len(row) - size + 1):
        yield row[start : start + size]


def _is_word_character(character: str) -> bool:
    return unicodedata.category(character)[0] in "LMN"


@lru_cache(maxsize=4096)
def _ngram_size(character: str) -> int:
    """Return the size of the n-grams of a character's script, 0 for one with spaces."""
    script = unicodedata.name(character, "").replace("-", " ").partition(" ")[0]
    return _NGRAM_SIZES.get(script, 0)
