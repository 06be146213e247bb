"""The write policy: from what a person did to what is learned from it, and where that goes.

Each current signal has exactly one routing. What the person wrote themselves (an edit, a preferred text, a
demonstration) counts more than what they only liked; of several acts on one turn the strongest is the lesson, and of
one kind the latest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from personalpeft.types import Message, Signal, SignalKind, Turn

Place: TypeAlias = Literal["layer", "profile", "memory", "kept"]

_STRENGTH = {SignalKind.EDIT: 3, SignalKind.PREFERENCE: 2, SignalKind.RATING: 1}
_LIKED_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class Lesson:
    """One thing to learn for a layer: after these messages, ``wanted`` rather than ``rejected`` (None: nothing to
    compare with).
    """

    signal: str
    kind: SignalKind
    messages: tuple[Message, ...]
    wanted: str
    rejected: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Routing:
    """Where one signal went and why; ``lesson`` is there when the place is a layer."""

    signal: Signal
    place: Place
    why: str
    layer: str | None = None
    lesson: Lesson | None = None


def route(signals: Sequence[Signal], turn_of: Callable[[str], Turn]) -> tuple[Routing, ...]:
    """One routing for each signal, in the order of the signals, which is that of the ledger: oldest first."""
    strongest = _strongest(signals)
    return tuple(_route(signal, turn_of, strongest) for signal in signals)


def lessons_for(routings: Sequence[Routing], layer: str) -> tuple[Lesson, ...]:
    """The lessons of one layer, oldest first."""
    return tuple(r.lesson for r in routings if r.layer == layer and r.lesson is not None)


def _strongest(signals: Sequence[Signal]) -> Mapping[str, Signal]:
    best: dict[str, Signal] = {}
    for signal in signals:
        if signal.turn is None or signal.kind not in _STRENGTH:
            continue
        rival = best.get(signal.turn)
        # The order is that of time, so among equals the later one wins.
        if rival is None or _STRENGTH[signal.kind] >= _STRENGTH[rival.kind]:
            best[signal.turn] = signal
    return best


def _route(signal: Signal, turn_of: Callable[[str], Turn], strongest: Mapping[str, Signal]) -> Routing:
    match signal.kind:
        case SignalKind.COMMENT:
            return Routing(signal, "profile", "a comment is a rule that acts on the next turn")
        case SignalKind.FACT:
            return Routing(signal, "memory", "a fact is looked up when a question is near it")
        case SignalKind.REWARD:
            return Routing(signal, "kept", "a reward trains skills by trial, which no layer does yet")
        case SignalKind.DEMONSTRATION:
            skill = signal.payload.get("skill")
            layer = f"skill.{skill}" if skill else "style"
            messages = (Message("user", signal.payload["prompt"]),)
            lesson = Lesson(signal.id, signal.kind, messages, signal.payload["answer"])
            return Routing(signal, "layer", "a demonstration shows the answer that is wanted", layer, lesson)
    if signal.turn is None:
        return Routing(signal, "kept", "it names no turn")
    best = strongest[signal.turn]
    if best.id != signal.id:
        return Routing(signal, "kept", f"the {best.kind} of the same turn says more")
    return _from_turn(signal, turn_of(signal.turn))


def _from_turn(signal: Signal, turn: Turn) -> Routing:
    if signal.kind is SignalKind.RATING:
        if signal.payload["value"] < 0:
            return Routing(signal, "kept", "a thumb down says what is wrong, not what is right; an edit would")
        if not turn.reply.strip():
            return Routing(signal, "kept", "the reply was empty")
        lesson = Lesson(signal.id, signal.kind, turn.messages, turn.reply, weight=_LIKED_WEIGHT)
        return Routing(signal, "layer", "a reply that was liked is an answer to give again", "style", lesson)
    lesson = Lesson(signal.id, signal.kind, turn.messages, signal.payload["text"], rejected=turn.reply or None)
    why = {
        SignalKind.EDIT: "an edit shows the answer that is wanted, and the one that was not",
        SignalKind.PREFERENCE: "of two answers the preferred one is wanted",
    }[signal.kind]
    return Routing(signal, "layer", why, "style", lesson)
