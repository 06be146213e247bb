"""The rounds of one practice: sample replies, verify them, train on them, repeat.

Each round samples from the layer as it is then, so the policy gradient is on-policy. The first
rounds train on replies that passed (rejection sampling), the others follow the rewards.
A practice may continue from a head that was practiced on the same tasks, so short ones add up.

Invariant: the state is saved after each round's replies and after each step. So a kill costs at
most one step, or the replies of the running round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from personalpeft.backends.base import Continuation, Session
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.engine.engine import Engine
from personalpeft.learning.candidate import build_adapter
from personalpeft.learning.options import cancelled_error
from personalpeft.learning.rl.plan import PracticePlan, RLState, StepLosses
from personalpeft.learning.rl.rollouts import (
    RolloutGroup,
    derive_seed,
    policy_gradient_step,
    sample_rollouts,
    select_tasks,
)
from personalpeft.learning.train.config import RLConfig
from personalpeft.learning.train.loop import (
    CheckpointStore,
    LoopControl,
    encode_checkpoint,
    restore_checkpoint,
)
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.plugins import Task
from personalpeft.types import Sampling, Stack

RESUME_HINT = "The next practice of these tasks goes on from what was done."


@dataclass(slots=True)
class RLLoop:
    """Runs the rounds of a plan on an open session."""

    engine: Engine
    plan: PracticePlan
    session: Session
    checkpoints: CheckpointStore
    control: LoopControl
    state: RLState = field(default_factory=RLState)
    _inputs_digest: str = field(init=False)
    _steps_before: int = field(init=False)

    def run(self) -> RLState:
        """Practice until the rounds are done, a budget is spent or no task teaches anything more.

        Returns the state at the end. At least one round is sampled and one of its steps made,
        whatever the budget.
        """
        self._inputs_digest = self.plan.inputs_digest
        progress = restore_checkpoint(self.checkpoints.load(), self.session, self._inputs_digest)
        if progress is not None:
            self.state = RLState.from_json(progress)
        state, rounds = self.state, self.plan.config.rounds
        self._steps_before = state.steps
        while True:
            while state.pending and not (state.steps and self._is_budget_spent()):
                self._train_step()
            self.control.progress(state.rounds / rounds)
            if state.rounds >= rounds or (state.rounds and self._is_budget_spent()):
                return state
            self._wait()
            seed = derive_seed("choice", self.plan.config.seed, self.plan.data_digest, state.rounds)
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
        plan, batch = self.plan, self.state.pending[0]
        is_rejection = plan.samples_rejections(self.state.rounds)
        config = plan.config
        rate = config.rejection_learning_rate if is_rejection else config.learning_rate
        with map_practice_errors():
            self.session.precompute_ref_log_probs(batch)
            self.session.step(batch, rate)
        self.state.record_step()
        self._save()

    def _select_tasks(self, rng: random.Random) -> tuple[Task, ...]:
        plan = self.plan
        return select_tasks(
            plan.train_tasks,
            self.state.posteriors,
            plan.config.prompts_per_round,
            rng,
            train_on_solved=plan.shaping is not None and plan.shaping.train_on_solved,
        )

    def _sample(self, tasks: Sequence[Task]) -> tuple[RolloutGroup, ...]:
        """Return replies of the layer as it is now."""
        plan = self.plan
        if not self.state.steps:
            start = plan.stack_with(plan.parent.digest) if plan.parent else plan.live
            return self._sample_from(start, tasks)
        adapter = build_adapter(plan, self.session.weights())
        with self.engine.temporary_adapter(adapter) as digest:
            return self._sample_from(plan.stack_with(digest), tasks)

    def _sample_from(self, stack: Stack, tasks: Sequence[Task]) -> tuple[RolloutGroup, ...]:
        config = self.plan.config
        seed = derive_seed("reply", config.seed, self.state.rounds)
        sampling = Sampling(config.temperature, 1.0, config.max_completion_length, seed)
        return sample_rollouts(
            self.engine,
            [(task, self.plan.request(task, stack, sampling)) for task in tasks],
            self.plan.verifier,
            num_generations=config.num_generations,
            cancelled=self.control.cancelled,
            paused=self.control.paused,
        )

    def _plan_steps(
        self, groups: Sequence[RolloutGroup], rng: random.Random
    ) -> tuple[StepLosses, ...]:
        """Return the steps of the round that was just sampled."""
        if self.plan.samples_rejections(self.state.rounds):
            return rejection_sampling(self.state.passed, self.plan.config, rng)
        batch = policy_gradient_step(groups, self.plan.shaping, self.plan.config)
        return (batch,) if batch else ()

    def _wait(self) -> None:
        self.control.wait()
        if self.control.cancelled():
            raise cancelled_error(f"after step {self.state.steps}")

    def _is_budget_spent(self) -> bool:
        limit, made = self.control.max_steps, self.state.steps - self._steps_before
        return (limit is not None and made >= limit) or self.control.out_of_time()

    def _save(self) -> None:
        with map_practice_errors():
            session_state = self.session.state()
        self.checkpoints.save(
            encode_checkpoint(session_state, self._inputs_digest, self.state.to_json())
        )


def rejection_sampling(
    passed: Sequence[Continuation], config: RLConfig, rng: random.Random
) -> tuple[StepLosses, ...]:
    """Return the steps of a round that trains on replies that passed, in whichever round.

    A right reply stays right, so it may come from an earlier state of the model.

    Args:
        passed: The different replies that passed.
        config: How many steps, and how many replies each has.
        rng: Draws the replies of each step.
    """
    if not passed:
        return ()
    size = min(config.batch_size, len(passed))
    batches = [rng.sample(passed, size) for _ in range(config.rejection_steps)]
    return tuple(tuple(SFTLoss(reply, 1 / size) for reply in batch) for batch in batches)


def map_practice_errors() -> AbstractContextManager[None]:
    """Return a context in which an error of the model becomes ``ServingFailed``."""
    return map_model_errors(
        "The model failed during practice.",
        hint=f"See the log. {RESUME_HINT}",
        memory_hint="Free memory and practice again, which goes on from what was done. A smaller"
        " batch_size or num_generations under [practice] in the base's card takes less.",
    )
