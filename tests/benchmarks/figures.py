"""Figures of several repetitions, in which the measured variants alternate.

So a machine that slows down slows all of them. A ratio is taken within a repetition, then its
median is taken. It can differ a little from the quotient of two medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, least and most of some figures."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.least:.3g} to {self.most:.3g})"


def spread(figures: Sequence[float]) -> Spread:
    """Summarize at least one figure."""
    return Spread(
        *(
            float(f"{figure:.4g}")
            for figure in (statistics.median(figures), min(figures), max(figures))
        )
    )


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Summarize the ratios of figures of the same repetitions."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def medians(spreads: Mapping[str, Spread | None]) -> dict[str, float | None]:
    """Return the medians by name, None for what was not run."""
    return {name: each and each.median for name, each in spreads.items()}


def ranges(spreads: Mapping[str, Spread | None]) -> dict[str, tuple[float, float]]:
    """Return the least and the most by name, without what was not run."""
    return {name: (each.least, each.most) for name, each in spreads.items() if each}


def percentile(figures: Sequence[float], percent: int) -> float:
    """Return a percentile of at least one figure."""
    return sorted(figures)[min(len(figures) - 1, len(figures) * percent // 100)]


def alternate(
    contestants: Mapping[str, Callable[[int], float]], repetitions: int, echo: Callable[[str], None]
) -> dict[str, list[float]]:
    """Run every contestant once in each repetition, in order.

    A contestant gets the repetition's number, from 1, to send new prompts that no cache holds.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for repetition in range(1, repetitions + 1):
        for name, run in contestants.items():
            figure = run(repetition)
            figures[name].append(figure)
            echo(f"{repetition} of {repetitions}: {name} {figure:.4g}")
    return figures
