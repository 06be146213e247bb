"""Two styles among lessons: one that replaced the other, or two that alternate. Pure.

Answers in one style have more n-grams of characters in common than answers in two. This holds in
any language and script. So lessons are divided into the two groups of the most similar answers.
Their order is ignored (spectral division: Newman 2006, arXiv physics/0605087). Two groups are two
styles if answers within a group are more similar than across, and requests are not. Otherwise the
kind of request decides how it is answered, and that is one style.

- A style has changed if the groups follow each other in time. A random order seldom does that.
- Two styles may alternate if the groups do. A model that learns both may write a mixture of them.
  The base decides whether these are two styles (``evaluate.text_quality``): in Japanese, answers
  that end in "desu" or in "kudasai" are two groups, and one style.

Invariant: a change that some lessons show is found with any later lessons too, until a later
change.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, compress, pairwise, takewhile
from math import ceil, comb
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from personalpeft.lru_cache import LRUCache
from personalpeft.memory.types import Vectors
from personalpeft.types import PromptResponse

_WINDOW = 20
"""Lessons that are compared with one another, the newest of some."""

_MIN_NEWER = 4
_MAX_CHANCE = 1 / 1500
# No division of fewer lessons follows the order so seldom by chance.
_MIN_WINDOW = 13

_MIN_ALTERNATING, _MIN_RUNS = 8, 4

# Rarer n-grams are content, and a smaller group is no style.
_MIN_SHARE = 0.2

# How often answers of one group must be more similar than answers of different groups, and how
# often their requests may be: of a change, and of groups that alternate.
_CHANGE_LIMITS, _ALTERNATION_LIMITS = (0.8, 0.75), (0.85, 0.7)
# The same of the embeddings of requests, of groups that alternate.
_MAX_SEPARATION_OF_MEANINGS = 0.66

_LONGEST_NGRAM = 3
# Characters that are read from the beginning and from the end of a text.
_EDGE = 200
_BEGIN, _END = "\x02", "\x03"

_Floats: TypeAlias = NDArray[np.float64]
_Mask: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StyleChange:
    """From the lesson at ``index`` on, answers are in a new style.

    ``weights``: by n-gram, how much more the new style has it than the old one.
    """

    index: int
    weights: Mapping[str, float]

    def matches(self, answer: str) -> bool:
        """Return whether an answer is more similar to the new style than to the old one."""
        return sum(self.weights.get(each, 0.0) for each in _ngrams(_mask_numbers(answer))) > 0


_scans = LRUCache[
    tuple[PromptResponse, ...], tuple[tuple[PromptResponse, ...], Mapping[int, StyleChange]]
](64)
"""By the oldest example, of a user: the examples scanned last, and each change by the count of
examples that show it. A scan of all lessons takes seconds for thousands of them, and a learn adds a
few."""


def drop_cached_texts() -> None:
    """Drop the texts of all users that this module has cached."""
    _scans.drop(lambda first: True)
    _ngrams.cache_clear()


def find_style_change(examples: tuple[PromptResponse, ...]) -> StyleChange | None:
    """Return the latest change in examples, oldest first; None if there is none."""
    known, changes = _scans.get(examples[:1]) or ((), {})
    pairs = zip(known, examples, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    changes = {end: change for end, change in changes.items() if end <= same}
    found = changes[max(changes)] if changes else None
    for end in range(max(_MIN_WINDOW, same + 1), len(examples) + 1):
        first = max(found.index if found else 0, end - _WINDOW)
        change = _find_change_in(examples[first:end])
        if change is not None:
            found = changes[end] = replace(change, index=first + change.index)
    _scans.put(examples[:1], (examples, changes))
    return found


def find_alternating_groups(
    examples: Sequence[PromptResponse], embed: Callable[[Sequence[str]], Vectors]
) -> tuple[Sequence[PromptResponse], Sequence[PromptResponse]] | None:
    """Return two groups of the newest examples whose answers look different and alternate, or None.

    Args:
        examples: Oldest first. The group of the newest one is the first.
        embed: Returns the embeddings of requests, each of length 1. Where their meaning explains
            the groups, each kind of request has its own style.
    """
    newest = tuple(examples[-_WINDOW:])
    if len(newest) < _MIN_ALTERNATING:
        return None
    groups = _divide(newest, *_ALTERNATION_LIMITS)
    if groups is None or 1 + sum(a != b for a, b in pairwise(groups)) < _MIN_RUNS:
        return None
    vectors = embed([each.request for each in newest]).astype(np.float64)
    if _separation(vectors @ vectors.T, groups) >= _MAX_SEPARATION_OF_MEANINGS:
        return None
    one, other = (list(compress(newest, side)) for side in (groups, ~groups))
    return one, other


def _find_change_in(window: tuple[PromptResponse, ...]) -> StyleChange | None:
    count = len(window)
    if count < _MIN_WINDOW:
        return None
    groups = _divide(window, *_CHANGE_LIMITS)
    if groups is None or not groups[-_MIN_NEWER:].all():
        return None
    cuts = [index for index in range(1, count - _MIN_NEWER + 1) if groups[index]]
    chances = {index: _chance(groups, index) for index in cuts}
    index = min(cuts, key=chances.__getitem__)
    if chances[index] > _MAX_CHANCE:
        return None
    ngrams, rows = _shared_ngrams(_read_answers(window))
    weights = rows[groups].mean(axis=0) - rows[~groups].mean(axis=0)
    return StyleChange(index, dict(zip(ngrams, weights.tolist(), strict=True)))


def _chance(groups: _Mask, cut: int) -> float:
    """Return how often a random order has as many of a group after a cut (Fisher's exact test)."""
    count, size, newer = len(groups), int(groups.sum()), len(groups) - cut
    ways = sum(
        comb(newer, k) * comb(cut, size - k)
        for k in range(int(groups[cut:].sum()), min(newer, size) + 1)
    )
    return ways / comb(count, size)


def _divide(
    examples: Sequence[PromptResponse], min_of_answers: float, max_of_requests: float
) -> _Mask | None:
    """Return which examples are in the style of the last one; None if all are in one style.

    ``min_of_answers``: the least separation of their answers. That of their requests is below
    ``max_of_requests``.

    Answers that come again and again are labels. How they are written is no style.
    """
    answers = _read_answers(examples)
    if 2 * len(set(answers)) <= len(examples):
        return None
    similarities = _similarities(answers)
    groups = _most_similar_groups(similarities)
    if _separation(similarities, groups) < min_of_answers:
        return None
    requests = _similarities([each.request for each in examples])
    if _separation(requests, groups) >= max_of_requests:
        return None
    in_last: _Mask = groups == groups[-1]
    return in_last


def _read_answers(examples: Sequence[PromptResponse]) -> list[str]:
    return [_mask_numbers(each.answer) for each in examples]


def _mask_numbers(answer: str) -> str:
    """Return an answer with 0 for each number.

    A date or a running number in each answer would otherwise be a new style each year or month.
    """
    return re.sub(r"\d+", "0", answer)


def _most_similar_groups(similarities: _Floats) -> _Mask:
    """Return the division with the most similarity, above the mean, within its two groups."""
    count = len(similarities)
    others = ~np.eye(count, dtype=bool)
    excess = np.where(others, similarities - similarities[others].mean(), 0.0)
    _, vectors = np.linalg.eigh(excess)
    least = ceil(_MIN_SHARE * count)
    # With unequal groups the second eigenvector may give the best division.
    ranks = [np.argsort(np.argsort(vector)) for vector in (vectors[:, -1], vectors[:, -2])]
    sides = [
        np.where(rank < size, 1.0, -1.0)
        for rank in ranks
        for size in range(least, count - least + 1)
    ]
    best: _Mask = max(sides, key=lambda side: float(side @ excess @ side)) > 0
    return best


def _separation(similarities: _Floats, groups: _Mask) -> float:
    """Return how often a similarity within a group is larger than one between the groups."""
    one, other = np.triu_indices(len(groups), 1)
    pairs, is_within = similarities[one, other], groups[one] == groups[other]
    within, between = pairs[is_within][:, None], pairs[~is_within][None]
    return float(((within > between) + 0.5 * (within == between)).mean())


def _similarities(texts: Sequence[str]) -> _Floats:
    """Return ``[n, n]``: the cosines of the n-grams that a fifth of the texts have."""
    _, rows = _shared_ngrams(texts)
    similarities: _Floats = rows @ rows.T
    return similarities


def _shared_ngrams(texts: Sequence[str]) -> tuple[Sequence[str], _Floats]:
    """Return the n-grams that a fifth of the texts have, and a vector of length 1 a text."""
    ngrams = [_ngrams(text) for text in texts]
    counts = Counter(chain.from_iterable(ngrams))
    least = ceil(_MIN_SHARE * len(texts))
    shared = sorted(each for each, count in counts.items() if count >= least)
    rows = np.array([[each in some for each in shared] for some in ngrams], dtype=np.float64)
    return shared, rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1.0)


@lru_cache(maxsize=1024)
def _ngrams(text: str) -> frozenset[str]:
    """Return one to three characters in a row, with marks for the beginning and the end."""
    text = text.strip()
    read = text if len(text) <= 2 * _EDGE else f"{text[:_EDGE]}\n{text[-_EDGE:]}"
    marked = f"{_BEGIN}{read}{_END}"
    return frozenset(
        marked[start : start + size]
        for size in range(1, _LONGEST_NGRAM + 1)
        for start in range(len(marked) - size + 1)
    )
