"""MinT's reverse KL: a run learns to answer as other saved weights do, which may read more.

The loss of a datum is ``sum_t w_t KL(p_t || q_t)``. ``p`` are the run's distributions at the target
tokens after the student's prompt, ``q`` those of the reference after its own prompt, both at one
temperature. It is the mode-seeking direction of distillation (Gu et al. 2023, arXiv 2306.08543).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import (
    Continuation,
    ModelOutputs,
    Session,
    SessionSpec,
    TrainingBackend,
)
from personalpeft_tinker_server import models
from personalpeft_tinker_server.codec import Array, read_tensor, read_tokens
from personalpeft_tinker_server.losses import (
    SingleLoss,
    check_tokens,
    invalid_datum,
    vocabulary_size,
)

# Target tokens whose distributions are in memory at once, each as large as the vocabulary.
_GROUP_TOKENS = 256


@dataclass(frozen=True, slots=True, eq=False)
class _ReverseKLItem:
    """One datum: what the run and the reference read, and the weights of the targets."""

    student: Continuation
    reference: Continuation
    weights: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Observed(SingleLoss):
    """Keeps the reference's distributions; as a ``personalpeft.backends.base.Loss`` it is zero."""

    temperature: float
    found: list[Any] = field(default_factory=list)

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        self.found.append(_tempered(outputs[0].logp, self.temperature).detach())
        return outputs[0].logp.new_zeros(())


@dataclass(frozen=True, slots=True, eq=False)
class _ReverseKL(SingleLoss):
    """One datum's loss, as a ``personalpeft.backends.base.Loss``."""

    reference: Any
    weights: Array
    temperature: float

    def loss(self, outputs: Sequence[ModelOutputs], references: Sequence[ModelOutputs]) -> Any:
        logp = _tempered(outputs[0].logp, self.temperature)
        divergences = (logp.exp() * (logp - self.reference)).sum(-1)
        return (divergences * logp.new_tensor(self.weights.tolist())).sum()


def open_reference(backend: TrainingBackend, adapter: Adapter | None) -> Session:
    """Open a session of saved weights, None for the bare base. The caller closes it."""
    projections = tuple(backend.base.architecture.projections)
    if adapter is None:
        return backend.session(SessionSpec(1, 0.0, projections[:1], 0))
    manifest = adapter.manifest
    return backend.session(
        SessionSpec(
            manifest.rank,
            manifest.scaling,
            tuple(name for name in projections if name in adapter.weights),
            0,
            initial_weights=adapter.weights,
        )
    )


def add_gradients(
    backend: TrainingBackend,
    session: Session,
    reference: Session,
    request: models.ReverseKL,
    *,
    between: Callable[[], None] = lambda: None,
) -> models.ReverseKLResponse:
    """Add the gradients of a call to a session's, and return the losses.

    Args:
        backend: That of both sessions.
        session: What is trained.
        reference: What it is to be like.
        request: The call.
        between: Called before each pass.

    Raises:
        InvalidInput: A datum does not fit.
    """
    temperature, vocabulary = request.temperature, vocabulary_size(backend.base)
    items = [
        _read_item(index, datum, vocabulary, backend.max_length)
        for index, datum in enumerate(request.data)
    ]
    losses: list[float] = []
    for group in _groups(items):
        observed = [_Observed(item.reference, temperature) for item in group]
        backend.forward_backward([reference], [observed], backward=False, between=between)
        terms = [
            _ReverseKL(item.student, each.found[0], item.weights, temperature)
            for item, each in zip(group, observed, strict=True)
        ]
        (results,) = backend.forward_backward([session], [terms], between=between)
        losses += [result.loss for result in results]
    tokens = sum(int((item.weights != 0).sum()) for item in items)
    mean = math.fsum(losses) / max(1, tokens)
    return models.ReverseKLResponse(
        outputs=[{"loss": models.Tensor(data=[loss], shape=[1])} for loss in losses],
        metrics={
            "loss:mean": mean,
            "reverse_kl:mean": mean,
            "num_samples:sum": float(len(items)),
            "num_tokens:sum": float(tokens),
        },
    )


def _read_item(
    index: int, datum: models.ReverseKLDatum, vocabulary: int, longest: int
) -> _ReverseKLItem:
    targets, weights = read_tensor(datum.target_tokens), read_tensor(datum.weights)
    if targets.ndim != 1 or not len(targets) or weights.shape != targets.shape:
        raise invalid_datum(index, "needs target_tokens and weights of one shape [n]")
    if not np.isfinite(weights).all():
        raise invalid_datum(index, "needs finite weights")
    completion = tuple(int(token) for token in targets)
    prompts = [read_tokens(datum.student_input), read_tokens(datum.reference_input)]
    for prompt in prompts:
        if not prompt or len(prompt) + len(completion) - 1 > longest:
            raise invalid_datum(
                index, f"needs prompts of 1 to {longest - len(completion) + 1} tokens"
            )
        check_tokens(index, (*prompt, *completion), vocabulary)
    student, reference = (Continuation(prompt, completion) for prompt in prompts)
    return _ReverseKLItem(student, reference, weights)


def _groups(items: Sequence[_ReverseKLItem]) -> list[list[_ReverseKLItem]]:
    groups: list[list[_ReverseKLItem]] = []
    room = 0
    for item in items:
        size = len(item.student.completion)
        if not groups or size > room:
            groups.append([])
            room = _GROUP_TOKENS
        groups[-1].append(item)
        room -= size
    return groups


def _tempered(logp: Any, temperature: float) -> Any:
    return logp if temperature == 1 else (logp / temperature).log_softmax(-1)
