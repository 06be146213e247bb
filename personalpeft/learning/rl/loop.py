"""One practice: its plan, and its rounds. Sample replies, verify them, train on them, repeat.

Each round samples from the layer as it is then, so the policy gradient is on-policy. The first
rounds train on replies that passed (rejection sampling), the others follow the rewards.
A practice may continue from a head that was practiced on the same tasks, so short ones add up.

Invariant: the state is saved after each round's replies and after each step. So a kill costs at
most one step, or the replies of the running round.
"""

from __future__ import annotations

import random
from collections.abc import Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from personalpeft.backends.base import Continuation, Session
from personalpeft.engine.engine import Engine, Request
from personalpeft.errors import InvalidInput
from personalpeft.learning.candidate import build_adapter
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.eval_job import EvalTask
from personalpeft.learning.gate.evidence import Evidence
from personalpeft.learning.layers import LayerState, replace_layer
from personalpeft.learning.options import cancelled_error
from personalpeft.learning.outcomes import Reason, ReasonCode, reason
from personalpeft.learning.plan import Plan
from personalpeft.learning.rl.rollouts import (
    STORED_STATE,
    PolicyGradientLoss,
    RLState,
    RolloutGroup,
    StepLosses,
    compute_advantages,
    count_passed,
    derive_seed,
    is_eval_task,
    sample_rollouts,
    select_tasks,
)
from personalpeft.learning.train.config import BUILD_FORMAT, RLConfig, TrainingConfig
from personalpeft.learning.train.loop import (
    Checkpoint,
    LoopControl,
    map_training_errors,
)
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.plugins import RIGHT, CheckedRewardShaper, CheckedVerifier, Task
from personalpeft.services import Services
from personalpeft.types import (
    Json,
    Message,
    Sampling,
    SignalRole,
    Stack,
    StackEntry,
    canonical_digest,
)

RESUME_HINT = "The next practice of these tasks goes on from what was done."


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticePlan(Plan):
    """What one practice is made of: tasks in the place of lessons.

    ``config`` says how to practice. ``train_tasks`` are practiced, ``eval_tasks`` are for the gate.
    ``state`` is how the rounds ended.
    """

    config: RLConfig
    verifier: CheckedVerifier
    shaping: CheckedRewardShaper | None
    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    state: RLState = field(default_factory=RLState)

    @property
    def steps(self) -> int:
        """The steps that were made."""
        return self.state.steps

    @property
    def progress(self) -> int:
        """The rounds that were made."""
        return self.state.rounds

    @property
    def plugin_names(self) -> dict[str, str | None]:
        """The plugins that decide a round, as a recipe stores them."""
        return {
            "verifier": self.verifier.name,
            "family": self.verifier.family,
            "shaping": self.shaping.name if self.shaping else None,
        }

    @property
    def rounds_before(self) -> int:
        """Rounds that the parent was practiced on such tasks since it last learned from lessons."""
        before = self.parent.recipe.get("practice", {}) if self.parent else {}
        same = all(before.get(key) == self.plugin_names[key] for key in ("verifier", "family"))
        return int(before["rounds"]) if before and same else 0

    @property
    def stored_recipe(self) -> Json:
        """How the layer was built, as a revision stores it."""
        rounds = self.rounds_before + self.progress
        practice = {**self.config.to_stored(), **self.plugin_names, "rounds": rounds}
        stored = {**self.recipe.to_stored(), "steps": self.steps, "practice": practice}
        return {**stored, **self.weights_form}

    @property
    def data_digest(self) -> str:
        """Digest of the tasks that are practiced."""
        return canonical_digest([[task.id, task.prompt] for task in self.train_tasks])

    @property
    def inputs_digest(self) -> str:
        """Digest of all that a build depends on; without ``state``, of what a step depends on."""
        practice = {**self.config.to_digest(), **self.plugin_names, "rounds": self.rounds_before}
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "base": self.live.base,
                "layer": self.layer,
                "practice": practice,
                "tasks": self.data_digest,
                "recipe": self.recipe.to_digest(),
                "rounds": self.state.rounds or None,
                "steps": self.state.steps or None,
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
                **self.weights_form,
            }
        )

    @property
    def signal_roles(self) -> dict[str, SignalRole]:
        """No signal: tasks are practiced."""
        return {}

    @property
    def figures(self) -> Json:
        """The course of the practice, for the scores of the revision."""
        return {"practice": self.state.summary()}

    def undecided(self, decided: Set[str]) -> tuple[Lesson, ...]:
        """Return no lesson: the practice is to improve its tasks."""
        return ()

    def samples_rejections(self, rounds: int) -> bool:
        """Return whether the last of so many rounds trains on replies that passed."""
        return self.rounds_before + rounds <= self.config.rejection_rounds

    def request(self, task: Task, stack: Stack, sampling: Sampling) -> Request:
        """Return how a stack is asked a task."""
        messages = (Message("user", task.prompt),)
        return Request(self.user, messages, stack, sampling, background=True)

    def eval_tasks_for(self, candidate: Stack) -> list[EvalTask]:
        """Return the evaluation tasks for the live stack and one with a candidate."""
        sampling = Sampling(max_tokens=self.config.max_completion_length)
        return [
            EvalTask(
                f"task_{derive_seed(task.prompt):08x}",
                task,
                self.request(task, self.live, sampling),
                self.request(task, candidate, sampling),
            )
            for task in self.eval_tasks
        ]

    def stack_with(self, digest: str) -> Stack:
        """Return the live stack with an adapter as this layer, at weight 1 as it is trained."""
        revision = f"{self.layer}@{digest[:12]}"
        return replace_layer(self.live, StackEntry(self.layer, revision, digest, 1.0))

    def explain_no_step(self) -> Reason:
        """Return why the rounds made no step."""
        state = self.state
        tasks = state.summary()["tasks"]
        if not any(state.pass_rates):
            return reason(ReasonCode.NO_REPLY_PASSED, replies=state.replies)
        if tasks["solved"] and not tasks["open"]:
            solved = tasks["solved"]
            return reason(ReasonCode.ALL_TASKS_SOLVED, tasks=solved, replies=state.replies)
        return reason(ReasonCode.NO_REWARD_CONTRAST, replies=state.replies)


def plan_practice(
    services: Services,
    state: LayerState,
    recipe: TrainingConfig,
    config: RLConfig,
    verifier: CheckedVerifier,
    shaping: CheckedRewardShaper | None,
    began: float,
) -> PracticePlan:
    """Draw the tasks of a practice: others than before once the head has changed.

    Args:
        services: The wired parts.
        state: The layer to practice, as it is now.
        recipe: The training configuration of the layer where it has no head.
        config: How to practice.
        verifier: Sets the tasks and scores replies.
        shaping: Changes the rewards of a group of replies, or None.
        began: When the practice began, on the timer.

    Raises:
        InvalidInput: The verifier has too few different tasks.
        PluginError: The verifier failed.
    """
    head = state.head
    seed = derive_seed("tasks", config.seed, state.layer, head.digest if head else None)
    tasks = verifier.tasks(seed, 4 * max(config.num_train_tasks, config.num_eval_tasks))
    held_out = tuple(filter(is_eval_task, tasks))[: config.num_eval_tasks]
    train = tuple(task for task in tasks if not is_eval_task(task))[: config.num_train_tasks]
    if not held_out or not train:
        raise InvalidInput(
            f"{verifier.name} has too few different tasks: {len(train)} to practice and"
            f" {len(held_out)} to judge by.",
            hint="Choose a larger family: a quarter of all tasks is held out for the gate.",
        )
    return PracticePlan(
        user=state.user,
        layer=state.layer,
        recipe=recipe.with_shape_of(head.recipe) if head else recipe,
        live=state.live,
        below=state.below,
        parent=head,
        began=began,
        holdout=state.holdout,
        other_holdout=state.holdout_beside,
        config=config,
        verifier=verifier,
        shaping=shaping,
        train_tasks=train,
        eval_tasks=held_out,
        maps_weights=services.training_backend.maps_weights,
    )


def allow_regressions(plan: PracticePlan, evidence: Evidence) -> Evidence:
    """Return evidence in which no demonstration of the skill counts as regressed, but as forgotten.

    Tasks judge the skill now, and may be solved in another way than the one that was shown.
    """
    own = {lesson.key for lesson in plan.holdout}
    retention = [
        replace(
            item,
            before=min(item.before, item.after),
            best=item.before if item.best is None else max(item.before, item.best),
        )
        if item.signal in own
        else item
        for item in evidence.retention
    ]
    return replace(evidence, retention=tuple(retention))


@dataclass(slots=True)
class RLLoop:
    """Runs the rounds of a plan on an open session."""

    engine: Engine
    plan: PracticePlan
    session: Session
    checkpoint: Checkpoint
    control: LoopControl
    state: RLState = field(default_factory=RLState)
    _steps_before: int = field(init=False)

    def run(self) -> RLState:
        """Practice until the rounds are done, a budget is spent or no task teaches anything more.

        Returns the state at the end. At least one round is sampled and one of its steps made,
        whatever the budget.
        """
        plan, config = self.plan, self.plan.config
        progress = self.checkpoint.restore(self.session)
        if progress is not None:
            self.state = STORED_STATE.validate_python(progress)
        state = self.state
        self._steps_before = state.steps
        while True:
            while state.pending and not (state.steps and self._is_budget_spent()):
                self._train_step()
            self.control.progress(state.rounds / config.rounds)
            if state.rounds >= config.rounds or (state.rounds and self._is_budget_spent()):
                return state
            self._wait()
            rng = random.Random(derive_seed("choice", config.seed, plan.data_digest, state.rounds))
            tasks = select_tasks(
                plan.train_tasks,
                state.posteriors,
                config.prompts_per_round,
                rng,
                train_on_solved=plan.shaping is not None and plan.shaping.train_on_solved,
            )
            if not tasks:
                return state
            groups = self._sample(tasks)
            state.record_round(tasks, groups)
            if plan.samples_rejections(state.rounds):
                state.pending = rejection_sampling(state.passed, config, rng)
            else:
                batch = self._policy_gradient(groups)
                state.pending = (batch,) if batch else ()
            self._save()

    def _train_step(self) -> None:
        self._wait()
        config, batch = self.plan.config, self.state.pending[0]
        is_rejection = self.plan.samples_rejections(self.state.rounds)
        rate = config.rejection_learning_rate if is_rejection else config.learning_rate
        with map_training_errors():
            self.session.precompute_ref_log_probs(batch)
            self.session.step(batch, rate)
        self.state.record_step()
        self._save()

    def _sample(self, tasks: Sequence[Task]) -> list[RolloutGroup]:
        """Return replies of the layer as it is now."""
        plan, config = self.plan, self.plan.config
        seed = derive_seed("reply", config.seed, self.state.rounds)
        sampling = Sampling(config.temperature, 1.0, config.max_completion_length, seed)
        with ExitStack() as attached:
            digest = plan.parent.digest if plan.parent else None
            if self.state.steps:
                adapter = build_adapter(plan, self.session.weights())
                digest = attached.enter_context(self.engine.temporary_adapter(adapter))
            stack = plan.stack_with(digest) if digest else plan.live
            return sample_rollouts(
                self.engine,
                [(task, plan.request(task, stack, sampling)) for task in tasks],
                plan.verifier,
                num_generations=config.num_generations,
                cancelled=self.control.cancelled,
                paused=self.control.paused,
            )

    def _policy_gradient(self, groups: Sequence[RolloutGroup]) -> StepLosses:
        """Return one loss for each reply whose advantage is not 0."""
        config, shaping = self.plan.config, self.plan.shaping
        used: list[tuple[Continuation, float]] = []
        for group in groups:
            rewards = [dict(rollout.rewards) for rollout in group]
            if shaping is not None:
                attempts = [rollout.attempt for rollout in group]
                shaped = shaping.shape(attempts, count_passed(group) / len(group))
                for each, reward in zip(rewards, shaped, strict=True):
                    each[RIGHT] = reward
            advantages = zip(group, compute_advantages(rewards), strict=True)
            used += [(rollout.reply, advantage) for rollout, advantage in advantages if advantage]
        return tuple(
            PolicyGradientLoss(
                reply, advantage, config.max_completion_length, config.beta, 1 / len(used)
            )
            for reply, advantage in used
        )

    def _wait(self) -> None:
        self.control.wait()
        if self.control.cancelled():
            raise cancelled_error(f"after step {self.state.steps}")

    def _is_budget_spent(self) -> bool:
        limit, made = self.control.max_steps, self.state.steps - self._steps_before
        return (limit is not None and made >= limit) or self.control.out_of_time()

    def _save(self) -> None:
        with map_training_errors():
            session_state = self.session.state()
        self.checkpoint.write(session_state, STORED_STATE.dump_python(self.state, mode="json"))


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
