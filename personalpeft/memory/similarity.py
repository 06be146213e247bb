"""Whether a request is about what a layer was taught. Pure: vectors in, a word out.

A layer that was taught one thing should be attached where that thing is asked about, and nowhere else. What is near is
calibrated for each layer on its own lessons: the least cosine that counts lies between what general questions reach and
what one lesson has with the nearest other one. Where these overlap, keeping general questions out comes first.

Invariants: a request that says what a lesson says is near, whatever the calibration; the same vectors give the same word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from personalpeft.memory.types import Vectors

# One in twenty general questions may be near: a person may well have taught what is in the list.
_STRANGERS = 0.95
# One in ten lessons may stand alone, far from all others, and not set the measure.
_ALONE = 0.1
_MOST = 0.95


@dataclass(frozen=True, slots=True)
class Region:
    """What a layer's lessons ask, ``[n, size]``, and the cosine with one of them from which a request is near."""

    vectors: Vectors
    least: float


def calibrated(lessons: Sequence[Vectors], general: Vectors, least: float) -> Region:
    """The region of some lessons, each ``[k, size]`` for the ``k`` ways in which it is asked about; of at least one.
    ``general`` are questions that belong to nobody; ``least`` is the cosine below which nothing is near, which the
    embedder knows of itself.
    """
    own = np.concatenate(lessons)
    strangers = float(np.quantile((general @ own.T).max(axis=1), _STRANGERS))
    threshold = max(least, strangers)
    if len(lessons) > 1:
        friends = float(np.quantile(_with_the_nearest_other(lessons, own), _ALONE))
        if friends > strangers:
            threshold = max(least, (friends + strangers) / 2)
    return Region(own, min(threshold, _MOST))


def _with_the_nearest_other(lessons: Sequence[Vectors], own: Vectors) -> list[float]:
    """Of each lesson, its cosine with the nearest of the others."""
    owner = np.repeat(np.arange(len(lessons)), [len(rows) for rows in lessons])
    return [float((rows @ own[owner != number].T).max()) for number, rows in enumerate(lessons)]
