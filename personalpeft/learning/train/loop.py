"""Runs sessions from their first steps to their last, all of them in one pass a step, and can be stopped between any two:
by the caller, by a budget, or by a kill.

Invariants:

- However often a build is interrupted and resumed, and whoever is trained beside it, it ends with what one uninterrupted
  run alone gives: to the byte where the backend's ``advance`` says so, else to its rounding.
- Every step is saved, by a thread beside the next one, and no step begins before the one before the last is safe. So a
  kill costs one step that was done, and the one that was running. What was saved is never done twice, and is only ever
  continued with the same inputs.
- Whose saving or step fails leaves the group; the others go on. Where the model fails at a step of several, each goes on
  alone from what was saved.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.adapters.types import Pair
from personalpeft.backends.base import Session, Term
from personalpeft.backends.error_mapping import failure, model_faults
from personalpeft.errors import (
    AdapterError,
    Cancelled,
    PersonalPeftError,
    ServingFailed,
    where_raised,
)
from personalpeft.learning.options import Order, wait_while
from personalpeft.learning.train.config import Recipe
from personalpeft.services import Services

log = logging.getLogger(__name__)

# The longest wait for replies before each step: a server that is never idle still learns.
_YIELD_SECONDS = 5.0

T = TypeVar("T")

_FAILED = "The model failed while it learned."
_AGAIN = "The log has the details; the next learn goes on from what was done."
_LESS = (
    "Close what else takes memory and learn again, which goes on from what was done; a smaller batch or rank under [learning] in the"
    " base's card takes less."
)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a half-done session lies: one file that is replaced as a whole."""

    load: Callable[[], bytes | None]
    save: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Course:
    """One build's training, decided to its last step: ``open`` gives a session that has not begun, ``progress`` hears how many
    of its own steps are done, of how many.
    """

    open: Callable[[], Session]
    schedule: Sequence[Sequence[Term]]
    recipe: Recipe
    inputs: str
    desk: Desk
    progress: Callable[[int, int], None] = lambda step, steps: None


@dataclass(frozen=True, slots=True)
class Manners:
    """What is asked between two steps: whether to stop, to pause, or that time is up. ``give_way`` waits, not for ever,
    for those who should go first; ``steps`` is how many a session may make in this run.
    """

    progress: Callable[[float], None]
    cancelled: Callable[[], bool]
    paused: Callable[[], bool]
    out_of_time: Callable[[], bool]
    give_way: Callable[[], None]
    steps: int | None = None

    def wait(self) -> None:
        """Until nobody who goes first is there, and nobody pauses it."""
        self.give_way()
        wait_while(self.paused, self.cancelled)


def manners_of(
    services: Services, order: Order, began: float, progress: Callable[[float], None]
) -> Manners:
    """Return the control of a build that began at ``began`` on the timer."""
    timer = services.clock.timer
    return Manners(
        progress=progress,
        cancelled=order.cancelled,
        paused=order.paused,
        out_of_time=lambda: order.seconds is not None and timer() - began > order.seconds,
        give_way=lambda: services.engine.give_way(_YIELD_SECONDS),
        steps=order.steps,
    )


@dataclass(frozen=True, slots=True)
class Trained:
    """How far training came: ``done`` of ``steps``, the losses of the steps that this run made, and the layer as it is
    then.
    """

    done: int
    steps: int
    losses: tuple[float, ...]
    resumed_at: int
    pairs: Mapping[str, Pair]

    @property
    def complete(self) -> bool:
        return self.done == self.steps


Advance = Callable[[Sequence[Session], Sequence[Sequence[Term]], Sequence[float]], Sequence[float]]
"""``Backend.advance``: one step of several sessions."""


def train(
    courses: Mapping[str, Course], advance: Advance, manners: Manners
) -> dict[str, Trained | PersonalPeftError]:
    """Trains each to its end, or to where a budget runs out, but one step at least, so that runs of any budget get there
    in the end; what was done is then on the desk. What the model fails at is the outcome of whom it fails for alone,
    ``ServingFailed``. Raises ``Cancelled`` when the caller asks to stop.
    """
    outcomes: dict[str, Trained | PersonalPeftError] = {}
    try:
        _together(courses, advance, manners, outcomes)
    except ServingFailed as error:
        if len(courses) == 1:
            return dict.fromkeys(courses, error)
    except PersonalPeftError:
        raise
    except Exception as bug:
        if len(courses) == 1:
            raise
        log.error("a step of several sessions failed: %s", where_raised(bug))
    # Nobody knows what a step that failed half-way has changed, so each begins again with a session of its own.
    for name in [name for name in courses if name not in outcomes]:
        log.warning("a session goes on alone from what was saved")
        try:
            outcomes |= train({name: courses[name]}, advance, manners)
        except Cancelled:
            raise
        except PersonalPeftError as error:
            outcomes[name] = error
        except Exception as bug:  # noqa: BLE001 - whatever it is, it is this session's alone
            log.error("and this one failed alone: %s", where_raised(bug))
            outcomes[name] = failure(_FAILED, bug, hint=_AGAIN, less=_LESS)
    return outcomes


def stopped(where: str) -> Cancelled:
    """The error for a learn that the caller stopped."""
    return Cancelled(
        f"Stopped {where}; nothing has changed.", hint="The next learn goes on from there."
    )


class _Run:
    """One session on its way; ``step`` is the next that it makes."""

    def __init__(self, course: Course, session: Session) -> None:
        self.course = course
        self.session = session
        self.steps = len(course.schedule)
        self.first = self.step = _resume(session, course.inputs, course.desk)
        self.losses: list[float] = []
        self._saving: Future[None] | None = None
        session.refer([term for terms in course.schedule for term in terms])
        course.progress(self.step, self.steps)

    @property
    def rate(self) -> float:
        return self.course.recipe.rate(self.step, self.steps)

    def stepped(self, loss: float, scribe: ThreadPoolExecutor) -> None:
        """Notes a step, and has it saved beside the next one once the one before it is. Raises what that raised."""
        self.losses.append(loss)
        self.step += 1
        # Copied out here, since the next step changes it; turned into a file and written there.
        state = self.session.state()
        self.settle()
        self._saving = scribe.submit(_save, self.course, self.step, state)
        self.course.progress(self.step, self.steps)

    def settle(self) -> None:
        """Returns when what was done is on the desk. Raises what saving it raised."""
        if self._saving is not None:
            self._saving.result()

    def done(self) -> Trained:
        self.settle()
        return Trained(self.step, self.steps, tuple(self.losses), self.first, self.session.pairs())


def _together(
    courses: Mapping[str, Course],
    advance: Advance,
    manners: Manners,
    outcomes: dict[str, Trained | PersonalPeftError],
) -> None:
    with ExitStack() as sessions, ThreadPoolExecutor(1, "personalpeft-saving") as scribe:
        runs: dict[str, _Run] = {}
        for name, course in courses.items():
            opened = _tried(partial(_opened, course, sessions))
            if isinstance(opened, PersonalPeftError):
                outcomes[name] = opened
            else:
                runs[name] = opened
        total = sum(run.steps for run in runs.values())
        began = False
        while True:
            manners.wait()
            if manners.cancelled():
                for name, run in runs.items():
                    if name not in outcomes:
                        run.settle()
                raise stopped(f"after step {sum(run.step for run in runs.values())} of {total}")
            spent = began and manners.out_of_time()
            for name, run in runs.items():
                over = manners.steps is not None and len(run.losses) >= manners.steps
                if name not in outcomes and (run.step == run.steps or over or spent):
                    outcomes[name] = _tried(run.done)
            going = {name: run for name, run in runs.items() if name not in outcomes}
            if not going:
                return
            with _guarded():
                losses = advance(
                    [run.session for run in going.values()],
                    [run.course.schedule[run.step] for run in going.values()],
                    [run.rate for run in going.values()],
                )
            began = True
            for (name, run), loss in zip(going.items(), losses, strict=True):
                stepped = _tried(partial(run.stepped, loss, scribe))
                if stepped is not None:
                    outcomes[name] = stepped
            manners.progress(sum(run.step for run in runs.values()) / total)


def _opened(course: Course, sessions: ExitStack) -> _Run:
    return _Run(course, sessions.enter_context(closing(course.open())))


def _guarded() -> AbstractContextManager[None]:
    return model_faults(_FAILED, hint=_AGAIN, less=_LESS)


def _tried(do: Callable[[], T]) -> T | PersonalPeftError:
    """What comes of it, or the error that is one session's own. Where the model fails there may be no memory for so many at
    once, so that is raised.
    """
    try:
        with _guarded():
            return do()
    except ServingFailed:
        raise
    except PersonalPeftError as error:
        return error


def _save(course: Course, step: int, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
    arrays = {name: np.atleast_1d(array) for name, array in state.items()}
    about = {
        "inputs": course.inputs,
        "step": str(step),
        "digest": _digest(course.inputs, step, arrays),
    }
    course.desk.save(safetensors.numpy.save(arrays, about))


def _resume(session: Session, inputs: str, desk: Desk) -> int:
    """The first step that is still to do. What cannot be read or is of another build is as if it were not there."""
    data = desk.load()
    if data is None:
        return 0
    try:
        tensors = read_tensors(data, source="the saved session")
        step = int(tensors.metadata["step"])
        # A wrong number that still is one would go unnoticed into the revision.
        if tensors.metadata["digest"] != _digest(inputs, step, tensors.arrays):
            return 0
        session.restore(tensors.arrays)
    except (AdapterError, KeyError, ValueError):
        return 0
    return step


def _digest(inputs: str, step: int, arrays: Mapping[str, npt.NDArray[np.float32]]) -> str:
    """Of all that a saved session says, and of the inputs that it was made from."""
    digest = hashlib.sha256(f"{inputs} {step} ".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
