"""Which lessons a build takes: those that fit the layer, and those that are held out to judge it.

Verbatim recall is near perfect below ``RECOMMENDED_TOKENS_PER_PARAMETER``. It falls off up to ten
times that, and collapses beyond (arXiv 2606.02437). So a memory takes the newest lessons up to the
configured ``tokens_per_parameter``. Lessons of one signal fit or stay out together. One that does
not fit leaves its room to older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set

from personalpeft.backends.base import Backend
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.types import Architecture, Message, canonical_json

MAX_HOLDOUT = 128
"""More held-out lessons decide nothing that so many do not, and each is scored at every learn."""

RECOMMENDED_TOKENS_PER_PARAMETER = 1e-3
# More than a chat template writes around the messages.
_TEMPLATE_BYTES = 4096


def find_too_long(lessons: Iterable[Lesson], cut: int, backend: Backend) -> set[str]:
    """Return the signals that are too long to teach anything.

    A prompt that leaves no room for a reply in the context cannot be asked. Training on it would
    take as long as on a hundred others. A reply is cut at ``cut`` tokens, and an edit behind the
    cut changes nothing.
    """
    context = backend.base.card.context
    room = context - min(cut, context // 2)
    return {
        lesson.signal
        for lesson in lessons
        if (_bytes_of(lesson.messages) > room and len(backend.render(lesson.messages)) > room)
        or _is_same_before_cut(lesson, cut, backend)
    }


def _is_same_before_cut(lesson: Lesson, cut: int, backend: Backend) -> bool:
    """Return whether a lesson's wanted and rejected reply differ only behind the cut."""
    if not lesson.chosen or not lesson.rejected:
        return False
    replies = lesson.chosen, lesson.rejected
    # Each token has a byte at least, so a shorter text is not cut.
    if any(len(each.encode()) < cut for each in replies):
        return False
    chosen, rejected = (backend.encode(each)[:cut] for each in replies)
    return chosen == rejected


def _bytes_of(messages: Sequence[Message]) -> int:
    """Return more than the tokens that messages can have: each has a byte at least."""
    texts = (canonical_json(message.to_list()) for message in messages)
    return _TEMPLATE_BYTES + sum(len(text.encode()) for text in texts)


def fit_lessons(
    lessons: Sequence[Lesson],
    layer: str,
    config: TrainingConfig,
    architecture: Architecture,
    count_tokens: Callable[[str], int],
) -> tuple[tuple[Lesson, ...], dict[str, int]]:
    """Return the lessons that fit a layer, in their order, and its ``LearnReport.capacity``.

    A layer other than "memory" has none. Lessons are oldest first. Each counts by its last message
    and its answer.
    """
    if layer != "memory":
        return tuple(lessons), {}
    sizes: dict[str, int] = {}
    for lesson in lessons:
        answer = min(count_tokens(lesson.chosen), config.max_length)
        size = count_tokens(lesson.question) + answer
        sizes[lesson.signal] = max(size, sizes.get(lesson.signal, 0))
    parameters = config.count_parameters(architecture)
    max_tokens = int(parameters * config.tokens_per_parameter)
    tokens, fit = 0, set[str]()
    for signal in reversed(sizes):
        if tokens + sizes[signal] <= max_tokens:
            tokens += sizes[signal]
            fit.add(signal)
    kept = tuple(lesson for lesson in lessons if lesson.signal in fit)
    return kept, {
        "parameters": parameters,
        "tokens": tokens,
        "max_tokens": max_tokens,
        # Up to here recall is near perfect.
        "recommended_tokens": int(parameters * RECOMMENDED_TOKENS_PER_PARAMETER),
    }


def select_holdout(
    lessons: Sequence[Lesson],
    new: Sequence[Lesson],
    held_out: Set[str],
    fraction: float,
    *,
    leave_one: bool,
) -> tuple[str, ...]:
    """Return the newest signals that fill the held-out share. One that was trained on never is.

    A group is held out as a whole: an older part decides for all of it. ``new`` are lessons that no
    build has used. ``leave_one``: a new lesson must be left to train on.
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
