"""Judge a candidate by replies that a verifier judges: to held-out prompts, or to tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from personalpeft.engine.engine import Engine, Request
from personalpeft.learning.evaluate.eval_job import EvalJob
from personalpeft.learning.evaluate.evaluation import MAX_EXAMPLES, EvalResult
from personalpeft.learning.gate.evidence import EvalItem, Evidence
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import Example
from personalpeft.learning.rl.rollouts import Rollout, sample_rollouts
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier, Task
from personalpeft.types import Sampling

# Of tokens more than the longest wanted answer: a wrong one need not be written to its end.
_EXTRA_TOKENS = 4


@dataclass(frozen=True, slots=True)
class EvalTask:
    """One task for both stacks. ``key`` is that of its item."""

    key: str
    task: Task
    live: Request
    candidate: Request


def tasks_of_lessons(engine: Engine, job: EvalJob) -> list[EvalTask]:
    """Return the held-out prompts as tasks, whose ``about`` has the wanted "answer"."""
    lessons = job.eval_set.undecided
    longest = max(len(engine.backend.encode(each.chosen)) for each in lessons)
    sampling = Sampling(max_tokens=longest + _EXTRA_TOKENS)
    return [
        EvalTask(
            f"{each.key}/right",
            Task(each.signal, each.messages[-1].content, {"answer": each.chosen}),
            *(
                Request(job.user, each.messages, side.for_layer(each), sampling, background=True)
                for side in (job.live, job.candidate)
            ),
        )
        for each in lessons
    ]


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
        return [group.rollouts[0] for group in groups]

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
