"""Judge a candidate by its answers to held-out prompts, where a verifier says which are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from personalpeft.engine.engine import Engine, Request
from personalpeft.learning.data.training_examples import Lesson
from personalpeft.learning.evaluate.eval_job import EvalJob, StackSelector
from personalpeft.learning.evaluate.evaluation import MAX_EXAMPLES, EvalResult
from personalpeft.learning.gate.evidence import EvalItem, Evidence
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import Example
from personalpeft.learning.train.loop import cancelled_error
from personalpeft.plugins import RIGHT, CheckedVerifier, Task
from personalpeft.types import Sampling

# Of tokens more than the longest wanted answer: a wrong one need not be written to its end.
_EXTRA_TOKENS = 4


def evaluate_answers(
    engine: Engine,
    job: EvalJob,
    verifier: CheckedVerifier,
    evidence: Evidence,
    options: LearnOptions,
) -> EvalResult:
    """Compare greedy answers of the live stack and of a candidate to the held-out prompts.

    The verifier gets a task for each prompt, whose ``about`` has the wanted "answer".

    Args:
        engine: Generates the answers.
        job: Has the stacks and the held-out lessons.
        verifier: Says how right an answer is.
        evidence: What else was measured.
        options: Stops or pauses the generation.

    Returns:
        The evidence with one item for each lesson, by its reward, as target; and examples.

    Raises:
        Cancelled: The options ended it.
        PluginError: The verifier failed.
    """
    lessons = job.eval_set.target
    before, after = (
        _answers(engine, job, select, options)
        for select in (job.live.for_layer, job.candidate.for_layer)
    )

    def rewards(answers: Sequence[str]) -> list[float]:
        return [
            verifier.verify(_task(each), text)[RIGHT]
            for each, text in zip(lessons, answers, strict=True)
        ]

    was, reached = rewards(before), rewards(after)
    items = tuple(
        EvalItem(f"{lesson.key}/right", before=old, after=new)
        for lesson, old, new in zip(lessons, was, reached, strict=True)
    )
    figures = {
        "asked": len(items),
        "improved": sum(item.improved for item in items),
        "regressed": sum(item.regressed for item in items),
        "passed_before": sum(reward == 1 for reward in was),
        "passed_after": sum(reward == 1 for reward in reached),
    }
    examples = tuple(
        Example(lesson.messages[-1].content, *texts)
        for lesson, *texts in zip(lessons, before, after, strict=True)
    )
    return replace(evidence, target=items, tasks=figures), examples[:MAX_EXAMPLES]


def _task(lesson: Lesson) -> Task:
    return Task(lesson.signal, lesson.messages[-1].content, {"answer": lesson.chosen})


def _answers(
    engine: Engine, job: EvalJob, select: StackSelector, options: LearnOptions
) -> list[str]:
    lessons = job.eval_set.target
    longest = max(len(engine.backend.encode(each.chosen)) for each in lessons)
    sampling = Sampling(max_tokens=longest + _EXTRA_TOKENS)
    requests = [
        Request(job.user, each.messages, select(each), sampling, background=True)
        for each in lessons
    ]
    texts = engine.complete(requests, cancelled=options.cancelled, paused=options.paused)
    if options.cancelled():
        raise cancelled_error("before the verdict")
    return texts
