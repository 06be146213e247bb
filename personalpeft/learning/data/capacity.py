"""How much a layer can hold: tokens of its lessons for each parameter that is trained. Pure.

What is to be recalled word for word fills a layer: recall is near perfect below ``ADVISED`` tokens a parameter, falls off
up to ten times that, and collapses beyond (arXiv 2606.02437). So the ``memory`` layer never takes more than the recipe's
``capacity``; where there is more to learn, the oldest lessons stay out. A style or a skill is a manner that its lessons
share: another lesson says it more clearly and fills nothing, so those layers are not counted.

Invariants: what fits is the newest part of the lessons, in their order; several lessons of one signal say one thing and
count once, by the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.train.config import Recipe
from personalpeft.types import Architecture

ADVISED = 1e-3

# Of a parameter that is trained, in float32: itself, its gradient and two moments while a step is made, and, of the last
# three that go on, a copy that is being saved and the file that is made of it.
_BYTES = 4 * (4 + 3 + 3)


@dataclass(frozen=True, slots=True)
class Room:
    """A layer's trainable ``parameters``, the ``tokens`` that its lessons take of them, and how many they may take."""

    parameters: int
    tokens: int
    most: int

    @property
    def advised(self) -> int:
        """The tokens up to which recall is near perfect."""
        return int(self.parameters * ADVISED)

    def as_json(self) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "tokens": self.tokens,
            "most": self.most,
            "advised": self.advised,
        }


def parameters(recipe: Recipe, architecture: Architecture) -> int:
    """What a layer of this recipe trains: an A of rank x inputs and a B of outputs x rank for each projection and block."""
    sizes = sum(sum(architecture.projections[target]) for target in recipe.targets)
    return recipe.rank * sizes * architecture.blocks


def megabytes(recipe: Recipe, architecture: Architecture) -> float:
    """About how much memory one training session takes, beside the base and the pass, which all sessions share."""
    return parameters(recipe, architecture) * _BYTES / 1e6


def too_much(need: float, allowed: float | None) -> str:
    """Why a session is not begun that takes so many MB, where no more than so many are ``allowed``; empty where it is begun."""
    if allowed is None or need <= allowed:
        return ""
    return f"to train it takes about {need:,.0f} MB, and {allowed:,g} are allowed"


def fitting(
    lessons: Sequence[Lesson],
    layer: str,
    recipe: Recipe,
    architecture: Architecture,
    count: Callable[[str], int],
) -> tuple[tuple[Lesson, ...], Room | None]:
    """The lessons that the layer has room for, and how much of it they take (None for a layer that is not counted).
    ``count`` says how many tokens a text has; a lesson counts with what is asked last and what is wanted.
    """
    if layer != "memory":
        return tuple(lessons), None
    sizes: dict[str, int] = {}
    for lesson in lessons:
        size = count(lesson.messages[-1].content) + min(count(lesson.chosen), recipe.longest)
        sizes[lesson.signal] = max(size, sizes.get(lesson.signal, 0))
    trainable = parameters(recipe, architecture)
    most = int(trainable * recipe.capacity)
    taken, kept = 0, set[str]()
    for signal in reversed(sizes):
        if taken + sizes[signal] > most:
            break
        taken += sizes[signal]
        kept.add(signal)
    return tuple(lesson for lesson in lessons if lesson.signal in kept), Room(
        trainable, taken, most
    )
