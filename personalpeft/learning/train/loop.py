"""The training loop: trains several sessions in one pass a step, and can be stopped between steps.

A learn, a rebase and a reproduction train their plans by it.

Invariants:

- Interruptions, resumes and other sessions in the group never change the result. It equals that of
  one uninterrupted run alone. It is equal to the byte where the backend's ``advance`` guarantees
  it, otherwise up to rounding.
- Another thread writes checkpoints. A step that ends ``CHECKPOINT_SECONDS`` after the last one
  began starts another, so a kill costs little more than that time, and the running step. Where the
  caller stops the loop, a checkpoint has all steps.
- Only the same build resumes a checkpoint, and only a whole one. A torn or altered file, or one of
  other inputs or of an older version, is ignored. Then the build starts anew.
- A session that fails leaves the group and the others go on.

A checkpoint is one safetensors file. It has the arrays of the training session. Its metadata has
the progress (JSON) and a digest over both and over the inputs of the build.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import Loss, Session, SessionSpec
from personalpeft.backends.error_mapping import map_model_errors
from personalpeft.errors import AdapterError, PersonalPeftError, ServingFailed
from personalpeft.learning.data.batching import build_batches
from personalpeft.learning.data.general_replies import generate_general_replies
from personalpeft.learning.options import (
    MAX_YIELD_SECONDS,
    cancelled_error,
    not_cancelled,
    wait_while,
)
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.services import Services
from personalpeft.store.store import Store
from personalpeft.types import Progress

CHECKPOINT_SECONDS = 5.0
"""Time from one checkpoint to the next. Writing one takes the time of a processor from the steps: on
the default base a tenth of it where each step of half a second had one."""

SessionState = Mapping[str, npt.NDArray[np.float32]]
TrainStep = Callable[
    [Sequence[Session], Sequence[Sequence[Loss]], Sequence[float]], Sequence[float]
]
"""``Backend.advance``: one step of several sessions."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The checkpoint of one build.

    ``load`` returns the file, and ``save`` replaces it as a whole. ``inputs_digest`` is that of all
    that the build depends on.
    """

    load: Callable[[], bytes | None]
    save: Callable[[bytes], None]
    inputs_digest: str

    @classmethod
    def of_plan(cls, store: Store, plan: Plan) -> Self:
        """Return the checkpoint of a plan, in the home's session folder."""
        of_layer = plan.user, plan.layer
        return cls(
            partial(store.load_checkpoint, *of_layer),
            partial(store.save_checkpoint, *of_layer),
            plan.inputs_digest,
        )

    def write(self, state: SessionState, progress: Any) -> None:
        """Write the arrays of a session, and how far the training came as JSON data."""
        arrays = {name: np.atleast_1d(array) for name, array in state.items()}
        text = json.dumps(progress)
        metadata = {"progress": text, "digest": self._digest(text, arrays)}
        self.save(safetensors.numpy.save(arrays, metadata))

    def restore(self, session: Session) -> Any:
        """Restore a session, and return the progress; None if there is nothing that can be used."""
        data = self.load()
        if data is None:
            return None
        try:
            metadata, arrays = read_tensors(data)
            text = metadata["progress"]
            # Without this, a wrong number that is still a number would reach the revision unnoticed.
            if metadata["digest"] != self._digest(text, arrays):
                return None
            session.restore(arrays)
            return json.loads(text)
        except (AdapterError, KeyError, ValueError):
            return None

    def _digest(self, progress: str, arrays: SessionState) -> str:
        digest = hashlib.sha256(f"{self.inputs_digest} {progress} ".encode())
        for name, array in sorted(arrays.items()):
            digest.update(f"{name}{array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One build's training.

    ``open_session`` returns a new session. ``batches`` are the losses of each step. ``progress`` is
    called with the number of steps done and the total.
    """

    open_session: Callable[[], Session]
    batches: Sequence[Sequence[Loss]]
    config: TrainingConfig
    checkpoint: Checkpoint
    progress: Callable[[int, int], None] = lambda step, steps: None


@dataclass(frozen=True, slots=True)
class LoopControl:
    """How the caller steers a loop between steps.

    ``timer`` returns seconds. ``yield_to_serving`` waits a limited time while chats are answered.
    ``max_steps`` is the most steps a session makes in this run.
    """

    timer: Callable[[], float]
    progress: Callable[[float], None]
    cancelled: Callable[[], bool]
    yield_to_serving: Callable[[], None]
    paused: Callable[[], bool] = not_cancelled
    out_of_time: Callable[[], bool] = not_cancelled
    max_steps: int | None = None

    def wait(self) -> None:
        """Wait while chats are answered or the caller pauses."""
        self.yield_to_serving()
        wait_while(self.paused, self.cancelled)


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How far training came: ``losses`` are of the steps of this run, ``weights`` the layer."""

    steps_done: int
    total_steps: int
    losses: tuple[float, ...]
    weights: Mapping[str, LoRAWeights]

    @property
    def is_complete(self) -> bool:
        return self.steps_done == self.total_steps


def train(
    jobs: Mapping[str, TrainJob], train_step: TrainStep, control: LoopControl
) -> dict[str, TrainResult | PersonalPeftError]:
    """Train the jobs together to their end or to the end of a budget, but at least one step.

    Args:
        jobs: The trainings by name.
        train_step: ``Backend.advance``: one step of several sessions.
        control: How the caller steers the loop.

    Returns:
        A result for each job, or the error that concerns it alone.

    Raises:
        Cancelled: The caller cancelled. All steps are in the checkpoints then.
        ServingFailed: A step of the group failed. It may have changed any session. Each job may
            be trained alone from its checkpoint.
    """
    results: dict[str, TrainResult | PersonalPeftError] = {}
    with ExitStack() as sessions, ThreadPoolExecutor(1, "personalpeft-checkpoint") as writer:
        runs: dict[str, _Run] = {}
        for name, job in jobs.items():
            with _as_result(name, results):
                runs[name] = _Run(job, sessions, writer, control.timer)
        total = sum(run.steps for run in runs.values())
        began = False
        while True:
            control.wait()
            active = {name: run for name, run in runs.items() if name not in results}
            if control.cancelled():
                for run in active.values():
                    run.write_checkpoint()
                    run.wait_for_checkpoint()
                done = sum(run.step for run in runs.values())
                raise cancelled_error(f"after step {done} of {total}")
            out_of_time = began and control.out_of_time()
            for name, run in list(active.items()):
                if run.step == run.steps or out_of_time or len(run.losses) == control.max_steps:
                    with _as_result(name, results):
                        results[name] = run.finish()
                    del active[name]
            if not active:
                return results
            with map_training_errors():
                losses = train_step(
                    [run.session for run in active.values()],
                    [run.job.batches[run.step] for run in active.values()],
                    [
                        run.job.config.learning_rate_at(run.step, run.steps)
                        for run in active.values()
                    ],
                )
            began = True
            for (name, run), loss in zip(active.items(), losses, strict=True):
                with _as_result(name, results):
                    run.record_step(loss)
            control.progress(sum(run.step for run in runs.values()) / total)


class _Run:
    """One open session. ``step`` is its next step."""

    def __init__(
        self,
        job: TrainJob,
        sessions: ExitStack,
        writer: ThreadPoolExecutor,
        timer: Callable[[], float],
    ) -> None:
        self.job = job
        self.session = sessions.enter_context(closing(job.open_session()))
        self.steps = len(job.batches)
        progress = job.checkpoint.restore(self.session)
        self.step = 0 if progress is None else progress["step"]
        self.losses: list[float] = []
        self._writer, self._timer = writer, timer
        self._write: Future[None] | None = None
        self._written_step = self.step
        self.session.precompute_ref_log_probs([loss for batch in job.batches for loss in batch])
        job.progress(self.step, self.steps)
        self._written_at = timer()

    def record_step(self, loss: float) -> None:
        """Count a step, and start a checkpoint if one is due. Raises what the last one raised."""
        self.losses.append(loss)
        self.step += 1
        if self._timer() - self._written_at >= CHECKPOINT_SECONDS:
            self.write_checkpoint()
        self.job.progress(self.step, self.steps)

    def write_checkpoint(self) -> None:
        """Start to write a checkpoint of the steps so far. Raises what the last one raised."""
        self.wait_for_checkpoint()
        if self._written_step == self.step:
            return
        self._written_step, self._written_at = self.step, self._timer()
        # Copied here, because the next step changes the session while this one is written.
        state = self.session.state()
        try:
            self._write = self._writer.submit(self.job.checkpoint.write, state, {"step": self.step})
        except RuntimeError as error:
            if "interpreter shutdown" not in str(error):
                raise
            # Python takes no more work once the program ends, and a daemon thread may still learn.
            raise cancelled_error("at the end of the program") from None

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is durable. Raises what writing it raised."""
        if self._write is not None:
            self._write.result()

    def finish(self) -> TrainResult:
        if self.step < self.steps:
            self.write_checkpoint()
        self.wait_for_checkpoint()
        losses = tuple(self.losses)
        return TrainResult(self.step, self.steps, losses, self.session.weights())


map_training_errors = partial(
    map_model_errors,
    "The model failed during training.",
    hint="See the log. The next learn or practice resumes from the last checkpoint.",
    memory_hint="Free memory and try again, which resumes from the last checkpoint. A smaller rank"
    " or batch_size under [learning], or num_generations under [rl], in the base's card takes"
    " less.",
)
"""A context in which an error of the model becomes ``ServingFailed``."""


@contextmanager
def _as_result(name: str, results: dict[str, TrainResult | PersonalPeftError]) -> Iterator[None]:
    """Return a context in which an error that concerns one session becomes its result.

    ``ServingFailed`` is raised: the group may be too large for the memory there is.
    """
    try:
        with map_training_errors():
            yield
    except ServingFailed:
        raise
    except PersonalPeftError as error:
        results[name] = error


def train_plans(
    services: Services,
    plans: Mapping[str, Plan],
    control: LoopControl,
    *,
    keeps_checkpoints: bool = True,
    show_step: Callable[[Plan, int, int], None] = lambda plan, step, steps: None,
) -> dict[str, TrainResult | Exception]:
    """Train plans together, to their end or to the end of a budget.

    Call it inside ``LazyModel.learning``. Without ``keeps_checkpoints`` nothing in the home
    changes. ``show_step`` gets a plan, the number of its steps that are done, and the total.

    Returns the result of each user, or the error that concerns the user alone. Raises
    ``Cancelled``, and ``ServingFailed`` if the model failed for the whole group.
    """
    replies = generate_general_replies(
        services, plans, cancelled=control.cancelled, paused=control.paused
    )
    if control.cancelled():
        raise cancelled_error("before the first step")
    services.model.free_learning_cache()
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
                Checkpoint.of_plan(services.store, plan)
                if keeps_checkpoints
                else Checkpoint(lambda: None, lambda data: None, plan.inputs_digest),
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

    Raises ``Cancelled`` and ``ServingFailed``.
    """
    progress(f"Reading {plan.layer}", 0.0)
    control = LoopControl(
        timer=services.clock.timer,
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
