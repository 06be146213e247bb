"""Measure by log-probs whether new lessons are meaningful.

Meaningless text is arbitrary. It is as likely after any other request, and its words
are as likely in any other order. So each reply is compared with itself elsewhere, under the bare
base. For meaningful text both differences are far above zero, in every language that the base knows
a little of.

- ``pmi``: how much likelier replies are after their own request than after others'. This is the
  pointwise mutual information, estimated among the lessons (van den Oord et al. 2018, arXiv
  1807.03748, section 2.3).
- ``word_order_gap``: how much likelier they are than their own words in random order.
- ``learned_pmi``: the same of held-out lessons, under the candidate, of the one that fits its request
  least. The bare base cannot know which of a user's labels belongs to a request, so their ``pmi`` is
  low. A candidate that learned the labels knows it, and none can know an arbitrary answer.
- ``novelty``: the share that is more than the request itself, as it is written. A reply that only
  repeats the request fits it better than any, and in its right order.

All but the last are in nats a token. Measured on the default base with four to twelve lessons:
meaningful text has 0.34 to 2.6 and 2.1 to 5.5. Meaningless text has at most 0.03 or at most 0.6. A
base without language cannot measure them (``gate.load_margins``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from personalpeft.memory.conflicts import normalize
from personalpeft.memory.words import has_spaces, split_tokens
from personalpeft.types import Message, PromptResponse

_MIN_LESSONS, _MAX_LESSONS = 4, 12
_MIN_HELD_OUT = 3
_MIN_WORDS = 5
_OTHER_REQUESTS = 2
MAX_REQUEST = 400
_MAX_BEFORE = 4  # messages, whole turns


@dataclass(frozen=True, slots=True)
class TextQuality:
    """The measures; None where there are too few lessons."""

    pmi: float | None = None
    word_order_gap: float | None = None
    novelty: float | None = None
    learned_pmi: float | None = None


NOT_MEASURED = TextQuality()


def measure_text_quality(
    lessons: Sequence[PromptResponse],
    logprobs: Callable[[Sequence[PromptResponse]], Sequence[float]],
) -> TextQuality:
    """Measure the newest of some lessons that users wrote.

    Args:
        lessons: Requests with what was before them, and their replies, oldest first.
        logprobs: Returns the mean log-prob per token of each reply under the bare base.
    """
    by_request = {(each.before, each.request): each for each in lessons}
    newest = list(by_request.values())[-_MAX_LESSONS:]
    asked = [_shorten(each) for each in newest]
    if len(asked) < _MIN_LESSONS:
        return NOT_MEASURED
    elsewhere = [
        replace(other, answer=each.answer)
        for place, each in enumerate(asked)
        for other in _others(asked, place)
    ]
    long = [each for each in asked if len(split_tokens(each.answer)) >= _MIN_WORDS]
    long = long if len(long) >= _MIN_LESSONS else []
    shuffled = [replace(each, answer=_shuffle(each.answer)) for each in long]
    scored = [*asked, *elsewhere, *shuffled]
    values = dict(zip(scored, logprobs(scored), strict=True))

    def mean(some: Sequence[PromptResponse]) -> float:
        return sum(values[each] for each in some) / len(some)

    gap = round(mean(long) - mean(shuffled), 4) if long else None
    novel = sum(map(_is_novel, newest)) / len(newest)
    return TextQuality(round(mean(asked) - mean(elsewhere), 4), gap, round(novel, 4))


def measure_learned_pmi(
    lessons: Sequence[PromptResponse],
    logprobs: Callable[[Sequence[PromptResponse]], Sequence[float]],
) -> float | None:
    """Return how much better the worst of some lessons fits its own request than the others'.

    None for fewer than three lessons, or where all answers are the same.

    Args:
        lessons: Held-out lessons that users wrote.
        logprobs: Returns the mean log-prob per token of each reply under the candidate.
    """
    asked = [_shorten(each) for each in lessons][-_MAX_LESSONS:]
    others = [
        [replace(other, answer=each.answer) for other in asked if other.answer != each.answer]
        for each in asked
    ]
    if len(asked) < _MIN_HELD_OUT or not all(others):
        return None
    scored = [*asked, *(each for some in others for each in some)]
    values = dict(zip(scored, logprobs(scored), strict=True))
    gaps = (
        values[own] - sum(values[each] for each in some) / len(some)
        for own, some in zip(asked, others, strict=True)
    )
    return round(min(gaps), 4)


def _others(asked: Sequence[PromptResponse], place: int) -> Sequence[PromptResponse]:
    """Return other requests, with other answers where there are any."""
    count, step = len(asked), max(1, len(asked) // (_OTHER_REQUESTS + 1))
    steps = dict.fromkeys((*(step * n for n in range(1, _OTHER_REQUESTS + 1)), *range(1, count)))
    others = [asked[(place + each) % count] for each in steps]
    different = [each for each in others if each.answer != asked[place].answer]
    return (different or others)[:_OTHER_REQUESTS]


def _shorten(each: PromptResponse) -> PromptResponse:
    """Return a request with the last turns before it, all cut: they are to tell requests apart."""
    before = each.before[-_MAX_BEFORE:]
    cut = tuple(Message(m.role, m.content[:MAX_REQUEST]) for m in before)
    return PromptResponse(each.request[:MAX_REQUEST], each.answer, cut)


def _is_novel(each: PromptResponse) -> bool:
    """Return whether a reply does more than repeat the request.

    To write it once with other capitals or punctuation is more: users teach that too.
    """
    answer, request = normalize(each.answer), normalize(each.request)
    if answer == request:
        return each.answer.strip() != each.request.strip()
    return bool(answer.replace(request, "").strip())


def _shuffle(text: str) -> str:
    tokens = split_tokens(text)
    # Seeded by the text alone, so that the same lesson always has the same score.
    random.Random(text).shuffle(tokens)
    return (" " if has_spaces(text) else "").join(tokens)
