"""What happened in a practice, step by step, and how it is kept so that a practice that was stopped can go on.

Invariant: what goes on from a page is the same to the byte as what was never stopped. A page that cannot be read, or is of
a practice with other inputs, is as if there were none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.backends.base import Continuation, Session
from personalpeft.errors import AdapterError
from personalpeft.learning.rl.policy_loss import PolicyGradient
from personalpeft.learning.rl.rollouts import Group
from personalpeft.learning.rl.tasks import UNSEEN, Standing
from personalpeft.learning.train.losses import Supervised

Step: TypeAlias = tuple[Supervised | PolicyGradient, ...]
"""What one step of a practice learns from."""


@dataclass(slots=True)
class Diary:
    """``passed`` are the different replies that were right, in the order in which they were found; ``todo`` are the steps
    that the last round asks for and that were not made yet. Its owner is the practice that runs.
    """

    standings: dict[str, Standing] = field(default_factory=dict)
    rounds: int = 0
    steps: int = 0
    replies: int = 0
    pass_rates: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    passed: dict[Continuation, None] = field(default_factory=dict)
    todo: tuple[Step, ...] = ()

    def tried(self, groups: Sequence[Group]) -> None:
        """Adds one round, without its steps."""
        for group in groups:
            known = self.standings.get(group.task.id, UNSEEN)
            self.standings[group.task.id] = known.after(
                group.passed, len(group.rollouts) - group.passed
            )
        replies = [rollout for group in groups for rollout in group.rollouts]
        self.rounds += 1
        self.replies += len(replies)
        self.pass_rates.append(round(sum(r.attempt.passed for r in replies) / len(replies), 4))
        self.lengths.append(round(sum(r.length for r in replies) / len(replies), 4))
        self.passed |= {r.said: None for r in replies if r.attempt.passed}

    def stepped(self) -> None:
        """Adds the step that was the next to do, after which the model is another."""
        self.steps += 1
        self.todo = self.todo[1:]
        self.standings = {name: standing.faded() for name, standing in self.standings.items()}

    def as_json(self) -> dict[str, Any]:
        """For the report: how many, and the curves of pass rate and length (a share of the longest) by round."""
        states = [standing.state for standing in self.standings.values()]
        return {
            "rounds": self.rounds,
            "steps": self.steps,
            "replies": self.replies,
            "tasks": {state: states.count(state) for state in ("open", "solved", "hopeless")},
            "pass_rate": self.pass_rates,
            "length": self.lengths,
        }


def write_page(diary: Diary, session: Session, inputs: str) -> bytes:
    """All that the next step depends on, with the name of what the practice depends on."""
    arrays = {name: np.atleast_1d(array) for name, array in session.state().items()}
    told = {each.name: getattr(diary, each.name) for each in fields(diary)}
    told["standings"] = {name: asdict(standing) for name, standing in diary.standings.items()}
    told["passed"] = [(said.prompt, said.completion) for said in diary.passed]
    told["todo"] = [[_told(term) for term in step] for step in diary.todo]
    words = json.dumps(told)
    about = {"inputs": inputs, "diary": words, "digest": _digest(inputs, words, arrays)}
    return safetensors.numpy.save(arrays, about)


def read_page(page: bytes | None, session: Session, inputs: str) -> Diary:
    """The diary as it was, with the session brought to where it was then; or an empty one."""
    if page is None:
        return Diary()
    try:
        tensors = read_tensors(page, source="the saved practice")
        words = tensors.metadata["diary"]
        # A wrong number that still is one would go unnoticed into the revision.
        if tensors.metadata["digest"] != _digest(inputs, words, tensors.arrays):
            return Diary()
        told = json.loads(words)
        session.restore(tensors.arrays)
    except (AdapterError, KeyError, ValueError):
        return Diary()
    standings = {name: Standing(**standing) for name, standing in told.pop("standings").items()}
    passed = {Continuation(tuple(prompt), tuple(said)): None for prompt, said in told.pop("passed")}
    todo = tuple(tuple(_term(**term) for term in step) for step in told.pop("todo"))
    return Diary(standings=standings, passed=passed, todo=todo, **told)


def _told(term: Supervised | PolicyGradient) -> dict[str, Any]:
    (said,) = term.continuations
    told = {"said": (said.prompt, said.completion), "weight": term.weight}
    if isinstance(term, PolicyGradient):
        told |= {"advantage": term.advantage, "longest": term.longest, "kl": term.kl}
    return told


def _term(said: Sequence[Sequence[int]], **numbers: Any) -> Supervised | PolicyGradient:
    prompt, completion = map(tuple, said)
    kind = PolicyGradient if "advantage" in numbers else Supervised
    return kind(Continuation(prompt, completion), **numbers)


def _digest(inputs: str, words: str, arrays: Mapping[str, npt.NDArray[np.float32]]) -> str:
    digest = hashlib.sha256(f"{inputs} {words} ".encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
