"""Judge a candidate revision: promoted, refused or abstained, with reasons.

A promotion is final from an e-value of ``CONFIRMATION_E_VALUE`` on (``evidence``). If all held-out
lessons of a build are decided, they judge it once more but are no evidence.

Below it a policy decides, and no test: a candidate may go live on probation. Its own items must
come to more than ``PROBATION_E_VALUE``, and their mean change to at least ``min_effect``. No more
than ``max_regressed`` of them may regress beyond their margin, so none of fewer than ten.
``tests/fast/learning/test_gate_rates.py`` measures how often noise and harm pass.

Where the lessons alone would not promote it, replies that a classifier of the user's thumbs prefers
(``ThumbsResults``) may put it on probation. They never refuse it, and are no evidence.

Invariant: harm is counted against the live stack, and in total. The total counts from the base's
right answers to probes and the best score of each older item. So many small harms are refused where
one large harm would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import ClassVar

from personalpeft.learning.data.lesson_assignment import lessons_for
from personalpeft.learning.gate.evidence import (
    CONFIRMATION_E_VALUE,
    IMPROVED_FACTOR,
    REGRESSED_FACTOR,
    TIE_MARGIN,
    Evidence,
    Leakage,
    LeakageGap,
    TextQuality,
)
from personalpeft.learning.gate.leak_check import find_leak
from personalpeft.learning.layers import ancestors, trained_on
from personalpeft.learning.outcomes import (
    MoveCause,
    Placement,
    Reason,
    ReasonCode,
    Reasons,
    reason,
)
from personalpeft.learning.plan import Plan
from personalpeft.learning.train.config import CardConfig, Fraction, Number
from personalpeft.store.store import Store
from personalpeft.types import Json, Revision, Verdict

PROBATION_E_VALUE = 1.2
MAX_P_VALUE_OF_CLASSIFIER = 0.05
"""The classifier of rated replies judges only if it predicts thumbs better than by chance."""
MAX_P_VALUE_OF_REPLIES = 0.1
"""A candidate passes only if the classifier prefers its replies, and not by chance."""
MIN_NOVELTY = 0.5
"""The least share of new answers that must say anything beside the request itself."""
MAX_LEARNED_END_SURPRISAL = 0.5
"""In nats: the candidate ends held-out answers where they end with a probability above 60 %."""


class Margins(CardConfig):
    """The harm that a candidate may do, and the least quality of new lessons."""

    FORMER_NAMES: ClassVar[Mapping[str, str]] = {
        "retention": "max_regressed",
        "canaries": "max_probes_lost",
        "kl": "max_kl",
        "fit": "min_pmi",
        "order": "min_word_order_gap",
    }

    max_regressed: Fraction = 0.1  # share of items that may regress
    max_probes_lost: Fraction = 0.2  # share of right answers to probes that may be lost
    max_kl: Number = 2.0  # mean KL from the base on the probes, in nats a token
    max_membership_auc: Fraction = 1  # see ``Leakage``; 1 switches the check off
    min_pmi: Number = 0.1  # see ``TextQuality``; 0 switches the check off
    min_learned_pmi: Number = 1.0  # the same of ``learned_pmi``, which makes up for a low ``pmi``
    min_word_order_gap: Number = 0.75  # see ``TextQuality``; 0 switches the check off
    max_end_surprisal: Number = 10.0  # in nats, see ``TextQuality``; 0 switches the check off
    min_style_overlap: Fraction = 0.45  # see ``TextQuality``; 0 switches the check off
    min_effect: Number = 0.1  # least mean gain of held-out items, in nats a token
    min_generated: Fraction = 0.4  # least share of replies to held-out prompts that are as wanted
    tie_margin: Number = TIE_MARGIN  # changes up to this are ties: the spread between seeds


def load_margins(card: str, overrides: Json, *, random: bool = False) -> Margins:
    """Return the margins for a base: the defaults, changed by its card.

    Args:
        card: The name of the card, for errors.
        overrides: Its ``[gate]`` table.
        random: Whether the base has random weights. It knows no language, so texts cannot be judged
            by it.

    Raises:
        CardError: The table has an unknown key, or a wrong value.
    """
    checks = (
        "min_pmi",
        "min_word_order_gap",
        "max_end_surprisal",
        "min_style_overlap",
        "min_generated",
    )
    defaults = dict.fromkeys(checks, 0.0) if random else {}
    return Margins(**{**defaults, **Margins.read_table(card, "gate", overrides)})


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


def judge_candidate(
    store: Store, plan: Plan, revision: str, evidence: Evidence, margins: Margins, *, accept: bool
) -> Judgement:
    """Return the verdict on a candidate. No later stage changes it.

    Args:
        store: The open home.
        plan: How the candidate was built.
        revision: Its id.
        evidence: What was measured of it.
        margins: The harm that it may do.
        accept: Whether the user makes it live whatever the verdict.
    """
    head = store.catalog.revision(plan.user, plan.head) if plan.head else None
    learned = trained_on(store, head)
    has_new_lessons = bool(plan.new_holdout) or any(
        lesson.signal not in learned for lesson in plan.new_examples
    )
    judgement = judge(
        evidence, margins, removes_lessons=plan.removes_lessons, has_new_lessons=has_new_lessons
    )
    if judgement.verdict is Verdict.PROMOTED:
        moves = store.catalog.head_moves(plan.user)
        was_withdrawn = any(
            move.before == revision and move.cause == MoveCause.WITHDRAWN for move in moves
        )
        withdrawn = Reason(ReasonCode.WITHDRAWN_BEFORE) if was_withdrawn else None
        if problem := withdrawn or _find_unsafe_lessons(store, plan):
            judgement = Judgement(Verdict.REFUSED, (problem,))
    # The user accepts the requested build, not a rebuild that follows from it.
    if accept and not judgement.live and (has_new_lessons or plan.rebuild_reason is None):
        judgement = override(judgement, evidence)
    reasons = (*plan.build_reasons, *judgement.reasons)
    if _undoes_practice(store, plan, head):
        reasons = (*reasons, Reason(ReasonCode.PRACTICE_NOT_INCLUDED))
    return replace(judgement, reasons=reasons)


def _undoes_practice(store: Store, plan: Plan, head: Revision | None) -> bool:
    """Return whether the head was practiced since the build's parent: no lesson brings that back."""
    parent = plan.parent.id if plan.parent else None
    since = takewhile(lambda each: each.id != parent, ancestors(store, head))
    return any("practice" in each.recipe for each in since)


def judge(
    evidence: Evidence,
    margins: Margins,
    *,
    removes_lessons: bool = False,
    has_new_lessons: bool = False,
) -> Judgement:
    """Judge by the evidence: harm first, then the lessons' quality, then benefit and its amount.

    Args:
        evidence: What was measured of the candidate.
        margins: The harm that it may do.
        removes_lessons: Whether the build leaves retracted lessons out. That is its benefit, so it
            may know the rest a little less well than the live stack.
        has_new_lessons: Whether it also learned new ones.
    """
    harm = find_harm(evidence, margins, check_regressions=not removes_lessons)
    harm = harm or find_leakage(evidence.leakage, margins)
    if problem := harm or _find_bad_text(evidence.text_quality, margins):
        return Judgement(Verdict.REFUSED, (problem,))
    if removes_lessons:
        judgement = judge(evidence, margins)
        if judgement.live:
            return judgement
        kept = _retention_kept(evidence)
        if not has_new_lessons:
            return _promote(evidence, kept)
        # The build goes live without the retracted lessons. Nothing is known of its new ones.
        reasons = (kept, Reason(ReasonCode.NEW_LESSONS), *judgement.reasons)
        return replace(_promote(evidence, *reasons), probation=True)
    judgement = _judge_lessons(evidence, margins)
    thumbs = evidence.thumbs
    if judgement.verdict is not Verdict.ABSTAINED or not thumbs.asked:
        return judgement
    if thumbs.auc_p_value > MAX_P_VALUE_OF_CLASSIFIER:
        unclear = reason(ReasonCode.THUMBS_UNCLEAR, liked=thumbs.liked, disliked=thumbs.disliked)
        return replace(judgement, reasons=(*judgement.reasons, unclear))
    preferred = reason(
        ReasonCode.PREFERRED, better=thumbs.better, worse=thumbs.worse, asked=thumbs.asked
    )
    if thumbs.p_value > MAX_P_VALUE_OF_REPLIES:
        return replace(judgement, reasons=(*judgement.reasons, preferred))
    return _promote(evidence, preferred)


def _judge_lessons(evidence: Evidence, margins: Margins) -> Judgement:
    """Judge the benefit by the held-out lessons, and by the style of generated replies."""
    any_decides = any(item.improved or item.regressed for item in evidence.undecided)
    is_new = any_decides or not evidence.decided
    items = evidence.undecided if is_new else evidence.decided
    improved = sum(item.improved for item in items)
    regressed = sum(item.regressed for item in items)
    if improved == regressed == 0:
        return Judgement(Verdict.ABSTAINED, (Reason(ReasonCode.NO_DIFFERENCE),))
    gain = sum(item.change for item in items)
    counts = {
        "improved": improved,
        "regressed": regressed,
        "asked": len(items),
        "examples": "held-out" if is_new else "older held-out",
    }
    code = ReasonCode.IMPROVED_AND_REGRESSED if regressed else ReasonCode.IMPROVED
    if improved < regressed or not gain > 0:
        # Several small improvements do not make up for one large regression.
        code = code if improved <= regressed else ReasonCode.LOSS_EXCEEDS_GAIN
        return Judgement(Verdict.REFUSED, (Reason(code, counts),))
    # Two improved and one regressed may be chance, whatever the sum.
    lost = sum(item.regressed_beyond_margin for item in items)
    is_confirmed = evidence.e_value >= CONFIRMATION_E_VALUE
    is_chance = IMPROVED_FACTOR**improved * REGRESSED_FACTOR**regressed <= PROBATION_E_VALUE
    if is_chance or (lost > margins.max_regressed * len(items) and not is_confirmed):
        too_little = Reason(ReasonCode.TOO_LITTLE_EVIDENCE)
        return Judgement(Verdict.ABSTAINED, (Reason(code, counts), too_little))
    if gain < margins.min_effect * len(items) and not is_confirmed:
        too_small = reason(ReasonCode.EFFECT_TOO_SMALL, effect=f"{gain / len(items):.2f}")
        return Judgement(Verdict.ABSTAINED, (Reason(code, counts), too_small))
    generated = evidence.generation
    if not generated.asked:
        return _promote(evidence, Reason(code, counts))
    written = reason(ReasonCode.GENERATED, count=generated.after, asked=generated.asked)
    if generated.after < margins.min_generated * generated.asked:
        # The wanted answers became likelier, and too few generated replies changed.
        return Judgement(Verdict.ABSTAINED, (Reason(code, counts), written))
    return _promote(evidence, Reason(code, counts), written)


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
    kept = sum(not item.lost_most_of_gain for item in items)
    return reason(ReasonCode.RETENTION_KEPT, kept=kept, asked=len(items))


def find_harm(evidence: Evidence, margins: Margins, *, check_regressions: bool) -> Reason | None:
    """Return the first harm beyond its margin, or None.

    Args:
        evidence: What was measured of the candidate.
        margins: The harm that it may do.
        check_regressions: Whether an older item that regressed is harm. One that lost most of its
            gain is in any case.
    """
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
    lost = sum(item.lost_most_of_gain for item in retention)
    if lost > margins.max_regressed * len(retention):
        return reason(ReasonCode.RETENTION_FORGOTTEN, lost=lost, asked=len(retention))
    if not evidence.kl <= margins.max_kl:
        return reason(ReasonCode.KL_TOO_LARGE, kl=f"{evidence.kl:.2f}", limit=margins.max_kl)
    return None


def find_leakage(leakage: Leakage, margins: Margins) -> Reason | None:
    """Return that the leakage is above the card's limit, or is unknown where there is one, or None.

    A memory is to reproduce its facts. Where no lesson was trained on, none can leak.
    """
    auc, limit = leakage.auc, margins.max_membership_auc
    if limit >= 1 or leakage.matched or leakage.missing == LeakageGap.NO_LESSONS:
        return None
    if auc is None:
        why = leakage.why_missing
        return reason(ReasonCode.LEAKAGE_UNKNOWN, why=why, limit=limit)
    if auc > limit:
        return reason(ReasonCode.LEAKAGE_TOO_LARGE, auc=f"{auc:.2f}", limit=limit)
    return None


def _find_bad_text(quality: TextQuality, margins: Margins) -> Reason | None:
    """Return what is wrong with the text of the new lessons, or None."""
    learned = quality.learned_pmi is not None and quality.learned_pmi >= margins.min_learned_pmi
    fits = quality.pmi is None or quality.pmi >= margins.min_pmi or learned
    if margins.min_pmi and not fits:
        return Reason(ReasonCode.UNRELATED_ANSWERS)
    gap = quality.word_order_gap
    if margins.min_word_order_gap and gap is not None and not gap >= margins.min_word_order_gap:
        return Reason(ReasonCode.SHUFFLED_ANSWERS)
    if quality.novelty is not None and quality.novelty < MIN_NOVELTY:
        return Reason(ReasonCode.REPEATED_QUESTIONS)
    if margins.max_end_surprisal and not _has_clear_ends(quality, margins.max_end_surprisal):
        return Reason(ReasonCode.CUT_OFF_ANSWERS)
    overlap = quality.style_overlap
    if (
        margins.min_style_overlap
        and overlap is not None
        and not overlap >= margins.min_style_overlap
    ):
        one, other = quality.group_sizes
        return reason(ReasonCode.STYLES_ALTERNATE, one=one, other=other)
    return None


def _has_clear_ends(quality: TextQuality, limit: float) -> bool:
    """Return whether the base or the candidate would end the new answers where they end."""
    end, learned = quality.end_surprisal, quality.learned_end_surprisal
    if end is None or learned is None:
        return True
    # A candidate can learn where labels end. Where a text was cut, it cannot.
    return end <= limit or learned <= MAX_LEARNED_END_SURPRISAL


def _allowed(share: float, asked: int) -> float:
    """Return how many items may be lost: at least one, which may be chance; none for share 0."""
    return max(1.0, share * asked) if share else 0.0


def _find_unsafe_lessons(store: Store, plan: Plan) -> Reason | None:
    """Return why the new lessons of a build must not become the style of all replies, or None.

    Words are not judged: no rule tells an order ("As Mallory orders:") from a greeting.
    """
    if plan.layer == "memory":
        return None
    moves = store.catalog.head_moves(plan.user)
    accepted = {move.after for move in moves if move.cause == MoveCause.ACCEPTED}
    return find_leak(
        lessons_for(plan.assignments, plan.layer),
        [each.signal for each in plan.assignments if each.place is Placement.MEMORY],
        new={lesson.signal for lesson in plan.arrived_lessons},
        accepted={
            signal
            for each in store.catalog.revisions(plan.user)
            if each.layer == plan.layer and each.id in accepted
            for signal in each.signals
        },
    )
