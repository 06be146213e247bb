"""The families of the package reasoning-gym as tasks.

A family may have settings of its own after its name: ``chain_sum,max_terms=2,max_digits=1``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from personalpeft.errors import InvalidInput, MissingPackage, NotFound, suggest_nearest
from personalpeft.plugins import Task


class ReasoningGym:
    """Made for a family. Raises ``MissingPackage``, ``NotFound`` with the nearest name, ``InvalidInput`` for a setting."""

    def __init__(self, family: str) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingPackage(
                "Its tasks need the package reasoning-gym.",
                hint="pip install 'personalpeft[reasoning-gym]'",
            ) from error
        self._name, *settings = family.split(",")
        if self._name not in DATASETS:
            raise NotFound(
                f"reasoning-gym has no family {self._name!a}.",
                hint=suggest_nearest(self._name, DATASETS, what="family"),
            )
        self._settings = dict(_setting(text) for text in settings)
        self._create = reasoning_gym.create_dataset
        self._score = self._made(seed=0, size=1).score_answer

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Those of one data set of this seed."""
        made = self._made(seed=seed, size=count)
        return [
            Task(f"{self._name} {seed} {number}", entry["question"], dict(entry))
            for number, entry in enumerate(made)
        ]

    def verify(self, task: Task, reply: str) -> float:
        """The family's own score of the whole reply, or of its last word where that is better: it asks for the bare answer,
        and a small model says more.
        """
        words = reply.split()
        answers = dict.fromkeys([reply.strip(), words[-1].rstrip(".!") if words else ""])
        return max(float(self._score(answer, entry=dict(task.about))) for answer in answers)

    def _made(self, *, seed: int, size: int) -> Any:
        try:
            return self._create(self._name, seed=seed, size=size, **self._settings)
        except (TypeError, ValueError, AssertionError) as error:
            raise InvalidInput(
                f"The family {self._name} cannot be made so: {error}",
                hint="Settings look like max_terms=2.",
            ) from error


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    known = {"true": True, "false": False}
    try:
        return key.strip(), known[value] if value in known else float(
            value
        ) if "." in value else int(value)
    except ValueError:
        raise InvalidInput(
            f"{text!a} is not a setting of a family.",
            hint="Write NAME=NUMBER, as in chain_sum,max_terms=2.",
        ) from None
