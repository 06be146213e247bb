"""What a lesson asks of the model, as terms of a loss over log-probs. Each is a file of its own, a few lines that name
their source.

A term says which continuations it reads and what it makes of their log-probs; the backend reads them all in one pass.
Log-probs are natural, float32; a continuation counts by its mean over tokens, so that a long answer weighs no more than
a short one. To add one that is asked of lessons: a file with the term and ``terms``, which says what it asks of a step's
lessons, and a line in ``OF_LESSONS``. What a step has beside lessons (thumbs, anchors, what nobody told) is put together in
``curriculum.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from personalpeft.backends.base import Term
from personalpeft.learning.data.assignment import Lesson
from personalpeft.learning.train.losses import context_distillation, dpo, sft
from personalpeft.learning.train.losses.base import BEGINNING, Batch, around, continuation
from personalpeft.learning.train.losses.context_distillation import Distilled
from personalpeft.learning.train.losses.dpo import Preferred
from personalpeft.learning.train.losses.kl_regularizer import Anchor
from personalpeft.learning.train.losses.kto import Thumbs
from personalpeft.learning.train.losses.sft import Supervised

Objective: TypeAlias = Callable[[Sequence[Lesson], Batch], Iterator[Term]]

OF_LESSONS: tuple[Objective, ...] = (sft.terms, context_distillation.terms, dpo.terms)
"""What is asked of the lessons of each step, in this order."""

__all__ = [
    "BEGINNING",
    "OF_LESSONS",
    "Anchor",
    "Batch",
    "Distilled",
    "Objective",
    "Preferred",
    "Supervised",
    "Thumbs",
    "around",
    "continuation",
]
