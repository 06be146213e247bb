"""Which of several facts counts: of two that answer the same question otherwise, the later; but whatever comes later, what a
person told counts before what an app or a judge did. Pure.

Two facts contradict each other only where somebody said which questions each answers, and how; of bare sentences nobody
can tell. What is outdated stays in the ledger, and is neither looked up nor learned; it still overrules what came before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from personalpeft.types import PERSON, Signal

# What is written around words and says nothing of them. Not "+" or "#": C, C++ and C# are three things.
_AROUND = ".,;:!?…'\"`´‘’“”„«»()[]{}¿¡*_-\u2013\u2014"


def same_words(text: str) -> str:
    """What two ways of writing one question, or one answer, have in common: its words, whatever their case, the space between
    them and the marks around them. A text of nothing but marks is itself.
    """
    spoken = text.casefold().split()
    return " ".join(word for each in spoken if (word := each.strip(_AROUND))) or " ".join(spoken)


def questions_in(fact: Signal) -> list[str]:
    """The questions that a fact answers, each as ``same_words`` has it."""
    return [same_words(question) for question in fact.payload.get("questions") or ()]


def outdated(facts: Sequence[Signal]) -> Mapping[str, Signal]:
    """By the id of each fact that counts no more, the one that contradicts it. ``facts`` are current, oldest first."""
    latest: dict[str, Signal] = {}
    found: dict[str, Signal] = {}
    newest = list(reversed(facts))
    # A person's first: whoever finds a rival among those before gives way to it.
    for fact in sorted(newest, key=lambda fact: fact.source != PERSON):
        answer: str = fact.payload.get("answer") or ""
        asked = questions_in(fact) if answer else []
        rivals = [latest[question] for question in asked if question in latest]
        rival = next(
            (each for each in rivals if same_words(each.payload["answer"]) != same_words(answer)),
            None,
        )
        if rival is not None:
            found[fact.id] = rival
        # What gives way itself still overrules what came before it, or a value that was said otherwise twice would come back.
        latest |= {question: fact for question in asked if question not in latest}
    return found
