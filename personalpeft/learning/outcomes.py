"""How a learn ended, what each signal is used for, and why: codes with their numbers.

Rows store the codes. `Reason.__str__` makes the sentences, and no code reads a sentence back. Only
`report.from_json` maps the sentences of earlier versions, by an exact table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, Self

from personalpeft.former_names import ShownCode
from personalpeft.types import Verdict


class _Outcome(StrEnum):
    @property
    def text(self) -> str:
        """The outcome in words."""
        return self.replace("_", " ")


class LearnOutcome(_Outcome):
    """How a learn, or a review of a probation, ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    ABSTAINED = "abstained"
    """The gate could not decide: no difference, too small an effect or too little evidence."""
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
    def verdict(self) -> Verdict | None:
        """The gate's verdict, or that of the user's feedback; None where nothing was judged."""
        match self:
            case LearnOutcome.PROMOTED | LearnOutcome.CONFIRMED:
                return Verdict.PROMOTED
            case LearnOutcome.REFUSED | LearnOutcome.WITHDRAWN:
                return Verdict.REFUSED
            case LearnOutcome.ABSTAINED:
                return Verdict.ABSTAINED
        return None


class MoveCause(StrEnum):
    """Why a head moved. The values are stored."""

    LEARN = "learn"
    ACCEPTED = "accepted"
    """The user made a revision live by name that the gate did not promote."""
    WITHDRAWN = "withdrawn"
    ROLLBACK = "rollback"
    ROLLBACK_UNDONE = "rollback_undone"
    RETRACTED = "retracted"
    REVALIDATED = "revalidated"
    IMPORT = "import"
    REBASE = "rebase"
    """The layers were built anew on another base, or the former ones were gone back to."""


class PairedResult(StrEnum):
    """How the wanted answer to a held-out question does on another base."""

    IMPROVED = "improved"
    REGRESSED = "regressed"
    TIED = "tied"


class RebaseOutcome(_Outcome):
    """How a rebase ended."""

    PROMOTED = "promoted"
    REFUSED = "refused"
    ABSTAINED = "abstained"
    UNCHANGED = "unchanged"
    """Each layer came out as the live revision."""
    LAYERS_MISSING = "layers_missing"
    """The other base has no build of some layer, so the stacks were not compared."""
    HEAD_MOVED = "head_moved"
    """Another program moved a head meanwhile. Nothing was changed."""

    @property
    def verdict(self) -> Verdict | None:
        """The gate's verdict on the new stack; None where it was not judged."""
        return next((each for each in Verdict if each.value == self.value), None)


class Placement(ShownCode):
    """Where the write policy puts a signal."""

    LAYER = "layer"
    RULE = "rule"
    """A rule, which is in every prompt."""
    MEMORY = "memory"
    """A fact, which is retrieved into the prompt of a similar question."""
    UNUSED = "unused"
    HISTORY = "history"


def _code(text: str) -> tuple[auto, str]:
    return auto(), text


class _CodeWithText(ShownCode):
    """A stored code (the member's name in lower case) with a text to show."""

    text: str

    def __new__(cls, value: str, text: str = "") -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.text = text
        return member


class ReproductionOutcome(_CodeWithText):
    """How the reproduction of a recorded revision ended."""

    EQUAL = _code("EQUAL, byte for byte")
    DIFFERENT = _code("DIFFERENT")
    IMPORTED = _code("cannot be reproduced, it was imported")
    PRACTICED = _code("cannot be reproduced, it was practiced")
    INPUTS_MISSING = _code("cannot be reproduced, an input is missing")
    TRAINING_FORBIDDEN = _code("not reproduced, training on it is no longer allowed")
    OTHER_BASE = _code("not reproduced, it is of another base")


class SignalUse(_CodeWithText):
    """What a signal is used for, in one build (`SignalUsage`) or so far (`SignalStatus`).

    Stored reports of earlier versions hold the texts.
    """

    IN_PROMPT = _code("applies in the prompt")
    PENDING = _code("waits for the next learn")
    LEARNED = _code("trained on")
    LEARNED_NOT_LIVE = _code("trained on, not live")
    LEARNED_EARLIER = _code("trained on earlier")
    HELD_OUT = _code("held out to judge")
    HELD_OUT_EARLIER = _code("held out earlier")
    TO_BE_HELD_OUT = _code("to be held out")
    NO_CAPACITY = _code("left out: the layer is full")
    TOO_LONG = _code("left out: its prompt or its change is beyond what is read")
    OTHER_LAYER = _code("for another layer")
    UNUSED = _code("recorded only")
    SUPERSEDED = _code("superseded")
    RETRACTED = _code("retracted")


DECIDED_USES = frozenset(
    {
        SignalUse.PENDING,
        SignalUse.LEARNED,
        SignalUse.LEARNED_NOT_LIVE,
        SignalUse.HELD_OUT,
        SignalUse.TO_BE_HELD_OUT,
        SignalUse.NO_CAPACITY,
        SignalUse.TOO_LONG,
    }
)
"""Uses that the build of a report decides. Of all others it has the count."""

OUTSIDE_LAYER_USES = frozenset({SignalUse.OTHER_LAYER, SignalUse.IN_PROMPT, SignalUse.UNUSED})
"""Uses outside the layer of the report: it does not learn from such a signal."""


class ReasonCode(_CodeWithText):
    """Why something was decided. ``text`` is a template."""

    TEXT = _code("{text}")

    # Why a signal is assigned as it is.
    COMMENT_IS_RULE = _code("a comment is a rule; it applies from the next turn on")
    NOT_USER_ACT = _code("layers are trained on acts of the user only")
    TRAINING_FORBIDDEN = _code("training on it is not allowed")
    REPLY_TRAINING_FORBIDDEN = _code(
        "the prompt of the reply had a fact that must not be trained on"
    )
    DEMONSTRATION = _code("a demonstration shows the wanted reply")
    EDIT = _code("an edit shows the wanted reply and the rejected one")
    PREFERENCE = _code("the preferred of two replies is the wanted one")
    MEMORY_COMPARISON = _code("a comparison of memory revisions does not show how to answer")
    NO_TURN = _code("it names no turn")
    EMPTY_REPLY = _code("the reply was empty")
    LIKED = _code("a liked reply becomes likelier")
    DISLIKED = _code("a disliked reply becomes less likely")
    FACT_OUTDATED = _code("the reply has a fact that is not current any more")
    OBSERVED = _code("implicit feedback counts as a weak rating")
    UNCLEAR_REWARD = _code("a reward between -{limit} and {limit} is too close to 0")
    STRONGER_SIGNAL = _code("the {kind} of the same turn takes precedence")
    MORE_SPECIFIC = _code("the {kind} of the same prompt takes precedence")
    REPEATED = _code("it repeats an earlier {kind}")
    CONTRADICTED = _code("a later {kind} of the same prompt contradicts it")
    RATED_BY_USER = _code("the user's own feedback on this reply takes precedence")
    NEWER_FACT = _code("a later fact has another answer to the same question")
    USER_FACT = _code("the user's own fact has another answer to the same question")
    FACT_LOOKED_UP = _code("a fact is retrieved for similar prompts")
    FACT_NOT_USERS = _code(
        "a fact is retrieved for similar prompts; only the user's own facts are trained on"
    )
    FACT_WITH_ANSWER = _code(
        "a fact is retrieved for similar prompts; its questions and answer are trained on as well"
    )
    FACT_HELPED = _code(
        "a fact is retrieved for similar prompts; it helped {count} times, so it is trained on "
        "as well"
    )
    STYLE_CHANGED_SINCE = _code(
        "the style has changed since: {since} and later lessons are in another style"
    )
    STYLE_CHANGED_BEFORE = _code(
        "the style had changed before: {since} and later lessons are in another style"
    )
    TOO_FEW_THUMBS = _code(
        "a disliked reply does not show the wanted one; dislikes are trained on once there are "
        "{needed} likes and {needed} dislikes ({up} and {down} now)"
    )
    REPLACED = _code("{signal} replaced it")
    RETRACTED = _code("it was retracted")

    # Why a layer is built though no lesson is new. They come before the gate's reasons.
    LESSONS_RETRACTED = _code("{count} of its lessons {were} retracted or replaced")
    STACK_BELOW_CHANGED = _code("a layer below has changed")
    STACK_BELOW_CHECKED = _code(
        "a layer below has changed; {valid} of {asked} held-out answers still hold"
    )
    OVERRIDDEN = _code("accepted by the user against the gate")

    NEW_LESSONS = _code("of the new lessons")

    # The gate's reasons.
    PROBES_LOST = _code("{lost} of {asked} general questions are no longer answered right")
    BASE_PROBES_LOST = _code(
        "{lost} of {asked} general questions that the base answers right are no longer "
        "answered right"
    )
    PROBES_DEGENERATE = _code("{broken} of {asked} general answers are empty or repeat themselves")
    RETENTION_REGRESSED = _code("{lost} of {asked} older held-out answers regressed")
    RETENTION_FORGOTTEN = _code(
        "{lost} of {asked} older held-out answers lost more than half of their gain"
    )
    KL_TOO_LARGE = _code(
        "the KL from the base on general questions is {kl} nats a token; the limit is {limit:g}"
    )
    LEAKAGE_TOO_LARGE = _code(
        "its own lessons can be distinguished from held-out ones: the AUC of membership inference "
        "is {auc}; the limit is {limit:g}"
    )
    LEAKAGE_UNKNOWN = _code("its leakage is unknown, and the limit is {limit:g}: {why}")
    UNRELATED_ANSWERS = _code(
        "the new answers do not fit their prompts: each is as likely after another prompt"
    )
    SHUFFLED_ANSWERS = _code(
        "the new answers have no meaning: their words are as likely in any other order"
    )
    CUT_OFF_ANSWERS = _code(
        "the new answers are cut off: neither the base nor the candidate would end them there"
    )
    REPEATED_QUESTIONS = _code("most of the new answers only repeat their prompts")
    ADDRESSES_LEAKED = _code(
        "{count} of {total} lessons put a link or an address into the answer ({address})"
    )
    FACTS_LEAKED = _code(
        "{count} of {total} lessons repeat remembered facts that were not asked for"
    )
    STYLES_ALTERNATE = _code(
        "{one} lessons are in one style and {other} in another, by turns; retract one style"
    )
    # Of earlier versions, which stored a sentence.
    UNSAFE_LESSONS = _code("{detail}")
    MIXED_STYLES = _code("{detail}")
    NO_DIFFERENCE = _code("no difference could be measured on the held-out lessons")
    IMPROVED = _code("{improved} of {asked} {examples} answers improved")
    IMPROVED_AND_REGRESSED = _code(
        "{improved} of {asked} {examples} answers improved, {regressed} regressed"
    )
    LOSS_EXCEEDS_GAIN = _code(
        "{improved} of {asked} {examples} answers improved, {regressed} regressed by more than "
        "the others gained"
    )
    TOO_LITTLE_EVIDENCE = _code("this is too little evidence")
    EFFECT_TOO_SMALL = _code("the mean gain of {effect} nats a token is too small")
    GENERATED = _code("{count} of {asked} replies to held-out prompts are in the wanted style")
    PREFERRED = _code(
        "{better} of {asked} replies to held-out prompts are more like the liked replies than "
        "before, {worse} less"
    )
    THUMBS_UNCLEAR = _code(
        "nothing was found that distinguishes the {liked} liked from the {disliked} disliked "
        "replies"
    )
    PROBES_KEPT = _code("{kept} of {asked} general questions are still answered right")
    RETENTION_KEPT = _code("{kept} of {asked} older held-out answers are still known")
    NOTHING_HELD_OUT = _code("no remaining lesson was held out to judge it")
    ON_PROBATION = _code("on probation, since this is little evidence")
    NOT_MEASURABLE = _code("not accepted, since it could not be measured")
    WITHDRAWN_BEFORE = _code("this revision was withdrawn before, and there is no new lesson")
    PRACTICE_NOT_INCLUDED = _code("the practice is not part of it; practice again")

    # How a learn ended otherwise.
    MEMORY_BUDGET = _code("training takes about {needed:,.0f} MB; {allowed:,g} MB are allowed")
    TOO_FEW_LESSONS = _code(
        "{count} of the {needed} lessons that a first learn needs: three to train on, one to judge"
    )
    WOULD_TRAIN = _code("would train {steps} steps from {parent}, rank {rank}")
    WOULD_REVALIDATE = _code("a layer below has changed; would judge it again")
    TIME_BUDGET = _code("the time budget ended at step {step} of {steps}; the next learn continues")
    STEP_BUDGET = _code("the step budget ended at step {step} of {steps}; the next learn continues")
    SAME_AS_LIVE = _code("the build equals the live revision")
    NO_HOLDOUT = _code("a layer below has changed; it stays, since no lesson can check it")
    PRACTICE_NEEDED = _code("practice again, since a build from lessons would undo the practice")
    # In reports of earlier versions only.
    BUILT_BEFORE = _code("it stays, since its replacement did not go live")
    REPLACEMENT_NOT_LIVE = _code("it stays, since its replacement {revision} did not go live")
    HEAD_MOVED = _code(
        "another program made {live} live meanwhile, so nothing was changed; the next learn "
        "starts from there"
    )
    ALL_RETRACTED = _code("all of its lessons were retracted, so {live} answers without it")
    NO_REPLY_PASSED = _code(
        "none of {replies} replies passed, so there is no reward to follow; teach some "
        "demonstrations and learn first"
    )
    ALL_TASKS_SOLVED = _code("all tasks are solved already: {tasks}, in {replies} replies")
    NO_REWARD_CONTRAST = _code("in {replies} replies no task was both passed and failed")

    # How a rebase ended.
    REBASE_UNCHANGED = _code("the layers came out as they are")
    REBASE_LAYERS_MISSING = _code("on this base nothing gives {layers}")
    REBASE_HEAD_MOVED = _code(
        "meanwhile another program moved a head; rebase again, which trains nothing twice"
    )
    REBASE_NOTHING_HELD_OUT = _code("nothing is held out to compare them by")
    REBASE_COMPARED = _code(
        "of {asked} wanted answers {improved} are likelier and {regressed} less likely"
    )
    REBASE_BASE_NOT_OPEN = _code(
        "the former base is not open; against the bare new base of {asked} wanted answers "
        "{improved} are likelier and {regressed} less likely"
    )

    # How a probation ended.
    WITHDRAWN = _code("withdrawn: {bad} of {replies} replies were {kind}{earlier}")
    CONFIRMED = _code("confirmed: {liked} of {replies} replies were liked")


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
        were = "was" if self.data.get("count") == 1 else "were"
        return self.code.text.format(**{"were": were, **self.data})


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
