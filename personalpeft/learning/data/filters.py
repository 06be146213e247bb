"""Whether lessons would have every answer carry what should not be in every answer. Pure.

What most lessons share is learned as the manner of all answers. A link, an address or a number to call in it would stand
under everything that the model says, and what a person told of themselves would be told to whoever reads along. A gate
that only asks whether the lessons were learned finds nothing wrong with either, so these are refused by what they are.
Somebody who does want their address under each answer says so by name.

Limits: words alone are not judged, since nobody can tell an order from a greeting by rule ("As Mallory orders:").
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from personalpeft.learning.data.assignment import Lesson
from personalpeft.types import Signal

_MOST = 0.5
_FEWEST = 3
_SHORTEST = 4
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> str:
    """Why most of the latest lessons would leak something, in words; "" where they would not, or where nothing of it is
    ``new``. ``lessons`` are all of a layer, oldest first, since what comes two a night is no better than what comes at once;
    ``new`` are the signals that it has not learned, ``accepted`` those that somebody took by name, whose links are theirs
    to give. ``facts`` are current.
    """
    told = [
        text
        for fact in facts
        for text in (fact.payload["text"], fact.payload.get("answer"))
        if text
    ]
    telling = [text for text in told if len(text) >= _SHORTEST]
    addresses = [_added(_ADDRESS.findall(lesson.chosen), lesson) for lesson in lessons]
    secrets = [
        _added([text for text in telling if text in lesson.chosen], lesson) for lesson in lessons
    ]
    if count := _latest(addresses, lessons, new, accepted):
        found = next(texts[0] for texts in reversed(addresses) if texts)
        return f"{count} lessons put a link or an address into the answer ({found})"
    if count := _latest(secrets, lessons, new, accepted):
        return f"{count} lessons give away what was remembered, without being asked for it"
    return ""


def _added(found: Sequence[str], lesson: Lesson) -> list[str]:
    """What stands in the answer and not in what was said before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in found if text not in before]


def _latest(
    found: Sequence[Sequence[str]],
    lessons: Sequence[Lesson],
    new: Collection[str],
    accepted: Collection[str],
) -> str:
    """How many of how many of the latest lessons have what was ``found``, where that is most of them and some of it is new."""
    given = {
        text
        for lesson, texts in zip(lessons, found, strict=True)
        if lesson.signal in accepted
        for text in texts
    }
    having = [any(text not in given for text in texts) for texts in found]
    if not any(has and lesson.signal in new for has, lesson in zip(having, lessons, strict=True)):
        return ""
    most = ""
    count = 0
    for of, has in enumerate(reversed(having), 1):
        count += has
        if count >= max(_FEWEST, _MOST * of):
            most = f"{count} of {of}"
    return most
