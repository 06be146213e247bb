"""``bench rebase``: what a user keeps who moves to another base.

Each user learns a realistic style (``edit_styles.py``) from twelve edits. Then the layer is built
anew on the other base, and both stacks are asked the same held-out questions. Nothing switches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import personalpeft
from benchmarks.edit_styles import EditStyle
from benchmarks.learn_course import chat_all
from personalpeft.base_models.registry import find_card


@dataclass(frozen=True, slots=True)
class Move:
    """How one user's layer moved.

    ``improved``, ``regressed`` and ``tied`` count the held-out questions, of which ``before`` and
    ``after`` are the mean log-probs in nats a byte. ``leakage`` is the AUC of membership inference
    on the other base.
    """

    style: str
    outcome: str
    reason: str
    improved: int
    regressed: int
    tied: int
    before: float | None
    after: float | None
    leakage: float | None
    learn_seconds: float
    rebase_seconds: float


@dataclass(frozen=True, slots=True)
class RebaseBench:
    """The object that ``--json`` prints. ``to`` is the name of the other base."""

    bench: str
    base: str
    to: str
    users: tuple[Move, ...]


def bench_rebase(
    base: str,
    to: str,
    styles: tuple[EditStyle, ...],
    *,
    backend: str,
    progress: Callable[[str, float], None],
) -> RebaseBench:
    """Move one user for each style. Raises ``NotFound`` for an unknown base, before a learn."""
    find_card(to)
    moves = []
    for number, style in enumerate(styles):
        progress(style.name, number / len(styles))
        moves.append(measure_move(base, to, style, backend))
    return RebaseBench("rebase", base, to, tuple(moves))


def measure_move(base: str, to: str, style: EditStyle, backend: str) -> Move:
    """Learn a style on one base, and compare it with the same layer on the other."""
    with (
        tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as home,
        personalpeft.open(home, base, backend) as runtime,
    ):
        user = runtime.user("mover")
        prompts = [case.prompt for case in style.lessons]
        for case, reply in zip(style.lessons, chat_all(user, prompts, style.tokens), strict=True):
            user.feedback(reply, edit=case.answer)
        learned = user.learn(accept=True)
        report = runtime.rebase("mover", to, compare_only=True)
        leakages = [each.scores["leakage"] for each in user.revisions() if each.base == report.to]
    asked = len(report.questions)
    means = (
        round(sum(getattr(each, side) for each in report.questions) / asked, 3) if asked else None
        for side in ("before", "after")
    )
    return Move(
        style.name,
        str(report.outcome),
        report.reason,
        report.improved,
        report.regressed,
        report.tied,
        *means,
        leakages[0]["auc"] if leakages else None,
        round(learned.seconds, 1),
        round(report.seconds, 1),
    )
