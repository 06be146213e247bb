"""The training loop: trains several sessions in one pass a step, and can be stopped between steps.

Invariants:

- Interruptions, resumes and other sessions in the group never change the result. It equals that of
  one uninterrupted run alone: to the byte where the backend's ``advance`` guarantees it, otherwise
  up to rounding.
- Each step is written to a checkpoint on another thread, and a step begins only when the checkpoint
  before the last is durable. So a kill costs at most one finished step and the running one.
- A session that fails leaves the group and the others go on. If a step of the whole group fails,
  each session goes on alone from its checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import Loss, Session
from personalpeft.backends.error_mapping import map_model_errors, to_serving_error
from personalpeft.errors import Cancelled, PersonalPeftError, ServingFailed, format_origin
from personalpeft.learning.options import LearnOptions, wait_while
from personalpeft.learning.train.checkpoint import (
    CheckpointStore,
    SessionState,
    encode_checkpoint,
    restore_checkpoint,
)
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.services import Services

log = logging.getLogger(__name__)

# Longest wait for chats before each step, so that a server that is never idle still learns.
_MAX_YIELD_SECONDS = 5.0

T = TypeVar("T")

_FAILED = "The model failed during training."
_RETRY = "See the log. The next learn resumes from the last checkpoint."
_LESS_MEMORY = (
    "Free memory and learn again, which resumes from the last checkpoint. A smaller batch_size or"
    " rank under [learning] in the base's card takes less."
)

Advance = Callable[[Sequence[Session], Sequence[Sequence[Loss]], Sequence[float]], Sequence[float]]
"""``Backend.advance``: one step of several sessions."""


@dataclass(frozen=True, slots=True)
class TrainJob:
    """One build's training.

    ``open_session`` returns a new session. ``batches`` are the losses of each step. ``progress`` is
    called with the number of steps done and the total.
    """

    open_session: Callable[[], Session]
    batches: Sequence[Sequence[Loss]]
    config: TrainingConfig
    inputs: str
    checkpoints: CheckpointStore
    progress: Callable[[int, int], None] = lambda step, steps: None


@dataclass(frozen=True, slots=True)
class LoopControl:
    """How the caller steers a loop between steps.

    ``yield_to_serving`` waits a limited time while chats are answered. ``max_steps`` is the most
    steps a session makes in this run.
    """

    progress: Callable[[float], None]
    cancelled: Callable[[], bool]
    paused: Callable[[], bool]
    out_of_time: Callable[[], bool]
    yield_to_serving: Callable[[], None]
    max_steps: int | None = None

    def wait(self) -> None:
        """Wait while chats are answered or the caller pauses."""
        self.yield_to_serving()
        wait_while(self.paused, self.cancelled)


def make_loop_control(
    services: Services, options: LearnOptions, started: float, progress: Callable[[float], None]
) -> LoopControl:
    """Return the control of a build that started at ``started`` on the timer."""
    timer, seconds = services.clock.timer, options.seconds
    return LoopControl(
        progress=progress,
        cancelled=options.cancelled,
        paused=options.paused,
        out_of_time=lambda: seconds is not None and timer() - started > seconds,
        yield_to_serving=lambda: services.engine.yield_to_foreground(_MAX_YIELD_SECONDS),
        max_steps=options.steps,
    )


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How far training came: ``losses`` are of the steps of this run, ``pairs`` the weights."""

    steps_done: int
    total_steps: int
    losses: tuple[float, ...]
    resumed_at: int
    pairs: Mapping[str, LoRAWeights]

    @property
    def is_complete(self) -> bool:
        return self.steps_done == self.total_steps


def train(
    jobs: Mapping[str, TrainJob], advance: Advance, control: LoopControl
) -> dict[str, TrainResult | PersonalPeftError]:
    """Train each job to its end or to the end of a budget, but at least one step.

    Returns a result for each job, or the error that concerns it alone. Raises ``Cancelled`` when
    the caller cancels; all steps are in the checkpoints then.
    """
    results: dict[str, TrainResult | PersonalPeftError] = {}
    try:
        _train_group(jobs, advance, control, results)
    except ServingFailed as error:
        if len(jobs) == 1:
            return dict.fromkeys(jobs, error)
    except PersonalPeftError:
        raise
    except Exception as bug:
        if len(jobs) == 1:
            raise
        log.error("a step of several sessions failed: %s", format_origin(bug))
    # A failed step may have changed any session, so each is opened again from its checkpoint.
    for name in [name for name in jobs if name not in results]:
        log.warning("a session goes on alone from its checkpoint")
        try:
            results |= train({name: jobs[name]}, advance, control)
        except Cancelled:
            raise
        except PersonalPeftError as error:
            results[name] = error
        except Exception as bug:  # noqa: BLE001 - any error concerns this session alone
            log.error("and this one failed alone: %s", format_origin(bug))
            results[name] = to_serving_error(_FAILED, bug, hint=_RETRY, memory_hint=_LESS_MEMORY)
    return results


def cancelled_error(where: str) -> Cancelled:
    """Return the error for a learn that the caller cancelled."""
    return Cancelled(
        f"Stopped {where}; nothing has changed.", hint="The next learn goes on from there."
    )


def _train_group(
    jobs: Mapping[str, TrainJob],
    advance: Advance,
    control: LoopControl,
    results: dict[str, TrainResult | PersonalPeftError],
) -> None:
    """Train the jobs together and put the outcome of each that ends into ``results``."""
    with ExitStack() as sessions, ThreadPoolExecutor(1, "personalpeft-checkpoint") as writer:
        runs: dict[str, _Run] = {}
        for name, job in jobs.items():
            run = _catch(partial(_Run, job, sessions, writer))
            if isinstance(run, PersonalPeftError):
                results[name] = run
            else:
                runs[name] = run
        total = sum(run.steps for run in runs.values())
        began = False
        while True:
            control.wait()
            active = {name: run for name, run in runs.items() if name not in results}
            if control.cancelled():
                for run in active.values():
                    run.wait_for_checkpoint()
                done = sum(run.step for run in runs.values())
                raise cancelled_error(f"after step {done} of {total}")
            out_of_time = began and control.out_of_time()
            for name, run in list(active.items()):
                if run.step == run.steps or out_of_time or len(run.losses) == control.max_steps:
                    results[name] = _catch(run.finish)
                    del active[name]
            if not active:
                return
            with _map_model_errors():
                losses = advance(
                    [run.session for run in active.values()],
                    [run.job.batches[run.step] for run in active.values()],
                    [run.learning_rate for run in active.values()],
                )
            began = True
            for (name, run), loss in zip(active.items(), losses, strict=True):
                error = _catch(partial(run.record_step, loss))
                if error is not None:
                    results[name] = error
            control.progress(sum(run.step for run in runs.values()) / total)


class _Run:
    """One open session; ``step`` is the next that it makes."""

    def __init__(self, job: TrainJob, sessions: ExitStack, writer: ThreadPoolExecutor) -> None:
        self.job = job
        self.session = sessions.enter_context(closing(job.open_session()))
        self.steps = len(job.batches)
        progress = restore_checkpoint(job.checkpoints.load(), self.session, job.inputs)
        self.resumed_at = self.step = 0 if progress is None else progress["step"]
        self.losses: list[float] = []
        self._writer = writer
        self._write: Future[None] | None = None
        self.session.precompute_ref_log_probs([loss for batch in job.batches for loss in batch])
        job.progress(self.step, self.steps)

    @property
    def learning_rate(self) -> float:
        return self.job.config.learning_rate_at(self.step, self.steps)

    def record_step(self, loss: float) -> None:
        """Count a step and start to write its checkpoint. Raises what the last write raised."""
        self.losses.append(loss)
        self.step += 1
        # Copied here, because the next step changes the session while this one is written.
        state = self.session.state()
        self.wait_for_checkpoint()
        self._write = self._writer.submit(_write_checkpoint, self.job, self.step, state)
        self.job.progress(self.step, self.steps)

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is durable. Raises what writing it raised."""
        if self._write is not None:
            self._write.result()

    def finish(self) -> TrainResult:
        self.wait_for_checkpoint()
        losses = tuple(self.losses)
        return TrainResult(self.step, self.steps, losses, self.resumed_at, self.session.weights())


def _write_checkpoint(job: TrainJob, step: int, state: SessionState) -> None:
    job.checkpoints.save(encode_checkpoint(state, job.inputs, {"step": step}))


def _map_model_errors() -> AbstractContextManager[None]:
    return map_model_errors(_FAILED, hint=_RETRY, memory_hint=_LESS_MEMORY)


def _catch(act: Callable[[], T]) -> T | PersonalPeftError:
    """Return what ``act`` returns, or the error that concerns one session.

    ``ServingFailed`` is raised: the group may be too large for the memory there is.
    """
    try:
        with _map_model_errors():
            return act()
    except ServingFailed:
        raise
    except PersonalPeftError as error:
        return error
