"""Measure a candidate against the live stack and the bare base, on the engine that serves users.

Invariant: replies are greedy or have fixed seeds, so the same stacks give the same evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import median

from personalpeft.backends.base import Continuation
from personalpeft.engine.completion_cache import Completions
from personalpeft.engine.engine import Request
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.general_prompts import MAX_REPLY_TOKENS, is_degenerate
from personalpeft.learning.data.lesson import Lesson, few_shot_messages
from personalpeft.learning.evaluate.eval_job import (
    EXAMPLE_SAMPLING,
    MAX_EXAMPLES,
    EffectiveStack,
    EvalJob,
    EvalResult,
)
from personalpeft.learning.evaluate.exposure import (
    MAX_TRAINED,
    MIN_LESSONS_EACH,
    measure_leakage,
    measure_variant_leakage,
)
from personalpeft.learning.evaluate.reply_classifier import compare_replies
from personalpeft.learning.evaluate.scoring import Scorer, ThrottledScorer, score_answers
from personalpeft.learning.evaluate.text_quality import measure_arrived_lessons
from personalpeft.learning.gate.evidence import (
    TRAINED_ELSEWHERE,
    BaseProbeResults,
    EvalItem,
    Evidence,
    GenerationResults,
    Leakage,
    LeakageGap,
    ProbeResults,
    PromptExampleResults,
    ThumbsResults,
)
from personalpeft.learning.options import Condition, cancelled_error, not_cancelled
from personalpeft.learning.report import Example
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.memory.types import Embedder
from personalpeft.services import Services
from personalpeft.types import Message, SignalKind, Stack

# Of the probes about so many, evenly spread, give the mean KL. All took a quarter of an evaluation.
_KL_PROBES = 16
# Of so many probes examples in the prompt may cost one.
_PROBES_PER_LOSS = 20


def evaluate(
    services: Services,
    jobs: Mapping[str, EvalJob],
    *,
    cancelled: Condition,
    paused: Condition = not_cancelled,
) -> dict[str, EvalResult | PersonalPeftError]:
    """Measure the candidates of several users; return the result or the error of each.

    Replies of all users are generated together: those to probes first, since they decide whether
    the judged replies have examples in the prompt. Scoring gives way to users who chat.

    Args:
        services: The wired parts.
        jobs: What to measure, by user.
        cancelled: Returns whether to stop.
        paused: Returns whether to wait.

    Returns:
        The result or the error of each user.

    Raises:
        Cancelled: ``cancelled`` returned True.
    """
    sampling = services.learning_engine.backend.base.card.sampling
    complete = partial(services.completions.complete_for_users, cancelled=cancelled, paused=paused)
    results: dict[str, EvalResult | PersonalPeftError] = {}

    def generate(
        requests: Mapping[str, tuple[list[Request], ...]],
    ) -> dict[str, list[list[str]]]:
        """Return each user's replies in the groups of the requests. An error is a result."""
        completed = complete({user: list(chain(*groups)) for user, groups in requests.items()})
        grouped = {}
        for user, replies in completed.items():
            if isinstance(replies, PersonalPeftError):
                results[user] = replies
            else:
                texts = iter(replies)
                grouped[user] = [list(islice(texts, len(group))) for group in requests[user]]
        return grouped

    probes = generate({user: job.probe_requests() for user, job in jobs.items()})
    with_examples = {
        user: _prompt_example_results(jobs[user], without, examples)
        for user, (_, without, examples) in probes.items()
    }
    jobs = {user: jobs[user].as_served(each) for user, each in with_examples.items()}
    replies = generate({user: job.lesson_requests(sampling) for user, job in jobs.items()})
    of_base = {
        user: services.completions.complete_with_base(
            user,
            job.live.stack.base,
            [probe.question for probe in job.eval_set.general.probes],
            cancelled=cancelled,
        )
        for user, job in jobs.items()
    }
    scorer = ThrottledScorer(services.learning_engine, paused, cancelled)
    for user, of_lessons in replies.items():
        if cancelled():
            raise cancelled_error("before the verdict")
        job, (live, candidate, _) = jobs[user], probes[user]
        general = _probe_results(job, live, candidate, of_base[user])
        try:
            evidence, examples = _measure(
                scorer, services.memory.embedder, job, of_lessons, general, of_base[user]
            )
        except PersonalPeftError as error:
            results[user] = error
            continue
        results[user] = replace(evidence, prompt_examples=with_examples[user]), examples
    return results


def _measure(
    engine: Scorer,
    embedder: Embedder,
    job: EvalJob,
    replies: Sequence[Sequence[str]],
    probes: ProbeResults,
    of_base: Completions,
) -> EvalResult:
    """Measure one candidate.

    ``replies`` are those to ``EvalJob.lesson_requests``, and ``of_base`` the probes with the
    base's replies.
    """
    eval_set, rated = job.eval_set, job.eval_set.rated
    before, after, sampled, *rated_replies = replies
    greedy = dict(zip((each.key for each in job.generated_lessons), after, strict=True))
    judged = [*(greedy[each.key] for each in job.judged_lessons), *sampled]
    held_out = {each.key: each for each in (*eval_set.undecided, *eval_set.retention)}
    items = {item.signal: item for item in _score_items(engine, job, tuple(held_out.values()))}
    kl = list(_kl_from_base(engine, job, of_base))
    evidence = Evidence(
        undecided=tuple(items[lesson.key] for lesson in eval_set.undecided),
        retention=(
            *(items[lesson.key] for lesson in eval_set.retention),
            *_score_items(engine, job, eval_set.other_layers, is_own=False),
        ),
        decided=tuple(items[lesson.key] for lesson in eval_set.decided),
        probes=probes,
        kl=sum(kl) / max(1, len(kl)),
        leakage=_measure_leakage(engine, job, tuple(held_out.values())),
        text_quality=measure_arrived_lessons(engine, embedder, job),
        generation=_measure_generation(engine, job, judged),
        thumbs=compare_replies(rated.liked, rated.disliked, *rated_replies)
        if rated_replies[1]
        else ThumbsResults(),
        history=eval_set.history,
    )
    examples = tuple(
        Example(lesson.messages[-1].content, *texts)
        for lesson, *texts in zip(job.generated_lessons, before, after, strict=True)
    )
    return evidence, examples[:MAX_EXAMPLES]


def _probe_results(
    job: EvalJob, before: Sequence[str], after: Sequence[str], completions: Completions
) -> ProbeResults:
    prompts, of_base = job.eval_set.general, job.eval_set.history.base_probes

    def right(replies: Sequence[str]) -> set[int]:
        answered = zip(prompts.probes, replies, strict=True)
        return {n for n, (probe, reply) in enumerate(answered) if probe.is_right(reply)}

    if of_base.questions != prompts.digest:
        replies = [reply for _, reply in completions]
        broken = sum(map(is_degenerate, replies))
        of_base = BaseProbeResults(prompts.digest, tuple(sorted(right(replies))), broken)
    right_before, right_after = right(before), right(after)
    return ProbeResults(
        asked=len(prompts.probes),
        right_before=len(right_before),
        still_right=len(right_before & right_after),
        base=of_base,
        kept_of_base=tuple(sorted(right_after & set(of_base.right))),
        broken_before=sum(map(is_degenerate, before)),
        broken=sum(map(is_degenerate, after)),
    )


def _prompt_example_results(
    job: EvalJob, without: Sequence[str], with_examples: Sequence[str]
) -> PromptExampleResults:
    """Count right answers to the probes that would get examples, and decide if they get any."""
    if job.prompt_examples is None:
        return PromptExampleResults()
    probes = job.eval_set.general.probes
    answers = dict(zip(job.prompt_examples, with_examples, strict=True))
    pairs = [
        (probe.is_right(reply), probe.is_right(answers[probe.question]))
        for probe, reply in zip(probes, without, strict=True)
        if probe.question in answers
    ]
    before, after = (sum(side) for side in zip(*pairs, strict=True)) if pairs else (0, 0)
    served = before - after <= len(probes) // _PROBES_PER_LOSS
    return PromptExampleResults(len(pairs), before, after, served)


def _kl_from_base(engine: Scorer, job: EvalJob, completions: Completions) -> Iterator[float]:
    """Yield the candidate's KL from the base on the base's own completions of some probes.

    Measured on the base's replies, since those of a style below differ from the base anyway.
    """
    by_stack: dict[Stack, list[Continuation]] = {}
    for messages, reply in completions[:: max(1, len(completions) // _KL_PROBES)]:
        if reply:
            item = encode_continuation(engine.backend, messages, reply, MAX_REPLY_TOKENS)
            by_stack.setdefault(job.candidate.parts[messages[-1].content], []).append(item)
    for stack, items in by_stack.items():
        yield from (score.kl or 0.0 for score in engine.score(items, stack, kl=True))


def _measure_generation(engine: Scorer, job: EvalJob, replies: Sequence[str]) -> GenerationResults:
    """Count the candidate's replies to held-out prompts that are written as the user wants.

    Such a reply is likelier under the bare base with lessons as examples in the prompt. That is
    the likelihood ratio of "in the user's way" and "in the base's own". A reply that repeats a
    lesson is likely for that reason alone, and is not counted.
    """
    backend, limit = engine.backend, EXAMPLE_SAMPLING.max_tokens

    def logprobs(pairs: Sequence[tuple[Sequence[Message], str]]) -> list[float]:
        items = [encode_continuation(backend, *pair, limit) for pair in pairs]
        return [score.logp for score in engine.score(items, Stack(job.live.stack.base))]

    prompts = [lesson.conversation for lesson in job.judged_lessons]
    trained = job.eval_set.trained
    with_examples = [few_shot_messages(trained, each, backend, limit) for each in prompts]
    if not prompts or any(shown == own for shown, own in zip(with_examples, prompts, strict=True)):
        return GenerationResults()
    lessons = {each.chosen.strip() for each in trained}
    times = len(replies) // len(prompts)
    shown, alone = (
        logprobs(list(zip(some * times, replies, strict=True))) for some in (with_examples, prompts)
    )
    wanted = sum(
        likelier > plain and reply.strip() not in lessons
        for likelier, plain, reply in zip(shown, alone, replies, strict=True)
    )
    return GenerationResults(len(replies), wanted)


def _measure_leakage(engine: Scorer, job: EvalJob, held_out: Sequence[Lesson]) -> Leakage:
    """Measure the leakage of a candidate."""
    if job.eval_set.trained_elsewhere:
        return TRAINED_ELSEWHERE
    return measure_build_leakage(
        engine, job.eval_set.trained, held_out, job.candidate, job.eval_set.max_length
    )


def measure_build_leakage(
    engine: Scorer,
    trained: Sequence[Lesson],
    held_out: Sequence[Lesson],
    candidate: EffectiveStack,
    max_length: int,
) -> Leakage:
    """Measure the leakage of a build.

    Facts of a memory are ranked among variants of themselves, and so are lessons where too few are
    held out.

    Args:
        engine: Scores.
        trained: The lessons that the layer was trained on.
        held_out: The held-out lessons of the layer.
        candidate: The stack with the layer.
        max_length: The tokens at which a reply is cut.
    """
    unseen = [each for each in held_out if each.is_written]
    written = [each for each in trained if each.is_written]
    facts = [each for each in trained if each.kind is SignalKind.FACT and each.is_users]
    if not (written or facts):
        return Leakage(missing=LeakageGap.NO_LESSONS)
    if min(len(written), len(unseen)) >= MIN_LESSONS_EACH:
        sample = written[-MAX_TRAINED:]
        gains = (_score_gains(engine, each, candidate, max_length) for each in (sample, unseen))
        return measure_leakage(*gains)
    newest = list({each.signal: each for each in written or facts}.values())
    base = candidate.stack.base
    leakage = measure_variant_leakage(engine, newest, candidate.for_layer, base)
    return replace(leakage, matched=not written, variants=bool(written))


def _score_gains(
    engine: Scorer, lessons: Sequence[Lesson], candidate: EffectiveStack, max_length: int
) -> list[float]:
    """Return how much likelier a candidate makes each lesson than its base, in nats a token."""
    base = Stack(candidate.stack.base)
    after = score_answers(engine, lessons, candidate.for_layer, max_length)
    before = score_answers(engine, lessons, lambda _: base, max_length)
    return [after[key].logp - before[key].logp for key in after]


def _score_items(
    engine: Scorer, job: EvalJob, lessons: Sequence[Lesson], *, is_own: bool = True
) -> tuple[EvalItem, ...]:
    """Score lessons under both stacks, and under the base where its scores are not known.

    Without examples in the prompt: which lessons these are changes with each learn, and an item
    that loses or gains them would say nothing about the layer. ``is_own``: the lessons are of the
    layer that is evaluated.
    """
    live, candidate, eval_set = job.live, job.candidate, job.eval_set
    history, length = eval_set.history, eval_set.max_length
    before, after = (
        score_answers(engine, lessons, side.for_layer if is_own else side.for_other_layer, length)
        for side in (live, candidate)
    )
    bare = Stack(live.stack.base)
    new = [lesson for lesson in lessons if lesson.key not in history.base]
    scored = before if live.stack == bare else score_answers(engine, new, lambda _: bare, length)
    base = {key: each.logp for key, each in scored.items()} | dict(history.base)
    return tuple(
        EvalItem(
            key,
            before[key].logp,
            after[key].logp,
            base[key],
            history.baseline(key, before[key].logp, eval_set.tie_margin),
            eval_set.tie_margin,
            (median(before[key].token_logprobs), median(after[key].token_logprobs)),
        )
        for key in (lesson.key for lesson in lessons)
    )
