"""When a fact becomes a lesson of the memory layer, and which questions it is then learned by. Pure.

A fact acts at once: it is looked up. It is learned as well where somebody said which questions it answers and how, or
where looking it up helped repeatedly. In the first case the short answer is the target; in the second it is what the
model said with the fact in its prompt, which it then learns to say without (distillation from prompt to weights; Snell et
al. 2022, "Learning by Distilling Context").

Invariant: each fact that is learned has one question that is never trained on and judges it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from personalpeft.learning.data.ratings import is_unclear, liking_of
from personalpeft.memory.conflicts import questions_in, same_words
from personalpeft.types import PERSON, Message, Revision, Signal, SignalKind, Turn, canonical_digest

T = TypeVar("T")

MIN_HELPFUL_TURNS = 2
"""So many replies in which a fact was looked up have to have helped, before it is learned without anybody's saying how."""

MEMORIZED_LOGPROB = math.log(0.7)

PARAPHRASE_TEMPLATES = (
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
_MOST_HELPED = 8
_SHORT = 3


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """One question about a fact and the answer that is wanted. ``given`` says whether the answer is the person's own short
    one, rather than a reply of the model; that may have been cut off before it ``ended``.
    """

    messages: tuple[Message, ...]
    answer: str
    is_user_answer: bool
    ended: bool = True


def fact_questions(fact: Signal, helped: Sequence[Turn]) -> tuple[tuple[FactQuestion, ...], FactQuestion | None]:
    """The questions that a fact is learned by and the one that judges it; nothing and None for one that is only looked up.
    ``helped`` are the turns in which looking it up helped, oldest first.
    """
    answer: str = fact.payload.get("answer") or ""
    questions = (
        _once(fact.payload.get("questions") or (), lambda question: question) if answer else []
    )
    if questions:
        asked = [
            FactQuestion((Message("user", question),), as_sentence(answer), True) for question in questions
        ]
        if len(asked) >= _FEWEST_TO_HOLD_ONE_BACK:
            return tuple(asked[:-1]), asked[-1]
        return tuple(asked), _framed(asked[-1], _JUDGED_IN)
    if len(helped) < MIN_HELPFUL_TURNS:
        return (), None
    # The oldest come first and stay, so that what judges is the same from build to build and was never trained on.
    turns = _once(helped, lambda turn: turn.messages[-1].content)[:_MOST_HELPED]
    asked = [FactQuestion(turn.messages, turn.reply, False, turn.ended) for turn in turns]
    return tuple(asked), _framed(asked[0], _JUDGED_IN)


def memorized(memory: Revision) -> frozenset[str]:
    """The facts that a memory was found to know when it was judged: their answers to a question that was never trained on
    were likelier than ``BY_HEART`` a token. Looking one of these up as well does harm: what lies in the prompt is
    told apart less surely than what was learned.
    """
    pins: Mapping[str, Any] = memory.scores.get("pins", {})
    likely = {
        key
        for key, said in pins.items()
        if said.get("after") is not None and said["after"] >= MEMORIZED_LOGPROB
    }
    return frozenset(signal for signal, slash, _ in (key.partition("/") for key in likely) if slash)


def paraphrases_digest() -> str:
    """Names the ways in which questions are put: they decide what is trained."""
    return canonical_digest([*PARAPHRASE_TEMPLATES, _JUDGED_IN])


def paraphrase(messages: Sequence[Message], frames: Iterable[str]) -> list[tuple[Message, ...]]:
    """The last question of a conversation as it is and put in each of the frames."""
    *before, last = messages
    return [
        tuple(messages),
        *((*before, replace(last, content=_put(frame, last.content))) for frame in frames),
    ]


def as_sentence(answer: str) -> str:
    """A short answer as a sentence: "walnuts" is "Walnuts."."""
    answer = answer[0].upper() + answer[1:]
    return answer if answer[-1] in ".!?…" else f"{answer}."


def helpful_turns(signals: Sequence[Signal], turns: Sequence[Turn]) -> Mapping[str, tuple[Turn, ...]]:
    """By fact, the turns in which looking it up helped: the reply says what only the fact can have told it, and was
    liked, or the conversation went on without a word against it. ``turns`` are oldest first, ``signals`` the current
    ones. For it only a person's own word counts, against it also what an app saw. A question of which the person said what
    answers it is that fact's to teach, and no other's.
    """
    facts = {signal.id: signal for signal in signals if signal.kind is SignalKind.FACT}
    told = {question: fact.id for fact in facts.values() for question in _told(fact)}
    opinions: dict[str, list[Signal]] = {}
    for signal in signals:
        heard = signal.source == PERSON or liking_of(signal) < 0
        if signal.turn is not None and heard and not is_unclear(signal):
            opinions.setdefault(signal.turn, []).append(signal)
    found: dict[str, list[Turn]] = {}
    for turn, is_last in zip(turns, [False] * (len(turns) - 1) + [True], strict=False):
        said = opinions.get(turn.id, [])
        if not (all(liking_of(signal) > 0 for signal in said) and (said or not is_last)):
            continue
        told_by = told.get(same_words(turn.messages[-1].content))
        for fact in turn.used:
            if (
                fact in facts
                and told_by in (None, fact)
                and _said_in(facts[fact].payload["text"], turn)
            ):
                found.setdefault(fact, []).append(turn)
    return {fact: tuple(helpful) for fact, helpful in found.items()}


def _told(fact: Signal) -> list[str]:
    """The questions of which the person said that this fact answers them, and how."""
    return questions_in(fact) if fact.source == PERSON and fact.payload.get("answer") else []


def _once(items: Sequence[T], question: Callable[[T], str]) -> list[T]:
    """Of items that ask the same, the first."""
    first: dict[str, T] = {}
    for item in items:
        first.setdefault(same_words(question(item)), item)
    return list(first.values())


def _said_in(fact: str, turn: Turn) -> bool:
    """Whether a reply says what it can only have from the fact: of its names and numbers that were not in the question, or
    of its other words where it has none, the last and no less than half. A wrong answer in the fact's own words ("is called
    Max") would else be taught.
    """
    asked = _words(" ".join(message.content for message in turn.messages))
    words = [word for word in re.findall(r"\w+", fact) if word.casefold() not in asked]
    # What begins a sentence is written large in any case, and a short word there is mostly no name.
    first = re.match(r"\W*(\w*)", fact)
    begins = first[1] if first and len(first[1]) <= _SHORT else ""
    names = [word for word in words if not word[0].islower() and word != begins]
    telling = [word.casefold() for word in names or words if names or len(word) > _SHORT]
    said = [word for word in telling if word in _words(turn.reply)]
    return bool(said) and said[-1] == telling[-1] and 2 * len(said) >= len(telling)


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.casefold()))


def _framed(asked: FactQuestion, frame: str) -> FactQuestion:
    return replace(asked, messages=paraphrase(asked.messages, [frame])[-1])


def _put(frame: str, question: str) -> str:
    # What comes after it would else be read as a part of it.
    question = question if question[-1:] in ".?!…" else f"{question}?"
    keeps = re.match(r"(I|I'.*)\b", question) is not None
    return frame.format(
        first=question, later=question if keeps else question[:1].lower() + question[1:]
    )
