"""Which of several facts counts: of two that answer the same question otherwise, the later. Pure.

Two facts contradict each other only where somebody said which questions each answers, and how; of bare sentences nobody
can tell. What is outdated stays in the ledger, and is neither looked up nor learned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from personalpeft.types import Signal


def same_question(text: str) -> str:
    """What two ways of writing one question have in common: its words, whatever their case and the marks between them."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def outdated(facts: Sequence[Signal]) -> Mapping[str, str]:
    """By the id of each fact that a later one contradicts, that of the later one. ``facts`` are current, oldest first."""
    latest: dict[str, Signal] = {}
    found: dict[str, str] = {}
    for fact in reversed(facts):
        answer: str = fact.payload.get("answer") or ""
        asked = [same_question(question) for question in fact.payload.get("questions") or ()] if answer else []
        rivals = [latest[question] for question in asked if question in latest]
        rival = next((each for each in rivals if same_question(each.payload["answer"]) != same_question(answer)), None)
        if rival is not None:
            found[fact.id] = rival.id
        else:
            latest |= {question: fact for question in asked if question not in latest}
    return found
