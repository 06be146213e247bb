"""Train plans, together or alone: for a learn, a rebase and a reproduction alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import Session, SessionSpec
from personalpeft.errors import PersonalPeftError
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_replies import generate_general_replies
from personalpeft.learning.options import MAX_YIELD_SECONDS, cancelled_error
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.loop import (
    CheckpointStore,
    LoopControl,
    TrainJob,
    TrainResult,
    train,
)
from personalpeft.services import Services
from personalpeft.types import Progress


def train_plans(
    services: Services,
    plans: Mapping[str, Plan],
    control: LoopControl,
    *,
    keeps_checkpoints: bool = True,
    show_step: Callable[[Plan, int, int], None] = lambda plan, step, steps: None,
) -> dict[str, TrainResult | Exception]:
    """Train plans together, to their end or to the end of a budget.

    Call it inside ``LazyModel.learning``.

    Args:
        services: The wired parts.
        plans: What is built, by user.
        control: How the caller steers the training.
        keeps_checkpoints: Whether a checkpoint is read and written. If not, nothing in the home
            changes.
        show_step: Called with a plan, the number of its steps that are done and the total.

    Returns:
        The result of each user, or the error that concerns the user alone.

    Raises:
        Cancelled: The caller cancelled.
        ServingFailed: The model failed for the whole group.
    """
    replies = generate_general_replies(
        services, plans, cancelled=control.cancelled, paused=control.paused
    )
    if control.cancelled():
        raise cancelled_error("before the first step")
    backend, jobs = services.learning_engine.backend, dict[str, TrainJob]()
    failed: dict[str, TrainResult | Exception] = {}
    for user, plan in plans.items():
        general = replies[user]
        if isinstance(general, PersonalPeftError):
            failed[user] = general
            continue
        try:
            jobs[user] = TrainJob(
                partial(open_session, services, plan),
                build_batches(plan, backend, general, services.memory),
                plan.recipe,
                plan.inputs_digest,
                CheckpointStore.of_layer(services.store, user, plan.layer)
                if keeps_checkpoints
                else CheckpointStore(lambda: None, lambda data: None),
                partial(show_step, plan),
            )
        except Exception as error:  # noqa: BLE001 - an error of any kind is a result
            failed[user] = error
    return failed | train(jobs, services.training_backend.advance, control)


def train_alone(
    services: Services,
    plan: Plan,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
    keeps_checkpoints: bool = True,
) -> Mapping[str, LoRAWeights]:
    """Train one plan to its end outside a learn, and return the weights of its layer.

    Args:
        services: The wired parts.
        plan: The plan.
        progress: Called with a stage and the share of it that is done.
        cancelled: Called between steps; returns whether to stop.
        keeps_checkpoints: As for ``train_plans``.

    Raises:
        Cancelled: ``cancelled`` returned True.
        ServingFailed: The model failed.
    """
    progress(f"Reading {plan.layer}", 0.0)
    control = LoopControl(
        progress=lambda done: progress(f"Building {plan.layer}", done),
        cancelled=cancelled,
        yield_to_serving=partial(services.learning_engine.yield_to_foreground, MAX_YIELD_SECONDS),
    )
    trained = train_plans(
        services, {plan.user: plan}, control, keeps_checkpoints=keeps_checkpoints
    )[plan.user]
    if isinstance(trained, Exception):
        raise trained
    return trained.weights


def open_session(services: Services, plan: Plan) -> Session:
    """Open the training session of a plan, on the stack below and from the parent's weights."""
    engine, recipe = services.learning_engine, plan.recipe
    start = engine.read_adapter(plan.parent.digest).weights if plan.parent else None
    # The session copies the stack below, so its slot is free while it trains.
    with engine.pin(plan.below) as below:
        return services.training_backend.session(
            SessionSpec(
                rank=recipe.rank,
                scaling=recipe.scaling,
                target_modules=recipe.target_modules,
                seed=recipe.seed,
                base_key=below,
                initial_weights=start,
                weight_decay=recipe.weight_decay,
                max_grad_norm=recipe.max_grad_norm,
            )
        )
