"""Configuration of one practice: reinforcement learning of a skill.

The defaults suit a base of about 135M parameters; a card's ``[practice]`` table overrides them.
docs/learning.md says how each default was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field

from personalpeft.learning.train.config import CardConfig, Count, Number, Size


class RLConfig(CardConfig):
    """How a skill is practised: rounds of rejection sampling, then of policy gradient."""

    STORED_NAMES: ClassVar[Mapping[str, str]] = {
        "rejection_rounds": "imitate",
        "rejection_steps": "repeats",
        "rejection_learning_rate": "imitation_rate",
        "batch_size": "batch",
        "prompts_per_round": "per_round",
        "num_generations": "group",
        "num_train_tasks": "pool",
        "num_eval_tasks": "held_back",
        "max_completion_length": "longest",
        "beta": "kl",
    }

    rounds: Count = 36  # rounds of sampling and training
    rejection_rounds: Size = 12  # first rounds, which train on replies that passed
    rejection_steps: Count = 4  # steps of such a round; a round of policy gradient has one
    batch_size: Count = 8  # replies a step of rejection sampling
    prompts_per_round: Count = 8  # tasks a round
    num_generations: Annotated[Count, Field(ge=2)] = 5  # replies a task, the group of GRPO
    num_train_tasks: Count = 128  # tasks to practise
    num_eval_tasks: Count = 48  # other tasks, for the gate
    temperature: Number = 1.0  # of sampling; at 1 the gradient is that of the model itself
    max_completion_length: Count = 48  # tokens at which a reply ends
    beta: Number = 0.01  # weight of the KL from the stack below
    rejection_learning_rate: Number = 5e-4  # rate of rejection sampling
    learning_rate: Number = 2e-4  # rate of policy gradient
    seed: Size = 0  # of tasks, replies and their order
