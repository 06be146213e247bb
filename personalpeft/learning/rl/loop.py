"""The rounds of one practice: sample replies, verify them, train on them, repeat.

Each round samples from the layer as it is then, so the policy gradient is on-policy. The first
rounds train on replies that passed (rejection sampling), the others follow the rewards. A practice
whose head was practised on the same tasks counts on from there, so many short ones add up.

Invariant: the state is saved after each round's replies and after each step, so a kill costs at
most one step, or the replies of the round that was being sampled.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from personalpeft.adapters.compose import in_half
from personalpeft.adapters.types import Adapter, Manifest
from personalpeft.backends.base import Continuation, Session
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.engine.engine import Engine
from personalpeft.errors import Cancelled
from personalpeft.learning.gate.gate import EvalItem
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import Example
from personalpeft.learning.rl.advantages import policy_gradient_step
from personalpeft.learning.rl.job import Batch, RLJob, RLState
from personalpeft.learning.rl.rollouts import (
    RESUME_HINT,
    Rollout,
    RolloutGroup,
    derive_seed,
    sample_rollouts,
    select_tasks,
)
from personalpeft.learning.train.checkpoint import (
    CheckpointStore,
    encode_checkpoint,
    restore_checkpoint,
)
from personalpeft.learning.train.config import RLConfig
from personalpeft.learning.train.loop import LoopControl
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.plugins import Task
from personalpeft.types import Sampling, Stack

_MAX_EXAMPLES = 3


@dataclass(slots=True)
class RLLoop:
    """Runs the rounds of a job on an open session. ``start`` replies until there is a step."""

    engine: Engine
    job: RLJob
    session: Session
    start: Stack
    checkpoints: CheckpointStore
    control: LoopControl
    state: RLState = field(default_factory=RLState)
    _inputs: str = field(init=False)
    _steps_before: int = field(init=False)

    def run(self) -> RLState:
        """Practise until the rounds are done, a budget is spent or no task teaches anything more.

        At least one round is sampled and one of its steps made, whatever the budget.
        """
        self._inputs = self.job.inputs()
        progress = restore_checkpoint(self.checkpoints.load(), self.session, self._inputs)
        if progress is not None:
            self.state = RLState.from_json(progress)
        state, rounds = self.state, self.job.config.rounds
        self._steps_before = state.steps
        while True:
            while state.pending and not (state.steps and self._is_budget_spent()):
                self._train_step()
            self.control.progress(state.rounds / rounds)
            if state.rounds >= rounds or (state.rounds and self._is_budget_spent()):
                return state
            self._wait()
            seed = derive_seed("choice", self.job.config.seed, self.job.tasks_digest, state.rounds)
            rng = random.Random(seed)
            tasks = self._select_tasks(rng)
            if not tasks:
                return state
            groups = self._sample(tasks)
            state.record_round(groups)
            state.pending = self._plan_steps(groups, rng)
            self._save()

    def _train_step(self) -> None:
        self._wait()
        job, batch = self.job, self.state.pending[0]
        is_rejection = job.samples_rejections(self.state.rounds)
        config = job.config
        rate = config.rejection_learning_rate if is_rejection else config.learning_rate
        with map_practice_errors():
            self.session.precompute_ref_log_probs(batch)
            self.session.step(batch, rate)
        self.state.record_step()
        self._save()

    def _select_tasks(self, rng: random.Random) -> tuple[Task, ...]:
        job = self.job
        return select_tasks(
            job.train_tasks,
            self.state.posteriors,
            job.config.prompts_per_round,
            rng,
            train_on_solved=job.shaping is not None and job.shaping.train_on_solved,
        )

    def _sample(self, tasks: Sequence[Task]) -> tuple[RolloutGroup, ...]:
        """Return replies of the layer as it is now."""
        if not self.state.steps:
            return self._sample_from(self.start, tasks)
        with self.engine.temporary_adapter(build_adapter(self.job, self.session, {})) as digest:
            return self._sample_from(self.job.stack_with(digest, 1.0), tasks)

    def _sample_from(self, stack: Stack, tasks: Sequence[Task]) -> tuple[RolloutGroup, ...]:
        config = self.job.config
        seed = derive_seed("reply", config.seed, self.state.rounds)
        return sample_rollouts(
            self.engine,
            self.job.user,
            stack,
            tasks,
            self.job.verifier,
            Sampling(config.temperature, 1.0, config.max_completion_length, seed),
            num_generations=config.num_generations,
            cancelled=self.control.cancelled,
            paused=self.control.paused,
        )

    def _plan_steps(self, groups: Sequence[RolloutGroup], rng: random.Random) -> tuple[Batch, ...]:
        """Return the steps of the round that was just sampled."""
        if self.job.samples_rejections(self.state.rounds):
            return rejection_sampling(self.state.passed, self.job.config, rng)
        batch = policy_gradient_step(groups, self.job.shaping, self.job.config)
        return (batch,) if batch else ()

    def _wait(self) -> None:
        self.control.wait()
        if self.control.cancelled():
            raise Cancelled(
                f"Stopped after step {self.state.steps}; nothing has changed.", hint=RESUME_HINT
            )

    def _is_budget_spent(self) -> bool:
        limit, made = self.control.max_steps, self.state.steps - self._steps_before
        return (limit is not None and made >= limit) or self.control.out_of_time()

    def _save(self) -> None:
        with map_practice_errors():
            session_state = self.session.state()
        self.checkpoints.save(encode_checkpoint(session_state, self._inputs, self.state.to_json()))


def rejection_sampling(
    passed: Sequence[Continuation], config: RLConfig, rng: random.Random
) -> tuple[Batch, ...]:
    """Return the steps of a round that trains on replies that passed, in whichever round.

    What was right once stays right, so a reply need not come from the model as it is.
    """
    if not passed:
        return ()
    size = min(config.batch_size, len(passed))
    batches = [rng.sample(passed, size) for _ in range(config.rejection_steps)]
    return tuple(tuple(SFTLoss(reply, 1 / size) for reply in batch) for batch in batches)


@dataclass(frozen=True, slots=True)
class TaskEvaluation:
    """One item a task by its (shaped) reward, the figures for the report, and examples."""

    items: tuple[EvalItem, ...]
    figures: dict[str, Any]
    examples: tuple[Example, ...]


def evaluate_tasks(
    engine: Engine, job: RLJob, candidate: Stack, options: LearnOptions
) -> TaskEvaluation:
    """Compare greedy replies of the live stack and of a candidate to the evaluation tasks."""

    def sample(stack: Stack) -> list[Rollout]:
        groups = sample_rollouts(
            engine,
            job.user,
            stack,
            job.eval_tasks,
            job.verifier,
            Sampling(max_tokens=job.config.max_completion_length),
            cancelled=options.cancelled,
            paused=options.paused,
        )
        return [group.rollouts[0] for group in groups]

    before, after = sample(job.live), sample(candidate)
    items = []
    for task, old, new in zip(job.eval_tasks, before, after, strict=True):
        attempts = (old.attempt, new.attempt)
        rewards = tuple(attempt.reward for attempt in attempts)
        if job.shaping is not None:
            rewards = job.shaping.shape(attempts, fmean(each.passed for each in attempts))
        items.append(EvalItem(f"task_{derive_seed(task.prompt):08x}", *rewards))
    figures = {
        "asked": len(items),
        "won": sum(item.improved for item in items),
        "lost": sum(item.regressed for item in items),
        "passed_before": sum(rollout.attempt.passed for rollout in before),
        "passed_after": sum(rollout.attempt.passed for rollout in after),
        "length_before": round(sum(rollout.length for rollout in before) / len(before), 4),
        "length_after": round(sum(rollout.length for rollout in after) / len(after), 4),
    }
    examples = [
        Example(task.prompt, old.text, new.text)
        for task, old, new in zip(job.eval_tasks, before, after, strict=True)
    ]
    return TaskEvaluation(tuple(items), figures, tuple(examples[:_MAX_EXAMPLES]))


def build_adapter(job: RLJob, session: Session, recipe: Mapping[str, Any]) -> Adapter:
    """Return the layer as the session has it now, as it would be stored."""
    manifest = Manifest(
        base=job.live.base,
        layer=job.layer,
        rank=job.shape.rank,
        scaling=job.shape.scaling,
        targets=job.shape.target_modules,
        recipe=recipe,
        signals=job.tasks_digest,
        below=tuple(entry.digest for entry in job.below.entries),
        parent=job.parent.digest if job.parent else None,
    )
    return Adapter(manifest, in_half(session.weights()))


def map_practice_errors() -> AbstractContextManager[None]:
    """Return a context in which an error of the model becomes ``ServingFailed``."""
    return map_model_errors(
        "The model failed during practice.",
        hint=f"See the log. {RESUME_HINT}",
        memory_hint="Free memory and practise again, which goes on from what was done. A smaller"
        " batch_size or num_generations under [practice] in the base's card takes less.",
    )
