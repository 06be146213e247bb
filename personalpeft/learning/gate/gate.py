"""Judges a candidate revision: promoted, refused or abstained, always with a reason that a person can read. Pure:
numbers in, words out.

A lesson held back is won where the candidate finds the wanted text likelier than the live stack does, by more than
``TIE`` nats a token, and lost where it is less likely by as much. Wins and losses are turned into evidence by betting
(Shafer 2021, "Testing by betting"): each win multiplies by 1.5, each loss by 0.5. From ``ENOUGH`` on a promotion is
final; below it, a revision whose own wins and losses come to more than ``FOR_IT`` goes live on probation, and its successors
go on with its stake (``lineage.py``).

Invariant: harm is counted in total as well as against what is live: from what the base had right, and from the best
that an older question ever was. So many learns that each do a little harm come to the same end as one that does all of
it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from personalpeft.errors import CardError, nearest
from personalpeft.learning.evaluate.rule_gain import RuleGain
from personalpeft.learning.evaluate.text_quality import NOT_MEASURED, TextQuality
from personalpeft.types import Json, Verdict, canonical_digest

TIE_MARGIN = 0.02
CONFIRMATION_E_VALUE = 20.0
WIN, LOSS = 1.5, 0.5
PROBATION_E_VALUE = 1.2
REGRESSION_SHARE = 0.1
MIN_NOVELTY = 0.5
"""So large a share of the new answers has to say anything beside what was asked."""


@dataclass(frozen=True, slots=True)
class Margins:
    """How much worse a candidate may be: the share of older questions, the share of canaries, and the mean KL from the
    base in nats a token. How much sense new lessons have to make: the least ``fit`` and ``order`` (``sense.py``), where 0 asks
    for none.
    """

    retention: float = 0.1
    canaries: float = 0.2
    kl: float = 2.0
    fit: float = 0.1
    order: float = 0.75


# What a margin may be at most, and how to say so.
_ALLOWED: Mapping[str, tuple[float, str]] = {
    "retention": (1, "a number from 0 to 1"),
    "canaries": (1, "a number from 0 to 1"),
    "kl": (math.inf, "a number from 0"),
    "fit": (math.inf, "a number from 0"),
    "order": (math.inf, "a number from 0"),
}


def margins_for(card: str, overrides: Json, *, random: bool = False) -> Margins:
    """The margins for a base: the defaults and what its card's ``[gate]`` says. A ``random`` base knows no language, so it is
    not asked what makes sense. Raises ``CardError`` for a key or a value that a gate does not have.
    """
    known = [field.name for field in fields(Margins)]
    for key, value in overrides.items():
        if key not in known:
            hint = nearest(key, known, what="key")
            raise CardError(f"The card {card} has an unknown key in [gate]: {key}.", hint=hint)
        most, like = _ALLOWED[key]
        number = not isinstance(value, bool) and isinstance(value, int | float)
        if not number or not 0 <= value <= most:
            raise CardError(
                f"The card {card} has a wrong value in [gate]: {key} = {value!r}.",
                hint=f"It is {like}.",
            )
    return replace(Margins(fit=0.0, order=0.0) if random else Margins(), **overrides)


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One pinned lesson: the mean log-prob a token of its wanted text under the live stack and under the candidate;
    where they are known, also under the bare base and the best that it was under any revision that led to the live
    stack.
    """

    signal: str
    before: float
    after: float
    base: float | None = None
    best: float | None = None

    @property
    def change(self) -> float:
        """How much likelier it became, in nats a token; at most one either way, so that no answer outweighs all others."""
        return (
            max(-1.0, min(1.0, self.after - self.before))
            if not math.isnan(self.after - self.before)
            else -1.0
        )

    @property
    def improved(self) -> bool:
        return self.after - self.before > TIE_MARGIN

    @property
    def regressed(self) -> bool:
        # Said the other way round, so that a score that is not a number is a loss.
        return not self.after >= self.before - TIE_MARGIN

    @property
    def regressed_beyond_margin(self) -> bool:
        """Whether it lost more than a tenth of what it had gained over the base. What was learned by heart
        moves by more than a tie with every learn, and is known by heart all the same.
        """
        gained = 0.0 if self.base is None else self.before - self.base
        return not self.after >= self.before - max(TIE_MARGIN, REGRESSION_SHARE * gained)

    @property
    def forgotten(self) -> bool:
        """Whether more than half of what it ever gained over the base is gone."""
        best = self.before if self.best is None else max(self.before, self.best)
        if self.base is None or self.after >= best - TIE_MARGIN:
            return False
        return not self.after >= (self.base + best) / 2 and best > self.base

    def as_json(self) -> dict[str, float | None]:
        """What later candidates are held to."""
        best = max(
            (x for x in (self.before, self.after, self.best) if x is not None and math.isfinite(x)),
            default=None,
        )
        known = {"base": self.base, "after": self.after, "best": best}
        return {name: None if value is None else _figure(value) for name, value in known.items()}


@dataclass(frozen=True, slots=True)
class BaseProbeResults:
    """What the bare base said to the general questions of a digest: which it had right, and how many were broken."""

    questions: str = ""
    right: tuple[int, ...] = ()
    broken: int = 0


NO_PROBE_RESULTS = BaseProbeResults()


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Replies to the general questions. ``right_before``: right under the live stack, ``still_right``: and under the
    candidate; ``base`` and ``kept_of_base`` (of those that it has right) the same with the bare base. The broken are
    empty or go round in circles.
    """

    asked: int = 0
    right_before: int = 0
    still_right: int = 0
    base: BaseProbeResults = NO_PROBE_RESULTS
    kept_of_base: tuple[int, ...] = ()
    broken_before: int = 0
    broken: int = 0

    @property
    def base_right(self) -> int:
        return len(self.base.right)


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that was asked. ``target``: this layer's pins that have not counted yet; ``retention``: everything pinned
    before, of all layers; ``trained``: fresh lessons that were trained on, asked where this build pins none, to decide
    where the target does not.
    ``stake`` and ``counted`` are what the candidate's lineage brought: its evidence, and the pins that it is from. ``sense``
    is that of the new lessons, ``rules`` what each rule explains of what was held back.
    """

    target: tuple[EvalItem, ...]
    retention: tuple[EvalItem, ...]
    trained_examples: tuple[EvalItem, ...]
    probes: ProbeResults
    kl: float
    prior_e_value: float = 1.0
    spent_items: frozenset[str] = frozenset()
    text_quality: TextQuality = NOT_MEASURED
    rule_gains: Mapping[str, RuleGain] = field(default_factory=dict)

    @property
    def e_value(self) -> float:
        """The evidence so far: what one unit staked on the lineage has become. A pin that counted before does not
        count again.
        """
        stake = self.prior_e_value
        for asked in self._counting():
            stake *= WIN if asked.improved else LOSS if asked.regressed else 1.0
        return stake

    @property
    def measured(self) -> bool:
        """Whether every figure is a number: what could not be measured cannot be accepted by name either."""
        asked = (*self.target, *self.retention, *self.trained_examples)
        return math.isfinite(self.kl) and all(
            math.isfinite(a.before) and math.isfinite(a.after) for a in asked
        )

    def as_json(self) -> dict[str, Any]:
        pins = {asked.signal: asked.as_json() for asked in (*self.retention, *self.target)}
        decided = {asked.signal for asked in self._counting() if asked.improved or asked.regressed}
        return {
            "target": _summary(self.target),
            "retention": _summary(self.retention, older=True),
            "trained": _summary(self.trained_examples),
            "canaries": {
                **asdict(self.probes),
                "base_right": self.probes.base_right,
                "kl": _figure(self.kl),
            },
            # Not to so many places: a stake can be small, and 0 would have no way back.
            "bet": float(f"{self.e_value:.6g}"),
            "counted": sorted(self.spent_items | decided),
            "sense": asdict(self.text_quality),
            "rules": {rule: asdict(each) for rule, each in self.rule_gains.items()},
            # Revisions that were judged by the same version can be compared by their figures.
            "questions": {"asked": len(pins), "version": canonical_digest(sorted(pins))[:12]},
            "pins": pins,
        }

    def _counting(self) -> Sequence[EvalItem]:
        return [asked for asked in self.target if asked.signal not in self.spent_items]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The gate's word on a candidate. ``accepted``: the user took it all the same."""

    verdict: Verdict
    reason: str
    probation: bool = False
    accepted: bool = False

    @property
    def live(self) -> bool:
        """Whether the candidate becomes the head."""
        return self.accepted or self.verdict is Verdict.PROMOTED


def judge(
    evidence: Evidence, margins: Margins, *, removes_lessons: bool = False, has_new_lessons: bool = False
) -> Judgement:
    """Harm first and whether it makes sense, then benefit, then whether the evidence is enough. What ``unlearns`` is built without
    what was taken back since: that is its benefit, and it may know the rest a little less well than what is live. Whether it
    ``brings_new`` lessons beside that is said, and how these did.
    """
    if wrong := _harm(evidence, margins, worse=not removes_lessons) or _nonsense(evidence.text_quality, margins):
        return Judgement(Verdict.REFUSED, wrong)
    if removes_lessons:
        better = judge(evidence, margins)
        if better.live:
            return better
        known = _still_known(evidence)
        if not has_new_lessons:
            return _enough(evidence, known)
        # What was taken back goes in any case. What came with it has earned nothing yet.
        return replace(
            _enough(evidence, f"{known}; of what is new {better.reason}"), probation=True
        )
    decided = any(asked.improved or asked.regressed for asked in evidence.target)
    judged_by = evidence.target if decided or not evidence.trained_examples else evidence.trained_examples
    # Of what is known already a little comes and goes with every learn, so a loss has to be worth the name here as well.
    won, lost = sum(a.improved for a in judged_by), sum(a.regressed_beyond_margin for a in judged_by)
    if won == lost == 0:
        return Judgement(Verdict.ABSTAINED, "no difference could be measured on what was held back")
    gained = sum(a.change for a in judged_by if a.improved or a.regressed_beyond_margin)
    what = f"{won} of {len(judged_by)} answers {'held back' if judged_by is evidence.target else 'just learned'} got better"
    if lost:
        what += f", {lost} got worse"
    if won < lost or not gained > 0:
        # Few answers that got a little better do not make up for one that got far worse.
        return Judgement(
            Verdict.REFUSED, what if won <= lost else f"{what}, by more than the others gained"
        )
    if WIN**won * LOSS**lost <= PROBATION_E_VALUE:
        # Two that got better and one that got worse may as well be chance, whatever the sum.
        return Judgement(Verdict.ABSTAINED, f"{what}: too little to go by")
    return _enough(evidence, what)


def override(judgement: Judgement, evidence: Evidence) -> Judgement:
    """What becomes of a judgement that the user overrides by name: the verdict stays, the candidate goes live. Not so
    where it could not be measured: then nobody can know what they accept.
    """
    if not evidence.measured:
        return replace(
            judgement, reason=f"{judgement.reason}; not accepted, since it could not be measured"
        )
    return replace(judgement, reason=f"accepted by name against: {judgement.reason}", accepted=True)


def _enough(evidence: Evidence, what: str) -> Judgement:
    """Promoted, for now or for good."""
    general = evidence.probes
    if general.right_before:
        what += f"; {general.still_right} of {general.right_before} general answers stayed right"
    if evidence.e_value >= CONFIRMATION_E_VALUE:
        return Judgement(Verdict.PROMOTED, what)
    return Judgement(
        Verdict.PROMOTED, f"{what}; on probation, since that is still thin evidence", probation=True
    )


def _still_known(evidence: Evidence) -> str:
    older = evidence.retention
    if not older:
        return "nothing that is left of it was held back to judge by"
    return (
        f"{sum(not asked.forgotten for asked in older)} of {len(older)} older answers are still known"
    )


def _harm(evidence: Evidence, margins: Margins, *, worse: bool) -> str:
    """What a candidate breaks; without ``worse`` an older answer has to be lost, rather than to get worse."""
    general = evidence.probes
    forgotten = general.right_before - general.still_right
    if forgotten > _some(margins.canaries, general.right_before):
        return (
            f"{forgotten} of {general.right_before} general answers that were right are wrong now"
        )
    forgotten = general.base_right - len(general.kept_of_base)
    if forgotten > _some(margins.canaries, general.base_right):
        return f"{forgotten} of {general.base_right} general answers that the base has right are wrong by now"
    if general.broken > min(general.broken_before, general.base.broken) + _some(
        margins.canaries, general.asked
    ):
        return (
            f"{general.broken} of {general.asked} general answers are empty or go round in circles"
        )
    lost = sum(asked.regressed_beyond_margin for asked in evidence.retention) if worse else 0
    if lost > _some(margins.retention, len(evidence.retention)):
        return f"{lost} of {len(evidence.retention)} older answers got worse"
    undone = sum(asked.forgotten for asked in evidence.retention)
    if undone > margins.retention * len(evidence.retention):
        return f"{undone} of {len(evidence.retention)} older answers have lost more than half of what was learned"
    if not evidence.kl <= margins.kl:
        return f"it is too far from the base on general questions (KL {evidence.kl:.2f} nats a token, at most {margins.kl:g})"
    return ""


def _nonsense(sense: TextQuality, margins: Margins) -> str:
    if margins.fit and sense.pmi is not None and not sense.pmi >= margins.fit:
        return "the new answers have nothing to do with what was asked: each is as likely after another's question"
    if margins.order and sense.word_order_gap is not None and not sense.word_order_gap >= margins.order:
        return "the new answers say nothing: their words are as likely in any other order"
    if sense.novelty is not None and sense.novelty < MIN_NOVELTY:
        return "the new answers say nothing: most of them only say over what was asked"
    return ""


def _some(share: float, asked: int) -> float:
    """How many of those that were asked may be lost: one alone may be chance, where any may."""
    return max(1.0, share * asked) if share else 0.0


def _summary(asked: Sequence[EvalItem], *, older: bool = False) -> dict[str, Any]:
    if not asked:
        return {"asked": 0}
    return {
        "asked": len(asked),
        "won": sum(a.improved for a in asked),
        "lost": sum(a.regressed_beyond_margin if older else a.regressed for a in asked),
        "before": _figure(sum(a.before for a in asked) / len(asked)),
        "after": _figure(sum(a.after for a in asked) / len(asked)),
    }


def _figure(value: float) -> float | None:
    """As it is kept and shown; None for what is not a finite number, since JSON has no such thing."""
    return round(value, 4) if math.isfinite(value) else None
