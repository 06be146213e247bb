"""Figures of several repetitions: contestants take turns, so that a machine that grows slower meanwhile does so for all.

A ratio is taken within a repetition, between neighbours in time, and then its median: what is printed for a ratio can
differ a little from the quotient of two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some figures, and the least and the most of them."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


def spread(figures: Sequence[float]) -> Spread:
    """Of one figure or more."""
    return Spread(
        *(
            float(f"{figure:.4g}")
            for figure in (statistics.median(figures), min(figures), max(figures))
        )
    )


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of figures from the same repetitions."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def percentile(figures: Sequence[float], percent: int) -> float:
    """The figure that so many per cent lie below; of one or more."""
    return sorted(figures)[min(len(figures) - 1, len(figures) * percent // 100)]


def taking_turns(
    contestants: Mapping[str, Callable[[int], float]], repetitions: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Each repetition runs every contestant once, in their order. A contestant is told the repetition's number, from 1, so
    that it can ask something new each time: what was asked before may be remembered.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(1, repetitions + 1):
        for name, run in contestants.items():
            figure = run(repetition)
            figures[name].append(figure)
            say(f"{repetition} of {repetitions}: {name} {figure:.4g}")
    return figures
