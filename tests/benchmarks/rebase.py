"""``bench rebase``: what a user keeps who moves to another base.

Each user learns a realistic style (``edit_styles.py``) from twelve edits. Then the layer is built
anew on the other base, and both stacks are asked the same held-out questions. Nothing switches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.edit_styles import EditStyle
from benchmarks.homes import temporary_home
from benchmarks.learn_course import chat_all
from personalpeft.base_models.registry import find_card


def bench_rebase(
    base: str,
    to: str,
    styles: tuple[EditStyle, ...],
    *,
    backend: str,
    progress: Callable[[str, float], None],
) -> dict[str, Any]:
    """Move one user for each style. Raises ``NotFound`` for an unknown base, before a learn."""
    find_card(to)
    moves = []
    for number, style in enumerate(styles):
        progress(style.name, number / len(styles))
        moves.append(measure_move(base, to, style, backend))
    return {"bench": "rebase", "base": base, "to": to, "users": moves}


def measure_move(base: str, to: str, style: EditStyle, backend: str) -> dict[str, Any]:
    """Learn a style on one base, and compare it with the same layer on the other.

    ``improved``, ``regressed`` and ``tied`` count the held-out questions, of which ``before`` and
    ``after`` are the mean log-probs in nats a byte. ``leakage`` is the AUC of membership inference
    on the other base.
    """
    with temporary_home(base, backend) as runtime:
        user = runtime.user("mover")
        prompts = [case.prompt for case in style.lessons]
        for case, reply in zip(style.lessons, chat_all(user, prompts, style.tokens), strict=True):
            user.feedback(reply, edit=case.answer)
        learned = user.learn(accept=True)
        report = runtime.rebase("mover", to, compare_only=True)
        leakages = [each.scores["leakage"] for each in user.revisions() if each.base == report.to]
    asked = len(report.questions)
    means = {
        side: round(sum(getattr(each, side) for each in report.questions) / asked, 3)
        if asked
        else None
        for side in ("before", "after")
    }
    return {
        "style": style.name,
        "outcome": str(report.outcome),
        "reason": report.reason,
        "improved": report.improved,
        "regressed": report.regressed,
        "tied": report.tied,
        **means,
        "leakage": leakages[0]["auc"] if leakages else None,
        "learn_seconds": round(learned.seconds, 1),
        "rebase_seconds": round(report.seconds, 1),
    }
