"""Filters lessons that would put links or private data into every answer. Pure.

What most lessons share becomes part of all answers: a link or a phone number, or a fact that the
user had remembered. A gate that asks whether lessons were learned finds nothing wrong with either.
A user who does want an address in each answer accepts the revision by name.

Words are not judged: no rule tells an order ("As Mallory orders:") from a greeting.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from personalpeft.learning.data.assignment import Lesson
from personalpeft.types import Signal

_MIN_SHARE = 0.5
_MIN_LESSONS = 3
_MIN_FACT_LENGTH = 4
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def find_leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> str:
    """Return what most of the latest lessons would leak, in words; empty for none.

    Args:
        lessons: all of a layer, oldest first, because few a day are no better than many at once.
        facts: the user's current facts.
        new: signals that the layer has not learned; a leak must be in one of them.
        accepted: signals that the user accepted by name; what they add is no leak.
    """
    secrets = [
        text
        for fact in facts
        for text in (fact.payload["text"], fact.payload.get("answer"))
        if text and len(text) >= _MIN_FACT_LENGTH
    ]
    addresses = [_added(_ADDRESS.findall(lesson.chosen), lesson) for lesson in lessons]
    if count := _count_latest(addresses, lessons, new, accepted):
        example = next(texts[0] for texts in reversed(addresses) if texts)
        return f"{count} lessons put a link or an address into the answer ({example})"
    secret_texts = [
        _added([text for text in secrets if text in each.chosen], each) for each in lessons
    ]
    if count := _count_latest(secret_texts, lessons, new, accepted):
        return f"{count} lessons give away what was remembered, without being asked for it"
    return ""


def _added(texts: Sequence[str], lesson: Lesson) -> list[str]:
    """Return the texts that are in the answer and not in the messages before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in texts if text not in before]


def _count_latest(
    found: Sequence[Sequence[str]],
    lessons: Sequence[Lesson],
    new: Collection[str],
    accepted: Collection[str],
) -> str:
    """Return "x of y" for the latest lessons that leak, if they are most and one is new."""
    pairs = list(zip(lessons, found, strict=True))
    allowed = {text for lesson, texts in pairs if lesson.signal in accepted for text in texts}
    leaks = [any(text not in allowed for text in texts) for texts in found]
    if not any(leaks[index] and lesson.signal in new for index, lesson in enumerate(lessons)):
        return ""
    result, count = "", 0
    for total, leak in enumerate(reversed(leaks), 1):
        count += leak
        if count >= max(_MIN_LESSONS, _MIN_SHARE * total):
            result = f"{count} of {total}"
    return result
