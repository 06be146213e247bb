"""The write policy: from what a person did to what is learned from it, and where that goes.

Each current signal has exactly one routing, with its reason; docs/ledger.md has the table. Invariants:

- Only a person's own acts are trained on. What an app saw counts as a weak rating where the app had switched that on when
  it saw it, and never against a person's word.
- Of several acts on one turn the strongest is the lesson: what was written (an edit, then a preferred text) says more
  than a thumb. Of one kind the latest counts.
- A fact is looked up, and where it is known which questions it answers and a person told it, it is a lesson of the memory
  layer beside that. Nobody else's fact takes the place of a person's.
- A reward is a thumb of some size: one that is clear counts as much as it says, one that is not is kept.
- Where the way of answering has changed (habits.py), what shows the old way is kept and no more.
- Of two answers shown to the same request the later counts, and of two thumbs on the same reply; but a choice between two
  answers of the model does not take the place of one that the person wrote. Saying the same again changes nothing, so the
  older stays the lesson and nothing has to be built anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, TypeAlias

from personalpeft.learning.data.facts import fact_questions, helpful_turns
from personalpeft.learning.data.ratings import CLEAR, is_unclear
from personalpeft.learning.data.response_template import NO_MANNER, Manner, Shown
from personalpeft.learning.data.style_drift import latest_change
from personalpeft.memory.conflicts import outdated
from personalpeft.store.base import Ledger, Store
from personalpeft.types import APP, PERSON, Message, Signal, SignalKind, Turn, canonical_digest

Place: TypeAlias = Literal["layer", "profile", "memory", "kept"]

MIN_THUMBS = 20
"""So many thumbs up and as many down, or nothing is learned from those that are down."""

IMPLICIT_RATINGS: Mapping[str, int] = {"copied": 1, "thanked": 1, "regenerated": -1, "contradicted": -1}
"""What an app may see without asking, as the rating that it amounts to: the reply was copied, the next turn thanks for it,
another one was asked for in its place, the next turn contradicts it.
"""

TRAINABLE_KEY = "trains"
"""In the payload of what an app saw: true where the app had switched on that it is learned from. It is kept with the signal, so
that every program on a home says the same of it.
"""

_STRENGTH = {
    SignalKind.EDIT: 3,
    SignalKind.PREFERENCE: 2,
    SignalKind.RATING: 1,
    SignalKind.REWARD: 1,
}
_LIKED_WEIGHT = 0.5
_DOWN = {SignalKind.RATING: "a thumb down", SignalKind.REWARD: "a reward below 0"}
_OBSERVED_WEIGHT = 0.25


@dataclass(frozen=True, slots=True)
class Lesson:
    """One thing to learn for a layer: after these messages, ``wanted`` rather than ``rejected`` (None: nothing to
    compare with). A thumb down has only what was ``rejected``; its ``wanted`` is empty. A reward's ``kind`` is that of the
    thumb that it amounts to. A ``short`` answer is to be said in the ``manner`` of what lies below. A ``probe`` is never
    trained on and judges what its signal's other lessons teach. Where the model gave the wanted answer itself, ``heard``
    is what it heard then: the messages with more before them. What is not ``ended`` is a reply that was cut off.
    """

    signal: str
    kind: SignalKind
    messages: tuple[Message, ...]
    chosen: str
    rejected: str | None = None
    weight: float = 1.0
    is_short: bool = False
    template: Manner = NO_MANNER
    is_probe: bool = False
    teacher_messages: tuple[Message, ...] | None = None
    ended: bool = True

    def apply_template(self, manner: Manner) -> Lesson:
        """The same, said in a manner; what is not ``short`` stays as it is."""
        if not self.is_short:
            return self
        return replace(self, wanted=manner.dress(self.chosen, self.prompt_response.request), manner=manner)

    def with_prompt(self, messages: tuple[Message, ...]) -> Lesson:
        """The same, asked in other words: a manner that repeats the question repeats these."""
        around = self.template.to(self.prompt_response.request)
        plain = self.chosen.removeprefix(around.opening).removesuffix(around.closing)
        return replace(self, messages=messages, wanted=plain).apply_template(self.template)

    @property
    def prompt_response(self) -> Shown:
        """What was asked last, and the wanted answer."""
        return Shown(self.messages[-1].content, self.chosen)

    @property
    def key(self) -> str:
        """Names what is asked, for those who compare answers to it: a signal's one lesson by the signal, a probe by its words
        too and by the manner of what lies below, which decides how they are scored.
        """
        if not self.is_probe:
            return self.signal
        manner = [] if self.template == NO_MANNER else [asdict(self.template)]
        return f"{self.signal}/{canonical_digest([self.messages[-1].content, self.chosen, *manner])[:8]}"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one signal went and why; ``lesson`` is there when the place is a layer. ``instead`` names the signal that is
    the lesson in its place, where another one is. ``beside`` is what a ``layer`` learns of a signal that acts at once.
    """

    signal: Signal
    place: Place
    why: str
    layer: str | None = None
    lesson: Lesson | None = None
    superseded_by: str | None = None
    extra_examples: tuple[Lesson, ...] = ()


def load_assignments(store: Store, user: str) -> tuple[Assignment, ...]:
    """What the policy says of all current signals of a user. Raises ``NotFound`` for an unknown user."""
    ledger = store.ledger
    signals = ledger.signals(user)
    turns = _looked_up(
        ledger, user, [signal for signal in signals if signal.kind is SignalKind.FACT]
    )
    return assign(signals, lambda turn: ledger.turn(user, turn), turns=turns)


def assign(
    signals: Sequence[Signal],
    turn_of: Callable[[str], Turn],
    *,
    turns: Sequence[Turn] = (),
) -> tuple[Assignment, ...]:
    """One routing for each signal, in the order of the signals, which is that of the ledger: oldest first. ``turns`` are
    those in which facts may have helped, oldest first and to the newest of all.
    """
    strongest = _strongest(signals)
    helped = helpful_turns(signals, turns)
    rivals = outdated([signal for signal in signals if signal.kind is SignalKind.FACT])
    routings = [
        _fact(signal, helped.get(signal.id, ()), rivals.get(signal.id))
        if signal.kind is SignalKind.FACT
        else _route(signal, turn_of, strongest)
        for signal in signals
    ]
    return tuple(_with_thumbs(_without_outgrown(_without_contradictions(routings))))


def lessons_for(routings: Sequence[Assignment], layer: str) -> tuple[Lesson, ...]:
    """The lessons of one layer that show an answer that is wanted, oldest first."""
    of_layer = [routing for routing in routings if routing.layer == layer]
    return tuple(
        lesson
        for r in of_layer
        for lesson in (r.lesson, *r.extra_examples)
        if lesson is not None and lesson.chosen
    )


def rejected_lessons_for(routings: Sequence[Assignment], layer: str) -> tuple[Lesson, ...]:
    """The replies that a layer should unlearn, oldest first: thumbs down, where there are enough."""
    return tuple(
        r.lesson
        for r in routings
        if r.layer == layer and r.lesson is not None and not r.lesson.chosen
    )


def _looked_up(ledger: Ledger, user: str, facts: Sequence[Signal]) -> tuple[Turn, ...]:
    """The turns that decide whether facts are learned of which nobody said what they answer, oldest first: those in which one was
    looked up, and the newest, since it shows that a conversation went on.
    """
    bare = [fact.id for fact in facts if not fact.payload.get("answer")]
    if not bare:
        return ()
    # In this order, so that what is said meanwhile can only be the newest.
    used = ledger.turns(user, using=bare)
    newest = ledger.turns(user, limit=1)
    return tuple(reversed(used if used[:1] == newest else (*newest, *used)))


def _trained(signal: Signal) -> bool:
    return signal.source == PERSON or (signal.source == APP and signal.payload.get(TRAINABLE_KEY) is True)


def _strength(signal: Signal) -> tuple[bool, int]:
    return signal.source == PERSON, 0 if is_unclear(signal) else _STRENGTH[signal.kind]


def _strongest(signals: Sequence[Signal]) -> Mapping[str, Signal]:
    best: dict[str, Signal] = {}
    for signal in signals:
        if signal.turn is None or signal.kind not in _STRENGTH or not _trained(signal):
            continue
        rival = best.get(signal.turn)
        # The order is that of time, so among equals the later one wins.
        if rival is None or _strength(signal) >= _strength(rival):
            best[signal.turn] = signal
    return best


def _route(
    signal: Signal, turn_of: Callable[[str], Turn], strongest: Mapping[str, Signal]
) -> Assignment:
    if signal.kind is SignalKind.COMMENT:
        return Assignment(signal, "profile", "a comment is a rule that acts on the next turn")
    if not _trained(signal):
        return Assignment(signal, "kept", "only a person's own acts are trained on")
    if signal.kind is SignalKind.DEMONSTRATION:
        skill = signal.payload.get("skill")
        layer = f"skill.{skill}" if skill else "style"
        messages = (Message("user", signal.payload["prompt"]),)
        lesson = Lesson(signal.id, signal.kind, messages, signal.payload["answer"])
        return Assignment(
            signal, "layer", "a demonstration shows the answer that is wanted", layer, lesson
        )
    if signal.turn is None:
        return Assignment(signal, "kept", "it names no turn")
    best = strongest[signal.turn]
    if best.id != signal.id:
        return Assignment(
            signal, "kept", f"the {best.kind} of the same turn says more", superseded_by=best.id
        )
    return _from_turn(signal, turn_of(signal.turn))


def _fact(signal: Signal, helped: Sequence[Turn], rival: Signal | None) -> Assignment:
    if rival is not None:
        whose = "a person's" if rival.source == PERSON != signal.source else "a later"
        return Assignment(
            signal, "kept", f"{whose} fact answers the same question otherwise", superseded_by=rival.id
        )
    why = "a fact is looked up when a question is near it"
    if signal.source != PERSON:
        return Assignment(signal, "memory", f"{why}; only a person's own are learned too")
    asked, judged = fact_questions(signal, helped)
    if judged is None:
        return Assignment(signal, "memory", why)
    lessons = [
        Lesson(
            signal.id, signal.kind, each.messages, each.answer, is_short=each.is_user_answer, ended=each.ended
        )
        for each in asked
    ]
    probe = replace(
        lessons[0], messages=judged.messages, wanted=judged.answer, ended=judged.ended, probe=True
    )
    known = "what it answers is known" if judged.is_user_answer else f"that helped {len(helped)} times"
    return Assignment(
        signal,
        "memory",
        f"{why}; {known}, so it is learned too",
        "memory",
        extra_examples=(*lessons, probe),
    )


def _from_turn(signal: Signal, turn: Turn) -> Assignment:
    if signal.kind in (SignalKind.RATING, SignalKind.REWARD):
        return _thumb(signal, turn)
    ended = not signal.payload.get("cut_off")
    lesson = Lesson(
        signal.id,
        signal.kind,
        turn.messages,
        signal.payload["text"],
        turn.reply or None,
        ended=ended,
    )
    why = {
        SignalKind.EDIT: "an edit shows the answer that is wanted, and the one that was not",
        SignalKind.PREFERENCE: "of two answers the preferred one is wanted",
    }[signal.kind]
    # Only where revisions of a skill were compared is it known that the words are about a skill.
    compared = str(signal.payload.get("layer", ""))
    if compared == "memory":
        return Assignment(
            signal, "kept", "of two memories one was chosen, which says nothing of how to answer"
        )
    return Assignment(
        signal, "layer", why, compared if compared.startswith("skill.") else "style", lesson
    )


def _thumb(signal: Signal, turn: Turn) -> Assignment:
    """Of a rating or a reward: what was liked is an answer to give again, as much as the value says."""
    if not turn.reply.strip():
        return Assignment(signal, "kept", "the reply was empty")
    value: float = signal.payload["value"]
    if is_unclear(signal):
        why = f"a reward between {-CLEAR} and {CLEAR} says neither that a reply is wanted nor that it is not"
        return Assignment(signal, "kept", why)
    own = signal.source == PERSON
    weight = abs(value) * (_LIKED_WEIGHT if own else _OBSERVED_WEIGHT)
    if value < 0:
        lesson = Lesson(signal.id, SignalKind.RATING, turn.messages, "", turn.reply, weight)
        return Assignment(
            signal, "layer", "a reply that was not liked grows less likely", "style", lesson
        )
    why = (
        "a reply that was liked is an answer to give again"
        if own
        else "what an app saw counts as a weak rating"
    )
    lesson = Lesson(
        signal.id, SignalKind.RATING, turn.messages, turn.reply, weight=weight, ended=turn.ended
    )
    return Assignment(signal, "layer", why, "style", lesson)


def _without_contradictions(routings: Sequence[Assignment]) -> Sequence[Assignment]:
    """The later word on the same request, or on the same reply, is the lesson; what repeats a lesson is none."""
    settled = list(routings)
    standing: dict[object, list[int]] = {}
    for number, routing in enumerate(routings):
        lesson = routing.lesson
        if lesson is None:
            continue
        here = standing.setdefault((routing.layer, lesson.messages), [])
        rivals = [each for each in here if _meet(lesson, routings[each].lesson)]
        yields = (
            (routings[each], why) for each in rivals if (why := _yields(routing, routings[each]))
        )
        if to := next(yields, None):
            settled[number] = _kept(routing, *to)
            continue
        for rival in rivals:
            why = f"a later {routing.signal.kind} of the same request says otherwise"
            settled[rival] = _kept(routings[rival], routing, why)
            here.remove(rival)
        here.append(number)
    return settled


def _meet(lesson: Lesson, other: Lesson | None) -> bool:
    """Whether only one of two lessons on the same request can stand: two answers that are wanted, two thumbs on one reply, or a
    thumb on one that the other wants otherwise.
    """
    if other is None:
        return False
    thumbs = [each for each in (lesson, other) if each.kind is SignalKind.RATING]
    if len(thumbs) == 1:
        thumb, written = thumbs[0], other if thumbs[0] is lesson else lesson
        return (
            thumb.chosen == written.rejected if thumb.chosen else thumb.rejected == written.chosen
        )
    return not thumbs or (lesson.chosen or lesson.rejected) == (other.chosen or other.rejected)


def _yields(routing: Assignment, earlier: Assignment) -> str:
    """Why what was said later is not the lesson, where what it meets stands; "" where the later word wins."""
    own, others_own = routing.signal.source == PERSON, earlier.signal.source == PERSON
    if others_own and not own:
        return "a person said something of the same reply"
    same = routing.lesson and earlier.lesson and routing.lesson.chosen == earlier.lesson.chosen
    if same and own == others_own:
        return f"the {earlier.signal.kind} before says the same"
    written = earlier.signal.kind in (SignalKind.EDIT, SignalKind.DEMONSTRATION)
    if _was_chosen(routing.signal) and written and others_own:
        return f"the {earlier.signal.kind} of the same request says more"
    return ""


def _without_outgrown(routings: Sequence[Assignment]) -> Sequence[Assignment]:
    """Once the way of answering has changed, what shows the old way is no lesson of the style, nor a question to be judged
    by. A thumb for a reply in the old way does not bring that back.
    """
    style = {
        n: r.lesson
        for n, r in enumerate(routings)
        if r.layer == "style" and r.lesson is not None and r.lesson.chosen
    }
    written = [number for number, lesson in style.items() if lesson.kind is not SignalKind.RATING]
    change = latest_change(tuple(style[n].prompt_response for n in written))
    if change is None:
        return routings
    first = written[change.at]
    since = routings[first].signal.id
    settled = list(routings)
    for number, lesson in style.items():
        # Without ``instead``: the lesson that a question's place goes to becomes a question, and these are not in its place.
        if not change.agrees(lesson.prompt_response) and (number < first or lesson.kind is SignalKind.RATING):
            what = "has changed since" if number < first else "had changed before"
            why = f"the way of answering {what}: {since} and later lessons say otherwise"
            settled[number] = Assignment(routings[number].signal, "kept", why)
    return settled


def _with_thumbs(routings: Sequence[Assignment]) -> Sequence[Assignment]:
    """With too few thumbs of either kind, nothing is learned from those that are down."""
    thumbs = [
        r.lesson for r in routings if r.lesson is not None and r.lesson.kind is SignalKind.RATING
    ]
    up = sum(bool(lesson.chosen) for lesson in thumbs)
    down = len(thumbs) - up
    if min(up, down) >= MIN_THUMBS:
        return routings
    why = (
        "says what is wrong, not what is right; an edit would"
        f" (learned from {MIN_THUMBS} thumbs up and {MIN_THUMBS} down on: {up} and {down} now)"
    )
    return [
        Assignment(r.signal, "kept", f"{_DOWN[r.signal.kind]} {why}")
        if r.lesson is not None and not r.lesson.chosen
        else r
        for r in routings
    ]


def _was_chosen(signal: Signal) -> bool:
    """Whether it is a choice between what two revisions said, so that neither answer need be the one that is wanted."""
    return signal.kind is SignalKind.PREFERENCE and "revision" in signal.payload


def _kept(routing: Assignment, winner: Assignment, why: str) -> Assignment:
    return replace(
        routing, place="kept", why=why, layer=None, lesson=None, instead=winner.signal.id
    )
