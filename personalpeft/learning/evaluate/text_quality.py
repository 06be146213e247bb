"""Measure the text of new lessons by log-probs.

Meaningless text is arbitrary. It is as likely after any other request, and its words are as
likely in any other order. So each reply is compared with itself elsewhere, under the bare base. For
meaningful text both differences are far above zero, in every language that the base knows a little
of.

- ``pmi``: how much likelier replies are after their own request than after others'. This is the
  pointwise mutual information, estimated among the lessons (van den Oord et al. 2018, arXiv
  1807.03748, section 2.3).
- ``word_order_gap``: how much likelier they are than their own words in random order.
- ``learned_pmi``: the same of held-out lessons, under the candidate, of the one that fits its request
  least. The bare base cannot know which of a user's labels belongs to a request, so their ``pmi`` is
  low. A candidate that learned the labels knows it, and none can know an arbitrary answer.
- ``novelty``: the share that is more than the request itself, as it is written. A reply that only
  repeats the request fits it better than any, and in its right order.
- ``end_surprisal``: how unlikely held-out replies end where they do. ``learned_end_surprisal``: the
  same under the candidate, which learns where labels end, but not where texts were cut.
- ``style_overlap``: of lessons whose answers fall into two groups by turns (``data.style``), how
  much a lesson of one group tells about the replies of the other, as a share of what it tells about
  its own. Two endings of one style have much in common, two styles little.

The first three are in nats a token, ends in nats. All but ``learned_pmi`` and ``novelty`` are
medians over the lessons, so a few good ones carry no meaningless batch. ``pmi`` is the mean where
that is smaller: of one reply to everything the mean is 0, and the median may be more by chance. A
base without language cannot measure them (``gate.load_margins``). Measured on the default base:

- Meaningful text has a ``pmi`` of 0.33 to 2.5 and a ``word_order_gap`` of 1.4 to 5.5. Meaningless
  text has at most 0.07 or at most 0.31.
- Replies end at 0.5 to 7.5 nats, one-letter labels at 17, then 0 under the candidate. Texts that
  were cut end at 16 and 17, then 1 and 3.7.
- Two styles by turns have an overlap of 0.28 (median), one style with two endings of 0.5 to 0.9.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from statistics import fmean, median

from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.style import find_alternating_groups
from personalpeft.learning.evaluate.eval_job import (
    EvalJob,
    Scorer,
    StackSelector,
    score_answers,
    score_each,
)
from personalpeft.learning.gate.evidence import TextQuality
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.memory.conflicts import normalize
from personalpeft.memory.types import Embedder
from personalpeft.memory.words import has_spaces, split_tokens
from personalpeft.types import Message, PromptResponse, Stack

_MIN_LESSONS, _MAX_LESSONS = 4, 12
_MIN_HELD_OUT = 3
_MIN_WORDS = 5
_OTHER_REQUESTS = 2
_MAX_REQUEST = 400
_EXAMPLES, _MAX_GROUP = 2, 4
_MAX_EXAMPLE = 600
_MIN_GAIN = 0.1  # nats a token
_MAX_BEFORE = 4  # messages, whole turns
_MIN_ENDS = 2
_MAX_TOKENS = 32
# What tells two styles apart may stand at the end.
_MAX_STYLE_TOKENS = 64
# Meaningful texts that the base can judge have more.
_CLEAR_PMI = 0.3


def measure_arrived_lessons(engine: Scorer, embedder: Embedder, job: EvalJob) -> TextQuality:
    """Measure the lessons that arrived since the last learn, held-out ones included."""
    bare = Stack(job.live.stack.base)

    def logprobs(
        some: Sequence[PromptResponse], stacks: Sequence[Stack], max_tokens: int
    ) -> list[float]:
        items = [
            encode_continuation(
                engine.backend,
                [*each.before, Message("user", each.request)],
                each.answer,
                max_tokens,
            )
            for each in some
        ]
        return [score.logp for score in score_each(engine, items, stacks)]

    def of_base(some: Sequence[PromptResponse], max_tokens: int = _MAX_TOKENS) -> list[float]:
        return logprobs(some, [bare] * len(some), max_tokens)

    arrived = _select_written(job.eval_set.arrived_lessons)
    quality = measure_text_quality(arrived, of_base)
    pmi = quality.pmi
    if pmi is None:
        return quality
    if groups := find_alternating_groups(arrived, embedder.embed):
        overlap = measure_style_overlap(*groups, partial(of_base, max_tokens=_MAX_STYLE_TOKENS))
        sizes = len(groups[0]), len(groups[1])
        quality = replace(quality, style_overlap=overlap, group_sizes=sizes)
    if ends := _measure_ends(engine, job):
        quality = replace(quality, end_surprisal=ends[0], learned_end_surprisal=ends[1])
    if pmi >= _CLEAR_PMI:
        return quality
    held_out = [each for each in job.eval_set.benefit if each.answers_user]
    lesson_of = {each.messages[-1].content[:_MAX_REQUEST]: each for each in held_out}

    def of_candidate(some: Sequence[PromptResponse]) -> list[float]:
        stacks = [job.candidate.for_layer(lesson_of[each.request]) for each in some]
        return logprobs(some, stacks, _MAX_TOKENS)

    return replace(
        quality, learned_pmi=measure_learned_pmi(_select_written(held_out), of_candidate)
    )


def _measure_ends(engine: Scorer, job: EvalJob) -> tuple[float, float] | None:
    """Return how unlikely replies end where they do, in nats: under the base and the candidate.

    Of the newest held-out lessons that arrived. None for fewer than two written ones that ended by
    themselves within the limit.
    """
    backend, limit = engine.backend, job.eval_set.max_length
    end = len(backend.end_of_turn)
    arrived = {lesson.key for lesson in job.eval_set.arrived_lessons}
    ended = [
        each
        for each in job.eval_set.undecided
        if each.key in arrived
        and each.is_written
        and each.ended
        and len(backend.encode(each.chosen)) + end <= limit
    ][-_MAX_LESSONS:]
    if len(ended) < _MIN_ENDS or not end:
        return None

    def surprisal(select: StackSelector) -> float:
        scores = score_answers(engine, ended, select, limit).values()
        # Tokens after the first of an end follow from it.
        return round(median(-score.token_logprobs[-end] for score in scores), 4)

    bare = Stack(job.live.stack.base)
    return surprisal(lambda _: bare), surprisal(job.candidate.for_layer)


def _select_written(lessons: Sequence[Lesson]) -> list[PromptResponse]:
    """Return the lessons that answer a user and were written by one."""
    return [
        replace(each.prompt_response, before=each.conversation[:-1])
        for each in lessons
        if each.is_written and each.answers_user
    ]


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
        return TextQuality()
    elsewhere = [
        [replace(other, answer=each.answer) for other in _others(asked, place)]
        for place, each in enumerate(asked)
    ]
    long = [each for each in asked if len(split_tokens(each.answer)) >= _MIN_WORDS]
    long = long if len(long) >= _MIN_LESSONS else []
    shuffled = [replace(each, answer=_shuffle(each.answer)) for each in long]
    scored = [*asked, *chain(*elsewhere), *shuffled]
    values = dict(zip(scored, logprobs(scored), strict=True))
    fits = [
        values[own] - fmean(values[each] for each in some)
        for own, some in zip(asked, elsewhere, strict=True)
    ]
    gaps = [values[own] - values[mixed] for own, mixed in zip(long, shuffled, strict=True)]
    return TextQuality(
        round(min(median(fits), fmean(fits)), 4),
        round(median(gaps), 4) if gaps else None,
        round(fmean(map(_is_novel, newest)), 4),
    )


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
        values[own] - fmean(values[each] for each in some)
        for own, some in zip(asked, others, strict=True)
    )
    return round(min(gaps), 4)


def measure_style_overlap(
    one: Sequence[PromptResponse],
    other: Sequence[PromptResponse],
    logprobs: Callable[[Sequence[PromptResponse]], Sequence[float]],
) -> float | None:
    """Return how much lessons of two groups tell about the replies of the other group.

    A reply becomes likelier where a lesson is the turn before it. The overlap is this gain for
    lessons of the other group, divided by that for lessons of its own. None where the base learns
    nothing from a lesson in its prompt.

    Args:
        one: A group of two lessons or more, oldest first.
        other: The other group, likewise.
        logprobs: Returns the mean log-prob per token of each reply under the bare base.
    """
    # What stood before a request would be missing where an example takes its place.
    newest = [
        [replace(_shorten(each), before=()) for each in group[-_MAX_GROUP:]]
        for group in (one, other)
    ]
    cases = []
    for same, others in (newest, newest[::-1]):
        for place, lesson in enumerate(same):
            # An equal answer would be copied, whatever its style.
            examples = [
                [each for each in some if each.answer != lesson.answer][:_EXAMPLES]
                for some in ([*same[place + 1 :], *same[:place]], [*others[place:], *others])
            ]
            if all(examples):
                cases.append([[lesson], *(_after_each(lesson, some) for some in examples)])
    scored = list(chain.from_iterable(chain.from_iterable(cases)))
    values = dict(zip(scored, logprobs(scored), strict=True))
    means = [[fmean(values[each] for each in some) for some in case] for case in cases]
    gain = median(after_same - alone for alone, after_same, _ in means) if means else 0.0
    if not gain >= _MIN_GAIN:
        return None
    return round(median(after_other - alone for alone, _, after_other in means) / gain, 4)


def _after_each(lesson: PromptResponse, examples: Sequence[PromptResponse]) -> list[PromptResponse]:
    """Return a lesson with each of some others as the turn before it."""
    turns = (
        (Message("user", each.request), Message("assistant", each.answer[:_MAX_EXAMPLE]))
        for each in examples
    )
    return [replace(lesson, before=turn) for turn in turns]


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
    cut = tuple(Message(m.role, m.content[:_MAX_REQUEST]) for m in before)
    return PromptResponse(each.request[:_MAX_REQUEST], each.answer, cut)


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
