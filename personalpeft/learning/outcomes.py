"""How a learn ended, what each signal is used for, and why: codes with their numbers.

Rows store the codes. `Reason.__str__` makes the sentences, and no code reads a sentence back. Only
`report.from_json` maps the sentences of earlier versions, by an exact table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Self

from personalpeft.types import Verdict


class LearnOutcome(StrEnum):
    """How a learn, or a review of a probation, ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    ABSTAINED = "abstained"
    """The gate had too little evidence. Nothing else is called so."""
    DRY_RUN = "dry_run"
    UNFINISHED = "unfinished"
    """A budget ended the training or did not admit it. The next learn continues."""
    NOTHING_TO_LEARN = "nothing_to_learn"
    UNCHANGED = "unchanged"
    """The live revision was judged again, or built again with the same bytes, and stays."""
    HEAD_MOVED = "head_moved"
    """Another program moved the head during the learn. Nothing was changed."""
    FAILED = "failed"
    WITHDRAWN = "withdrawn"
    CONFIRMED = "confirmed"
    RETRACTED = "retracted"
    """All lessons of the live revision were retracted. So an earlier head, or none, is live."""

    @property
    def is_event(self) -> bool:
        """Whether later signals, and no training, ended so."""
        return self in (LearnOutcome.WITHDRAWN, LearnOutcome.CONFIRMED, LearnOutcome.RETRACTED)

    @property
    def verdict(self) -> Verdict:
        """The verdict that earlier versions stored for this outcome."""
        if self in (LearnOutcome.PROMOTED, LearnOutcome.CONFIRMED):
            return Verdict.PROMOTED
        if self in (LearnOutcome.REFUSED, LearnOutcome.WITHDRAWN):
            return Verdict.REFUSED
        return Verdict.ABSTAINED


class MoveCause(StrEnum):
    """Why a head moved. The values are stored."""

    LEARN = "learn"
    ACCEPTED = "accepted"
    """The user made a revision live by name that the gate did not promote."""
    WITHDRAWN = "withdrawn"
    ROLLBACK = "rollback"
    ROLLBACK_UNDONE = "rollback undone"
    RETRACTED = "taken back"
    REVALIDATED = "judged again"
    IMPORT = "import"
    REBASE = "rebase"
    """The layers were built anew on another base, or the former ones were gone back to."""


class PairedResult(StrEnum):
    """How the wanted answer to a held-out question does on another base."""

    WON = "won"
    LOST = "lost"
    TIED = "tied"


class RebuildOutcome(StrEnum):
    """How the rebuild of a recorded revision ended."""

    EQUAL = "equal"
    DIFFERENT = "different"
    IMPORTED = "imported"
    """It was trained elsewhere, so the ledger does not have what it was made of."""
    PRACTISED = "practised"
    """It was trained on tasks of a verifier, which the ledger does not have."""
    INPUTS_MISSING = "inputs missing"
    TRAINING_FORBIDDEN = "training forbidden"
    """Consent to train on one of its signals was withdrawn since."""
    OTHER_BASE = "other base"


class Placement(StrEnum):
    """Where the write policy puts a signal. The values are stored and shown."""

    LAYER = "layer"
    PROFILE = "profile"
    MEMORY = "memory"
    UNUSED = "kept"
    HISTORY = "history"


class _CodeWithText(StrEnum):
    """A stored code (the member's name in lower case) with a text to show."""

    text: str

    def __new__(cls, value: str, text: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class SignalUse(_CodeWithText):
    """What a signal is used for, in one build (`Source`) or so far (`SignalStatus`).

    Stored reports of earlier versions hold the texts.
    """

    IN_PROMPT = auto(), "acts now"
    PENDING = auto(), "to be learned"
    LEARNED = auto(), "learned"
    LEARNED_NOT_LIVE = auto(), "learned, not live"
    LEARNED_EARLIER = auto(), "learned earlier"
    HELD_OUT = auto(), "held back to judge by"
    HELD_OUT_EARLIER = auto(), "held back earlier"
    TO_BE_HELD_OUT = auto(), "to be held back, to judge by"
    NO_CAPACITY = auto(), "left out: the layer is full"
    OTHER_LAYER = auto(), "for another layer"
    UNUSED = auto(), "only kept"
    SUPERSEDED = auto(), "superseded"
    RETRACTED = auto(), "taken back"


TRAINED_USES = frozenset({SignalUse.LEARNED, SignalUse.LEARNED_NOT_LIVE, SignalUse.LEARNED_EARLIER})
"""Uses of a signal that the build, or a parent of it, was trained on."""

OUTSIDE_LAYER_USES = frozenset({SignalUse.OTHER_LAYER, SignalUse.IN_PROMPT, SignalUse.UNUSED})
"""Uses outside the layer of the report: it does not learn from such a signal."""


class ReasonCode(_CodeWithText):
    """Why something was decided. ``text`` is a template."""

    TEXT = auto(), "{text}"

    # Why a signal is assigned as it is.
    COMMENT_IS_RULE = auto(), "a comment is a rule that acts on the next turn"
    NOT_USER_ACT = auto(), "only a person's own acts are trained on"
    TRAINING_FORBIDDEN = auto(), "training on it is not allowed"
    REPLY_TRAINING_FORBIDDEN = (
        auto(),
        "the reply was given with a fact in the prompt that training is not allowed on",
    )
    DEMONSTRATION = auto(), "a demonstration shows the answer that is wanted"
    EDIT = auto(), "an edit shows the answer that is wanted, and the one that was not"
    PREFERENCE = auto(), "of two answers the preferred one is wanted"
    MEMORY_COMPARISON = auto(), "a choice between two memories says nothing about how to answer"
    NO_TURN = auto(), "it names no turn"
    EMPTY_REPLY = auto(), "the reply was empty"
    LIKED = auto(), "a reply that was liked is an answer to give again"
    DISLIKED = auto(), "a reply that was not liked grows less likely"
    OBSERVED = auto(), "what an app saw counts as a weak rating"
    UNCLEAR_REWARD = (
        auto(),
        "a reward between -{limit} and {limit} says neither that a reply is wanted nor that it is "
        "not",
    )
    STRONGER_SIGNAL = auto(), "the {kind} of the same turn says more"
    MORE_SPECIFIC = auto(), "the {kind} of the same request says more"
    REPEATED = auto(), "the {kind} before says the same"
    CONTRADICTED = auto(), "a later {kind} of the same request says otherwise"
    RATED_BY_USER = auto(), "a person said something of the same reply"
    NEWER_FACT = auto(), "a later fact answers the same question otherwise"
    USER_FACT = auto(), "a person's fact answers the same question otherwise"
    FACT_LOOKED_UP = auto(), "a fact is looked up when a question is near it"
    FACT_NOT_USERS = (
        auto(),
        "a fact is looked up when a question is near it; only a person's own are learned too",
    )
    FACT_WITH_ANSWER = (
        auto(),
        "a fact is looked up when a question is near it; what it answers is known, so it is "
        "learned too",
    )
    FACT_HELPED = (
        auto(),
        "a fact is looked up when a question is near it; that helped {count} times, so it is "
        "learned too",
    )
    STYLE_CHANGED_SINCE = (
        auto(),
        "the way of answering has changed since: {since} and later lessons say otherwise",
    )
    STYLE_CHANGED_BEFORE = (
        auto(),
        "the way of answering had changed before: {since} and later lessons say otherwise",
    )
    TOO_FEW_THUMBS = (
        auto(),
        "a {kind} below 0 says what is wrong, not what is right; an edit would (learned from "
        "{needed} thumbs up and {needed} down on: {up} and {down} now)",
    )
    REPLACED = auto(), "{signal} came in its place"
    RETRACTED = auto(), "it was taken back"

    # Why a layer is built though no lesson is new. They come before the gate's reasons.
    LESSONS_RETRACTED = auto(), "{count} lesson{s} that it learned {were} taken back"
    STACK_BELOW_CHANGED = auto(), "what lies below has changed"
    STACK_BELOW_CHECKED = (
        auto(),
        "what lies below has changed; {valid} of {asked} answers still hold",
    )
    OVERRIDDEN = auto(), "accepted by name against"

    NEW_LESSONS = auto(), "of what is new"

    # The gate's reasons.
    PROBES_LOST = auto(), "{lost} of {asked} general answers that were right are wrong now"
    BASE_PROBES_LOST = (
        auto(),
        "{lost} of {asked} general answers that the base has right are wrong by now",
    )
    PROBES_DEGENERATE = (
        auto(),
        "{broken} of {asked} general answers are empty or go round in circles",
    )
    RETENTION_REGRESSED = auto(), "{lost} of {asked} older answers got worse"
    RETENTION_FORGOTTEN = (
        auto(),
        "{lost} of {asked} older answers have lost more than half of what was learned",
    )
    KL_TOO_LARGE = (
        auto(),
        "it is too far from the base on general questions (KL {kl} nats a token, at most "
        "{limit:g})",
    )
    LEAKAGE_TOO_LARGE = (
        auto(),
        "lessons that it was trained on can be told from held-out ones (AUC of membership "
        "inference {auc}, at most {limit:g})",
    )
    UNRELATED_ANSWERS = (
        auto(),
        "the new answers have nothing to do with what was asked: each is as likely after "
        "another's question",
    )
    SHUFFLED_ANSWERS = (
        auto(),
        "the new answers say nothing: their words are as likely in any other order",
    )
    REPEATED_QUESTIONS = (
        auto(),
        "the new answers say nothing: most of them only say over what was asked",
    )
    UNSAFE_LESSONS = auto(), "{detail}"
    MIXED_STYLES = auto(), "{detail}"
    NO_DIFFERENCE = auto(), "no difference could be measured on what was held back"
    IMPROVED = auto(), "{improved} of {asked} answers {examples} got better"
    IMPROVED_AND_REGRESSED = (
        auto(),
        "{improved} of {asked} answers {examples} got better, {regressed} got worse",
    )
    LOSS_EXCEEDS_GAIN = (
        auto(),
        "{improved} of {asked} answers {examples} got better, {regressed} got worse, by more than "
        "the others gained",
    )
    TOO_LITTLE_EVIDENCE = auto(), "that is too little to go by"
    EFFECT_TOO_SMALL = auto(), "the mean gain of {effect} nats a token is too small to go by"
    GENERATED = auto(), "{count} of {asked} unseen prompts were answered as you want"
    PROBES_KEPT = auto(), "{kept} of {asked} general answers stayed right"
    RETENTION_KEPT = auto(), "{kept} of {asked} older answers are still known"
    NOTHING_HELD_OUT = auto(), "nothing that is left of it was held back to judge by"
    ON_PROBATION = auto(), "on probation, since that is still thin evidence"
    NOT_MEASURABLE = auto(), "not accepted, since it could not be measured"
    WITHDRAWN_BEFORE = (
        auto(),
        "it is the revision that was withdrawn, and nothing new has come since",
    )
    PRACTICE_NOT_INCLUDED = auto(), "what was practised is not in it: practise it again"

    # How a learn ended otherwise.
    MEMORY_BUDGET = auto(), "to train it takes about {needed:,.0f} MB, and {allowed:,g} are allowed"
    TOO_FEW_LESSONS = (
        auto(),
        "{count} of the {needed} lessons that a first learn takes: three to learn, one to judge by",
    )
    WOULD_TRAIN = auto(), "would train {steps} steps from {parent}, rank {rank}"
    WOULD_REVALIDATE = auto(), "what lies below has changed; would judge it again"
    TIME_BUDGET = (
        auto(),
        "the time was up after step {step} of {steps}; the next learn goes on from there",
    )
    STEP_BUDGET = (
        auto(),
        "it was to stop after step {step} of {steps}; the next learn goes on from there",
    )
    SAME_AS_LIVE = auto(), "it came out as the revision that is live already"
    NO_HOLDOUT = (
        auto(),
        "what lies below has changed; it stays, since no lesson is there to ask it by",
    )
    PRACTICE_NEEDED = auto(), "practise it again, which a build from lessons would undo"
    # In reports of earlier versions only.
    BUILT_BEFORE = auto(), "it stays, since what was built in its place did not go live"
    REPLACEMENT_NOT_LIVE = auto(), "it stays: {revision}, built in its place, did not go live"
    HEAD_MOVED = (
        auto(),
        "meanwhile {live} was made live, so nothing has changed; the next learn goes by that",
    )
    ALL_RETRACTED = auto(), "all that it had learned was taken back; {live} answers again"
    WOULD_RETRACT = auto(), "all that it had learned was taken back: {live} would answer"
    NO_REPLY_PASSED = (
        auto(),
        "none of {replies} replies passed, so there is no reward to follow; teach some "
        "demonstrations and learn first",
    )
    ALL_TASKS_SOLVED = auto(), "all tasks are solved already: {tasks}, in {replies} replies"
    NO_REWARD_CONTRAST = (
        auto(),
        "in {replies} replies no task was answered well once and badly another time",
    )
    WITHDRAWN = auto(), "withdrawn: {bad} of {replies} replies were {kind}{earlier}"
    CONFIRMED = auto(), "confirmed: {liked} of {replies} replies were liked"


FORBIDDEN_CODES = frozenset({ReasonCode.TRAINING_FORBIDDEN, ReasonCode.REPLY_TRAINING_FORBIDDEN})
"""Codes of signals that no layer may keep, although nothing is learned in their place."""

_LEADING = frozenset(
    {
        ReasonCode.LESSONS_RETRACTED,
        ReasonCode.STACK_BELOW_CHANGED,
        ReasonCode.STACK_BELOW_CHECKED,
        ReasonCode.OVERRIDDEN,
        ReasonCode.NEW_LESSONS,
    }
)
"""Codes that say why something was judged. A colon, and not a semicolon, leads on to the next."""


@dataclass(frozen=True, slots=True)
class Reason:
    """A code and the numbers and names that its template takes."""

    code: ReasonCode
    data: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        is_one = self.data.get("count") == 1
        number = {"s": "" if is_one else "s", "were": "was" if is_one else "were"}
        return self.code.text.format(**{**number, **self.data})


Reasons = tuple[Reason, ...]


def reason(code: ReasonCode, **data: Any) -> Reason:
    """Return a reason from keyword arguments."""
    return Reason(code, data)


def text_reason(text: str) -> Reason:
    """Return a reason that has no code: an error's text, or one of an earlier version."""
    return Reason(ReasonCode.TEXT, {"text": text})


def render_reasons(reasons: Sequence[Reason]) -> str:
    """Return reasons as one sentence."""
    text = ""
    for number, each in enumerate(reasons):
        separator = ": " if number and reasons[number - 1].code in _LEADING else "; "
        text += f"{separator if number else ''}{each}"
    return text
