"""Filters the lessons of a layer: facts beyond its capacity, links and private data. Pure.

Recall of text word for word is near perfect below ``RECOMMENDED_TOKENS_PER_PARAMETER``, falls off
up to ten times that, and collapses beyond (arXiv 2606.02437). So a memory takes the newest lessons
up to the configured ``tokens_per_parameter``. Lessons of one signal fit or stay out together.

What most lessons share becomes part of all answers: a link or a phone number, or a fact that the
user had remembered. The gate measures whether lessons were learned, so it does not object. Words
are not judged: no rule tells an order ("As Mallory orders:") from a greeting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from personalpeft.learning.data.assignment import Assignment, Lesson, lessons_for
from personalpeft.learning.data.style import find_style_conflict
from personalpeft.learning.outcomes import MoveCause, Placement, Reason, ReasonCode, reason
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.store.store import Store
from personalpeft.types import Architecture, Signal

RECOMMENDED_TOKENS_PER_PARAMETER = 1e-3

# Of each trained float32 parameter: itself, its gradient, two moments; and the parameter and the
# moments again in the checkpoint that is being copied and in the file that is made of it.
_BYTES_PER_PARAMETER = 4 * (4 + 3 + 3)


@dataclass(frozen=True, slots=True)
class LayerCapacity:
    """A layer's trained parameters, and the tokens that its lessons take and may take."""

    parameters: int
    tokens: int
    max_tokens: int

    @property
    def recommended_tokens(self) -> int:
        """The tokens up to which recall is near perfect."""
        return int(self.parameters * RECOMMENDED_TOKENS_PER_PARAMETER)


def count_parameters(config: TrainingConfig, architecture: Architecture) -> int:
    """Return the size of A (rank x inputs) and B (outputs x rank) of all modules and blocks."""
    sizes = sum(sum(architecture.projections[module]) for module in config.target_modules)
    return config.rank * sizes * architecture.blocks


def estimate_session_mb(config: TrainingConfig, architecture: Architecture) -> float:
    """Return about how many MB a training session takes beside the base and its activations."""
    return count_parameters(config, architecture) * _BYTES_PER_PARAMETER / 1e6


def fit_lessons(
    lessons: Sequence[Lesson],
    layer: str,
    config: TrainingConfig,
    architecture: Architecture,
    count_tokens: Callable[[str], int],
) -> tuple[tuple[Lesson, ...], LayerCapacity | None]:
    """Return the lessons that fit a layer, in their order, and what they take.

    ``lessons``: oldest first; each counts by its last message and its answer. A layer other than
    "memory" has no capacity.
    """
    if layer != "memory":
        return tuple(lessons), None
    sizes: dict[str, int] = {}
    for lesson in lessons:
        answer = min(count_tokens(lesson.chosen), config.max_length)
        size = count_tokens(lesson.messages[-1].content) + answer
        sizes[lesson.signal] = max(size, sizes.get(lesson.signal, 0))
    parameters = count_parameters(config, architecture)
    max_tokens = int(parameters * config.tokens_per_parameter)
    tokens, fit = 0, set[str]()
    for signal in reversed(sizes):
        if tokens + sizes[signal] > max_tokens:
            break
        tokens += sizes[signal]
        fit.add(signal)
    kept = tuple(lesson for lesson in lessons if lesson.signal in fit)
    return kept, LayerCapacity(parameters, tokens, max_tokens)


_MIN_SHARE = 0.5
_MIN_LESSONS = 3
_MIN_FACT_LENGTH = 4
_ADDRESS = re.compile(r"https?://\S+|www\.\S+|[\w.+-]+@[\w-]+\.[\w.]+|\+\d[\d /-]{7,}\d")


def find_unsafe_lessons(
    store: Store,
    user: str,
    layer: str,
    assignments: Sequence[Assignment],
    new: Sequence[Lesson],
) -> Reason | None:
    """Return why ``new`` lessons must not become the style of all replies, or None."""
    if layer == "memory":
        return None
    moves = store.catalog.head_moves(user)
    accepted = {move.after for move in moves if move.cause == MoveCause.ACCEPTED}
    leak = find_leak(
        lessons_for(assignments, layer),
        [each.signal for each in assignments if each.place is Placement.MEMORY],
        new={lesson.signal for lesson in new},
        accepted={
            signal
            for each in store.catalog.revisions(user)
            if each.layer == layer and each.id in accepted
            for signal in each.signals
        },
    )
    if leak:
        return reason(ReasonCode.UNSAFE_LESSONS, detail=leak)
    conflict = find_style_conflict([lesson.prompt_response for lesson in new])
    return reason(ReasonCode.MIXED_STYLES, detail=conflict) if conflict else None


def find_leak(
    lessons: Sequence[Lesson],
    facts: Sequence[Signal],
    *,
    new: Collection[str],
    accepted: Collection[str] = (),
) -> str:
    """Return what most of the latest lessons would leak, in words; empty for none.

    ``lessons``: all of a layer, oldest first, because few a day are no better than many at once.
    ``new``: signals that the layer has not learned; a leak must be in one of them. What signals
    that were ``accepted`` by name add is no leak.
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
