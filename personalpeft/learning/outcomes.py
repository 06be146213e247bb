"""How a learn ended, what each signal is used for, and why: codes with their numbers.

Rows store the codes. `Reason.__str__` makes the only sentences of them, and no sentence is read
back: `report.from_json` maps the sentences that earlier versions stored by an exact table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from personalpeft.types import Json, Verdict


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
    """All that the live revision was trained on was retracted, so what was below it is live."""

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


class Placement(StrEnum):
    """Where the write policy puts a signal. The values are stored and shown."""

    LAYER = "layer"
    PROFILE = "profile"
    MEMORY = "memory"
    UNUSED = "kept"
    HISTORY = "history"


class SignalUse(StrEnum):
    """What a signal is used for, in one build (`Source`) or so far (`SignalStatus`)."""

    IN_PROMPT = "in_prompt"
    PENDING = "pending"
    LEARNED = "learned"
    LEARNED_NOT_LIVE = "learned_not_live"
    LEARNED_EARLIER = "learned_earlier"
    HELD_OUT = "held_out"
    HELD_OUT_EARLIER = "held_out_earlier"
    TO_BE_HELD_OUT = "to_be_held_out"
    NO_CAPACITY = "no_capacity"
    OTHER_LAYER = "other_layer"
    UNUSED = "unused"
    SUPERSEDED = "superseded"
    RETRACTED = "retracted"

    @property
    def label(self) -> str:
        """The use in words. Stored reports of earlier versions hold these words."""
        return _USE_LABELS[self]


_USE_LABELS: Mapping[SignalUse, str] = {
    SignalUse.IN_PROMPT: "acts now",
    SignalUse.PENDING: "to be learned",
    SignalUse.LEARNED: "learned",
    SignalUse.LEARNED_NOT_LIVE: "learned, not live",
    SignalUse.LEARNED_EARLIER: "learned earlier",
    SignalUse.HELD_OUT: "held back to judge by",
    SignalUse.HELD_OUT_EARLIER: "held back earlier",
    SignalUse.TO_BE_HELD_OUT: "to be held back, to judge by",
    SignalUse.NO_CAPACITY: "left out: the layer is full",
    SignalUse.OTHER_LAYER: "for another layer",
    SignalUse.UNUSED: "only kept",
    SignalUse.SUPERSEDED: "superseded",
    SignalUse.RETRACTED: "taken back",
}
USE_BY_LABEL: Mapping[str, SignalUse] = {label: use for use, label in _USE_LABELS.items()}

TRAINED_USES = frozenset({SignalUse.LEARNED, SignalUse.LEARNED_NOT_LIVE, SignalUse.LEARNED_EARLIER})
"""Uses of a signal that the build, or a parent of it, was trained on."""

OUTSIDE_LAYER_USES = frozenset({SignalUse.OTHER_LAYER, SignalUse.IN_PROMPT, SignalUse.UNUSED})
"""Uses of a signal that the layer of the report neither learns from nor is judged by."""


class ReasonCode(StrEnum):
    """Why something was decided. Each member has a code, which is stored, and a template."""

    template: str

    def __new__(cls, value: str, template: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.template = template
        return member

    TEXT = "text", "{text}"

    # Why a signal is assigned as it is.
    COMMENT_IS_RULE = "comment_is_rule", "a comment is a rule that acts on the next turn"
    NOT_USER_ACT = "not_user_act", "only a person's own acts are trained on"
    DEMONSTRATION = "demonstration", "a demonstration shows the answer that is wanted"
    EDIT = "edit", "an edit shows the answer that is wanted, and the one that was not"
    PREFERENCE = "preference", "of two answers the preferred one is wanted"
    MEMORY_COMPARISON = (
        "memory_comparison",
        "a choice between two memories says nothing about how to answer",
    )
    NO_TURN = "no_turn", "it names no turn"
    EMPTY_REPLY = "empty_reply", "the reply was empty"
    LIKED = "liked", "a reply that was liked is an answer to give again"
    DISLIKED = "disliked", "a reply that was not liked grows less likely"
    OBSERVED = "observed", "what an app saw counts as a weak rating"
    UNCLEAR_REWARD = (
        "unclear_reward",
        "a reward between -{limit} and {limit} says neither that a reply is wanted nor that it is"
        " not",
    )
    STRONGER_SIGNAL = "stronger_signal", "the {kind} of the same turn says more"
    MORE_SPECIFIC = "more_specific", "the {kind} of the same request says more"
    REPEATED = "repeated", "the {kind} before says the same"
    CONTRADICTED = "contradicted", "a later {kind} of the same request says otherwise"
    RATED_BY_USER = "rated_by_user", "a person said something of the same reply"
    NEWER_FACT = "newer_fact", "a later fact answers the same question otherwise"
    USER_FACT = "user_fact", "a person's fact answers the same question otherwise"
    FACT_LOOKED_UP = "fact_looked_up", "a fact is looked up when a question is near it"
    FACT_NOT_USERS = (
        "fact_not_users",
        "a fact is looked up when a question is near it; only a person's own are learned too",
    )
    FACT_WITH_ANSWER = (
        "fact_with_answer",
        "a fact is looked up when a question is near it; what it answers is known, so it is"
        " learned too",
    )
    FACT_HELPED = (
        "fact_helped",
        "a fact is looked up when a question is near it; that helped {count} times, so it is"
        " learned too",
    )
    STYLE_CHANGED_SINCE = (
        "style_changed_since",
        "the way of answering has changed since: {since} and later lessons say otherwise",
    )
    STYLE_CHANGED_BEFORE = (
        "style_changed_before",
        "the way of answering had changed before: {since} and later lessons say otherwise",
    )
    TOO_FEW_THUMBS = (
        "too_few_thumbs",
        "a {kind} below 0 says what is wrong, not what is right; an edit would (learned from"
        " {needed} thumbs up and {needed} down on: {up} and {down} now)",
    )
    REPLACED = "replaced", "{signal} came in its place"
    RETRACTED = "retracted", "it was taken back"

    # Why a layer is built though no lesson is new. They come before the gate's reasons.
    LESSONS_RETRACTED = "lessons_retracted", "{count} lesson{s} that it learned {were} taken back"
    STACK_BELOW_CHANGED = "stack_below_changed", "what lies below has changed"
    STACK_BELOW_CHECKED = (
        "stack_below_checked",
        "what lies below has changed; {valid} of {asked} answers still hold",
    )
    OVERRIDDEN = "overridden", "accepted by name against"

    NEW_LESSONS = "new_lessons", "of what is new"

    # The gate's reasons.
    PROBES_LOST = (
        "probes_lost",
        "{lost} of {asked} general answers that were right are wrong now",
    )
    BASE_PROBES_LOST = (
        "base_probes_lost",
        "{lost} of {asked} general answers that the base has right are wrong by now",
    )
    PROBES_DEGENERATE = (
        "probes_degenerate",
        "{broken} of {asked} general answers are empty or go round in circles",
    )
    RETENTION_REGRESSED = "retention_regressed", "{lost} of {asked} older answers got worse"
    RETENTION_FORGOTTEN = (
        "retention_forgotten",
        "{lost} of {asked} older answers have lost more than half of what was learned",
    )
    KL_TOO_LARGE = (
        "kl_too_large",
        "it is too far from the base on general questions (KL {kl} nats a token, at most"
        " {limit:g})",
    )
    UNRELATED_ANSWERS = (
        "unrelated_answers",
        "the new answers have nothing to do with what was asked: each is as likely after another's"
        " question",
    )
    SHUFFLED_ANSWERS = (
        "shuffled_answers",
        "the new answers say nothing: their words are as likely in any other order",
    )
    REPEATED_QUESTIONS = (
        "repeated_questions",
        "the new answers say nothing: most of them only say over what was asked",
    )
    UNSAFE_LESSONS = "unsafe_lessons", "{detail}"
    MIXED_STYLES = "mixed_styles", "{detail}"
    NO_DIFFERENCE = "no_difference", "no difference could be measured on what was held back"
    IMPROVED = "improved", "{improved} of {asked} answers {examples} got better"
    IMPROVED_AND_REGRESSED = (
        "improved_and_regressed",
        "{improved} of {asked} answers {examples} got better, {regressed} got worse",
    )
    LOSS_EXCEEDS_GAIN = (
        "loss_exceeds_gain",
        "{improved} of {asked} answers {examples} got better, {regressed} got worse, by more than"
        " the others gained",
    )
    TOO_LITTLE_EVIDENCE = "too_little_evidence", "that is too little to go by"
    PROBES_KEPT = "probes_kept", "{kept} of {asked} general answers stayed right"
    RETENTION_KEPT = "retention_kept", "{kept} of {asked} older answers are still known"
    NOTHING_HELD_OUT = "nothing_held_out", "nothing that is left of it was held back to judge by"
    ON_PROBATION = "on_probation", "on probation, since that is still thin evidence"
    NOT_MEASURABLE = "not_measurable", "not accepted, since it could not be measured"
    WITHDRAWN_BEFORE = (
        "withdrawn_before",
        "it is the revision that was withdrawn, and nothing new has come since",
    )
    PRACTICE_NOT_INCLUDED = (
        "practice_not_included",
        "what was practised is not in it: practise it again",
    )

    # How a learn ended otherwise.
    MEMORY_BUDGET = (
        "memory_budget",
        "to train it takes about {needed:,.0f} MB, and {allowed:,g} are allowed",
    )
    TOO_FEW_LESSONS = (
        "too_few_lessons",
        "{count} of the {needed} lessons that a first learn takes: three to learn, one to judge by",
    )
    WOULD_TRAIN = "would_train", "would train {steps} steps from {parent}, rank {rank}"
    WOULD_REVALIDATE = (
        "would_revalidate",
        "what lies below has changed; would judge it again",
    )
    TIME_BUDGET = (
        "time_budget",
        "the time was up after step {step} of {steps}; the next learn goes on from there",
    )
    STEP_BUDGET = (
        "step_budget",
        "it was to stop after step {step} of {steps}; the next learn goes on from there",
    )
    SAME_AS_LIVE = "same_as_live", "it came out as the revision that is live already"
    NO_HOLDOUT = (
        "no_holdout",
        "what lies below has changed; it stays, since no lesson is there to ask it by",
    )
    PRACTICE_NEEDED = (
        "practice_needed",
        "practise it again, which a build from lessons would undo",
    )
    BUILT_BEFORE = (
        "built_before",
        "it stays, since what was built in its place did not go live",
    )
    REPLACEMENT_NOT_LIVE = (
        "replacement_not_live",
        "it stays: {revision}, built in its place, did not go live",
    )
    HEAD_MOVED = (
        "head_moved",
        "meanwhile {live} was made live, so nothing has changed; the next learn goes by that",
    )
    ALL_RETRACTED = (
        "all_retracted",
        "all that it had learned was taken back; {live} answers again",
    )
    WOULD_RETRACT = (
        "would_retract",
        "all that it had learned was taken back: {live} would answer",
    )
    NO_REPLY_PASSED = (
        "no_reply_passed",
        "none of {replies} replies passed, so there is no reward to follow; teach some"
        " demonstrations and learn first",
    )
    ALL_TASKS_SOLVED = (
        "all_tasks_solved",
        "all tasks are solved already: {tasks}, in {replies} replies",
    )
    NO_REWARD_CONTRAST = (
        "no_reward_contrast",
        "in {replies} replies no task was answered well once and badly another time",
    )
    WITHDRAWN = "withdrawn", "withdrawn: {bad} of {replies} replies were {kind}{earlier}"
    CONFIRMED = "confirmed", "confirmed: {liked} of {replies} replies were liked"


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
        return self.code.template.format(**{**number, **self.data})

    def as_json(self) -> Json:
        """Return the reason as plain data."""
        return {"code": str(self.code), "data": dict(self.data)}


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
