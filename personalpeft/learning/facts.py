"""When a fact becomes a lesson of the memory layer, and which questions it is then learned by. Pure.

A fact acts at once: it is looked up. It is learned as well where somebody said which questions it answers and how, or
where looking it up helped repeatedly. In the first case the short answer is the target; in the second it is what the
model said with the fact in its prompt, which it then learns to say without (distillation from prompt to weights; Snell et
al. 2022, "Learning by Distilling Context").

Invariants: each fact that is learned has one question that is never trained on and judges it; of two facts that answer the
same question otherwise the later is learned.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.types import PERSON, Message, Revision, Signal, SignalKind, Turn

HELPED = 2
"""So many replies in which a fact was looked up have to have helped, before it is learned without anybody's saying how."""

BY_HEART = math.log(0.7)

FRAMES = (
    "Can you tell me: {later}",
    "I forgot. {first}",
    "Quick question: {later}",
    "Remind me, {later}",
    "{first} Please tell me.",
    "Do you know {later}",
    "Hey, {later}",
    "Please answer this: {first}",
    "One thing: {later}",
)
"""Ways of putting a question. ``first`` is the question as it begins a sentence, ``later`` as it goes on with one."""

_JUDGED_IN = "So, {later} Just asking."
_FEWEST_TO_HOLD_ONE_BACK = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about a fact and the answer that is wanted. ``given`` says whether the answer is the person's own short
    one, rather than a reply of the model.
    """

    messages: tuple[Message, ...]
    answer: str
    given: bool


def asked_of(fact: Signal, helped: Sequence[Turn]) -> tuple[tuple[Asked, ...], Asked | None]:
    """The questions that a fact is learned by and the one that judges it; nothing and None for one that is only looked up.
    ``helped`` are the turns in which looking it up helped, oldest first.
    """
    questions = tuple(dict.fromkeys(fact.payload.get("questions") or ()))
    answer = fact.payload.get("answer")
    if questions and answer:
        asked = [Asked((Message("user", question),), as_sentence(answer), True) for question in questions]
    elif len(helped) >= HELPED:
        asked = [Asked(turn.messages, turn.reply, False) for turn in helped]
    else:
        return (), None
    if len(asked) >= _FEWEST_TO_HOLD_ONE_BACK:
        return tuple(asked[:-1]), asked[-1]
    return tuple(asked), _framed(asked[-1], _JUDGED_IN)


def by_heart(memory: Revision) -> frozenset[str]:
    """The facts that a memory was found to know when it was judged: their answers to a question that was never trained on
    were likelier than ``BY_HEART`` a token. Looking one of these up as well does harm: what lies in the prompt is
    told apart less surely than what was learned.
    """
    pins: Mapping[str, Any] = memory.scores.get("pins", {})
    likely = {key.partition("/")[0] for key, said in pins.items() if (said.get("after") or -math.inf) >= BY_HEART}
    return frozenset(likely & {signal for signal, role in memory.signals.items() if role == "train"})


def said_in(messages: Sequence[Message], frames: Iterable[str]) -> list[tuple[Message, ...]]:
    """The last question of a conversation as it is and put in each of the frames."""
    *before, last = messages
    return [tuple(messages), *((*before, Message(last.role, _put(frame, last.content))) for frame in frames)]


def as_sentence(answer: str) -> str:
    """A short answer as a sentence: "walnuts" is "Walnuts."."""
    answer = answer[0].upper() + answer[1:]
    return answer if answer[-1] in ".!?…" else f"{answer}."


def same_question(text: str) -> str:
    """What two ways of writing one question have in common: its words, whatever their case and the marks between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def helped_by(signals: Sequence[Signal], turns: Sequence[Turn]) -> Mapping[str, tuple[Turn, ...]]:
    """By fact, the turns in which looking it up helped: the reply says a word of the fact that the question did not, and was
    liked, or the conversation went on without a word against it. ``turns`` are oldest first, ``signals`` the current
    ones; only what a person said counts.
    """
    facts = {signal.id: signal for signal in signals if signal.kind is SignalKind.FACT}
    opinions: dict[str, list[Signal]] = {}
    for signal in signals:
        if signal.turn is not None and signal.source == PERSON:
            opinions.setdefault(signal.turn, []).append(signal)
    found: dict[str, list[Turn]] = {}
    for turn, is_last in zip(turns, [False] * (len(turns) - 1) + [True], strict=False):
        said = opinions.get(turn.id, [])
        if not (all(map(_is_like, said)) and (said or not is_last)):
            continue
        for fact in turn.used:
            if fact in facts and _said_in(facts[fact].payload["text"], turn):
                found.setdefault(fact, []).append(turn)
    return {fact: tuple(helpful) for fact, helpful in found.items()}


def _is_like(signal: Signal) -> bool:
    value = signal.payload.get("value", 0)
    return signal.kind in (SignalKind.RATING, SignalKind.REWARD) and value > 0


def _said_in(fact: str, turn: Turn) -> bool:
    """Whether a reply says something that it can only have from the fact."""
    own = _words(fact) - _words(" ".join(message.content for message in turn.messages))
    return bool(own & _words(turn.reply))


def _words(text: str) -> set[str]:
    """The words that carry something: numbers, and what has four letters or more."""
    return {word for word in re.findall(r"\w+", text.casefold()) if len(word) > 3 or word.isdigit()}


def _framed(asked: Asked, frame: str) -> Asked:
    return Asked(said_in(asked.messages, [frame])[-1], asked.answer, asked.given)


def _put(frame: str, question: str) -> str:
    keeps = re.match(r"(I|I'.*)\b", question) is not None
    return frame.format(first=question, later=question if keeps else question[:1].lower() + question[1:])
