"""Conversations, found again in a ledger that knows only turns.

A turn holds the messages that it was asked with, so it names the turn before it: the one whose question and reply stand at
the end of what it was told. Only the questions are compared further back, since a reply that was edited since is told
anew, and the beginning of a long conversation may have been left out. Invariant: each turn is in one conversation at
most, and in none where it was only the half of a blind comparison that was not chosen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from personalpeft.types import Message, Signal, SignalKind, Turn
from personalpeft_app.tui.conversation import Conversation, Exchange


@dataclass(slots=True)
class _Place:
    """A turn, and what it goes on from; ``first`` names the conversation."""

    turn: Turn
    before: _Place | None
    first: str


def conversations(turns: Iterable[Turn], signals: Sequence[Signal]) -> tuple[Conversation, ...]:
    """Every conversation of a user, the one that was spoken in last first; each along its newest replies, so that one that
    was asked for again stands where the old one stood. ``turns`` and ``signals`` may come in any order.
    """
    said = _signals_by_turn(signals)
    newest: dict[str, _Place] = {}
    ends: dict[tuple[str, str], list[_Place]] = defaultdict(list)
    last: _Place | None = None
    for turn in sorted(turns, key=lambda turn: (turn.at, turn.id)):
        own = said.get(turn.id, ())
        if any(_compared(signal) for signal in own):
            continue
        before = _before(turn, ends)
        if before is not None:
            first = before.first
        elif last is not None and last.before is None and last.turn.messages == turn.messages:
            # Asked again with nothing in between: another try, not another conversation that begins in the same words.
            first = last.first
        else:
            first = turn.id
        last = newest[first] = _Place(turn, before, first)
        for reply in {turn.reply, *(s.payload["text"] for s in own if s.kind is SignalKind.EDIT)}:
            ends[turn.messages[-1].content, reply].append(last)
    found = sorted(newest.values(), key=lambda place: (place.turn.at, place.turn.id), reverse=True)
    return tuple(_talk(place, said) for place in found)


def _signals_by_turn(signals: Iterable[Signal]) -> dict[str, list[Signal]]:
    said: dict[str, list[Signal]] = defaultdict(list)
    for signal in sorted(signals, key=lambda signal: (signal.at, signal.id)):
        if signal.turn is not None:
            said[signal.turn].append(signal)
    return said


def _compared(signal: Signal) -> bool:
    return signal.kind is SignalKind.PREFERENCE and "revision" in signal.payload


def _before(turn: Turn, ends: dict[tuple[str, str], list[_Place]]) -> _Place | None:
    told = turn.messages
    if len(told) < 3 or (told[-3].role, told[-2].role) != ("user", "assistant"):
        return None
    asked = _asked(told[:-2])
    for place in reversed(ends.get((told[-3].content, told[-2].content), ())):
        known = _asked(place.turn.messages)
        if known[-len(asked) :] == asked:
            return place
    return None


def _asked(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role == "user"]


def _talk(place: _Place, said: dict[str, list[Signal]]) -> Conversation:
    turns: list[Turn] = []
    at: _Place | None = place
    while at is not None:
        turns.append(at.turn)
        at = at.before
    turns.reverse()
    system = tuple(message for message in turns[-1].messages if message.role == "system")
    exchanges = tuple(_exchange(n, turn, said.get(turn.id, ())) for n, turn in enumerate(turns))
    return Conversation(place.first, exchanges, system, turns[-1].at)


def _exchange(number: int, turn: Turn, said: Iterable[Signal]) -> Exchange:
    rating, edited, comments = 0, None, 0
    for signal in said:
        if signal.kind is SignalKind.RATING:
            rating = int(signal.payload["value"])
        elif signal.kind is SignalKind.EDIT:
            edited = str(signal.payload["text"])
        elif signal.kind is SignalKind.COMMENT:
            comments += 1
    return Exchange(
        number,
        turn.messages[-1].content,
        turn.reply,
        "stopped" if turn.finish_reason == "cancelled" else "done",
        turn=turn.id,
        stack=turn.stack.digest,
        rating=rating,
        edited=edited,
        comments=comments,
    )
