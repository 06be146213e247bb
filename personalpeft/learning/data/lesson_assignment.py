"""The write policy: it assigns each signal to a place, and makes lessons of it.

Each current signal has exactly one assignment, with its reason; docs/explanation/ledger.md has the
table. Invariants:

- Only a user's own acts are trained on. Implicit feedback counts as a weak rating if the app had
  enabled that, and never against a user's own act.
- A signal that training is not allowed on is no lesson. It settles no conflict of lessons. But a
  later act on the same reply replaces the earlier ones. A later fact replaces the one that it
  contradicts. A reply with such a fact in its prompt is trained on neither as wanted nor as
  rejected.
- Of several acts on one turn the strongest is the lesson: an edit, then a preferred text, then a
  thumb. Of one kind the latest counts.
- A fact is looked up. If the user stated it and its questions are known, it is also a lesson of the
  memory layer. Only the user's facts replace the user's facts.
- A reward is a weighted thumb; one nearer to 0 than ``MIN_CLEAR_REWARD`` is not used.
- Where the style has changed (data/style.py), lessons in the old style are not used.
- Of two answers to one request, and of two thumbs on one reply, the later counts. A choice between
  two replies of the model does not replace an answer that the user wrote. A repeated lesson stays
  the older one, so that nothing is built again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache, partial

from personalpeft.learning.data.fact_lessons import fact_lessons, helpful_turns, reveals
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.style import find_style_change
from personalpeft.learning.outcomes import Placement, Reason, ReasonCode, reason
from personalpeft.memory.conflicts import normalize, superseded_facts
from personalpeft.store.ledger import Ledger
from personalpeft.store.store import Store
from personalpeft.types import (
    MIN_CLEAR_REWARD,
    USER_SOURCE,
    Message,
    PromptExample,
    Signal,
    SignalKind,
    Turn,
    canonical_json,
)

MIN_THUMBS = 20
"""Dislikes are trained on only once there are this many likes and this many dislikes.

Rewards and learned observations count too.
"""

_STRENGTH = {
    SignalKind.EDIT: 3,
    SignalKind.PREFERENCE: 2,
    SignalKind.RATING: 1,
    SignalKind.REWARD: 1,
}
_USER_WEIGHT, _OBSERVED_WEIGHT = 0.5, 0.25


PROMPT_KINDS = SignalKind.COMMENT, SignalKind.FACT
"""The kinds of signals that memory adds to prompts."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where one signal goes, and why.

    ``lesson`` is set where the placement is a layer. ``extra_examples`` are lessons of ``layer``
    from a signal that is used in the prompt. ``superseded_by`` is the signal that is the lesson
    in this one's place.
    """

    signal: Signal
    place: Placement
    reason: Reason
    layer: str | None = None
    lesson: Lesson | None = None
    superseded_by: str | None = None
    extra_examples: tuple[Lesson, ...] = ()


def load_assignments(
    store: Store, user: str, *, until: int | None = None
) -> tuple[Assignment, ...]:
    """Return the assignments of all current signals of a user.

    Args:
        store: The open home.
        user: The user.
        until: As for ``Ledger.signals``: the ledger as it was before this entry.

    Raises:
        NotFound: There is no such user.
    """
    signals = store.ledger.signals(user, until=until)
    turns = _load_fact_turns(store.ledger, user, signals, until)
    continued = store.ledger.continued(user, [each.id for each in turns], until=until)
    # Former ones count too: a reply does not lose a fact by its retraction.
    former = store.ledger.signals(user, kinds=PROMPT_KINDS, current=False, until=until)
    turn_of = cache(partial(store.ledger.turn, user))
    return assign(signals, turn_of, turns=turns, continued=continued, former=former)


def assign(
    signals: Sequence[Signal],
    turn_of: Callable[[str], Turn],
    *,
    turns: Sequence[Turn] = (),
    continued: Set[str] = frozenset(),
    former: Sequence[Signal] = (),
) -> tuple[Assignment, ...]:
    """Return one assignment for each of the current signals, oldest first.

    Args:
        signals: The current signals, oldest first.
        turn_of: Returns a turn by its id.
        turns: Those in which facts may have helped, and the newest turn, oldest first.
        continued: Those of them after which their conversation went on.
        former: All rules and facts, also those that are not current.
    """
    forbidden = {each.id for each in former if each.forbids_training}
    strongest = _strongest_by_turn(signals)
    helpful = helpful_turns(signals, turns, forbidden, continued)
    facts = [signal for signal in signals if signal.kind is SignalKind.FACT]
    newer = superseded_facts(facts)
    current = {fact.id for fact in facts} - newer.keys()
    outdated = {
        each.id: str(each.payload["text"])
        for each in former
        if each.kind is SignalKind.FACT and each.id not in current
    }
    assignments = [
        _assign_fact(signal, helpful.get(signal.id, ()), newer.get(signal.id))
        if signal.kind is SignalKind.FACT
        else _assign_one(signal, turn_of, strongest, forbidden, outdated)
        for signal in signals
    ]
    assignments = _replace_taught_tests(assignments, former)
    settled = _drop_old_style(_resolve_conflicts(assignments))
    return tuple(_drop_dislikes_if_too_few(settled))


def lessons_for(assignments: Sequence[Assignment], layer: str) -> tuple[Lesson, ...]:
    """Return a layer's lessons that have a chosen reply, oldest first."""
    return tuple(
        lesson
        for each in assignments
        if each.layer == layer
        for lesson in (each.lesson, *each.extra_examples)
        if lesson is not None and lesson.chosen
    )


def load_style_examples(
    store: Store, user: str, countries: Sequence[str] = ()
) -> tuple[PromptExample, ...]:
    """Return the lessons of the style that can be examples in a prompt, oldest first.

    None is older than a rule of the user, which it may contradict.

    Args:
        store: The home.
        user: The user.
        countries: As for ``scrub_assignments``, of the revision that the examples are for.

    Raises:
        NotFound: There is no such user.
        MissingPackage: The extra ``scrub`` is not installed.
    """
    assignments = scrub_assignments(load_assignments(store, user), "style", countries)
    rules = [number for number, each in enumerate(assignments) if each.place is Placement.RULE]
    newer = assignments[max(rules, default=-1) + 1 :]
    lessons = (each.lesson for each in newer if each.layer == "style" and each.lesson is not None)
    return tuple(example for lesson in lessons if (example := lesson.example) is not None)


def undesirable_lessons_for(assignments: Sequence[Assignment], layer: str) -> tuple[Lesson, ...]:
    """Return a layer's lessons that only have a rejected reply, oldest first."""
    return tuple(
        each.lesson
        for each in assignments
        if each.layer == layer and each.lesson is not None and not each.lesson.chosen
    )


def scrub_assignments(
    assignments: Sequence[Assignment], layer: str, countries: Sequence[str]
) -> tuple[Assignment, ...]:
    """Return assignments without personal data in the lessons of one layer.

    The ledger keeps what the user wrote.

    Args:
        assignments: The assignments.
        layer: The layer.
        countries: As for ``find_personal_data``. If there are none, nothing is replaced.

    Raises:
        InvalidInput: A country is unknown.
        MissingPackage: The extra ``scrub`` is not installed.
    """
    return tuple(
        replace(
            each,
            lesson=each.lesson and each.lesson.scrubbed(countries),
            extra_examples=tuple(lesson.scrubbed(countries) for lesson in each.extra_examples),
        )
        if countries and each.layer == layer
        else each
        for each in assignments
    )


def _load_fact_turns(
    ledger: Ledger, user: str, signals: Sequence[Signal], until: int | None
) -> tuple[Turn, ...]:
    """Return the turns that used facts without a stated answer, and the newest, oldest first.

    The newest turn shows whether a conversation went on after a fact was used.
    """
    facts = (signal for signal in signals if signal.kind is SignalKind.FACT)
    bare = [fact.id for fact in facts if not fact.payload.get("answer")]
    if not bare:
        return ()
    # In this order, so that a turn that arrives between the two reads can only be the newest.
    used = ledger.turns(user, using=bare, until=until)
    newest = ledger.turns(user, limit=1, until=until)
    return tuple(reversed(used if used[:1] == newest else (*newest, *used)))


def _strongest_by_turn(signals: Sequence[Signal]) -> Mapping[str, Signal]:
    def strength(signal: Signal) -> tuple[bool, int]:
        clear = 0 if signal.is_unclear_reward else _STRENGTH[signal.kind]
        return signal.source == USER_SOURCE, clear

    best: dict[str, Signal] = {}
    for signal in signals:
        if signal.turn is None or signal.kind not in _STRENGTH:
            continue
        if not signal.is_trainable and signal.source != USER_SOURCE:
            continue
        rival = best.get(signal.turn)
        # Signals are in order of time, so the later one wins a draw. What may not train replaces
        # earlier acts like any other, and yields to every later act of the user.
        yields = rival is not None and rival.forbids_training and signal.source == USER_SOURCE
        if rival is None or yields or strength(signal) >= strength(rival):
            best[signal.turn] = signal
    return best


def _unused(signal: Signal, why: Reason, superseded_by: str | None = None) -> Assignment:
    return Assignment(signal, Placement.UNUSED, why, superseded_by=superseded_by)


def _assign_one(
    signal: Signal,
    turn_of: Callable[[str], Turn],
    strongest: Mapping[str, Signal],
    forbidden: Set[str],
    outdated: Mapping[str, str],
) -> Assignment:
    if signal.kind is SignalKind.COMMENT:
        forbids = signal.forbids_training
        code = ReasonCode.TRAINING_FORBIDDEN if forbids else ReasonCode.COMMENT_IS_RULE
        return Assignment(signal, Placement.RULE, Reason(code))
    if signal.forbids_training:
        return _unused(signal, Reason(ReasonCode.TRAINING_FORBIDDEN))
    if not signal.is_trainable:
        return _unused(signal, Reason(ReasonCode.NOT_USER_ACT))
    if signal.kind is SignalKind.DEMONSTRATION:
        payload = signal.payload
        before = map(Message.from_list, payload.get("before", ()))
        messages = (*before, Message("user", payload["prompt"]))
        group = payload.get("group")
        lesson = Lesson(signal.id, signal.kind, messages, payload["answer"], group=group)
        why = Reason(ReasonCode.DEMONSTRATION)
        return Assignment(signal, Placement.LAYER, why, layer_of(signal), lesson)
    if signal.turn is None:
        return _unused(signal, Reason(ReasonCode.NO_TURN))
    best = strongest[signal.turn]
    if best.id != signal.id:
        return _unused(signal, reason(ReasonCode.STRONGER_SIGNAL, kind=str(best.kind)), best.id)
    turn = turn_of(signal.turn)
    forbids_reply = reply_shows(turn, turn_of, forbidden)
    if signal.kind in (SignalKind.EDIT, SignalKind.PREFERENCE):
        return _assign_written(signal, turn, forbids_reply=forbids_reply)
    if any(reveals(outdated[each], turn) for each in turn.used if each in outdated):
        return _unused(signal, Reason(ReasonCode.FACT_OUTDATED))
    if forbids_reply:
        return _unused(signal, Reason(ReasonCode.REPLY_TRAINING_FORBIDDEN))
    return _assign_rating(signal, turn)


def layer_of(signal: Signal) -> str:
    """Return the layer that may learn from a signal, or "" for none."""
    if signal.kind is SignalKind.COMMENT:
        return ""
    if signal.kind is SignalKind.FACT:
        return "memory"
    skill = signal.payload.get("skill")
    compared = str(signal.payload.get("layer", ""))
    return f"skill.{skill}" if skill else compared if compared.startswith("skill.") else "style"


def reply_shows(turn: Turn, turn_of: Callable[[str], Turn], items: Set[str]) -> bool:
    """Return whether rules or facts could show in a reply.

    They were in its prompt, or in that of an earlier reply of the same conversation.

    Args:
        turn: The turn of the reply.
        turn_of: Returns a turn by its id.
        items: The rules and facts.
    """
    if not items:
        return False
    while items.isdisjoint(turn.used):
        if turn.previous is None:
            return False
        turn = turn_of(turn.previous)
    return True


def _assign_fact(signal: Signal, helpful: Sequence[Turn], newer: Signal | None) -> Assignment:
    if newer is not None:
        is_users = newer.source == USER_SOURCE != signal.source
        code = ReasonCode.USER_FACT if is_users else ReasonCode.NEWER_FACT
        return _unused(signal, Reason(code), newer.id)
    if signal.forbids_training:
        return Assignment(signal, Placement.MEMORY, Reason(ReasonCode.TRAINING_FORBIDDEN))
    if signal.source != USER_SOURCE:
        return Assignment(signal, Placement.MEMORY, Reason(ReasonCode.FACT_NOT_USERS))
    lessons = fact_lessons(signal, helpful)
    if not lessons:
        return Assignment(signal, Placement.MEMORY, Reason(ReasonCode.FACT_LOOKED_UP))
    why = Reason(ReasonCode.FACT_WITH_ANSWER)
    if not lessons[0].is_users:
        why = reason(ReasonCode.FACT_HELPED, count=len(helpful))
    return Assignment(signal, Placement.MEMORY, why, "memory", extra_examples=lessons)


def _assign_written(signal: Signal, turn: Turn, *, forbids_reply: bool) -> Assignment:
    """Assign an edit or a preference: its text is wanted rather than the reply."""
    # The layer is known only where revisions of that layer were compared.
    if signal.payload.get("layer") == "memory":
        return _unused(signal, Reason(ReasonCode.MEMORY_COMPARISON))
    if forbids_reply and "revision" in signal.payload:
        # Both answers of a comparison had the same facts in the prompt.
        return _unused(signal, Reason(ReasonCode.REPLY_TRAINING_FORBIDDEN))
    code = ReasonCode.EDIT if signal.kind is SignalKind.EDIT else ReasonCode.PREFERENCE
    lesson = Lesson(
        signal.id,
        signal.kind,
        turn.messages,
        signal.payload["text"],
        rejected=None if forbids_reply else turn.reply or None,
        ended=not signal.payload.get("cut_off"),
        rejected_ended=turn.ended,
    )
    return Assignment(signal, Placement.LAYER, Reason(code), layer_of(signal), lesson)


def _assign_rating(signal: Signal, turn: Turn) -> Assignment:
    """Assign a rating or reward: its value weighs the reply as one to give again, or to avoid."""
    if not turn.reply.strip():
        return _unused(signal, Reason(ReasonCode.EMPTY_REPLY))
    if signal.is_unclear_reward:
        return _unused(signal, reason(ReasonCode.UNCLEAR_REWARD, limit=MIN_CLEAR_REWARD))
    value: float = signal.payload["value"]
    is_users = signal.source == USER_SOURCE
    weight = abs(value) * (_USER_WEIGHT if is_users else _OBSERVED_WEIGHT)
    kind, messages, reply = SignalKind.RATING, turn.messages, turn.reply
    if value < 0:
        code = ReasonCode.DISLIKED
        lesson = Lesson(signal.id, kind, messages, "", reply, weight, rejected_ended=turn.ended)
    else:
        code = ReasonCode.LIKED if is_users else ReasonCode.OBSERVED
        lesson = Lesson(signal.id, kind, messages, reply, weight=weight, ended=turn.ended)
    return Assignment(signal, Placement.LAYER, Reason(code), "style", lesson)


def _resolve_conflicts(assignments: Sequence[Assignment]) -> Sequence[Assignment]:
    """Keep one of several lessons that contradict or repeat each other on one request."""
    settled = list(assignments)
    active: dict[object, list[int]] = {}
    for number, each in enumerate(assignments):
        if each.lesson is None:
            continue
        # Equal messages may offer different tools.
        request = canonical_json([message.to_list() for message in each.lesson.messages])
        same_request = active.setdefault((each.layer, request), [])
        rivals = [n for n in same_request if _conflict(each.lesson, assignments[n].lesson)]
        for rival in rivals:
            if why := _yields_to(each, assignments[rival]):
                settled[number] = _unused(each.signal, why, assignments[rival].signal.id)
                break
        else:
            why = reason(ReasonCode.CONTRADICTED, kind=str(each.signal.kind))
            for rival in rivals:
                settled[rival] = _unused(assignments[rival].signal, why, each.signal.id)
                same_request.remove(rival)
            same_request.append(number)
    return settled


def _conflict(lesson: Lesson, other: Lesson | None) -> bool:
    """Return whether only one of two lessons on the same request can stand.

    Two written lessons conflict. So do two ratings of the same reply. A rating conflicts with a
    written lesson if it likes the rejected reply or dislikes the wanted one.
    """
    if other is None:
        return False
    ratings = [each for each in (lesson, other) if each.kind is SignalKind.RATING]
    if len(ratings) == 1:
        rating, written = ratings[0], other if ratings[0] is lesson else lesson
        if rating.chosen:
            return rating.chosen == written.rejected
        return rating.rejected == written.chosen
    return not ratings or (lesson.chosen or lesson.rejected) == (other.chosen or other.rejected)


def _yields_to(later: Assignment, earlier: Assignment) -> Reason | None:
    """Return why the earlier of two assignments stays the lesson, or None where the later wins."""
    is_users = later.signal.source == USER_SOURCE
    earlier_is_users = earlier.signal.source == USER_SOURCE
    kind = str(earlier.signal.kind)
    if earlier_is_users and not is_users:
        return Reason(ReasonCode.RATED_BY_USER)
    same = later.lesson and earlier.lesson and later.lesson.chosen == earlier.lesson.chosen
    if same and is_users == earlier_is_users:
        return reason(ReasonCode.REPEATED, kind=kind)
    written = earlier.signal.kind in (SignalKind.EDIT, SignalKind.DEMONSTRATION)
    # In a choice between replies of two revisions neither need be the wanted one.
    is_choice = later.signal.kind is SignalKind.PREFERENCE and "revision" in later.signal.payload
    if is_choice and written and earlier_is_users:
        return reason(ReasonCode.MORE_SPECIFIC, kind=kind)
    return None


def _replace_taught_tests(
    assignments: Sequence[Assignment], former: Sequence[Signal]
) -> list[Assignment]:
    """Judge a fact by a template of its test question where another fact teaches that question.

    Facts that are not current count, since the live revision may have been trained on them.
    """
    lessons = [lesson for each in assignments for lesson in each.extra_examples]
    for each in former:
        if each.kind is SignalKind.FACT:
            lessons += fact_lessons(each, ())
    taught: dict[str, set[str]] = {}
    for lesson in lessons:
        if not lesson.is_test:
            taught.setdefault(normalize(lesson.question), set()).add(lesson.signal)

    def untaught(lesson: Lesson) -> Lesson:
        others = taught.get(normalize(lesson.question), set()) - {lesson.signal}
        return lesson.as_test() if lesson.is_test and others else lesson

    return [
        replace(each, extra_examples=tuple(map(untaught, each.extra_examples)))
        for each in assignments
    ]


def _drop_old_style(assignments: Sequence[Assignment]) -> Sequence[Assignment]:
    """Drop lessons that show an old style.

    Likes of replies in the old style go too, and earlier dislikes of replies in the new one.
    """
    written = [
        (number, each.lesson.prompt_response)
        for number, each in enumerate(assignments)
        if each.layer == "style" and each.lesson is not None
        if each.lesson.chosen and each.lesson.kind is not SignalKind.RATING
    ]
    change = find_style_change(tuple(example for _, example in written))
    if change is None:
        return assignments
    first, _ = written[change.index]
    since = assignments[first].signal.id
    settled = list(assignments)
    for number, each in enumerate(assignments):
        lesson, is_older = each.lesson, number < first
        if lesson is None or each.layer != "style" or not (lesson.chosen or is_older):
            continue
        # A reply in the new style is no longer disliked for it.
        if change.matches(lesson.chosen or lesson.rejected or "") is bool(lesson.chosen):
            continue
        if is_older or lesson.kind is SignalKind.RATING:
            # Without ``superseded_by``: a lesson that supersedes a held-out one is held out too.
            # The new style must not be held out for the old one.
            code = ReasonCode.STYLE_CHANGED_SINCE if is_older else ReasonCode.STYLE_CHANGED_BEFORE
            settled[number] = _unused(each.signal, reason(code, since=since))
    return settled


def _drop_dislikes_if_too_few(assignments: Sequence[Assignment]) -> Sequence[Assignment]:
    """Drop all dislikes while there are too few likes or dislikes."""
    ratings = [
        each.lesson
        for each in assignments
        if each.lesson is not None and each.lesson.kind is SignalKind.RATING
    ]
    up = sum(bool(lesson.chosen) for lesson in ratings)
    down = len(ratings) - up
    if min(up, down) >= MIN_THUMBS:
        return assignments
    counts = {"needed": MIN_THUMBS, "up": up, "down": down}
    return [
        each
        if each.lesson is None or each.lesson.chosen
        else _unused(
            each.signal, reason(ReasonCode.TOO_FEW_THUMBS, kind=str(each.signal.kind), **counts)
        )
        for each in assignments
    ]
