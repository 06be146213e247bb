"""Which lessons are held out to judge a layer. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set

from personalpeft.learning.data.lesson import Lesson

# More held-out lessons decide nothing that so many do not, and each is scored at every learn.
MAX_HOLDOUT = 128


def select_holdout(
    lessons: Sequence[Lesson],
    new: Sequence[Lesson],
    held_out: Set[str],
    fraction: float,
    *,
    leave_one: bool,
) -> tuple[str, ...]:
    """Return the newest signals that fill the held-out share. One that was trained on never is.

    A group is held out as a whole: an older part decides for all of it.

    Args:
        lessons: The layer's lessons.
        new: Those that no build has used.
        held_out: The signals that are held out.
        fraction: The share to hold out.
        leave_one: Whether a new lesson must be left to train on.
    """
    fresh = {lesson.signal for lesson in new}
    older = [lesson for lesson in lessons if lesson.signal not in fresh and lesson.group]
    pinned = {str(lesson.group) for lesson in older if lesson.signal in held_out}
    trained = {str(lesson.group) for lesson in older} - pinned
    units: dict[str, list[str]] = {}
    for lesson in new:
        units.setdefault(lesson.group or lesson.signal, []).append(lesson.signal)
    chosen = {signal for group in pinned & units.keys() for signal in units.pop(group)}
    free = [unit for group, unit in units.items() if group not in trained]
    share = min(int(fraction * len(lessons)), MAX_HOLDOUT)
    missing = share - len(held_out & {lesson.signal for lesson in lessons}) - len(chosen)
    if len(free) == len(units) > (0 if leave_one else 1):
        free = free[1:]
    while free and missing > 0:
        unit = free.pop()
        chosen |= set(unit)
        missing -= len(unit)
    return tuple(lesson.signal for lesson in new if lesson.signal in chosen)
