"""Find what a text can only have from erased texts, in any language and script. Pure.

Texts are compared without case, marks and invisible characters, and with marks as well: Arabic and
Hebrew may be written without their vowels, while in Hindi a vowel makes another word. A text
reveals an erased one if it has a *revealing part*, which no remaining text has:

- A word: three letters or more, or a digit.
- A word inside a longer one, of the erased text or of the other. Many languages attach articles,
  prepositions and endings. Short words are inside others by accident, so it must be one that chance
  would not put into all these texts once, with letters as frequent as they are there.
- Two characters or more in a row, in scripts without spaces between words. The scripts are those
  whose lines may break inside words (Unicode Standard Annex 14).

A suffix automaton finds the runs of any length in linear time (Blumer et al. 1985, "The smallest
automaton recognizing the subwords of a text").
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

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


class RevealingText:
    """The parts of erased texts that no remaining text has."""

    def __init__(self, erased: Iterable[str], remaining: Iterable[str]) -> None:
        """Compare texts. ``remaining`` are all that may contain the same words."""
        erased, remaining = tuple(erased), tuple(remaining)
        self._forms = [
            (form, _RevealingParts(_split(erased, form), _split(remaining, form)))
            for form in (_with_marks, _without_marks)
        ]

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


def _script(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0]


@dataclass(frozen=True, slots=True)
class _Split:
    """The words of texts that can reveal anything, the runs without spaces, and all letters."""

    words: frozenset[str]
    runs: frozenset[str]
    letters: Counter[str] = field(default_factory=Counter)


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
        self._runs = _SharedRuns(erased.runs, remaining.runs)

    def are_in(self, text: _Split) -> bool:
        if self._words & text.words or any(map(self._runs.is_unique_in, text.runs)):
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


@dataclass(slots=True)
class _State:
    """All runs with the same ends in the erased texts. ``length`` is that of the longest.

    ``remaining`` is the length of the longest of them that a remaining text has.
    """

    length: int
    link: int = -1
    following: dict[str, int] = field(default_factory=dict)
    remaining: int = 0


class _SharedRuns:
    """A suffix automaton of the erased runs."""

    def __init__(self, erased: Iterable[str], remaining: Iterable[str]) -> None:
        self._states = [_State(0)]
        for run in sorted(erased):
            self._add(run)
        if len(self._states) == 1:
            return
        for run in remaining:
            for state, length in self._matches(run):
                state.remaining = max(state.remaining, length)
        # A text that has a run has all its ends.
        for state in sorted(self._states[1:], key=lambda state: -state.length):
            if state.remaining and state.link > 0:
                shorter = self._states[state.link]
                shorter.remaining = shorter.length

    def is_unique_in(self, run: str) -> bool:
        """Return whether a run has a part that is in the erased texts and no remaining one."""
        return any(
            length > state.remaining and _count_letters(run[end - length : end]) >= _MIN_RUN
            for end, (state, length) in enumerate(self._matches(run), start=1)
        )

    def _matches(self, run: str) -> Iterator[tuple[_State, int]]:
        """Yield, for each place, the longest part that ends there and is in the erased texts."""
        at, length = 0, 0
        for character in run:
            while at and character not in self._states[at].following:
                at = self._states[at].link
                length = self._states[at].length
            at = self._states[at].following.get(character, 0)
            length = length + 1 if at else 0
            yield self._states[at], length

    def _add(self, run: str) -> None:
        states, last = self._states, 0
        for character in run:
            last = self._extend(states, last, character)

    def _extend(self, states: list[_State], last: int, character: str) -> int:
        """Add a character after a state, and return the state of the longer run."""
        known = states[last].following.get(character)
        if known is not None and states[known].length == states[last].length + 1:
            return known
        new = len(states) if known is None else -1
        if known is None:
            states.append(_State(states[last].length + 1))
        at = last
        while at >= 0 and character not in states[at].following:
            states[at].following[character] = new
            at = states[at].link
        link = 0 if at < 0 else self._split_state(states, at, character)
        if known is not None:
            return link
        states[new].link = link
        return new

    def _split_state(self, states: list[_State], at: int, character: str) -> int:
        """Return the state after ``at`` whose longest run is one longer, split off if need be."""
        after = states[at].following[character]
        if states[after].length == states[at].length + 1:
            return after
        copy = len(states)
        other = states[after]
        states.append(_State(states[at].length + 1, other.link, dict(other.following)))
        other.link = copy
        while at >= 0 and states[at].following.get(character) == after:
            states[at].following[character] = copy
            at = states[at].link
        return copy


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


def _split(texts: Sequence[str], form: Callable[[str], str]) -> _Split:
    words: set[str] = set()
    runs: set[str] = set()
    letters: Counter[str] = Counter()
    for text in map(form, texts):
        found = (_ASCII_WORD if text.isascii() else _WORD).findall(text)
        letters.update("".join(found))
        words.update(found)
        if not text.isascii():
            runs.update(_RUN.findall(text))
    return _Split(frozenset(filter(_can_reveal, words)), frozenset(runs), letters)


def _count_letters(run: str) -> int:
    return sum(unicodedata.category(character)[0] != "M" for character in run)


def _can_reveal(word: str) -> bool:
    return len(word) >= _MIN_LETTERS or any(map(str.isdigit, word))
