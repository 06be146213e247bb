"""Sums and differences of two small numbers: short tasks with one right answer."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

from personalpeft.errors import InvalidInput
from personalpeft.plugins import RIGHT, Task

_DIGITS = 3
_LONGEST = 24


class Sums:
    """Tasks of a family: the number of digits, "1" to "3"."""

    def __init__(self, family: str) -> None:
        if family not in ("", *map(str, range(1, _DIGITS + 1))):
            raise InvalidInput(
                f"There are no sums of {family!a} digits.",
                hint=f"Give 1 to {_DIGITS}, or no family for 1.",
            )
        self._largest = 10 ** int(family or 1) - 1

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Return up to `count` different tasks."""
        chance = random.Random(seed)
        every = 2 * (self._largest + 1) ** 2
        return [self._task(number) for number in chance.sample(range(every), min(count, every))]

    def verify(self, task: Task, reply: str) -> Mapping[str, float]:
        """Score whether the last number is the answer, and whether the reply is brief."""
        numbers = re.findall(r"-?\d+", reply)
        right = bool(numbers) and int(numbers[-1]) == task.about["answer"]
        return {RIGHT: float(right), "brief": float(len(reply.strip()) <= _LONGEST)}

    def _task(self, number: int) -> Task:
        number, minus = divmod(number, 2)
        first, second = divmod(number, self._largest + 1)
        text = f"{first} {'-' if minus else '+'} {second}"
        return Task(
            text, f"What is {text}?", {"answer": first - second if minus else first + second}
        )
