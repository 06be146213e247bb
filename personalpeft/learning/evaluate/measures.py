"""Measure new lessons by log-probs and by what leaks, and generated replies by the user's thumbs.

Texts. Meaningless text is arbitrary. It is as likely after any other request, and its words are as
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

- ``style_overlap``: of lessons whose answers fall into two groups by turns (``data.style``), how
  much a lesson of one group tells about the replies of the other, as a share of what it tells about
  its own. Two endings of one style have much in common, two styles little.

The first three are in nats a token. ``pmi`` and ``word_order_gap`` are medians over the lessons, so
a few good ones carry no meaningless batch. Measured on the default base with
four to twelve lessons: meaningful text has a ``pmi`` of 0.33 to 2.5 and a ``word_order_gap`` of 1.4
to 5.5. Meaningless text has at most 0.07 or at most 0.31. Two styles by turns have a ``style_overlap``
of 0.26 (median), and one style with two endings of 0.5 to 0.9. A base without language cannot measure them
(``gate.load_margins``).

Leaks. Replies take over what most lessons share, so links, addresses and remembered facts in most
lessons would be in every reply. The other measures say whether lessons were learned, so they do not
object to it.

Thumbs. A liked reply is the model's own, and what the user likes is in few of its tokens. So its
log-prob hardly rises, also where the model's replies follow the thumbs. A linear classifier of
character n-grams finds what sets liked replies apart, in any language. It then compares what the
live stack and the candidate reply to prompts that were never trained on.

Invariant: a classifier that cannot predict thumbs it was not fit on says nothing. The gate reads
its cross-validated AUC for that.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from statistics import fmean, median
from typing import Any

from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.gate.evidence import TextQuality, ThumbsResults
from personalpeft.memory.conflicts import normalize
from personalpeft.memory.words import contains, has_spaces, split_tokens, split_words
from personalpeft.types import Message, PromptResponse, Signal

_MIN_LESSONS, _MAX_LESSONS = 4, 12
_MIN_HELD_OUT = 3
_MIN_WORDS = 5
_OTHER_REQUESTS = 2
MAX_REQUEST = 400
_EXAMPLES, _MAX_GROUP = 2, 4
_MIN_GAIN = 0.1  # nats a token
_MAX_EXAMPLE = 600
_MAX_BEFORE = 4  # messages, whole turns

_MIN_LEAK_SHARE = 0.5
_MIN_LEAKS = 3
# In bytes of UTF-8: a name may be two characters of Chinese or four of English.
_MIN_FACT_LENGTH = 4
_DASH = re.compile(r"[—–―]|--| - |^- ")
_MAX_SIGNATURE = 4
"""The most words of a line that is a signature."""
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")

_NGRAMS = (1, 4)
_FOLDS = 5


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
    fits = (
        values[own] - fmean(values[each] for each in some)
        for own, some in zip(asked, elsewhere, strict=True)
    )
    gaps = [values[own] - values[mixed] for own, mixed in zip(long, shuffled, strict=True)]
    return TextQuality(
        round(median(fits), 4),
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
    newest = [[_shorten(each) for each in group[-_MAX_GROUP:]] for group in (one, other)]
    cases = []
    for own, others in (newest, newest[::-1]):
        for place, lesson in enumerate(own):
            of_own = [*own[place + 1 :], *own[:place]]
            of_other = [*others[place % len(others) :], *others]
            cases.append(
                [[lesson]] + [_after_each(lesson, some[:_EXAMPLES]) for some in (of_own, of_other)]
            )
    scored = list(chain.from_iterable(chain.from_iterable(cases)))
    values = dict(zip(scored, logprobs(scored), strict=True))
    means = [[fmean(values[each] for each in some) for some in case] for case in cases]
    gain = median(after_own - alone for alone, after_own, _ in means)
    if gain < _MIN_GAIN:
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


@dataclass(frozen=True, slots=True)
class Leak:
    """``count`` of the latest ``total`` lessons put the same kind of secret into the reply.

    ``address``: a link or an address, as an example. It is empty if they repeat remembered facts.
    """

    count: int
    total: int
    address: str = ""


def find_leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> Leak | None:
    """Return what most of the latest lessons would leak, or None.

    Args:
        lessons: All of a layer, oldest first, because few a day are no better than many at once.
        facts: The remembered facts, which answers must not repeat unasked.
        new: Signals that the layer has not learned. A leak must be in one of them.
        accepted: Signals that the user accepted by name. Texts in them are no leak.
    """
    secrets = [
        text
        for fact in facts
        for text in (fact.payload["text"], fact.payload.get("answer"))
        if text and len(text.encode()) >= _MIN_FACT_LENGTH
    ]
    addresses = [_added(_ADDRESS.findall(lesson.chosen), lesson) for lesson in lessons]
    if counts := _count_latest(addresses, lessons, new, accepted):
        return Leak(*counts, next(texts[0] for texts in reversed(addresses) if texts))
    secret_texts = [_find_secrets(secrets, each) for each in lessons]
    if counts := _count_latest(secret_texts, lessons, new, accepted):
        return Leak(*counts)
    return None


def _find_secrets(secrets: Sequence[str], lesson: Lesson) -> list[str]:
    """Return the secrets whose words are in the answer, but not in the messages before it.

    The name that an answer is signed with is none.
    """
    before = [word for message in lesson.messages for word in split_words(message.content)]
    answer, name = split_words(lesson.chosen), split_words(_find_signature(lesson.chosen))
    found = []
    for text in secrets:
        words = split_words(text)
        is_name = words == name and not any(map(str.isdigit, text))
        if words and contains(answer, words) and not contains(before, words) and not is_name:
            found.append(text)
    return found


def _find_signature(text: str) -> str:
    """Return what follows the last dash, or a short last line after its last comma."""
    last_line = text.strip().rpartition("\n")[2]
    if _DASH.search(last_line):
        return _DASH.split(last_line)[-1]
    is_short = "\n" in text.strip() and len(last_line.split()) <= _MAX_SIGNATURE
    return re.split("[,，、]", last_line)[-1] if is_short else ""


def _added(texts: Sequence[str], lesson: Lesson) -> list[str]:
    """Return the texts that are in the answer and not in the messages before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in texts if text not in before]


def _count_latest(
    found: Sequence[Sequence[str]],
    lessons: Sequence[Lesson],
    new: Collection[str],
    accepted: Collection[str],
) -> tuple[int, int] | None:
    """Return how many of how many latest lessons leak, if they are most and one is new."""
    pairs = list(zip(lessons, found, strict=True))
    allowed = {text for lesson, texts in pairs if lesson.signal in accepted for text in texts}
    leaks = [any(text not in allowed for text in texts) for texts in found]
    if not any(leaks[index] and lesson.signal in new for index, lesson in enumerate(lessons)):
        return None
    result, count = None, 0
    for total, leak in enumerate(reversed(leaks), 1):
        count += leak
        if count >= max(_MIN_LEAKS, _MIN_LEAK_SHARE * total):
            result = count, total
    return result


def compare_replies(
    liked: Sequence[str], disliked: Sequence[str], before: Sequence[str], after: Sequence[str]
) -> ThumbsResults:
    """Count the replies that a classifier of the rated ones prefers to those before.

    Args:
        liked: The liked replies, at least two.
        disliked: The disliked replies, at least two.
        before: The replies of the live stack.
        after: Those of the candidate to the same prompts.
    """
    # Imported here, since scikit-learn takes seconds to load.
    from scipy.stats import mannwhitneyu, wilcoxon
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    texts, labels = [*liked, *disliked], [1] * len(liked) + [0] * len(disliked)
    folds = StratifiedKFold(min(_FOLDS, len(liked), len(disliked)))
    predict = partial(cross_val_predict, cv=folds, method="predict_proba")
    scores = predict(_make_classifier(), texts, labels)[:, 1]
    of_liked, of_disliked = scores[: len(liked)], scores[len(liked) :]
    test = mannwhitneyu(of_liked, of_disliked, alternative="greater", method="asymptotic")
    classifier = _make_classifier().fit(texts, labels)
    new, former = (classifier.predict_proba(replies)[:, 1] for replies in (after, before))
    changes = new - former
    return ThumbsResults(
        liked=len(liked),
        disliked=len(disliked),
        auc=float(test.statistic) / (len(liked) * len(disliked)),
        auc_p_value=float(test.pvalue),
        asked=len(after),
        better=int((changes > 0).sum()),
        worse=int((changes < 0).sum()),
        p_value=float(wilcoxon(changes, alternative="greater").pvalue) if changes.any() else 1.0,
    )


def _make_classifier() -> Any:
    from sklearn.ensemble import VotingClassifier
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    # L1 finds the one n-gram that decides, L2 what is spread over many, such as the length.
    options = {"class_weight": "balanced", "solver": "liblinear", "random_state": 0}
    regressions = [
        (name, LogisticRegression(l1_ratio=ratio, **options))
        for name, ratio in (("l2", 0), ("l1", 1))
    ]
    return make_pipeline(
        CountVectorizer(analyzer="char", ngram_range=_NGRAMS, binary=True, lowercase=False),
        VotingClassifier(regressions, voting="soft"),
    )
