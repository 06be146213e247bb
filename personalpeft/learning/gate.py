"""Judges a candidate revision: promoted, refused or abstained, always with a reason that a person can read. Pure:
numbers in, words out.

A lesson held back is won where the candidate finds the wanted text likelier than the live stack does, by more than
``TIE`` nats a token, and lost where it is less likely by as much. Wins and losses are turned into evidence by betting
(Shafer 2021, "Testing by betting"): each win multiplies by 1.5, each loss by 0.5. From ``ENOUGH`` on a promotion is
final; below it, a revision that does more good than harm goes live on probation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.types import Verdict

TIE = 0.02
ENOUGH = 20.0


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse a candidate may be: the share of older questions, the count of canaries, and the mean KL from the
    base in nats a token.
    """

    retention: float = 0.1
    canaries: int = 2
    kl: float = 2.0


@dataclass(frozen=True, slots=True)
class Asked:
    """One pinned lesson: the mean log-prob a token of its wanted text under the live stack and under the candidate."""

    signal: str
    before: float
    after: float

    @property
    def won(self) -> bool:
        return self.after - self.before > TIE

    @property
    def lost(self) -> bool:
        # Said the other way round, so that a score that is not a number is a loss.
        return not self.after >= self.before - TIE


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was asked. ``target``: this layer's newest pins; ``retention``: everything pinned before, of all layers;
    ``trained``: fresh lessons that were trained on, asked only where nothing was pinned. Canaries: right before, right
    before and after, and replies broken.
    """

    target: tuple[Asked, ...]
    retention: tuple[Asked, ...]
    trained: tuple[Asked, ...]
    canaries: int
    right_before: int
    still_right: int
    broken: int
    broken_before: int
    kl: float

    @property
    def bet(self) -> float:
        """The evidence so far: what one unit staked on the candidate has become."""
        stake = 1.0
        for asked in self.target:
            stake *= 1.5 if asked.won else 0.5 if asked.lost else 1.0
        return stake

    def as_json(self) -> dict[str, Any]:
        return {
            "target": _summary(self.target),
            "retention": _summary(self.retention),
            "trained": _summary(self.trained),
            "canaries": {
                "asked": self.canaries,
                "right_before": self.right_before,
                "still_right": self.still_right,
                "broken_before": self.broken_before,
                "broken": self.broken,
                "kl": _figure(self.kl),
            },
            "bet": round(self.bet, 3),
        }


@dataclass(frozen=True, slots=True)
class Judgement:
    """The gate's word on a candidate."""

    verdict: Verdict
    reason: str
    probation: bool = False


def judge(evidence: Evidence, margins: Margins) -> Judgement:
    """Harm first, then benefit, then whether the evidence is enough."""
    harm = _harm(evidence, margins)
    if harm:
        return Judgement(Verdict.REFUSED, harm)
    judged_by = evidence.target or evidence.trained
    won, lost = sum(a.won for a in judged_by), sum(a.lost for a in judged_by)
    if won == lost == 0:
        return Judgement(Verdict.ABSTAINED, "no difference could be measured on what was held back")
    what = f"{won} of {len(judged_by)} answers {'held back' if evidence.target else 'just learned'} got better"
    if lost:
        what += f", {lost} got worse"
    if won <= lost:
        return Judgement(Verdict.REFUSED, what)
    if evidence.right_before:
        what += f"; {evidence.still_right} of {evidence.right_before} general answers stayed right"
    if evidence.bet >= ENOUGH:
        return Judgement(Verdict.PROMOTED, what)
    return Judgement(Verdict.PROMOTED, f"{what}; on probation, since that is still thin evidence", probation=True)


def _harm(evidence: Evidence, margins: Margins) -> str:
    forgotten = evidence.right_before - evidence.still_right
    if forgotten > margins.canaries:
        return f"{forgotten} of {evidence.right_before} general answers that were right are wrong now"
    if evidence.broken > evidence.broken_before + margins.canaries:
        return f"{evidence.broken} of {evidence.canaries} general answers are empty or go round in circles"
    lost = sum(asked.lost for asked in evidence.retention)
    if lost > margins.retention * len(evidence.retention):
        return f"{lost} of {len(evidence.retention)} older answers got worse"
    if not evidence.kl <= margins.kl:
        return f"it is too far from the base on general questions (KL {evidence.kl:.2f} nats a token, at most {margins.kl:g})"
    return ""


def _summary(asked: Sequence[Asked]) -> dict[str, Any]:
    if not asked:
        return {"asked": 0}
    return {
        "asked": len(asked),
        "won": sum(a.won for a in asked),
        "lost": sum(a.lost for a in asked),
        "before": _figure(sum(a.before for a in asked) / len(asked)),
        "after": _figure(sum(a.after for a in asked) / len(asked)),
    }


def _figure(value: float) -> float | None:
    """As it is kept and shown; None for what is not a finite number, since JSON has no such thing."""
    return round(value, 4) if math.isfinite(value) else None
