"""The shaping in a run on a tiny model: lengths fall once a task is mastered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import pytest

import personalpeft
from personalpeft import LearnReport, User
from personalpeft.plugins import Task

pytestmark = pytest.mark.exhaustive


class StartsWithY:
    """A reply passes if it begins with a y, whatever its length."""

    def tasks(self, seed: int, count: int) -> Sequence[Task]:
        return [Task(f"t{number}", f"Say y {number}", {}) for number in range(count)]

    def verify(self, task: Task, reply: str) -> float:
        return float(reply.startswith("y"))


@pytest.fixture
def ada(tmp_path: Path, card: Path) -> Iterator[User]:
    """A user whose model has mastered the task from demonstrations of all lengths."""
    import torch

    torch.set_num_threads(1)
    with personalpeft.open(tmp_path / "home", base=card) as runtime:
        ada = runtime.user("ada")
        for number in range(24):
            ada.teach(f"Say y {7 * number}", "y" * (1 + 5 * number % 12), skill="yes")
        shown = ada.learn("skill.yes").revision
        ada.rollback("skill.yes", shown)
        yield ada


def curves(report: LearnReport) -> tuple[list[float], list[float]]:
    practice = report.scores["practice"]
    return practice["pass_rate"], practice["length"]


def test_lengths_fall_once_a_task_is_mastered_and_it_stays_mastered(ada: User) -> None:
    plain = ada.practice("yes", verifier=StartsWithY(), rounds=48)
    report = ada.practice("yes", verifier=StartsWithY(), shaping="t2t", rounds=48)
    passed, lengths = curves(report)
    # Above a half, the shaper prefers shorter replies.
    assert fmean(passed[:3]) > 0.7, "the task was not mastered to begin with"
    first, last = fmean(lengths[:3]), fmean(lengths[-3:])
    assert last < first / 2
    assert fmean(passed[-5:]) > 0.8
    # The same run without shaping leaves lengths unpressured.
    assert last < fmean(curves(plain)[1][-3:]) / 2
    tasks = report.scores["tasks"]
    assert tasks["length_after"] < tasks["length_before"]
    assert tasks["passed_after"] == tasks["asked"]
