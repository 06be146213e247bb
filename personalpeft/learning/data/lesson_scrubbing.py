"""Replace personal data in lessons before a build. The ledger keeps what the user wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from personalpeft.learning.data.scrubber import (
    LessonPart,
    RemovedText,
    find_personal_data,
    replace_personal_data,
)
from personalpeft.learning.data.training_examples import Assignment, Lesson
from personalpeft.types import Message


def scrub_assignments(
    assignments: Sequence[Assignment], layer: str, countries: Sequence[str]
) -> tuple[Assignment, ...]:
    """Return assignments without personal data in the lessons of one layer.

    Args:
        assignments: The assignments.
        layer: The layer.
        countries: As for ``find_personal_data``. If there are none, nothing is replaced.

    Raises:
        InvalidInput: A country is unknown.
        MissingPackage: The extra ``scrub`` is not installed.
    """
    return tuple(
        replace(
            each,
            lesson=each.lesson and scrub_lesson(each.lesson, countries),
            extra_examples=tuple(scrub_lesson(one, countries) for one in each.extra_examples),
        )
        if countries and each.layer == layer
        else each
        for each in assignments
    )


def scrub_lesson(lesson: Lesson, countries: Sequence[str]) -> Lesson:
    """Return a lesson without personal data. For the arguments see ``scrub_assignments``."""
    removed = list(lesson.removed)

    def scrub(text: str, part: LessonPart, message: int = 0) -> str:
        found = find_personal_data(text, countries) if countries else []
        removed.extend(
            RemovedText(
                lesson.signal,
                part,
                message,
                each.kind,
                each.start,
                each.end,
                text[each.start : each.end],
            )
            for each in found
        )
        return replace_personal_data(text, found)

    def scrub_messages(messages: Sequence[Message], part: LessonPart) -> tuple[Message, ...]:
        return tuple(
            replace(each, content=scrub(each.content, part, number))
            for number, each in enumerate(messages)
        )

    teacher = lesson.teacher_messages
    scrubbed = replace(
        lesson,
        messages=scrub_messages(lesson.messages, LessonPart.PROMPT),
        chosen=scrub(lesson.chosen, LessonPart.ANSWER),
        rejected=lesson.rejected and scrub(lesson.rejected, LessonPart.REJECTED),
        teacher_messages=teacher and scrub_messages(teacher, LessonPart.TEACHER),
    )
    return replace(scrubbed, removed=tuple(removed))
