"""One practice as data: what is fixed before it starts, and the state that its rounds change.

Invariant: ``RLState`` and the session's weights hold all that the next step depends on, so what
resumes from them gives the same bytes as what was never stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from personalpeft.backends.base import Continuation
from personalpeft.errors import InvalidInput
from personalpeft.learning.layers import replace_layer
from personalpeft.learning.rl.advantages import PolicyGradientLoss
from personalpeft.learning.rl.rollouts import (
    UNSEEN,
    RolloutGroup,
    TaskPosterior,
    derive_seed,
    is_eval_task,
)
from personalpeft.learning.train.config import BUILD_FORMAT, RLConfig, TrainingConfig
from personalpeft.learning.train.losses import SFTLoss
from personalpeft.plugins import CheckedRewardShaper, CheckedVerifier, Task
from personalpeft.types import Revision, Stack, StackEntry, canonical_digest

Batch: TypeAlias = tuple[SFTLoss | PolicyGradientLoss, ...]
"""The losses of one step."""


@dataclass(frozen=True, slots=True)
class RLJob:
    """What one practice is made of.

    ``config`` says how to practise and ``shape`` how the layer is built. ``live`` is the user's
    stack, ``below`` the part under this layer, ``parent`` the layer's head. ``train_tasks`` are
    practised, ``eval_tasks`` are for the gate.
    """

    user: str
    layer: str
    config: RLConfig
    shape: TrainingConfig
    verifier: CheckedVerifier
    shaping: CheckedRewardShaper | None
    live: Stack
    below: Stack
    parent: Revision | None
    train_tasks: tuple[Task, ...]
    eval_tasks: tuple[Task, ...]

    @property
    def rounds_before(self) -> int:
        """Rounds that the parent was practised on such tasks since it last learned from lessons."""
        before = self.parent.recipe.get("practice", {}) if self.parent else {}
        same = all(before.get(key) == self.stored_config[key] for key in ("verifier", "family"))
        return int(before["rounds"]) if before and same else 0

    @property
    def stored_config(self) -> dict[str, Any]:
        """All that decides a round beside the weights, as a recipe stores it."""
        return {
            **self.config.to_stored(),
            "verifier": self.verifier.name,
            "family": self.verifier.family,
            "shaping": self.shaping.name if self.shaping else None,
        }

    @property
    def tasks_digest(self) -> str:
        return canonical_digest([[task.id, task.prompt] for task in self.train_tasks])

    def samples_rejections(self, rounds: int) -> bool:
        """Return whether the last of so many rounds trains on replies that passed."""
        return self.rounds_before + rounds <= self.config.rejection_rounds

    def inputs(self, state: RLState | None = None) -> str:
        """Return the digest of all that a build depends on; without state, of what a step does."""
        return canonical_digest(
            {
                "format": BUILD_FORMAT,
                "base": self.live.base,
                "layer": self.layer,
                "practice": {**self.stored_config, "rounds": self.rounds_before},
                "tasks": self.tasks_digest,
                "recipe": self.shape.to_stored(),
                "rounds": state.rounds if state else None,
                "steps": state.steps if state else None,
                "parent": self.parent.digest if self.parent else None,
                "below": self.below.digest,
            }
        )

    def recipe(self, state: RLState) -> dict[str, Any]:
        """Return the recipe of the revision, as it is stored."""
        practice = {**self.stored_config, "rounds": self.rounds_before + state.rounds}
        return {**self.shape.to_stored(), "steps": state.steps, "practice": practice}

    def stack_with(self, digest: str, weight: float) -> Stack:
        """Return the live stack with an adapter as this layer."""
        revision = f"{self.layer}@{digest[:12]}"
        return replace_layer(self.live, StackEntry(self.layer, revision, digest, weight))


def draw_tasks(
    layer: str, config: RLConfig, verifier: CheckedVerifier, head: Revision | None
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """Return tasks to practise and others for the gate; other ones once the head has changed."""
    seed = derive_seed("tasks", config.seed, layer, head.digest if head else None)
    tasks = verifier.tasks(seed, 4 * max(config.num_train_tasks, config.num_eval_tasks))
    held_out = tuple(filter(is_eval_task, tasks))[: config.num_eval_tasks]
    train = tuple(task for task in tasks if not is_eval_task(task))[: config.num_train_tasks]
    if not held_out or not train:
        raise InvalidInput(
            f"{verifier.name} has too few different tasks: {len(train)} to practise and"
            f" {len(held_out)} to judge by.",
            hint="Choose a larger family: a quarter of all tasks is held out for the gate.",
        )
    return train, held_out


@dataclass(slots=True)
class RLState:
    """What happened in a practice so far; its owner is the loop that runs.

    ``passed`` are the different replies that passed, in order of discovery. ``pending`` are the
    steps of the last round that are still to do.
    """

    posteriors: dict[str, TaskPosterior] = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    replies: int = 0
    pass_rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    passed: list[Continuation] = field(default_factory=list)
    pending: tuple[Batch, ...] = ()

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
        """Remove the step that was made; what is known of the tasks ages with the model."""
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
