"""The literal style of answers: its template, its changes, and styles that conflict. Pure.

- A template is the opening, closing and letter case that most answers share. An answer may repeat
  the request ("You asked: ..."). ``REQUEST_PLACEHOLDER`` stands for it in a template.
- A style has changed where lessons in a row differ about a mark from those before: of the older at
  least three of four agree, of the newer all or all but one, and the newest four do. A random order
  has so clean a cut in at most one of 250 cases, and the requests do not explain it.
- Two styles conflict that alternate in most lessons. A model cannot learn both, and no score finds
  it: half learned, either style makes every held-out answer a little likelier.

Invariants: styles that alternate or mix are no change, and a clean cut is no conflict. A change
that some lessons show is found with any later lessons too, until a later change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, groupby
from math import comb, sqrt
from typing import Literal

REQUEST_PLACEHOLDER = "\ufffc"

_MIN_SHARE = 0.75
# A shorter request may well stand in an answer by accident.
_MIN_REQUEST_LENGTH = 6


@dataclass(frozen=True, slots=True)
class PromptResponse:
    """The last message of a prompt and the answer to it."""

    request: str
    answer: str

    @property
    def pattern(self) -> str:
        """The answer with a placeholder where it repeats the request."""
        request = self.request.strip()
        if len(request) < _MIN_REQUEST_LENGTH:
            return self.answer
        return self.answer.replace(request, REQUEST_PLACEHOLDER)


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """What most of some answers share literally. The default is no template."""

    opening: str = ""
    closing: str = ""
    letters: Literal["own", "lower", "upper"] = "own"

    def for_request(self, request: str) -> ResponseTemplate:
        """Return the template with the request in place of the placeholder."""
        text = request.strip()
        opening, closing = (
            part.replace(REQUEST_PLACEHOLDER, text) for part in (self.opening, self.closing)
        )
        return ResponseTemplate(opening, closing, self.letters)

    def apply(self, sentence: str, request: str) -> str:
        """Return a plain sentence in this template, as the answer to a request."""
        filled = self.for_request(request)
        if self.letters != "own":
            sentence = sentence.lower() if self.letters == "lower" else sentence.upper()
        return f"{filled.opening}{sentence}{filled.closing}"


NO_TEMPLATE = ResponseTemplate()


def infer_template(answers: Sequence[str]) -> ResponseTemplate:
    """Return the template of at least three of four answers (``PromptResponse.pattern``).

    An opening ends in punctuation ("Ahoy! ", "- "), because mere words are content. A closing
    follows the last sentence, so it begins with a space.
    """
    letters: Literal["own", "lower", "upper"] = "own"
    if answers and sum(map(str.islower, answers)) >= _MIN_SHARE * len(answers):
        letters = "lower"
    elif answers and sum(map(str.isupper, answers)) >= _MIN_SHARE * len(answers):
        letters = "upper"
    opening = re.match(r".*[^\w\s]\s*", _shared_prefix(answers), re.DOTALL)
    suffix = _shared_prefix([answer.rstrip()[::-1] for answer in answers])[::-1]
    closing = re.search(r"\s+\S.*", suffix, re.DOTALL)
    return ResponseTemplate(opening[0] if opening else "", closing[0] if closing else "", letters)


def _shared_prefix(texts: Sequence[str]) -> str:
    """Return the longest prefix of at least three of four texts."""
    prefix = ""
    while True:
        following = Counter(
            text[len(prefix)]
            for text in texts
            if text.startswith(prefix) and len(text) > len(prefix)
        )
        letter, count = following.most_common(1)[0] if following else ("", 0)
        if not letter or count < _MIN_SHARE * len(texts):
            return prefix
        prefix += letter


_MIN_LESSONS = 4
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


_MIN_CONFLICT_LESSONS = 6
_MIN_STYLE_SHARE, _MAX_STYLE_SHARE, _MIN_TOGETHER = 0.25, 0.75, 2 / 3
_MIN_TURNS = 4
_OPENING_EDGE = 60
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
    if count < _MIN_CONFLICT_LESSONS:
        return ""
    # Of marks of the same answers the last one is kept, which is the longest.
    marks = {
        mark.indices: mark
        for mark in _find_answer_marks(examples)
        if _MIN_STYLE_SHARE * count <= len(mark.indices) <= _MAX_STYLE_SHARE * count
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
                and not _styles_explained_by_requests(examples, styles)
            ):
                words = " and ".join(f"{len(mark.indices)} {mark.words}" for mark in chosen)
                return f"{words}, by turns: that could not all be one way of answering"
    return ""


def _find_answer_marks(examples: Sequence[PromptResponse]) -> Iterator[_AnswerMark]:
    texts = [each.pattern.strip() for each in examples]
    openings = {
        text[: match.end()]
        for text in texts
        for match in re.finditer(r"[^\w\s]+\s+", text[:_OPENING_EDGE])
    }
    for opening in sorted(openings, key=lambda text: (len(text), text)):
        indices = _true_at(text.startswith(opening) for text in texts)
        is_style = len(_WORD.findall(opening)) != 1
        yield _AnswerMark(f'begin with "{opening.strip()}"', indices, is_style)
    endings = {ending for text in texts for ending in _endings(text[-_OPENING_EDGE:])}
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


def _styles_explained_by_requests(
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
    return explained >= _MAX_STYLE_SHARE * len(grams)
