"""Find what a text can only have from erased texts, in any language and script. Pure.

Texts are compared without case, invisible characters and marks, and once more with marks. Arabic
and Hebrew may be written without their vowels. In Hindi a vowel makes another word. A text reveals
an erased one if it has a *revealing part*, which no remaining text has:

- A word: three letters or more, or a digit.
- A word inside a longer one, of the erased text or of the other. Many languages attach articles,
  prepositions and endings. Short words are inside others by accident, so it must be one that chance
  would not put into all these texts once, with letters as frequent as they are there.
- Two characters or more in a row, in scripts without spaces between words. The scripts are those
  whose lines may break inside words (Unicode Standard Annex 14).
- One Chinese character, such as a name of Chinese or Japanese people. Any short text lacks most of
  them, so the remaining texts must be long enough: a character as frequent as this one is in the
  erased texts would be expected in them three times, so that chance leaves it out in 5 %.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import regex

# The classes of UAX 14 for ideographs, kana, Hangul, and the scripts of South-East Asia.
UNSPACED = r"[\p{LB=ID}\p{LB=CJ}\p{LB=NS}\p{LB=H2}\p{LB=H3}\p{LB=SA}\p{LB=AK}\p{LB=AS}\p{LB=AP}]"
"""A character of a script without spaces between words, as a regular expression."""
_LETTER = r"[\p{L}\p{N}]"
_RUN = regex.compile(rf"(?:(?={UNSPACED}){_LETTER}\p{{M}}*)+")
_WORD = regex.compile(rf"(?:(?!{UNSPACED}){_LETTER}\p{{M}}*)+")
_ASCII_WORD = re.compile("[a-z0-9]+")
_INVISIBLE = regex.compile(r"\p{Cf}+")
_MARKS = regex.compile(r"\p{Mn}+")
_MIN_LETTERS = 3
_MIN_RUN = 2
_IDEOGRAPH = regex.compile(r"\p{Han}")
_MIN_EXPECTED = 3.0


class RevealingText:
    """The parts of erased texts that no remaining text has."""

    def __init__(self, erased: Iterable[str], remaining: Iterable[str]) -> None:
        """Compare texts. ``remaining`` are all that may contain the same words."""
        self._erased, self._remaining = tuple(erased), tuple(remaining)

    @cached_property
    def _forms(self) -> list[tuple[Callable[[str], str], _RevealingParts]]:
        """The parts in each form. Made for the first text: it takes seconds for a long history."""
        forms = (_with_marks, _without_marks)
        erased, remaining = (_split_forms(each, forms) for each in (self._erased, self._remaining))
        return list(zip(forms, map(_RevealingParts, erased, remaining), strict=True))

    def prepare(self) -> None:
        """Compare the texts now, and not when the first text is judged."""
        self._forms  # noqa: B018

    def is_in(self, texts: Iterable[str]) -> bool:
        """Return whether any of the texts has a revealing part."""
        texts = tuple(texts)
        return any(parts.are_in(_split(texts, form)) for form, parts in self._forms)


def has_words(text: str) -> bool:
    """Return whether a text has a word or run that can reveal anything."""
    parts = _split([text], _with_marks)
    return bool(parts.words) or any(_count_letters(run) >= _MIN_RUN for run in parts.runs)


def comparable(text: str) -> str:
    """Return the words of a text, without case, marks and punctuation.

    They are separated by a space, but not in scripts without spaces: there a line may end anywhere.
    """
    text = _without_marks(text)
    if text.isascii():
        return " ".join(_ASCII_WORD.findall(text))
    pieces = regex.findall(rf"{_RUN.pattern}|{_WORD.pattern}", text)
    joined = " ".join(pieces)
    return str(regex.sub(rf"(?<={UNSPACED}\p{{M}}*) (?={UNSPACED})", "", joined))


def pieces(text: str) -> list[tuple[int, int]]:
    """Return where the words of a text stand; in a script without spaces, the pairs of characters.

    Pairs do not overlap.
    """
    found = [match.span() for match in _WORD.finditer(text)]
    for match in _RUN.finditer(text):
        starts = range(match.start(), match.end(), _MIN_RUN)
        found += [(start, min(start + _MIN_RUN, match.end())) for start in starts]
    return sorted(found)


def letters_only(letters: str, *, like: str) -> str:
    """Return the letters of the same scripts as those of another text, in lower case."""
    scripts = {_script(letter) for letter in like}
    return "".join(letter for letter in letters.lower() if _script(letter) in scripts)


@cache
def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


@dataclass(frozen=True, slots=True)
class _Split:
    """The words of texts that can reveal anything, and the runs without spaces.

    Also how often each character is in all words, and in all runs.
    """

    words: frozenset[str]
    runs: frozenset[str]
    letters: Counter[str] = field(default_factory=Counter)
    run_letters: Counter[str] = field(default_factory=Counter)

    def with_other(self, other: _Split) -> _Split:
        """Return the words and runs of both."""
        return _Split(
            self.words | other.words,
            self.runs | other.runs,
            self.letters + other.letters,
            self.run_letters + other.run_letters,
        )


class _RevealingParts:
    def __init__(self, erased: _Split, remaining: _Split) -> None:
        self._letters = erased.letters + remaining.letters
        self._total = self._letters.total()
        self._erased = " ".join(erased.words)
        self._remaining = " ".join(remaining.words)
        self._words = {
            word for word in erased.words - remaining.words if not self._is_remaining(word)
        }
        self._long_words = [word for word in self._words if not self._is_likely(word)]
        self._parts = _unique_parts(erased.runs, remaining.runs) | _unique_ideographs(
            erased.run_letters, remaining.run_letters
        )
        self._sizes = {len(part) for part in self._parts}

    def are_in(self, text: _Split) -> bool:
        runs = "\n".join(text.runs)
        if self._words & text.words or any(
            runs[start : start + size] in self._parts
            for size in self._sizes
            for start in range(len(runs))
        ):
            return True
        joined = " ".join(text.words)
        return any(word in joined for word in self._long_words) or any(
            word in self._erased and not self._is_likely(word) and not self._is_remaining(word)
            for word in text.words
        )

    def _is_remaining(self, word: str) -> bool:
        return word in self._remaining and not self._is_likely(word)

    def _is_likely(self, word: str) -> bool:
        """Return whether chance would put a word into all texts once or more."""
        chance = sum(math.log(self._letters[letter] / self._total) for letter in word)
        return math.log(self._total) + chance >= 0


def _unique_parts(erased: Iterable[str], remaining: Iterable[str]) -> frozenset[str]:
    """Return the parts of erased runs that can reveal and that no remaining run has.

    From each start the shortest one. Starts whose part remains are read again with one character
    more, beside the places of the remaining runs that still agree with one of them.
    """
    text, kept = "\n".join(erased), "\n".join(remaining)
    parts: set[str] = set()
    starts = [start for start, character in enumerate(text) if character != "\n"]
    places: Sequence[int] = range(len(kept))
    size = 1
    while starts:
        found = {text[start : start + size] for start in starts}
        shared = found & {kept[place : place + size] for place in places}
        new = {part for part in found - shared if _count_letters(part) >= _MIN_RUN}
        parts |= new
        starts = [
            start
            for start in starts
            if text[start : start + size] not in new
            and text[start + size : start + size + 1].strip()
        ]
        places = [place for place in places if kept[place : place + size] in shared]
        size += 1
    return frozenset(parts)


def _unique_ideographs(erased: Counter[str], remaining: Counter[str]) -> frozenset[str]:
    """Return the ideographs of erased runs that chance would have put into the remaining ones."""
    needed = _MIN_EXPECTED * erased.total() / max(1, remaining.total())
    return frozenset(
        letter
        for letter, count in erased.items()
        if letter not in remaining and count >= needed and _IDEOGRAPH.match(letter)
    )


def _with_marks(text: str) -> str:
    if text.isascii():
        return text.casefold()
    # Some characters have a capital form only after NFKC.
    visible = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text))
    return unicodedata.normalize("NFKC", visible.casefold())


def _without_marks(text: str) -> str:
    if text.isascii():
        return text.casefold()
    bare = _MARKS.sub("", unicodedata.normalize("NFD", _with_marks(text)))
    return unicodedata.normalize("NFC", bare)


def _split_forms(texts: Sequence[str], forms: Iterable[Callable[[str], str]]) -> list[_Split]:
    """Return the words of texts in each form. All forms of an ASCII text are the same."""
    shared = _split([text for text in texts if text.isascii()], str.casefold)
    others = [text for text in texts if not text.isascii()]
    return [shared.with_other(_split(others, form)) for form in forms]


def _split(texts: Sequence[str], form: Callable[[str], str]) -> _Split:
    words: set[str] = set()
    runs: set[str] = set()
    letters: Counter[str] = Counter()
    run_letters: Counter[str] = Counter()
    for text in map(form, texts):
        found = (_ASCII_WORD if text.isascii() else _WORD).findall(text)
        letters.update("".join(found))
        words.update(found)
        if not text.isascii():
            in_text = _RUN.findall(text)
            runs.update(in_text)
            run_letters.update("".join(in_text))
    return _Split(frozenset(filter(_can_reveal, words)), frozenset(runs), letters, run_letters)


def _count_letters(run: str) -> int:
    return sum(unicodedata.category(character)[0] != "M" for character in run)


def _can_reveal(word: str) -> bool:
    return len(word) >= _MIN_LETTERS or any(map(str.isdigit, word))
