"""One practice as data: its fixed plan, the state that its rounds change, and its tasks.

Invariant: ``RLState`` and the session's weights hold all that the next step depends on. So a
resumed practice gives the same bytes as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Request
from personalpeft.errors import InvalidInput
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.evaluate.answers import EvalTask
from personalpeft.learning.gate.evidence import Evidence
from personalpeft.learning.layers import LayerState, holdout_beside, holdout_of, replace_layer
from personalpeft.learning.outcomes import Reason, ReasonCode, reason
from personalpeft.learning.plan import Plan
from personalpeft.learning.rl.rollouts import (
    UNSEEN,
    PolicyGradientLoss,
    RolloutGroup,
    TaskPosterior,
    derive_seed,
    is_eval_task,
)
from personalpeft.learning.train.config import BUILD_FORMAT, RLConfig, TrainingConfig
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier, Task
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

StepLosses: TypeAlias = tuple[SFTLoss | PolicyGradientLoss, ...]
"""The losses of one step."""


@dataclass(slots=True)
class RLState:
    """The state of a practice. The running loop owns it.

    ``passed`` are the different replies that passed, in order of discovery. ``pending`` are the
    remaining steps of the last round.
    """

    posteriors: dict[str, TaskPosterior] = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    replies: int = 0
    pass_rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    passed: list[Continuation] = field(default_factory=list)
    pending: tuple[StepLosses, ...] = ()

    def record_round(self, groups: Sequence[RolloutGroup]) -> None:
        """Add the replies of one round."""
        for group in groups:
            failed = len(group.rollouts) - group.passed
            posterior = self.posteriors.get(group.task.id, UNSEEN)
            self.posteriors[group.task.id] = posterior.update(group.passed, failed)
        replies = [rollout for group in groups for rollout in group.rollouts]
        passed = [rollout.reply for rollout in replies if rollout.attempt.passed]
        self.rounds += 1
        self.replies += len(replies)
        self.pass_rates.append(round(len(passed) / len(replies), 4))
        self.lengths.append(round(sum(each.length for each in replies) / len(replies), 4))
        self.passed = list(dict.fromkeys((*self.passed, *passed)))

    def record_step(self) -> None:
        """Remove the step that was made. The counts of the tasks decay."""
        self.steps += 1
        self.pending = self.pending[1:]
        self.posteriors = {task: each.decay() for task, each in self.posteriors.items()}

    def summary(self) -> dict[str, Any]:
        """Return the counts, and pass rate and length by round, as a report stores them."""
        states = [posterior.state for posterior in self.posteriors.values()]
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "replies": self.replies,
            "tasks": {state: states.count(state) for state in ("open", "solved", "hopeless")},
            "pass_rate": self.pass_rates,
            "length": self.lengths,
        }

    def to_json(self) -> Any:
        """Return the state as a checkpoint holds it."""
        return _STATE.dump_python(self, mode="json")

    @staticmethod
    def from_json(data: Any) -> RLState:
        """Return the state that ``to_json`` gave."""
        return _STATE.validate_python(data)


_STATE = TypeAdapter(RLState)


@dataclass(frozen=True, slots=True, kw_only=True)
class PracticePlan(Plan):
    """What one practice is made of: tasks in the place of lessons.

    ``config`` says how to practice. ``train_tasks`` are practiced, ``eval_tasks`` are for the gate.
    ``state`` is set when the rounds have ended.
    """

    config: RLConfig
    verifier: CheckedVerifier
    shaping: CheckedRewardShaper | None
    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]
    state: RLState | None = None

    @property
    def steps(self) -> int:
        """The steps that were made."""
        return self.state.steps if self.state else 0

    @property
    def progress(self) -> int:
        """The rounds that were made."""
        return self.state.rounds if self.state else 0

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
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "base": self.live.base,
                "layer": self.layer,
                "practice": {
                    **self.config.to_digest(),
                    **self.plugin_names,
                    "rounds": self.rounds_before,
                },
                "tasks": self.data_digest,
                "recipe": self.recipe.to_digest(),
                "rounds": self.state.rounds if self.state else None,
                "steps": self.state.steps if self.state else None,
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
        return {"practice": self.state.summary()} if self.state else {}

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
        state = self.state or RLState()
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
        holdout=holdout_of(services.store, state, state.layer),
        other_holdout=holdout_beside(services.store, state),
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
