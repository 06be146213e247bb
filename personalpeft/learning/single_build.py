"""Train one plan outside a learn: no gate judges it, and nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from personalpeft.adapters.types import LoRAWeights
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_replies import generate_general_replies
from personalpeft.learning.options import not_cancelled
from personalpeft.learning.pipeline import MAX_YIELD_SECONDS, open_session
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.loop import (
    CheckpointStore,
    LoopControl,
    TrainJob,
    TrainResult,
    cancelled_error,
    train,
)
from personalpeft.services import Services
from personalpeft.types import Progress

NO_CHECKPOINTS = CheckpointStore(lambda: None, lambda data: None)
"""Keeps nothing, so that a training changes nothing in the home."""


def train_plan(
    services: Services,
    plan: Plan,
    checkpoints: CheckpointStore,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> Mapping[str, LoRAWeights]:
    """Train a plan to its end, and return the weights of its layer.

    Call it inside ``LazyModel.learning``.

    Args:
        services: The wired parts.
        plan: The plan.
        checkpoints: Where its checkpoint is kept.
        progress: Called with a stage and the share of it that is done.
        cancelled: Called between steps; returns whether to stop.

    Raises:
        Cancelled: ``cancelled`` returned True.
        ServingFailed: The model failed.
    """
    engine, user = services.learning_engine, plan.user
    progress(f"Reading {plan.layer}", 0.0)
    replies = generate_general_replies(
        services, {user: plan}, cancelled=cancelled, paused=not_cancelled
    )
    general = replies[user]
    if isinstance(general, PersonalPeftError):
        raise general
    if cancelled():
        raise cancelled_error("before the first step")
    job = TrainJob(
        lambda: open_session(services, plan),
        build_batches(plan, engine.backend, general, services.memory.embedder),
        plan.recipe,
        plan.inputs_digest,
        checkpoints,
    )
    control = LoopControl(
        progress=lambda done: progress(f"Building {plan.layer}", done),
        cancelled=cancelled,
        paused=not_cancelled,
        out_of_time=lambda: False,
        yield_to_serving=lambda: engine.yield_to_foreground(MAX_YIELD_SECONDS),
    )
    trained = train({user: job}, services.training_backend.advance, control)[user]
    if not isinstance(trained, TrainResult):
        raise trained
    return trained.weights
