"""The measure of fidelity as a verifier: an answer is right if it is the wanted one, word for word."""

from __future__ import annotations

from collections.abc import Sequence

from personalpeft.plugins import Task

EXACT_MATCH = "exact-match"
"""The name of the verifier below, as a plugin."""


class ExactMatch:
    """Judges the answers to held-out demonstrations. It sets no tasks of its own.

    Args:
        family: Ignored; every verifier takes one.
    """

    def __init__(self, family: str = "") -> None:
        pass

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        """Return no tasks: there is nothing to practice."""
        return ()

    def verify(self, task: Task, reply: str) -> float:
        """Return 1 where the reply is the task's "answer", apart from space around it."""
        return float(reply.strip() == str(task.about["answer"]).strip())
