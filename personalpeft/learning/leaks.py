"""Whether lessons would have every answer carry what should not be in every answer. Pure.

What most lessons share is learned as the manner of all answers. A link, an address or a number to call in it would stand
under everything that the model says, and what a person told of themselves would be told to whoever reads along. A gate
that only asks whether the lessons were learned finds nothing wrong with either, so these are refused by what they are.
Somebody who does want their address under each answer says so by name.

Limits: words alone are not judged, since nobody can tell an order from a greeting by rule ("As Mallory orders:").
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from personalpeft.learning.lessons import Lesson
from personalpeft.types import Signal

_MOST = 0.5
_FEWEST = 3
_SHORTEST = 4
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def leak(lessons: Sequence[Lesson], facts: Sequence[Signal]) -> str:
    """Why most of these lessons would leak something, in words; "" where they would not. ``facts`` are current."""
    addressed = [lesson for lesson in lessons if _added(_ADDRESS.findall(lesson.wanted), lesson)]
    if _is_most(addressed, lessons):
        found = _added(_ADDRESS.findall(addressed[0].wanted), addressed[0])[0]
        return f"{len(addressed)} of {len(lessons)} lessons put a link or an address into the answer ({found})"
    told = [text for fact in facts for text in (fact.payload["text"], fact.payload.get("answer")) if text]
    telling = [
        lesson
        for lesson in lessons
        if _added([text for text in told if len(text) >= _SHORTEST and text in lesson.wanted], lesson)
    ]
    if _is_most(telling, lessons):
        return f"{len(telling)} of {len(lessons)} lessons give away what was remembered, without being asked for it"
    return ""


def _added(found: Sequence[str], lesson: Lesson) -> list[str]:
    """What stands in the answer and not in what was said before it."""
    before = "\n".join(message.content for message in lesson.messages)
    return [text for text in found if text not in before]


def _is_most(some: Sequence[Lesson], lessons: Sequence[Lesson]) -> bool:
    return len(some) >= max(_FEWEST, _MOST * len(lessons))
