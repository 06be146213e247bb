"""Measure how far a stack has memorized texts: exposure, membership and extraction.

A *secret* is an answer after its prompt, with the words in it that occur nowhere else, the prompt
included. Matched unseen texts are the same answer with other words in their place. They are those
whose log-prob under the bare base is nearest to the secret's. So they differ from it in nothing
that a model could know without having seen it.

Texts are ranked by how much likelier the stack makes them than the base does, in nats (difficulty
calibration, Watson et al. 2022, arXiv 2111.08440). Of N unseen texts and the secret:

- Exposure is ``log2(N + 1) - log2(rank)`` (Carlini et al. 2019, "The Secret Sharer", arXiv
  1802.08232, section 4.2, with the N + 1 texts for the space of candidates). It is at most
  ``log2(N + 1)``, where the secret is the likeliest of all. A text that was never seen has an equal
  chance of every rank, so 1.4 bits on average.
- Membership inference takes the same statistic. Its AUC is the share of unseen texts below the
  secret: 1.0 if all are, and 0.5 on average for a text that was never seen.
- A secret is extracted if the greedy reply to its prompt has one of those words.

That takes some hundred passes for one secret. So the leakage of every revision is measured by what
its evaluation has anyway: each lesson that it was trained on is a secret, and the held-out lessons
of its layer are the unseen texts. They have other lengths, so the statistic is nats a token. Only
lessons that the user wrote count. For a memory the newest facts are ranked among a few matched
texts. That is reported and not judged: a memory is to reproduce them. Lessons are ranked so where
too few are held out, and that is judged.

All texts stay in memory.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from personalpeft.engine.engine import Engine, Request
from personalpeft.learning.data.general_prompts import PROBE_SAMPLING, load_general_prompts
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.eval_job import (
    EvalJob,
    Scorer,
    StackSelector,
    score_answers,
)
from personalpeft.learning.gate.evidence import TRAINED_ELSEWHERE, Leakage, LeakageGap
from personalpeft.learning.options import Condition
from personalpeft.learning.revealing_text import RevealingText, letters_only, pieces
from personalpeft.learning.train.config import MAX_LENGTH
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.types import Message, SignalKind, Stack

UNSEEN = 63
"""How many unseen texts a secret is ranked among. Exposure is at most 6 bits."""
# The nearest are chosen among so many times as many, which are drawn in so many tries.
_POOL, _TRIES = 2, 40
# How many answers are ranked among variants of themselves, and among how many each.
_MAX_MATCHED, _VARIANTS = 2, 15
MIN_LESSONS_EACH = 3
"""Leakage is measured from so many lessons on, of those that were trained on and of unseen ones."""
# How many lessons that were trained on are scored for it, the newest.
_MAX_TRAINED = 16


@dataclass(frozen=True, slots=True)
class Secret:
    """An answer after its prompt, of one item, with the parts of it that occur nowhere else."""

    item: str
    messages: tuple[Message, ...]
    answer: str
    revealing: RevealingText
    spans: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Exposure:
    """How far one stack has memorized one text. ``rank`` is 1 for the likeliest; ties share.

    ``is_extracted`` is None where no reply was generated.
    """

    rank: float
    unseen: int
    is_extracted: bool | None = None

    @property
    def bits(self) -> float:
        """The exposure in bits."""
        return round(math.log2((self.unseen + 1) / self.rank), 3)

    @property
    def auc(self) -> float:
        """The share of unseen texts that are less likely."""
        return round((self.unseen + 1 - self.rank) / self.unseen, 3)


@dataclass(frozen=True, slots=True)
class MatchedSecret:
    """A secret and its unseen texts, with the log-prob of each under the base; the secret first."""

    secret: Secret
    texts: tuple[str, ...]
    base_logprobs: tuple[float, ...]


def find_secret(
    item: str, messages: Sequence[Message], answer: str, elsewhere: Sequence[str]
) -> Secret | None:
    """Return an answer as a secret, or None if all of it occurs elsewhere or in its prompt.

    Args:
        item: The id of the turn or signal.
        messages: The prompt of the answer.
        answer: The answer.
        elsewhere: Texts that may have the same words.
    """
    known = [*elsewhere, *(message.content for message in messages)]
    revealing = RevealingText([answer], known)
    spans = tuple(span for span in pieces(answer) if revealing.is_in([answer[slice(*span)]]))
    if not spans and revealing.is_in([answer]):
        spans = ((0, len(answer)),)
    return Secret(item, tuple(messages), answer, revealing, spans) if spans else None


def match_secret(
    engine: Scorer,
    secret: Secret,
    words: Sequence[str],
    base: str,
    rng: random.Random,
    unseen: int = UNSEEN,
) -> MatchedSecret | None:
    """Return a secret with its unseen texts, or None if there are not enough different ones.

    Args:
        engine: Scores.
        secret: The secret.
        words: Those that ``words_of`` returned; they and their letters make the unseen texts.
        base: The digest of the base.
        rng: Draws them.
        unseen: How many unseen texts.
    """
    letters = "".join(words)

    @cache
    def alphabet_like(old: str) -> str:
        return letters_only(letters, like=old) or letters_only(old, like=old) or letters

    others: dict[str, None] = {}
    for _ in range(_TRIES * unseen):
        if len(others) == _POOL * unseen:
            break
        text = _replace(secret, words, alphabet_like, rng)
        if text != secret.answer and not secret.revealing.is_in([text]):
            others[text] = None
    if len(others) < unseen:
        return None
    texts = [secret.answer, *others]
    logprobs = _total_logprobs(engine, secret, texts, Stack(base))
    order = sorted(range(1, len(texts)), key=lambda n: abs(logprobs[n] - logprobs[0]))
    kept = [0, *order[:unseen]]
    return MatchedSecret(secret, tuple(texts[n] for n in kept), tuple(logprobs[n] for n in kept))


def measure_exposure(
    engine: Engine, user: str, matched: MatchedSecret, stack: Stack, cancelled: Condition
) -> Exposure:
    """Measure one secret under one stack.

    Args:
        engine: Scores the texts, and generates the reply.
        user: The owner.
        matched: The secret with its unseen texts.
        stack: The stack.
        cancelled: Returns whether to stop.

    Raises:
        ServingFailed: The model failed.
    """
    secret, exposure = matched.secret, _rank(engine, matched, stack)
    request = Request(user, secret.messages, stack, PROBE_SAMPLING, background=True)
    (reply,) = engine.complete([request], cancelled=cancelled)
    return replace(exposure, is_extracted=secret.revealing.is_in([reply]))


def _rank(engine: Scorer, matched: MatchedSecret, stack: Stack) -> Exposure:
    logprobs = _total_logprobs(engine, matched.secret, matched.texts, stack)
    gain, *unseen = [now - base for now, base in zip(logprobs, matched.base_logprobs, strict=True)]
    return rank_gain(gain, unseen)


def rank_gain(gain: float, unseen: Sequence[float]) -> Exposure:
    """Return the exposure of a text by its gain in log-prob over the base, and that of others."""
    more, equal = sum(other > gain for other in unseen), unseen.count(gain)
    return Exposure(1 + more + equal / 2, len(unseen))


def measure_build_leakage(engine: Scorer, job: EvalJob) -> Leakage:
    """Measure the leakage of a candidate.

    Facts of a memory are ranked among variants of themselves, and so are lessons where too few are
    held out.
    """
    eval_set, candidate = job.eval_set, job.candidate
    if eval_set.trained_elsewhere:
        return TRAINED_ELSEWHERE
    unseen = [each for each in eval_set.held_out if each.is_written]
    written = [each for each in eval_set.trained if each.is_written]
    facts = [each for each in eval_set.trained if each.kind is SignalKind.FACT and each.is_users]
    if not (written or facts):
        return Leakage(missing=LeakageGap.NO_LESSONS)
    base = Stack(candidate.stack.base)

    def gains(lessons: Sequence[Lesson]) -> list[float]:
        """Return how much likelier the candidate makes each lesson than its base, in nats a token."""
        after = score_answers(engine, lessons, candidate.for_layer, eval_set.max_length)
        before = score_answers(engine, lessons, lambda _: base, eval_set.max_length)
        return [after[key].logp - before[key].logp for key in after]

    if min(len(written), len(unseen)) >= MIN_LESSONS_EACH:
        return measure_leakage(gains(written[-_MAX_TRAINED:]), gains(unseen))
    newest = list({each.signal: each for each in written or facts}.values())
    leakage = measure_variant_leakage(engine, newest, candidate.for_layer, base.base)
    return replace(leakage, matched=not written, variants=bool(written))


def measure_leakage(trained: Sequence[float], unseen: Sequence[float]) -> Leakage:
    """Return how well lessons that were trained on can be distinguished from unseen ones.

    Args:
        trained: The gain of each lesson that was trained on, over the base in nats a token.
        unseen: That of each unseen one.
    """
    counts = len(trained), len(unseen)
    if min(counts) < MIN_LESSONS_EACH:
        return Leakage(*counts, missing=LeakageGap.NO_VARIANTS)
    if not all(map(math.isfinite, (*trained, *unseen))):
        return Leakage(*counts, missing=LeakageGap.NOT_FINITE)
    return _mean_leakage([rank_gain(gain, unseen) for gain in trained], len(unseen))


def _mean_leakage(ranked: Sequence[Exposure], unseen: int) -> Leakage:
    bits, auc = fmean(each.bits for each in ranked), fmean(each.auc for each in ranked)
    return Leakage(len(ranked), unseen, round(bits, 3), round(auc, 3))


def measure_variant_leakage(
    engine: Scorer, lessons: Sequence[Lesson], select: StackSelector, base: str
) -> Leakage:
    """Return how well the newest answers can be distinguished from variants of themselves.

    Args:
        engine: Scores.
        lessons: One lesson of each signal. Their words and letters make the variants.
        select: Returns the stack for a lesson.
        base: The digest of the base.
    """
    texts = {each.signal: (each.messages[-1].content, each.chosen) for each in lessons}
    words = words_of([text for some in texts.values() for text in some])
    secrets, ranked = 0, list[Exposure]()
    for lesson in reversed(lessons):
        item = lesson.signal
        others = [text for other, some in texts.items() if other != item for text in some]
        secret = find_secret(item, lesson.messages, lesson.chosen, others)
        if secret is None:
            continue
        # The same candidate gets the same score.
        rng = random.Random(item)
        matched = match_secret(engine, secret, words, base, rng, _VARIANTS)
        if matched is not None:
            ranked.append(_rank(engine, matched, select(lesson)))
        secrets += 1
        if secrets == _MAX_MATCHED:
            break
    if not ranked:
        return Leakage(missing=LeakageGap.NO_VARIANTS)
    return _mean_leakage(ranked, _VARIANTS)


def _total_logprobs(
    engine: Scorer, secret: Secret, texts: Sequence[str], stack: Stack
) -> list[float]:
    backend = engine.backend
    items = [encode_continuation(backend, secret.messages, text, MAX_LENGTH) for text in texts]
    scores = engine.score(items, stack)
    return [score.logp * len(item.scored) for item, score in zip(items, scores, strict=True)]


def words_of(texts: Sequence[str]) -> list[str]:
    """Return the words of some texts and of the package's general prompts."""
    general = load_general_prompts().questions
    return sorted({text[slice(*span)] for text in (*texts, *general) for span in pieces(text)})


def _replace(
    secret: Secret, words: Sequence[str], alphabet_like: Callable[[str], str], rng: random.Random
) -> str:
    """Return the answer with other words for its revealing ones, each the same everywhere."""
    text, end, drawn = secret.answer, 0, dict[str, str]()
    made = ""
    for start, stop in secret.spans:
        old = text[start:stop]
        if old not in drawn:
            drawn[old] = _other_word(old, words, alphabet_like, rng)
        made += text[end:start] + drawn[old]
        end = stop
    return made + text[end:]


def _other_word(
    old: str, words: Sequence[str], alphabet_like: Callable[[str], str], rng: random.Random
) -> str:
    """Return a word of the texts, or one of random letters in the script of the old one."""
    if old.isdigit():
        return "".join(rng.choice("0123456789") for _ in old)
    word = rng.choice(words) if rng.random() < 0.5 else ""
    if not word or word.isdigit():
        alphabet = alphabet_like(old)
        word = "".join(rng.choice(alphabet) for _ in old)
    return word[:1].upper() + word[1:] if old[:1].isupper() else word
