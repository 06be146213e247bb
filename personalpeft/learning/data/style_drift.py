"""Finds when the style of a user's answers changed. Pure.

A style is known by its marks (``infer_template``: opening, closing, letter case). It has changed
where lessons in a row differ about a mark from those before, and all of this holds:

- Of the older at least three of four agree, of the newer all or all but one; the newest four do.
- It is no accident: in a random order so clean a cut would come in at most one of 250.
- The requests do not explain it. Requests of another kind may have a style of their own.

Invariants: styles that alternate or mix are no change. A change that some lessons show is found
with any later lessons too, until a later change; so going back to an old style is a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt
from typing import Literal

from personalpeft.learning.data.response_template import PromptResponse, infer_template

_MIN_LESSONS = 4
_MIN_SHARE = 0.75
_MAX_CHANCE = 1 / 250
# Lessons that are compared on either side of a cut.
_MAX_OLDER, _MAX_NEWER = 32, 12
# Characters that are read of an answer's beginning and end, and of a request's beginning.
_EDGE, _MAX_REQUEST = 120, 400


@dataclass(frozen=True, slots=True)
class StyleMark:
    """Something that an answer has or lacks."""

    kind: Literal["opening", "closing", "letters"]
    text: str

    def is_on(self, answer: str) -> bool:
        """Return whether an answer (``PromptResponse.pattern``) has it."""
        match self.kind:
            case "opening":
                return answer.startswith(self.text)
            case "closing":
                return answer.rstrip().endswith(self.text)
        # Digits are in neither case, so they speak against neither.
        return not any(map(str.isupper if self.text == "lower" else str.islower, answer))


@dataclass(frozen=True, slots=True)
class StyleChange:
    """From the lesson at ``index`` on, answers have (True) or lack (False) these marks."""

    index: int
    marks: tuple[tuple[StyleMark, bool], ...]

    def matches(self, example: PromptResponse) -> bool:
        """Return whether an answer is in the new style."""
        return all(mark.is_on(example.pattern) is has for mark, has in self.marks)


@lru_cache(maxsize=64)
def find_style_change(examples: tuple[PromptResponse, ...]) -> StyleChange | None:
    """Return the latest change in examples, oldest first; None if there is none."""
    found, since = None, 0
    older_marks: dict[int, tuple[StyleMark, ...]] = {}
    for end in range(2 * _MIN_LESSONS, len(examples) + 1):
        for index in range(end - _MIN_LESSONS, max(since, end - _MAX_NEWER), -1):
            window, newer = examples[max(since, index - _MAX_OLDER) : end], end - index
            answers = [each.pattern for each in window]
            if index not in older_marks:
                older_marks[index] = _find_marks(answers[:-newer])
            marks = dict.fromkeys((*older_marks[index], *_find_marks(answers[-newer:])))
            changed = tuple(_changed_marks(marks, answers[:-newer], answers[-newer:]))
            change = StyleChange(index, changed)
            settled = change.marks and all(map(change.matches, window[-_MIN_LESSONS:]))
            if settled and not _explained_by_requests(window, change):
                found, since = change, index
                older_marks.clear()
                break
    return found


def _changed_marks(
    marks: Iterable[StyleMark], older: Sequence[str], newer: Sequence[str]
) -> Iterator[tuple[StyleMark, bool]]:
    for mark in marks:
        had, have = sum(map(mark.is_on, older)), sum(map(mark.is_on, newer))
        if _is_clean_cut(len(older), had, len(newer), have):
            yield mark, True
        elif _is_clean_cut(len(older), len(older) - had, len(newer), len(newer) - have):
            yield mark, False


def _find_marks(answers: Sequence[str]) -> tuple[StyleMark, ...]:
    template = infer_template(
        [text if len(text) <= 2 * _EDGE else text[:_EDGE] + text[-_EDGE:] for text in answers]
    )
    letters = "" if template.letters == "own" else template.letters
    marks = (
        StyleMark("opening", template.opening),
        StyleMark("closing", template.closing),
        StyleMark("letters", letters),
    )
    return tuple(mark for mark in marks if mark.text)


def _is_clean_cut(older: int, had: int, newer: int, have: int) -> bool:
    """Return whether few older and nearly all newer answers have a mark, and not by chance."""
    if had > (1 - _MIN_SHARE) * older or have < max(_MIN_LESSONS, newer - 1):
        return False
    # Fisher's exact test, one-sided: at least so many of those with the mark among the newer.
    total, everything = had + have, older + newer
    ways = sum(
        comb(total, k) * comb(everything - total, newer - k)
        for k in range(have, min(newer, total) + 1)
    )
    return ways <= _MAX_CHANCE * comb(everything, newer)


def _explained_by_requests(window: Sequence[PromptResponse], change: StyleChange) -> bool:
    """Return whether most newly styled requests are unlike the others.

    Unlike means: less similar to any other than three of four of the others are to one another.
    """
    grams = {
        is_new: [trigrams(each.request) for each in window if change.matches(each) is is_new]
        for is_new in (True, False)
    }
    old, new = grams[False], grams[True]
    similarities = sorted(
        max_similarity(each, [*old[:n], *old[n + 1 :]]) for n, each in enumerate(old)
    )
    usual = similarities[int((1 - _MIN_SHARE) * len(similarities))]
    return sum(max_similarity(each, old) < usual for each in new) >= _MIN_SHARE * len(new)


def max_similarity(grams: frozenset[str], others: Sequence[frozenset[str]]) -> float:
    """Return the largest cosine similarity of a set of trigrams to others, 0 without others."""
    similarities = (len(grams & other) / sqrt(len(grams) * len(other)) for other in others)
    return max(similarities, default=0.0)


def trigrams(request: str) -> frozenset[str]:
    """Return every three letters in a row, which serves any language."""
    text = f"  {request[:_MAX_REQUEST].casefold()} "
    return frozenset(text[i : i + 3] for i in range(len(text) - 2))
