"""Runs a session from its first step to its last, and can be stopped between any two: by the caller, by a time budget,
or by a kill.

Invariant: however often a build is interrupted and resumed, it ends with the bytes that one uninterrupted run gives; a
step that was saved is never done twice, and a saved session is only ever continued with the same inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.adapters.safetensors_reader import read_tensors
from personalpeft.backends.base import Session, Term
from personalpeft.errors import AdapterError, Cancelled
from personalpeft.learning.recipe import Recipe

SAVE_EVERY = 5


@dataclass(frozen=True, slots=True)
class Desk:
    """Where a half-done session lies: one file that is replaced as a whole."""

    load: Callable[[], bytes | None]
    save: Callable[[bytes], None]


@dataclass(frozen=True, slots=True)
class Trained:
    """How far training came: ``done`` of ``steps``, and the losses of the steps that this run made."""

    done: int
    steps: int
    losses: tuple[float, ...]
    resumed_at: int

    @property
    def complete(self) -> bool:
        return self.done == self.steps


def train(
    session: Session,
    schedule: Sequence[Sequence[Term]],
    recipe: Recipe,
    inputs: str,
    desk: Desk,
    *,
    progress: Callable[[float], None],
    cancelled: Callable[[], bool],
    out_of_time: Callable[[], bool],
) -> Trained:
    """Trains to the end, or to where time runs out, but one step at least, so that runs of any budget get there in the
    end; what was done is then on the desk. Raises ``Cancelled`` when the caller asks to stop.
    """
    first = _resume(session, inputs, desk)
    session.refer([term for terms in schedule for term in terms])
    losses: list[float] = []
    saved = first
    for step in range(first, len(schedule)):
        stop = cancelled()
        if stop or (step > first and out_of_time()):
            if step > saved:
                _save(session, inputs, step, desk)
            if stop:
                raise stopped(f"after step {step} of {len(schedule)}")
            return Trained(step, len(schedule), tuple(losses), first)
        losses.append(session.step(schedule[step], recipe.rate(step, len(schedule))))
        # The last step too: a kill while the candidate is judged then costs no training.
        if (step + 1) % SAVE_EVERY == 0 or step + 1 == len(schedule):
            _save(session, inputs, step + 1, desk)
            saved = step + 1
        progress((step + 1) / len(schedule))
    return Trained(len(schedule), len(schedule), tuple(losses), first)


def stopped(where: str) -> Cancelled:
    """The error for a learn that the caller stopped."""
    return Cancelled(f"Stopped {where}; nothing has changed.", hint="The next learn goes on from there.")


def _save(session: Session, inputs: str, step: int, desk: Desk) -> None:
    arrays = {name: np.atleast_1d(array) for name, array in session.state().items()}
    about = {"inputs": inputs, "step": str(step), "digest": _digest(inputs, step, arrays)}
    desk.save(safetensors.numpy.save(arrays, about))


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
