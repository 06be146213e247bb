"""Measure a candidate against the live stack and the bare base, on the engine that serves users.

Where a verifier judges replies, to held-out prompts or to tasks, they are sampled and judged here.

Invariant: replies are greedy or have fixed seeds, so the same stacks give the same evidence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from statistics import fmean, median
from typing import Any, TypeAlias

from personalpeft.backends.base import Continuation
from personalpeft.engine.completion_cache import Completions
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import AdapterError, Cancelled, Damaged, NotFound, PersonalPeftError
from personalpeft.learning.data.general_prompts import MAX_REPLY_TOKENS, is_degenerate
from personalpeft.learning.data.lesson import Lesson, few_shot_messages
from personalpeft.learning.evaluate.eval_job import (
    EXAMPLE_SAMPLING,
    MAX_EXAMPLES,
    EvalJob,
    EvalTask,
    Scorer,
    ThrottledScorer,
    effective_stack,
    score_answers,
)
from personalpeft.learning.evaluate.exposure import measure_build_leakage
from personalpeft.learning.evaluate.text_quality import measure_arrived_lessons
from personalpeft.learning.gate.evidence import (
    BaseProbeResults,
    EvalItem,
    Evidence,
    GenerationResults,
    ProbeResults,
    PromptExampleResults,
    ThumbsResults,
)
from personalpeft.learning.layers import layer_order, trained_on
from personalpeft.learning.options import Condition, LearnOptions, not_cancelled
from personalpeft.learning.outcomes import Reason, ReasonCode
from personalpeft.learning.plan import Plan
from personalpeft.learning.report import Example
from personalpeft.learning.rl.rollouts import Rollout, sample_rollouts
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.memory.types import Embedder
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier, Task
from personalpeft.services import Services
from personalpeft.types import Message, Revision, Stack

# Of the probes about so many, evenly spread, give the mean KL. All took a quarter of an evaluation.
_KL_PROBES = 16
# Of so many probes examples in the prompt may cost one.
_PROBES_PER_LOSS = 20
# The classifier of rated replies: the lengths of its n-grams, and of how many folds is its AUC.
_NGRAMS = (1, 4)
_FOLDS = 5
# The lessons of a head without held-out ones that judge it again, the newest.
_MAX_REVALIDATED = 8

EvalResult: TypeAlias = tuple[Evidence, tuple[Example, ...]]
"""The evidence, and examples for the report."""


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
            job.eval_set.probes,
            cancelled=cancelled,
        )
        for user, job in jobs.items()
    }
    scorer = ThrottledScorer(services.learning_engine, paused, cancelled)
    for user, of_lessons in replies.items():
        job, (live, candidate, _) = jobs[user], probes[user]
        general = _probe_results(job, live, candidate, of_base[user])
        try:
            evidence, examples = _measure(
                scorer, services.memory.embedder, job, of_lessons, general, of_base[user]
            )
        except Cancelled:
            raise
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
    items = {item.signal: item for item in _score_items(engine, job, eval_set.held_out)}
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
        leakage=measure_build_leakage(engine, job),
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


def compare_replies(
    liked: Sequence[str], disliked: Sequence[str], before: Sequence[str], after: Sequence[str]
) -> ThumbsResults:
    """Count the replies that a classifier of the rated ones prefers to those before.

    What the user likes of the model's own replies is in few of their tokens, so their log-prob
    hardly rises. A linear classifier of character n-grams finds what sets liked replies apart, in
    any language. One that cannot predict thumbs it was not fit on says nothing: the gate reads its
    cross-validated AUC for that.

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


def evaluate_replies(
    engine: Engine,
    tasks: Sequence[EvalTask],
    verifier: CheckedVerifier,
    shaping: CheckedRewardShaper | None,
    evidence: Evidence,
    options: LearnOptions,
) -> EvalResult:
    """Compare greedy replies of the live stack and of a candidate.

    Args:
        engine: Generates the replies.
        tasks: What is asked.
        verifier: Says how right a reply is.
        shaping: Changes the rewards of both replies to a task, or None.
        evidence: What else was measured.
        options: Stops or pauses the generation.

    Returns:
        The evidence, and examples. It has one undecided item for each task, by its (shaped) reward.

    Raises:
        Cancelled: The options ended it.
        PluginError: The verifier failed.
    """

    def sample(asked: Sequence[tuple[Task, Request]]) -> list[Rollout]:
        groups = sample_rollouts(
            engine, asked, verifier, cancelled=options.cancelled, paused=options.paused
        )
        return [rollout for (rollout,) in groups]

    before = sample([(each.task, each.live) for each in tasks])
    after = sample([(each.task, each.candidate) for each in tasks])
    items, examples = [], []
    for each, old, new in zip(tasks, before, after, strict=True):
        attempts = (old.attempt, new.attempt)
        rewards = tuple(attempt.reward for attempt in attempts)
        if shaping is not None:
            rewards = shaping.shape(attempts, fmean(attempt.passed for attempt in attempts))
        was, reached = rewards
        items.append(EvalItem(each.key, was, reached))
        examples.append(Example(each.task.prompt, old.text, new.text))
    figures = {
        "asked": len(items),
        "improved": sum(item.improved for item in items),
        "regressed": sum(item.regressed for item in items),
        "passed_before": sum(rollout.attempt.passed for rollout in before),
        "passed_after": sum(rollout.attempt.passed for rollout in after),
        "length_before": round(fmean(rollout.length for rollout in before), 4),
        "length_after": round(fmean(rollout.length for rollout in after), 4),
    }
    return replace(evidence, undecided=tuple(items), tasks=figures), tuple(examples[:MAX_EXAMPLES])


def revalidate(
    services: Services,
    scorer: ThrottledScorer,
    head: Revision,
    plan: Plan,
    *,
    max_regressed: float,
    tie_margin: float,
) -> tuple[bool, Reason]:
    """Judge a head again after the stack below its layer changed.

    Its held-out lessons, or without any its newest ones, are scored in the whole stack. A lesson
    passes if its words are as likely as when the layer was built.

    Args:
        services: The wired parts.
        scorer: Scores the lessons.
        head: The live revision.
        plan: The build that would replace it.
        max_regressed: The share of the lessons that may fail.
        tie_margin: As of ``EvalItem``.

    Returns:
        Whether enough lessons still pass, and why the layer stays or is built again.

    Raises:
        Cancelled: The scorer was cancelled.
    """
    length = plan.recipe.max_length
    # By the signal alone: a fact that is paraphrased otherwise is the same fact.
    known: dict[str, float | None] = {
        key.partition("/")[0]: scores.get("after")
        for key, scores in head.scores.get("items", {}).items()
    }
    held_out = [each for each in plan.holdout if known.get(each.signal) is not None]
    trained = trained_on(services.store, head)
    of_head = [lesson for lesson in plan.new_examples if lesson.signal in trained]
    lessons = held_out or of_head[-_MAX_REVALIDATED:]
    if not lessons:
        return False, Reason(ReasonCode.STACK_BELOW_CHANGED)
    # At its full weight: that the user lowered it says nothing about the stack below.
    entries = (
        replace(entry, weight=1.0) if entry.layer == head.layer else entry
        for entry in plan.live.entries
    )
    full = replace(plan.live, entries=tuple(entries))
    prompts = [lesson.messages[-1].content for lesson in lessons]
    stack = effective_stack(services.router, head.user, head.layer, full, prompts, {})

    def as_built(lesson: Lesson) -> Stack:
        part, order = stack.for_layer(lesson), layer_order(head.layer)
        above = (entry for entry in part.entries if layer_order(entry.layer) >= order)
        return replace(part, entries=(*head.below, *above))

    if not held_out:
        try:
            built = score_answers(scorer, lessons, as_built, length)
        except (AdapterError, Damaged, NotFound):
            # The stack that it was built on is gone, so nothing can be compared.
            return False, Reason(ReasonCode.STACK_BELOW_CHANGED)
        known = {lesson.signal: built[lesson.key].logp for lesson in lessons}
    bare = Stack(plan.live.base)
    now = score_answers(scorer, lessons, stack.for_layer, length)
    base = score_answers(scorer, lessons, lambda _: bare, length)
    items = (
        EvalItem(
            each.key,
            known[each.signal] or 0.0,
            now[each.key].logp,
            base[each.key].logp,
            tie_margin=tie_margin,
        )
        for each in lessons
    )
    lost = sum(item.regressed_beyond_margin for item in items)
    counts = {"valid": len(lessons) - lost, "asked": len(lessons)}
    return lost <= max_regressed * len(lessons), Reason(ReasonCode.STACK_BELOW_CHECKED, counts)
