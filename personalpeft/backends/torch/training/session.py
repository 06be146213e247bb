"""The temporary state of one update: weights, optimizer and reference outputs.

Invariants: gradients reach the layer's own A and B alone. The same spec and steps give the same
bytes. ``state`` is sufficient to resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import Continuation, Loss, SessionSpec
from personalpeft.backends.torch.lora_bank import LoRABank
from personalpeft.backends.torch.lora_layers import group_projections
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.logprobs import (
    PolicyOutputs,
    ReferenceOutputs,
    read_outputs,
)
from personalpeft.backends.torch.training.lora_autograd import (
    TrainedSegment,
    TrainedSegments,
    TrainedWeights,
)
from personalpeft.backends.torch.training.packing import pack, split_by_size
from personalpeft.backends.torch.training.reference_cache import ReferenceCache

# Tokens of one pass over several sessions. More are hardly faster and take more memory
# (docs/explanation/learning.md).
_PASS_TOKENS = 256


class TorchSession:
    """AdamW (Loshchilov & Hutter 2019) on one adapter's A and B, in float32.

    Args:
        model: The base.
        bank: Has the frozen stack below, of which the session takes a copy.
        references: Computes reference outputs.
        spec: The adapter and the optimizer's options.
        on_close: Called once, when the session was closed.

    Raises:
        KeyError: The stack below is not attached.
        ValueError: The spec does not fit the base.
    """

    def __init__(
        self,
        model: ModelRunner,
        bank: LoRABank,
        references: ReferenceCache,
        spec: SessionSpec,
        on_close: Callable[[], None],
    ) -> None:
        unknown = set(spec.target_modules) - set(model.base.architecture.projections)
        if unknown:
            raise ValueError(
                f"target_modules must be projections of the base, got {sorted(unknown)}"
            )
        self._model, self._spec = model, spec
        self._groups = group_projections(model.base.architecture)
        self._below = bank.single_adapter_lora(spec.base_key)
        self._below_weights = bank.fused_weights(spec.base_key)
        self._halves = _initial_halves(model, spec)
        self._optimizer = torch.optim.AdamW(
            self._halves.values(),
            lr=0.0,
            betas=(0.9, 0.95),
            weight_decay=spec.weight_decay,
            fused=model.where.device.type in {"cpu", "cuda"},
        )
        self._reference_cache = references
        self._references: dict[Continuation, ReferenceOutputs] = {}
        self._on_close = on_close
        self._open = True
        model.open_session()

    def is_open_on(self, model: ModelRunner) -> bool:
        """Return whether the session is open and belongs to this model."""
        return self._open and self._model is model

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        """Compute the reference outputs of these terms, unless a session has them."""
        missing: dict[Continuation, bool] = {}
        for term in terms:
            for item in term.references:
                if item not in self._references:
                    missing[item] = missing.get(item, True) and term.is_general
        self._references |= self._reference_cache.read(missing, self._spec.base_key, self._below)

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        """Take one optimizer step on the sum of the terms' losses, and return that loss."""
        (loss,) = advance(self._model, [self], [terms], [learning_rate])
        return loss

    def segment(self, begin: int, end: int) -> TrainedSegment:
        """Return the current weights, over those below, for these tokens of a pass."""
        weights = TrainedWeights(self._halves, self._spec.scaling, self._groups)
        return TrainedSegment(begin, end, weights, self._below_weights, self._model.where.dtype)

    def loss(self, terms: Sequence[Loss], outputs: Mapping[Continuation, PolicyOutputs]) -> Tensor:
        """Return the sum of the terms' losses."""
        losses = [
            term.loss(
                [outputs[item] for item in term.continuations],
                [self._references[item] for item in term.references],
            )
            for term in terms
        ]
        return torch.stack(losses).sum()

    def apply_gradients(self, segment: TrainedSegment, learning_rate: float) -> None:
        """Take an optimizer step with the gradients of a pass."""
        for name, grad in segment.gradients().items():
            self._halves[name].grad = grad
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        nn.utils.clip_grad_norm_(self._halves.values(), self._spec.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Mapping[str, LoRAWeights]:
        """Return a copy of the current weights."""
        return {
            projection: LoRAWeights(
                _array(self._halves[f"{projection}.A"]), _array(self._halves[f"{projection}.B"])
            )
            for projection in self._spec.target_modules
        }

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """Return A and B with AdamW's two moments and step."""
        arrays: dict[str, npt.NDArray[np.float32]] = {}
        for name, half in self._halves.items():
            moments = self._optimizer.state[half] or _no_moments(half)
            arrays |= {
                name: _array(half),
                **{f"{name}.{moment}": _array(value) for moment, value in moments.items()},
            }
        return arrays

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Resume from the state of a session of the same spec, after checking all of it."""
        for name, half in self._halves.items():
            for suffix in ("", ".exp_avg", ".exp_avg_sq", ".step"):
                array = state.get(name + suffix)
                fits = array is not None and (
                    array.size == 1 if suffix == ".step" else array.shape == tuple(half.shape)
                )
                if array is None or not fits or not np.isfinite(array).all():
                    raise ValueError(f"the saved session does not fit: {name}{suffix}")
        with torch.no_grad():
            for name, half in self._halves.items():
                half.copy_(_tensor(state[name]))
                self._optimizer.state[half] = {
                    "step": _tensor(state[f"{name}.step"]).reshape(()),
                    "exp_avg": _tensor(state[f"{name}.exp_avg"]).to(half.device),
                    "exp_avg_sq": _tensor(state[f"{name}.exp_avg_sq"]).to(half.device),
                }

    def close(self) -> None:
        """Free the session's memory."""
        self._references.clear()
        self._optimizer.state.clear()
        if self._open:
            self._open = False
            self._model.close_session()
            self._on_close()


def advance(
    model: ModelRunner,
    sessions: Sequence[TorchSession],
    terms: Sequence[Sequence[Loss]],
    rates: Sequence[float],
) -> tuple[float, ...]:
    """Take one step of each session, several sessions in a pass.

    Args:
        model: The base of all sessions.
        sessions: Different open sessions.
        terms: The losses of each.
        rates: The learning rate of each.

    Returns:
        The loss of each session.
    """
    if not len(sessions) == len(terms) == len(rates):
        raise ValueError("sessions, terms and rates must have the same length")
    losses: list[float] = []
    continuations = [
        list(dict.fromkeys(item for term in own for item in term.continuations)) for own in terms
    ]
    sizes = [len(pack(items).tokens) for items in continuations]
    for group in split_by_size(sizes, _PASS_TOKENS):
        losses += _advance(model, sessions[group], terms[group], rates[group], continuations[group])
    return tuple(losses)


def _advance(
    model: ModelRunner,
    sessions: Sequence[TorchSession],
    terms: Sequence[Sequence[Loss]],
    rates: Sequence[float],
    continuations: Sequence[Sequence[Continuation]],
) -> list[float]:
    """Run one forward and one backward pass."""
    packed = pack(*continuations)
    begins = (0, *packed.ends[:-1])
    segments = [s.segment(b, e) for s, b, e in zip(sessions, begins, packed.ends, strict=True)]
    with (
        model.exclusive(TrainedSegments(segments, model.where.device)),
        torch.enable_grad(),
    ):
        outputs = iter(read_outputs(model, list(chain(*continuations)), packed))
        losses = [
            session.loss(own, {item: next(outputs) for item in items})
            for session, own, items in zip(sessions, terms, continuations, strict=True)
        ]
        torch.stack(losses).sum().backward()
        for session, segment, rate in zip(sessions, segments, rates, strict=True):
            session.apply_gradients(segment, rate)
        return [float(loss.detach()) for loss in losses]


def _no_moments(half: Tensor) -> dict[str, Tensor]:
    """Return AdamW's initial state."""
    return {
        "step": torch.zeros(()),
        "exp_avg": torch.zeros_like(half),
        "exp_avg_sq": torch.zeros_like(half),
    }


def _initial_halves(model: ModelRunner, spec: SessionSpec) -> dict[str, Tensor]:
    """Return the parent's A and B, or A uniform and B zero (LoRA, Hu et al. 2021, section 4.1)."""
    generator = torch.Generator().manual_seed(spec.seed)
    architecture, device = model.base.architecture, model.where.device
    halves = {}
    for projection in spec.target_modules:
        inputs, outputs = architecture.projections[projection]
        if spec.initial_weights is not None:
            pair = spec.initial_weights[projection]
            a, b = _tensor(pair.a), _tensor(pair.b)
            if a.shape[1] != spec.rank:
                raise ValueError(f"the parent has rank {a.shape[1]}, the recipe {spec.rank}")
        else:
            limit = 1 / math.sqrt(inputs)
            a = (
                torch.rand((architecture.blocks, spec.rank, inputs), generator=generator)
                * 2
                * limit
                - limit
            )
            b = torch.zeros((architecture.blocks, outputs, spec.rank))
        halves[f"{projection}.A"] = a.to(device).requires_grad_(True)
        halves[f"{projection}.B"] = b.to(device).requires_grad_(True)
    return halves


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().cpu().numpy().astype(np.float32, copy=True)


def _tensor(array: npt.NDArray[np.float32]) -> Tensor:
    # A copy: arrays of files are read-only, and torch would write to them.
    return torch.from_numpy(array.astype(np.float32, copy=True))
