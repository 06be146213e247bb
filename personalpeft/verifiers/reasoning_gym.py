"""The families of the package reasoning-gym as tasks.

A family may have settings of its own after its name: ``chain_sum,max_terms=2,max_digits=1``.

The package scores a reply in this process, and a user of a server may choose the family and teach the
reply. So families are refused whose scorer runs the reply as Python, or needs time or memory without
a limit. The scorers of one version were read for this, so no other version is used.

Settings may ask for tasks of any size. So a child process with limits makes the tasks first, and this
process makes the same ones only if the child did.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from personalpeft.errors import InvalidInput, MissingPackage, NotFound, suggest_nearest
from personalpeft.plugins import Task
from personalpeft.sandbox import Limits, run_reader

_VERSION = "0.1.25"
_RUNS_REPLY = (
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
)
# "1e999999999", "F+999999999" and the like keep their scorers busy for hours.
_UNLIMITED = ("coin_flip", "propositional_logic", "rubiks_cube", "rush_hour")
# The tasks of a practice take less than a second.
_LIMITS = Limits(memory=4 << 30, seconds=10)
# It imports the package, which may be missing here.
_TASKS = f"{__package__}.reasoning_gym_tasks"


class ReasoningGym:
    """Tasks of a family.

    Raises:
        MissingPackage: reasoning-gym is not installed, or in another version.
        NotFound: The family is unknown.
        InvalidInput: A setting is malformed, or scoring the family is not safe.
    """

    def __init__(self, family: str) -> None:
        try:
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise MissingPackage(
                "Its tasks need the package reasoning-gym.",
                hint="pip install 'personalpeft[reasoning-gym]'",
            ) from error
        if (installed := version("reasoning-gym")) != _VERSION:
            raise MissingPackage(
                f"Its tasks need reasoning-gym {_VERSION}, and {installed} is installed: "
                "only the scorers of that version are known to be safe.",
                hint="pip install 'personalpeft[reasoning-gym]'",
            )
        self._name, *settings = family.split(",")
        if self._name not in DATASETS:
            raise NotFound(
                f"reasoning-gym has no family {self._name!a}.",
                hint=suggest_nearest(self._name, DATASETS, what="family"),
            )
        if self._name in _RUNS_REPLY + _UNLIMITED:
            raise InvalidInput(
                f"The family {self._name} is not offered: its scorer is not safe.",
                hint=f"Choose another family than {', '.join(_RUNS_REPLY + _UNLIMITED)}.",
            )
        self._settings = dict(_setting(text) for text in settings)
        self._check_limits(seed=0, size=1)
        self._create_dataset = import_module(_TASKS).create_dataset
        self._score = self._create_dataset(self._name, self._settings, seed=0, size=1).score_answer

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Return the tasks of the data set with this seed.

        Raises:
            InvalidInput: They take too much time or memory.
        """
        self._check_limits(seed=seed, size=count)
        made = self._create_dataset(self._name, self._settings, seed=seed, size=count)
        return [
            Task(f"{self._name} {seed} {number}", entry["question"], dict(entry))
            for number, entry in enumerate(made)
        ]

    def verify(self, task: Task, reply: str) -> float:
        """Return the better score of the whole reply and of its last word.

        Families expect the bare answer, and a small model often adds words.
        """
        words = reply.split()
        answers = dict.fromkeys([reply.strip(), words[-1].rstrip(".!") if words else ""])
        return max(self._score_answer(answer, task) for answer in answers)

    def _score_answer(self, answer: str, task: Task) -> float:
        try:
            return float(self._score(answer, entry=dict(task.about)))
        except Exception:  # noqa: BLE001 - some scorers raise for an answer that they cannot read.
            return 0.0

    def _check_limits(self, *, seed: int, size: int) -> None:
        run_reader(
            f"{_TASKS}:make_tasks",
            {"name": self._name, "settings": self._settings, "seed": seed, "size": size},
            _LIMITS,
            source=f"Tasks of the family {self._name} with these settings",
            error=InvalidInput,
            hint="Choose smaller numbers.",
        )


def _setting(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    if value in ("true", "false"):
        return key.strip(), value == "true"
    try:
        return key.strip(), float(value) if "." in value else int(value)
    except ValueError:
        raise InvalidInput(
            f"{text!a} is not a setting of a family.",
            hint="Write NAME=NUMBER, as in chain_sum,max_terms=2.",
        ) from None
