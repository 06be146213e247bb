"""How much a layer can hold, and how long a lesson can be. Pure.

Verbatim recall is near perfect below ``RECOMMENDED_TOKENS_PER_PARAMETER``. It falls off up to ten
times that, and collapses beyond (arXiv 2606.02437). So a memory takes the newest lessons up to the
configured ``tokens_per_parameter``. Lessons of one signal fit or stay out together. One that does
not fit leaves its room to older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Backend
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.types import Architecture, Message, canonical_json

RECOMMENDED_TOKENS_PER_PARAMETER = 1e-3
# More than a chat template writes around the messages.
_TEMPLATE_BYTES = 4096

# Training holds ten float32 numbers for each trained parameter. Four are the parameter, its
# gradient and two moments. A checkpoint copies the parameter and the moments twice.
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


def find_too_long(lessons: Iterable[Lesson], cut: int, backend: Backend) -> set[str]:
    """Return the signals that are too long to teach anything.

    A prompt that leaves no room for a reply in the context cannot be asked. Training on it would
    take as long as on a hundred others. A reply is cut, and an edit behind the cut changes nothing.

    Args:
        lessons: The lessons.
        cut: Tokens at which a reply is cut.
        backend: Gives the base's context and the tokenizer.
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
) -> tuple[tuple[Lesson, ...], LayerCapacity | None]:
    """Return the lessons that fit a layer, in their order, and what they take.

    A layer other than "memory" has no capacity.

    Args:
        lessons: Oldest first. Each counts by its last message and its answer.
        layer: The layer.
        config: Gives the rank and target modules of the layer.
        architecture: The shapes of the base.
        count_tokens: Returns the number of tokens of a text.
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
        if tokens + sizes[signal] <= max_tokens:
            tokens += sizes[signal]
            fit.add(signal)
    kept = tuple(lesson for lesson in lessons if lesson.signal in fit)
    return kept, LayerCapacity(parameters, tokens, max_tokens)
