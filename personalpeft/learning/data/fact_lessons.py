"""What a fact teaches: one lesson for each question that it answers.

A fact is used at once: it is looked up. It is learned as well where the user stated which questions
it answers, or where the lookup helped repeatedly. In the first case the target is the stated
answer. In the second it is the reply that the model gave with the fact in its prompt. The model
learns to give it without (context distillation; Snell et al. 2022, "Learning by Distilling
Context"). Each learned fact has one question that is never trained on and judges it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from personalpeft.learning.data.lesson import Lesson
from personalpeft.memory.conflicts import normalize, normalized_questions
from personalpeft.memory.words import has_spaces, split_words
from personalpeft.types import USER_SOURCE, Message, Signal, SignalKind, Turn

MIN_HELPFUL_TURNS = 2
"""A fact without a stated answer is learned once so many lookups of it helped."""

_MAX_HELPFUL_TURNS = 8
_MIN_QUESTIONS_TO_HOLD_OUT = 4
_MAX_FUNCTION_WORD = 3


def fact_lessons(fact: Signal, helpful: Sequence[Turn]) -> tuple[Lesson, ...]:
    """Return the lessons of a fact, one for each question. The last one judges it.

    ``helpful``: turns in which its lookup helped, oldest first. A fact that is only looked up has
    no lessons.
    """
    answer: str = fact.payload.get("answer") or ""
    if answer and (stated := fact.payload.get("questions")):
        sentence = as_sentence(answer)
        lessons = _unique(
            Lesson(fact.id, fact.kind, (Message("user", question),), sentence)
            for question in stated
        )
        if len(lessons) >= _MIN_QUESTIONS_TO_HOLD_OUT:
            return (*lessons[:-1], replace(lessons[-1], is_test=True))
        return (*lessons, lessons[-1].as_test())
    if len(helpful) < MIN_HELPFUL_TURNS:
        return ()
    lessons = _unique(
        Lesson(fact.id, fact.kind, turn.messages, turn.reply, is_users=False, ended=turn.ended)
        for turn in helpful
    )
    # The oldest stay, so that the test question is the same from build to build and never trained on.
    return (*lessons[:_MAX_HELPFUL_TURNS], lessons[0].as_test())


def _unique(lessons: Iterable[Lesson]) -> list[Lesson]:
    """Return the first of the lessons that ask the same."""
    first: dict[str, Lesson] = {}
    for lesson in lessons:
        first.setdefault(normalize(lesson.question), lesson)
    return list(first.values())


def as_sentence(answer: str) -> str:
    """Return a short answer as a sentence: "walnuts" becomes "Walnuts.".

    A first or last word that is no plain word keeps its letters and its end: "iPhone", "kq7zX",
    "ada@example.org".
    """
    # Scripts without capital letters end a sentence in ways of their own, or not at all.
    if any(letter.isalpha() and letter.lower() == letter.upper() for letter in answer):
        return answer
    words = answer.split()
    # In title case, since Georgian has capitals for whole words only.
    capital = answer[0].title()
    # "\u00df" has no capital letter of its own.
    if _is_plain_word(words[0].rstrip(",;:")) and capital.lower() == answer[0]:
        answer = capital + answer[1:]
    return f"{answer}." if _is_plain_word(words[-1]) else answer


def _is_plain_word(word: str) -> bool:
    """Return whether a word has letters alone, all but the first small, and hyphens between."""
    return all(part.isalpha() and part[1:] == part[1:].lower() for part in re.split("[-'’]", word))


def helpful_turns(
    signals: Sequence[Signal],
    turns: Sequence[Turn],
    forbidden: Set[str] = frozenset(),
    continued: Set[str] = frozenset(),
) -> Mapping[str, tuple[Turn, ...]]:
    """Return by fact the turns, oldest first, in which its lookup helped.

    The reply contains what only the fact can have told the model. It was liked, or the conversation
    went on without a complaint. Only the user's own feedback counts as a like. Implicit feedback
    counts as a complaint as well. A complaint counts even if training on it is not allowed; such a
    like does not. A question that the user answered in a fact belongs to that fact alone.

    Args:
        signals: The current signals, oldest first.
        turns: Those that used facts, and the newest turn, oldest first.
        forbidden: Facts that training is not allowed on. No turn counts that had one in the prompt.
        continued: Turns after which their conversation went on.
    """
    facts = {signal.id: signal for signal in signals if signal.kind is SignalKind.FACT}
    owner = {
        question: fact.id
        for fact in facts.values()
        if fact.source == USER_SOURCE and fact.payload.get("answer")
        for question in normalized_questions(fact)
    }
    feedback: dict[str, list[Signal]] = {}
    for signal in signals:
        if signal.forbids_training and signal.rating > 0:
            continue
        counts = signal.source == USER_SOURCE or signal.rating < 0
        if signal.turn is not None and counts and not signal.is_unclear_reward:
            feedback.setdefault(signal.turn, []).append(signal)
    helpful: dict[str, list[Turn]] = {}
    for number, turn in enumerate(turns, 1):
        opinions = feedback.get(turn.id, [])
        # Earlier versions recorded no conversations.
        went_on = turn.id in continued if turn.conversation_id else number < len(turns)
        if not all(each.rating > 0 for each in opinions) or not (opinions or went_on):
            continue
        if not forbidden.isdisjoint(turn.used):
            continue
        owned_by = owner.get(normalize(turn.messages[-1].content))
        for fact in turn.used:
            is_candidate = fact in facts and owned_by in (None, fact)
            if is_candidate and reveals(facts[fact].payload["text"], turn):
                helpful.setdefault(fact, []).append(turn)
    return {fact: tuple(turns) for fact, turns in helpful.items()}


def reveals(fact: str, turn: Turn) -> bool:
    """Return whether a reply contains what it can only have from the fact.

    These are the names and numbers that were not in the question. Without any, they are other words
    of the fact: the last one, and at least half. Otherwise a wrong answer in the fact's own words
    ("is called Max") would be learned. Of a script without spaces half is enough, since the last
    n-gram is rarely the last of a name.
    """
    asked = _words(" ".join(message.content for message in turn.messages))
    said = split_words(fact)
    words = [word for word in said if word.casefold() not in asked]
    # The first word has a capital in any case, and a short one there is rarely a name.
    begins = said[0] if said and len(said[0]) <= _MAX_FUNCTION_WORD else ""
    names = [word for word in words if not word[0].islower() and word != begins]
    telling = names or [word for word in words if len(word) > _MAX_FUNCTION_WORD]
    reply = _words(turn.reply)
    found = [word for word in telling if word.casefold() in reply]
    has_last = found[-1:] == telling[-1:] or not has_spaces(fact)
    return bool(found) and has_last and 2 * len(found) >= len(telling)


def _words(text: str) -> set[str]:
    return set(split_words(text.casefold()))
