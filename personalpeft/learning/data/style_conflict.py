"""Finds lessons that show two styles by turns, which a model cannot both learn. Pure.

Half learned, either style makes every held-out answer a little likelier, so no score finds it. It
is found in the lessons: marks that never share an answer, each in many and together in most, one
after the other and back. Requests that explain the style (letters and questions) are no conflict.

Invariants: a clean cut is a change of style (style_drift.py) and no conflict; answers without
common marks are no conflict.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from personalpeft.learning.data.response_template import PromptResponse
from personalpeft.learning.data.style_drift import max_similarity, trigrams

_MIN_LESSONS = 6
_MIN_SHARE, _MAX_SHARE, _MIN_TOGETHER = 0.25, 0.75, 2 / 3
_MIN_TURNS = 4
_EDGE = 60
_WORD = re.compile(r"[^\W\d]+")


@dataclass(frozen=True, slots=True)
class _AnswerMark:
    """What the answers with these ``indices`` share, in words.

    An opening of one word is no style by itself: some answers say yes and others no.
    """

    words: str
    indices: frozenset[int]
    is_style: bool = True


def find_style_conflict(examples: Sequence[PromptResponse]) -> str:
    """Return how the answers, oldest first, are divided, in words; empty if they are not."""
    count = len(examples)
    if count < _MIN_LESSONS:
        return ""
    # Of marks of the same answers the last one is kept, which is the longest.
    marks = {
        mark.indices: mark
        for mark in _find_marks(examples)
        if _MIN_SHARE * count <= len(mark.indices) <= _MAX_SHARE * count
    }
    for size in (2, 3):
        for chosen in combinations(marks.values(), size):
            styles = [mark.indices for mark in chosen]
            together = len(frozenset().union(*styles))
            if (
                together == sum(map(len, styles))
                and any(mark.is_style for mark in chosen)
                and together >= _MIN_TOGETHER * count
                and _alternate(styles)
                and not _explained_by_requests(examples, styles)
            ):
                words = " and ".join(f"{len(mark.indices)} {mark.words}" for mark in chosen)
                return f"{words}, by turns: that could not all be one way of answering"
    return ""


def _find_marks(examples: Sequence[PromptResponse]) -> Iterator[_AnswerMark]:
    texts = [each.pattern.strip() for each in examples]
    openings = {
        text[: match.end()] for text in texts for match in re.finditer(r"[^\w\s]+\s+", text[:_EDGE])
    }
    for opening in sorted(openings, key=lambda text: (len(text), text)):
        indices = _true_at(text.startswith(opening) for text in texts)
        is_style = len(_WORD.findall(opening)) != 1
        yield _AnswerMark(f'begin with "{opening.strip()}"', indices, is_style)
    endings = {ending for text in texts for ending in _endings(text[-_EDGE:])}
    for ending in sorted(endings, key=lambda text: (len(text), text)):
        indices = _true_at(text.endswith(ending) for text in texts)
        yield _AnswerMark(f'end with "{ending.strip()}"', indices)
    yield _AnswerMark("are in small letters", _true_at(map(str.islower, texts)))
    yield _AnswerMark("are in capitals", _true_at(map(str.isupper, texts)))


def _endings(text: str) -> Iterator[str]:
    """Yield what may be a closing: two words or more after the end of a sentence."""
    for match in re.finditer(r"(?<=[.!?])\s+(?=\S+\s+\S)", text):
        yield text[match.start() :]


def _true_at(values: Iterable[bool]) -> frozenset[int]:
    return frozenset(index for index, value in enumerate(values) if value)


def _alternate(styles: Sequence[frozenset[int]]) -> bool:
    order = sorted((index, style) for style, indices in enumerate(styles) for index in indices)
    return len(list(groupby(style for _, style in order))) >= _MIN_TURNS


def _explained_by_requests(
    examples: Sequence[PromptResponse], styles: Sequence[frozenset[int]]
) -> bool:
    """Return whether most requests are most like one that is answered in the same style."""
    grams = {index: trigrams(examples[index].request) for style in styles for index in style}
    explained = 0
    for style in styles:
        for index in style:
            same = max_similarity(grams[index], [grams[n] for n in style if n != index])
            other = max_similarity(grams[index], [grams[n] for n in grams if n not in style])
            explained += same > other
    return explained >= _MAX_SHARE * len(grams)
