"""Measure a candidate, and read what it inherits from the revisions judged before it.

A held-out lesson is scored by its log-prob per token, under the live stack and the candidate. It is
improved if that rises by more than the base's ``tie_margin``, and regressed if it falls by more.
The factor of an improved item is 1.5, of a regressed one 0.5, of a tied one 1. Each learn multiplies
the e-value of the layer (Shafer 2021, "Testing by betting") by the mean factor of its items. This
holds for every verdict. Lessons that were trained on never judge.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from personalpeft.types import PROMPT_EXAMPLES, Revision, SignalRole, Verdict, canonical_digest

TIE_MARGIN = 0.04
"""The margin in nats a token within which a lesson is tied. A base's card may set its own.

``bench nulls`` measured it: the spread of the default base's builds that differ only in the seed.
"""

CONFIRMATION_E_VALUE = 20.0
IMPROVED_FACTOR, REGRESSED_FACTOR = 1.5, 0.5
REGRESSION_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class EvalItem:
    """The score of one held-out lesson: mean log-probs per token of its chosen text.

    Attributes:
        signal: The lesson's signal.
        before: Under the live stack.
        after: Under the candidate.
        base: Under the bare base; None where unknown.
        best: The highest under any revision that led to the live stack; None where unknown.
        tie_margin: The largest change that is a tie.
        medians: Medians of the tokens' log-probs, before and after. They are only reported.
    """

    signal: str
    before: float
    after: float
    base: float | None = None
    best: float | None = None
    tie_margin: float = TIE_MARGIN
    medians: tuple[float, float] | None = None

    @property
    def change(self) -> float:
        """The change in nats a token, clipped to 1 so that no item outweighs all others."""
        change = self.after - self.before
        return -1.0 if math.isnan(change) else max(-1.0, min(1.0, change))

    @property
    def improved(self) -> bool:
        return self.after - self.before > self.tie_margin

    @property
    def regressed(self) -> bool:
        # Negated, so that NaN counts as regressed.
        return not self.after >= self.before - self.tie_margin

    @property
    def regressed_beyond_margin(self) -> bool:
        """Whether it lost more than a tenth of its gain over the base.

        A memorized item moves by more than a tie with every learn, and stays memorized.
        """
        gain = 0.0 if self.base is None else self.before - self.base
        return not self.after >= self.before - max(self.tie_margin, REGRESSION_SHARE * gain)

    @property
    def lost_most_of_gain(self) -> bool:
        """Whether more than half of its best gain over the base is lost."""
        best = self.before if self.best is None else max(self.before, self.best)
        if self.base is None or self.after >= best - self.tie_margin:
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


@dataclass(frozen=True, slots=True)
class ProbeResults:
    """Answers to the general probes. The field names are stored.

    Attributes:
        asked: How many probes were asked.
        right_before: How many are right under the live stack.
        still_right: How many of these are right under the candidate.
        base: The bare base's answers.
        kept_of_base: The probes that the base and the candidate have right.
        broken_before: Empty or repetitive answers of the live stack.
        broken: Empty or repetitive answers of the candidate.
    """

    asked: int = 0
    right_before: int = 0
    still_right: int = 0
    base: BaseProbeResults = BaseProbeResults()
    kept_of_base: tuple[int, ...] = ()
    broken_before: int = 0
    broken: int = 0

    @property
    def base_right(self) -> int:
        return len(self.base.right)


@dataclass(frozen=True, slots=True)
class PromptExampleResults:
    """The candidate's answers to the probes that are like its lessons. The field names are stored.

    Attributes:
        asked: How many of the probes these are.
        right_without: How many are right without examples in the prompt.
        right_with: How many are right with them.
        served: Whether the revision is served with examples.
    """

    asked: int = 0
    right_without: int = 0
    right_with: int = 0
    served: bool = False


@dataclass(frozen=True, slots=True)
class TextQuality:
    """See ``evaluate.text_quality``. None where nothing was measured. The field names are stored.

    ``group_sizes``: how many lessons are in each of the groups of ``style_overlap``.
    """

    pmi: float | None = None
    word_order_gap: float | None = None
    novelty: float | None = None
    learned_pmi: float | None = None
    end_surprisal: float | None = None
    learned_end_surprisal: float | None = None
    style_overlap: float | None = None
    group_sizes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class GenerationResults:
    """Replies of the candidate to held-out prompts. The field names are stored.

    ``after`` counts those that are as the user wants.
    """

    asked: int = 0
    after: int = 0


@dataclass(frozen=True, slots=True)
class ThumbsResults:
    """Generated replies, compared by a classifier of the rated ones. The field names are stored.

    Attributes:
        liked: How many liked replies the classifier was fit on.
        disliked: How many disliked ones.
        auc: Its AUC on rated replies that it was not fit on; 0.5 is chance.
        auc_p_value: How likely such an AUC is if thumbs do not depend on the replies (Mann-Whitney).
        asked: To how many held-out prompts the live stack and the candidate replied.
        better: How many of the candidate's replies it prefers to the live stack's.
        worse: How many of the live stack's it prefers.
        p_value: How likely such scores are if it prefers neither (Wilcoxon's signed-rank test).
    """

    liked: int = 0
    disliked: int = 0
    auc: float = 0.5
    auc_p_value: float = 1.0
    asked: int = 0
    better: int = 0
    worse: int = 0
    p_value: float = 1.0


class LeakageGap(StrEnum):
    """Why a revision has no leakage score. The values are stored."""

    NO_LESSONS = "no_lessons"
    NO_VARIANTS = "no_variants"
    NOT_FINITE = "not_finite"
    TRAINED_ELSEWHERE = "trained_elsewhere"

    @property
    def text(self) -> str:
        """The cause in words."""
        return {
            self.NO_LESSONS: "no lesson that the user wrote was trained on",
            self.NO_VARIANTS: "too few lessons are held out, and none has words of its own",
            self.NOT_FINITE: "a score is not a number",
            self.TRAINED_ELSEWHERE: "it was trained elsewhere, on unknown lessons",
        }[self]


@dataclass(frozen=True, slots=True)
class Leakage:
    """How well trained lessons can be distinguished from held-out ones. The field names are stored.

    Attributes:
        trained: How many lessons that were trained on were scored.
        unseen: How many held-out ones they were ranked among.
        exposure: Mean exposure in bits; None where there are too few lessons.
        auc: The AUC of membership inference; None where there are too few lessons.
        matched: Whether facts were ranked among variants of themselves. That is reported and not
            judged, since a memory is to reproduce them.
        variants: Whether lessons were ranked among variants of themselves, since too few are held
            out.
        missing: The ``LeakageGap`` where there is no score. Earlier versions stored none.
    """

    trained: int = 0
    unseen: int = 0
    exposure: float | None = None
    auc: float | None = None
    matched: bool = False
    variants: bool = False
    missing: str = ""

    @property
    def why_missing(self) -> str:
        """Why there is no score, in words."""
        return LeakageGap(self.missing).text if self.missing else "it was not measured"

    @property
    def chance_exposure(self) -> float:
        """The mean exposure, in bits, of a lesson that was never trained on."""
        count = self.unseen + 1
        return math.log2(count) - math.lgamma(count + 1) / math.log(2) / count


TRAINED_ELSEWHERE = Leakage(missing=LeakageGap.TRAINED_ELSEWHERE)
"""That of an adapter that no build here trained."""


@dataclass(frozen=True, slots=True)
class EvalHistory:
    """What a candidate inherits from earlier revisions: their evidence, and scores to keep.

    Each candidate is compared with the stack that was live then. The e-values of all candidates of
    a layer multiply. Suppose that no candidate makes an unseen lesson likelier more often than less
    likely. Then the product reaches ``CONFIRMATION_E_VALUE`` in at most one layer of twenty,
    however often one looks (Ville 1939). Three rules keep that true:

    - Only lessons that were never trained on count.
    - A lesson counts once in the life of a layer, when it first improved or regressed. It counts
      for a refused candidate too. Otherwise repeated tries would bet on the same lessons until one
      wins by chance.
    - An e-value that confirmed a revision, alone or with feedback, is spent: the next candidate
      starts with 1.

    Attributes:
        prior_e_value: The e-value of the layer before this candidate.
        spent_items: The items that ``prior_e_value`` has counted.
        decided_items: The items that the live revisions were promoted with.
        base: Log-probs per token of held-out items under the bare base.
        last: The same when the newest live revision was judged.
        best: The highest ever.
        base_probes: The base's answers to the probes.
    """

    prior_e_value: float = 1.0
    spent_items: frozenset[str] = frozenset()
    decided_items: frozenset[str] = frozenset()
    base: Mapping[str, float] = field(default_factory=dict)
    last: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    base_probes: BaseProbeResults = BaseProbeResults()

    def baseline(self, item: str, live: float, tie_margin: float) -> float | None:
        """Return the best log-prob that a candidate must not undo, or None.

        A ``live`` log-prob below the last judgement's is not due to a learn. The user rolled back,
        or lowered a layer's weight. No candidate has to make up for it.

        Args:
            item: The key of the item.
            live: Its log-prob per token under the live stack.
            tie_margin: The largest change that is a tie, in nats a token.
        """
        last = self.last.get(item)
        return None if last is not None and live < last - tie_margin else self.best.get(item)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that was measured of a candidate."""

    undecided: tuple[EvalItem, ...]  # held out in the layer, and not decided by its history
    retention: tuple[EvalItem, ...]  # everything that was held out before, of all layers
    decided: tuple[EvalItem, ...]  # held out in the layer, and decided by it
    probes: ProbeResults
    kl: float  # mean KL from the base on the probes, in nats a token
    history: EvalHistory = EvalHistory()
    text_quality: TextQuality = TextQuality()
    generation: GenerationResults = GenerationResults()
    thumbs: ThumbsResults = ThumbsResults()
    leakage: Leakage = Leakage()
    prompt_examples: PromptExampleResults = PromptExampleResults()
    tasks: Mapping[str, Any] = field(default_factory=dict)  # figures, where ``undecided`` are tasks

    @property
    def e_value(self) -> float:
        """The e-value of the layer, with this candidate. No item counts twice.

        All items of a learn are scored under one candidate, so they improve or regress together.
        The mean of their factors has a mean of 1 or less however they depend on one another. Their
        product has not.
        """
        factors = [
            IMPROVED_FACTOR if item.improved else REGRESSED_FACTOR if item.regressed else 1.0
            for item in self._unspent()
        ]
        return self.history.prior_e_value * (sum(factors) / len(factors) if factors else 1.0)

    @property
    def measured(self) -> bool:
        """Whether every figure is finite. Nothing else can be accepted by name."""
        items = (*self.undecided, *self.retention)
        return math.isfinite(self.kl) and all(
            math.isfinite(item.before) and math.isfinite(item.after) for item in items
        )

    def as_json(self) -> dict[str, Any]:
        """Return the scores of a revision. Later candidates read them: the keys are stored."""
        items = {item.signal: item.as_json() for item in (*self.retention, *self.undecided)}
        newly_decided = {item.signal for item in self.undecided if item.improved or item.regressed}
        figures = {"tasks": self.tasks} if self.tasks else {"target": _summarize(self.undecided)}
        return {
            **figures,
            "retention": _summarize(self.retention, is_retention=True),
            "probes": {
                **asdict(self.probes),
                "base_right": self.probes.base_right,
                "kl": _round(self.kl),
            },
            # In significant digits: an e-value can be small, and 0 would stay 0 for ever.
            "e_value": float(f"{self.e_value:.6g}"),
            "spent_items": sorted(self.history.spent_items | newly_decided),
            "decided_items": sorted(self.history.decided_items | newly_decided),
            "text_quality": {
                name: _round(value) if isinstance(value, float) else value
                for name, value in asdict(self.text_quality).items()
            },
            "generated": asdict(self.generation),
            "thumbs": asdict(self.thumbs),
            "leakage": asdict(self.leakage),
            PROMPT_EXAMPLES: asdict(self.prompt_examples),
            # Revisions that were judged by the same version can be compared by their figures.
            "questions": {"asked": len(items), "version": canonical_digest(sorted(items))[:12]},
            "items": items,
        }

    def _unspent(self) -> list[EvalItem]:
        # A lesson has another key where its text was scrubbed since, and counts once all the same.
        spent = {key.partition("/")[0] for key in self.history.spent_items}
        return [item for item in self.undecided if item.signal.partition("/")[0] not in spent]


def eval_history(
    heads: Sequence[Revision], layer: str, candidates: Sequence[Revision] = ()
) -> EvalHistory:
    """Return what a candidate for ``layer`` inherits.

    Args:
        heads: The live revisions of all layers.
        layer: The candidate's layer.
        candidates: All revisions that were ever judged on the open base.
    """
    base: dict[str, float] = {}
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    base_probes = BaseProbeResults()
    # Each revision was judged by the items of all layers, and kept the best scores of those before
    # it. So the newest that scored an item decides.
    for head in sorted(heads, key=lambda head: head.at):
        # Users who made a refused revision live accepted its losses: the baseline is what is left.
        is_accepted = head.verdict is Verdict.REFUSED
        probes = head.scores.get("probes", {})
        if of_base := probes.get("base"):
            right = probes["kept_of_base"] if is_accepted else of_base["right"]
            base_probes = BaseProbeResults(of_base["questions"], tuple(right), of_base["broken"])
        for item, scores in head.scores.get("items", {}).items():
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
    # Spent items are only added, so the newest revision has the most. Times are no proof: a clock
    # may be set back, and an older revision may be built and judged again.
    newest = max(judged, key=lambda each: (len(_spent_items(each)), each.at), default=None)
    return EvalHistory(
        _unspent_e_value(newest) if newest else 1.0,
        _spent_items(newest) if newest else frozenset(),
        _decided_items(own) if own else frozenset(),
        base,
        last,
        best,
        base_probes,
    )


def _unspent_e_value(revision: Revision) -> float:
    e_value = float(revision.scores.get("e_value", 1.0))
    is_confirmed = revision.verdict is Verdict.PROMOTED and not revision.probation
    return 1.0 if is_confirmed or e_value >= CONFIRMATION_E_VALUE else e_value


def _spent_items(revision: Revision) -> frozenset[str]:
    """Return the items that the e-value of a layer had counted when a revision was judged."""
    return frozenset(revision.scores.get("spent_items", _decided_items(revision)))


def _decided_items(revision: Revision) -> frozenset[str]:
    """Return the items that a revision and those before it were promoted with."""
    # Revisions of early versions do not store them; they were judged by all their items.
    held_out = [signal for signal, role in revision.signals.items() if role == SignalRole.HELD_OUT]
    return frozenset(revision.scores.get("decided_items", held_out))


def _summarize(items: Sequence[EvalItem], *, is_retention: bool = False) -> dict[str, Any]:
    if not items:
        return {"asked": 0}
    lost = [x.regressed_beyond_margin if is_retention else x.regressed for x in items]
    summary: dict[str, Any] = {
        "asked": len(items),
        "improved": sum(item.improved for item in items),
        "regressed": sum(lost),
        "before": _mean([item.before for item in items]),
        "after": _mean([item.after for item in items]),
    }
    medians = [item.medians for item in items if item.medians is not None]
    if medians:
        before, after = zip(*medians, strict=True)
        summary |= {"median_before": _mean(before), "median_after": _mean(after)}
    return summary


def _mean(values: Sequence[float]) -> float | None:
    return _round(sum(values) / len(values))


def _round(value: float) -> float | None:
    """Return a figure as it is stored; None where it is not finite, which JSON cannot hold."""
    return round(value, 4) if math.isfinite(value) else None
