"""Judge a candidate revision: promoted, refused or abstained, with reasons. Pure.

A held-out lesson is improved where its log-prob per token rises by more than ``TIE_MARGIN`` nats
from the live stack to the candidate, and regressed where it falls by as much. Improved and
regressed items multiply the e-value of the layer (Shafer 2021, "Testing by betting") by 1.5 and by
0.5, whatever the verdict. From ``CONFIRMATION_E_VALUE`` on a promotion is final.

Below it a policy decides, and no test: a candidate goes live on probation if its own items come to
more than ``PROBATION_E_VALUE`` and their mean change is at least ``min_effect``.
``tests/fast/learning/test_gate_rates.py`` measures how often noise and harm pass.

Invariant: harm is counted in total as well as against the live stack: from the probes that the base
answers, and from the best that an older item ever was. Many learns that each do a little harm are
refused where one that does all of it would be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from personalpeft.learning.evaluate.measures import NOT_MEASURED, RuleGain, TextQuality
from personalpeft.learning.outcomes import (
    Reason,
    ReasonCode,
    Reasons,
    reason,
    render_reasons,
)
from personalpeft.learning.train.config import CardConfig, Fraction, Number
from personalpeft.types import Json, Revision, Verdict, canonical_digest

TIE_MARGIN = 0.02
CONFIRMATION_E_VALUE = 20.0
IMPROVED_FACTOR, REGRESSED_FACTOR = 1.5, 0.5
PROBATION_E_VALUE = 1.2
REGRESSION_SHARE = 0.1
MIN_NOVELTY = 0.5
"""The least share of new answers that must say anything beside the request itself."""


class Margins(CardConfig):
    """The harm that a candidate may do, and the least quality of new lessons."""

    STORED_NAMES: ClassVar[Mapping[str, str]] = {
        "max_regressed": "retention",
        "max_probes_lost": "canaries",
        "max_kl": "kl",
        "min_pmi": "fit",
        "min_word_order_gap": "order",
    }

    max_regressed: Fraction = 0.1  # share of older items that may regress
    max_probes_lost: Fraction = 0.2  # share of right answers to probes that may be lost
    max_kl: Number = 2.0  # mean KL from the base on the probes, in nats a token
    min_pmi: Number = 0.1  # see ``TextQuality``; 0 switches the check off
    min_word_order_gap: Number = 0.75  # see ``TextQuality``; 0 switches the check off
    min_effect: Number = 0.1  # least mean gain of held-out items, in nats a token


def load_margins(card: str, overrides: Json, *, random: bool = False) -> Margins:
    """Return the margins for a base: the defaults, changed by its card's ``[gate]`` table.

    A ``random`` base knows no language, so text quality cannot be measured.
    """
    defaults = {"min_pmi": 0.0, "min_word_order_gap": 0.0} if random else {}
    return Margins(**{**defaults, **Margins.read_table(card, "gate", overrides)})


@dataclass(frozen=True, slots=True)
class EvalItem:
    """One held-out lesson, scored: mean log-probs per token of its chosen text.

    ``before`` is under the live stack, ``after`` under the candidate, ``base`` under the bare base
    and ``best`` the highest under any revision that led to the live stack; None where unknown.
    """

    signal: str
    before: float
    after: float
    base: float | None = None
    best: float | None = None

    @property
    def change(self) -> float:
        """The change in nats a token, clipped to 1 so that no item outweighs all others."""
        change = self.after - self.before
        return -1.0 if math.isnan(change) else max(-1.0, min(1.0, change))

    @property
    def improved(self) -> bool:
        return self.after - self.before > TIE_MARGIN

    @property
    def regressed(self) -> bool:
        # Negated, so that NaN counts as regressed.
        return not self.after >= self.before - TIE_MARGIN

    @property
    def regressed_beyond_margin(self) -> bool:
        """Whether it lost more than a tenth of its gain over the base.

        A memorized item moves by more than a tie with every learn, and stays memorized.
        """
        gain = 0.0 if self.base is None else self.before - self.base
        return not self.after >= self.before - max(TIE_MARGIN, REGRESSION_SHARE * gain)

    @property
    def forgotten(self) -> bool:
        """Whether more than half of its best gain over the base is lost."""
        best = self.before if self.best is None else max(self.before, self.best)
        if self.base is None or self.after >= best - TIE_MARGIN:
            return False
        return not self.after >= (self.base + best) / 2 and best > self.base

    def as_json(self) -> dict[str, float | None]:
        """Return what later candidates are compared with."""
        values = [value for value in (self.before, self.after, self.best) if value is not None]
        best = max(filter(math.isfinite, values), default=None)
        stored = {"base": self.base, "after": self.after, "best": best}
        return {name: None if value is None else _round(value) for name, value in stored.items()}


@dataclass(frozen=True, slots=True)
class BaseProbeResults:
    """The bare base's answers to the probes of a digest: which are right, how many degenerate."""

    questions: str = ""
    right: tuple[int, ...] = ()
    broken: int = 0


NO_PROBE_RESULTS = BaseProbeResults()


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Answers to the general probes. The field names are stored.

    ``right_before``: right under the live stack; ``still_right``: of these, right under the
    candidate; ``kept_of_base``: of those that the base has right, right under the candidate;
    ``broken``: empty or repetitive.
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
    """Everything that was measured of a candidate."""

    target: tuple[EvalItem, ...]  # held-out lessons of the layer that its history did not spend
    retention: tuple[EvalItem, ...]  # everything that was held out before, of all layers
    trained_examples: tuple[EvalItem, ...]  # decide where the target does not
    probes: ProbeResults
    kl: float  # mean KL from the base on the probes, in nats a token
    prior_e_value: float = 1.0  # of the candidate's history
    spent_items: frozenset[str] = frozenset()  # items that ``prior_e_value`` has counted
    decided_items: frozenset[str] = frozenset()  # items that the live revisions were promoted with
    text_quality: TextQuality = NOT_MEASURED
    rule_gains: Mapping[str, RuleGain] = field(default_factory=dict)

    @property
    def e_value(self) -> float:
        """The e-value of the layer, with this candidate. No item counts twice."""
        value = self.prior_e_value
        for item in self._unspent():
            factor = REGRESSED_FACTOR if item.regressed else 1.0
            value *= IMPROVED_FACTOR if item.improved else factor
        return value

    @property
    def measured(self) -> bool:
        """Whether every figure is finite. Nothing else can be accepted by name."""
        items = (*self.target, *self.retention, *self.trained_examples)
        return math.isfinite(self.kl) and all(
            math.isfinite(item.before) and math.isfinite(item.after) for item in items
        )

    def as_json(self) -> dict[str, Any]:
        """Return the scores of a revision. Later candidates read them: the keys are stored."""
        pins = {item.signal: item.as_json() for item in (*self.retention, *self.target)}
        decided = {item.signal for item in self.target if item.improved or item.regressed}
        return {
            "target": _summarize(self.target),
            "retention": _summarize(self.retention, is_retention=True),
            "trained": _summarize(self.trained_examples),
            "canaries": {
                **asdict(self.probes),
                "base_right": self.probes.base_right,
                "kl": _round(self.kl),
            },
            # In significant digits: an e-value can be small, and 0 would stay 0 for ever.
            "bet": float(f"{self.e_value:.6g}"),
            "spent": sorted(self.spent_items | decided),
            "counted": sorted(self.decided_items | decided),
            "sense": self.text_quality.as_json(),
            "rules": {rule: asdict(gain) for rule, gain in self.rule_gains.items()},
            # Revisions that were judged by the same version can be compared by their figures.
            "questions": {"asked": len(pins), "version": canonical_digest(sorted(pins))[:12]},
            "pins": pins,
        }

    def _unspent(self) -> list[EvalItem]:
        return [item for item in self.target if item.signal not in self.spent_items]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The gate's verdict. ``probation``: live on thin evidence. ``accepted``: by the user."""

    verdict: Verdict
    reasons: Reasons
    probation: bool = False
    accepted: bool = False

    @property
    def live(self) -> bool:
        """Whether the candidate becomes the head."""
        return self.accepted or self.verdict is Verdict.PROMOTED

    @property
    def reason(self) -> str:
        """The reasons in words."""
        return render_reasons(self.reasons)


def judge(
    evidence: Evidence,
    margins: Margins,
    *,
    removes_lessons: bool = False,
    has_new_lessons: bool = False,
) -> Judgement:
    """Judge harm first, then the quality of the lessons, then benefit and amount of evidence.

    A build that ``removes_lessons`` leaves retracted ones out. That is its benefit, so it may know
    the rest a little less well than the live stack. ``has_new_lessons``: it also learned new ones.
    """
    harm = _find_harm(evidence, margins, check_regressions=not removes_lessons)
    if problem := harm or _find_bad_text(evidence.text_quality, margins):
        return Judgement(Verdict.REFUSED, (problem,))
    if removes_lessons:
        judgement = judge(evidence, margins)
        if judgement.live:
            return judgement
        kept = _retention_kept(evidence)
        if not has_new_lessons:
            return _promote(evidence, kept)
        # Retracted lessons go in any case. The new ones have not earned anything yet.
        reasons = (kept, Reason(ReasonCode.NEW_LESSONS), *judgement.reasons)
        return replace(_promote(evidence, *reasons), probation=True)
    is_decided = any(item.improved or item.regressed for item in evidence.target)
    is_held_out = is_decided or not evidence.trained_examples
    items = evidence.target if is_held_out else evidence.trained_examples
    improved = sum(item.improved for item in items)
    regressed = sum(item.regressed for item in items)
    if improved == regressed == 0:
        return Judgement(Verdict.ABSTAINED, (Reason(ReasonCode.NO_DIFFERENCE),))
    gain = sum(item.change for item in items)
    counts = {
        "improved": improved,
        "regressed": regressed,
        "asked": len(items),
        "examples": "held back" if is_held_out else "just learned",
    }
    code = ReasonCode.IMPROVED_AND_REGRESSED if regressed else ReasonCode.IMPROVED
    if improved < regressed or not gain > 0:
        # Several small improvements do not make up for one large regression.
        code = code if improved <= regressed else ReasonCode.LOSS_EXCEEDS_GAIN
        return Judgement(Verdict.REFUSED, (Reason(code, counts),))
    if IMPROVED_FACTOR**improved * REGRESSED_FACTOR**regressed <= PROBATION_E_VALUE:
        # Two improved and one regressed may be chance, whatever the sum.
        too_little = Reason(ReasonCode.TOO_LITTLE_EVIDENCE)
        return Judgement(Verdict.ABSTAINED, (Reason(code, counts), too_little))
    if gain < margins.min_effect * len(items) and evidence.e_value < CONFIRMATION_E_VALUE:
        too_small = reason(ReasonCode.EFFECT_TOO_SMALL, effect=f"{gain / len(items):.2f}")
        return Judgement(Verdict.ABSTAINED, (Reason(code, counts), too_small))
    return _promote(evidence, Reason(code, counts))


def override(judgement: Judgement, evidence: Evidence) -> Judgement:
    """Return the judgement as the user overrides it: the verdict stays, the candidate goes live.

    A candidate that could not be measured stays refused: its harm is unknown to the user as well.
    """
    if not evidence.measured:
        return replace(judgement, reasons=(*judgement.reasons, Reason(ReasonCode.NOT_MEASURABLE)))
    reasons = (Reason(ReasonCode.OVERRIDDEN), *judgement.reasons)
    return replace(judgement, reasons=reasons, accepted=True)


def _promote(evidence: Evidence, *reasons: Reason) -> Judgement:
    probes = evidence.probes
    if probes.right_before:
        kept = reason(ReasonCode.PROBES_KEPT, kept=probes.still_right, asked=probes.right_before)
        reasons = (*reasons, kept)
    if evidence.e_value >= CONFIRMATION_E_VALUE:
        return Judgement(Verdict.PROMOTED, reasons)
    reasons = (*reasons, Reason(ReasonCode.ON_PROBATION))
    return Judgement(Verdict.PROMOTED, reasons, probation=True)


def _retention_kept(evidence: Evidence) -> Reason:
    items = evidence.retention
    if not items:
        return Reason(ReasonCode.NOTHING_HELD_OUT)
    kept = sum(not item.forgotten for item in items)
    return reason(ReasonCode.RETENTION_KEPT, kept=kept, asked=len(items))


def _find_harm(evidence: Evidence, margins: Margins, *, check_regressions: bool) -> Reason | None:
    """Return the first harm beyond its margin, or None."""
    probes, retention = evidence.probes, evidence.retention
    lost = probes.right_before - probes.still_right
    if lost > _allowed(margins.max_probes_lost, probes.right_before):
        return reason(ReasonCode.PROBES_LOST, lost=lost, asked=probes.right_before)
    lost = probes.base_right - len(probes.kept_of_base)
    if lost > _allowed(margins.max_probes_lost, probes.base_right):
        return reason(ReasonCode.BASE_PROBES_LOST, lost=lost, asked=probes.base_right)
    broken_before = min(probes.broken_before, probes.base.broken)
    if probes.broken > broken_before + _allowed(margins.max_probes_lost, probes.asked):
        return reason(ReasonCode.PROBES_DEGENERATE, broken=probes.broken, asked=probes.asked)
    lost = sum(item.regressed_beyond_margin for item in retention) if check_regressions else 0
    if lost > _allowed(margins.max_regressed, len(retention)):
        return reason(ReasonCode.RETENTION_REGRESSED, lost=lost, asked=len(retention))
    lost = sum(item.forgotten for item in retention)
    if lost > margins.max_regressed * len(retention):
        return reason(ReasonCode.RETENTION_FORGOTTEN, lost=lost, asked=len(retention))
    if not evidence.kl <= margins.max_kl:
        return reason(ReasonCode.KL_TOO_LARGE, kl=f"{evidence.kl:.2f}", limit=margins.max_kl)
    return None


def _find_bad_text(quality: TextQuality, margins: Margins) -> Reason | None:
    """Return what is wrong with the text of the new lessons, or None."""
    if margins.min_pmi and quality.pmi is not None and not quality.pmi >= margins.min_pmi:
        return Reason(ReasonCode.UNRELATED_ANSWERS)
    gap = quality.word_order_gap
    if margins.min_word_order_gap and gap is not None and not gap >= margins.min_word_order_gap:
        return Reason(ReasonCode.SHUFFLED_ANSWERS)
    if quality.novelty is not None and quality.novelty < MIN_NOVELTY:
        return Reason(ReasonCode.REPEATED_QUESTIONS)
    return None


def _allowed(share: float, asked: int) -> float:
    """Return how many items may be lost: at least one, which may be chance, unless none may."""
    return max(1.0, share * asked) if share else 0.0


def _summarize(items: Sequence[EvalItem], *, is_retention: bool = False) -> dict[str, Any]:
    if not items:
        return {"asked": 0}
    lost = [x.regressed_beyond_margin if is_retention else x.regressed for x in items]
    return {
        "asked": len(items),
        "won": sum(item.improved for item in items),
        "lost": sum(lost),
        "before": _round(sum(item.before for item in items) / len(items)),
        "after": _round(sum(item.after for item in items) / len(items)),
    }


def _round(value: float) -> float | None:
    """Return a figure as it is stored; None where it is not finite, which JSON cannot hold."""
    return round(value, 4) if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class EvalHistory:
    """What a candidate inherits from earlier revisions: evidence, and what it may not undo.

    Each candidate is compared with the stack that was live then. The e-values of all candidates of
    a layer multiply. If no candidate makes unseen lessons likelier more often than less likely, the
    product reaches ``CONFIRMATION_E_VALUE`` in at most one layer of twenty, however often one looks
    (Ville 1939). Three rules keep that true:

    - Only lessons that were never trained on count.
    - A lesson counts once in the life of a layer, when it first improved or regressed, also under a
      candidate that was refused. Otherwise a user's twentieth try would bet on the same lessons
      until chance was kind.
    - An e-value that reached the threshold is spent: the next candidate starts with 1.

    ``prior_e_value``, ``spent_items`` and ``decided_items`` are as in ``Evidence``. ``base``,
    ``last`` and ``best`` are log-probs per token of held-out items: under the bare base, when the
    newest live revision was judged, and the highest ever. ``base_probes`` are the base's answers to
    the probes.
    """

    prior_e_value: float = 1.0
    spent_items: frozenset[str] = frozenset()
    decided_items: frozenset[str] = frozenset()
    base: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    base_probes: BaseProbeResults = NO_PROBE_RESULTS

    def baseline(self, item: str, live: float) -> float | None:
        """Return the best log-prob that a candidate must not undo, or None.

        Where the ``live`` log-prob is below the one at the last judgement, no learn caused that:
        the user rolled back, or lowered a layer's weight. No candidate has to make up for it.
        """
        last = self.last.get(item)
        return None if last is not None and live < last - TIE_MARGIN else self.best.get(item)


def eval_history(
    heads: Sequence[Revision], layer: str, candidates: Sequence[Revision] = ()
) -> EvalHistory:
    """Return what a candidate for ``layer`` inherits.

    ``heads`` are the live revisions of all layers, ``candidates`` all revisions of this layer that
    were ever judged on the open base, whatever the verdict.
    """
    base: dict[str, float] = {}
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    base_probes = NO_PROBE_RESULTS
    # Each revision was judged by the items of all layers and took over the best of those before
    # it, so the newest that scored an item decides.
    for head in sorted(heads, key=lambda head: head.at):
        # Users who made a refused revision live accepted its losses: the baseline is what is left.
        is_accepted = head.verdict is Verdict.REFUSED
        probes = head.scores.get("canaries", {})
        if of_base := probes.get("base"):
            right = probes["kept_of_base"] if is_accepted else of_base["right"]
            base_probes = BaseProbeResults(of_base["questions"], tuple(right), of_base["broken"])
        for item, scores in head.scores.get("pins", {}).items():
            reached = scores.get("after" if is_accepted else "best")
            for known, value in (
                (base, scores.get("base")),
                (last, scores.get("after")),
                (best, reached),
            ):
                if value is not None:
                    known[item] = value
    own = next((head for head in heads if head.layer == layer), None)
    judged = [each for each in (*heads, *candidates) if each.layer == layer and each.scores]
    newest = sorted(judged, key=lambda each: each.at)[-1] if judged else None
    e_value = float(newest.scores.get("bet", 1.0)) if newest else 1.0
    return EvalHistory(
        1.0 if e_value >= CONFIRMATION_E_VALUE else e_value,
        frozenset(newest.scores.get("spent", _decided_items(newest))) if newest else frozenset(),
        _decided_items(own) if own else frozenset(),
        base,
        last,
        best,
        base_probes,
    )


def _decided_items(revision: Revision) -> frozenset[str]:
    """Return the items that a revision and those before it were promoted with."""
    # Revisions of early versions do not store them; they were judged by all their items.
    held_out = [signal for signal, role in revision.signals.items() if role == "pinned"]
    return frozenset(revision.scores.get("counted", held_out))
