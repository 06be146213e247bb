"""The temporary state of one update: weights, optimizer and reference outputs.

Invariants: gradients reach the layer's own A and B alone. The same spec and steps give the same
bytes. ``state`` is sufficient to resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from personalpeft.adapters.types import LoRAWeights
from personalpeft.backends.base import (
    AdamParams,
    Continuation,
    ForwardResult,
    Loss,
    Session,
    SessionSpec,
)
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.torch.lora_bank import LoRABank
from personalpeft.backends.torch.lora_layers import group_projections
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.training.logprobs import TorchOutputs, read_outputs
from personalpeft.backends.torch.training.lora_autograd import TrainedSegment, TrainedSegments
from personalpeft.backends.torch.training.packing import pack, split_by_size
from personalpeft.backends.torch.training.reference_cache import ReferenceCache

# Tokens of one pass over several sessions. More are hardly faster and take more memory
# (docs/benchmarks/learning-experiments.md).
PASS_TOKENS = 256
# Tokens of one pass of ``forward_backward``. A pass keeps the logits of all of them.
FORWARD_TOKENS = {"cpu": 256, "cuda": 4096}


class TorchSession:
    """See ``Session``. AdamW (Loshchilov & Hutter 2019) on one adapter's A and B, in float32.

    Args:
        model: The base.
        bank: Has the frozen stack below, of which the session takes a copy.
        references: Computes reference outputs.
        spec: The adapter and the optimizer's options.

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
    ) -> None:
        unknown = set(spec.target_modules) - set(model.base.architecture.projections)
        if unknown:
            raise ValueError(
                f"target_modules must be projections of the base, got {sorted(unknown)}"
            )
        self.model, self._spec = model, spec
        self._groups = group_projections(model.base.architecture)
        self._below = bank.single_adapter_lora(spec.base_key)
        self._below_weights = bank.fused_weights(spec.base_key)
        self._halves = _initial_halves(model, spec)
        # The halves and AdamW's state, which the fused step reads on the device.
        self._state: dict[str, Tensor] = {}
        for name, half in self._halves.items():
            self._state[name] = half
            self._state[f"{name}.step"] = torch.zeros((), device=half.device)
            self._state[f"{name}.exp_avg"] = torch.zeros_like(half)
            self._state[f"{name}.exp_avg_sq"] = torch.zeros_like(half)
        self._reference_cache = references
        self._references: dict[Continuation, TorchOutputs] = {}
        self.is_open = True
        model.open_session()

    def precompute_ref_log_probs(self, terms: Sequence[Loss]) -> None:
        missing: dict[Continuation, bool] = {}
        for term in terms:
            for item in term.references:
                if item not in self._references:
                    missing[item] = missing.get(item, True) and term.is_general
        self._references |= self._reference_cache.read(missing, self._spec.base_key, self._below)

    def step(self, terms: Sequence[Loss], learning_rate: float) -> float:
        (loss,) = _step([_SessionTerms(self, terms)], [learning_rate])
        return loss

    def segment(self, tokens: slice) -> TrainedSegment:
        """Return the current weights, over those below, for these tokens of a pass."""
        return TrainedSegment(
            tokens,
            self._halves,
            self._spec.scaling,
            self._groups,
            self._below_weights,
            self.model.where.dtype,
        )

    def losses(self, terms: Sequence[Loss], outputs: Mapping[Continuation, TorchOutputs]) -> Tensor:
        """Return the loss of each term."""
        losses = [
            term.loss(
                [outputs[item] for item in term.continuations],
                [self._references[item] for item in term.references],
            )
            for term in terms
        ]
        return torch.stack(losses)

    def add_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of a pass to those of earlier passes."""
        for name, grad in gradients.items():
            half = self._halves[name]
            half.grad = grad if half.grad is None else half.grad.add_(grad)

    def default_params(self, learning_rate: float) -> AdamParams:
        """Return the options of ``step`` from the spec."""
        return AdamParams(
            learning_rate,
            weight_decay=self._spec.weight_decay,
            max_grad_norm=self._spec.max_grad_norm,
        )

    def optim_step(self, params: AdamParams) -> float:
        limit = math.inf if params.max_grad_norm is None else params.max_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self._halves.values(), limit))
        grads = {name: half.grad for name, half in self._halves.items() if half.grad is not None}
        if grads and math.isfinite(norm):
            steps, averages, squares = (
                [self._state[f"{name}.{moment}"] for name in grads]
                for moment in ("step", "exp_avg", "exp_avg_sq")
            )
            with torch.no_grad():
                torch._foreach_add_(steps, 1)
                # torch.optim.AdamW calls the same operation, but its first use in a process
                # imports torch's compiler: 2.8 s.
                torch._fused_adamw_(
                    [self._halves[name] for name in grads],
                    list(grads.values()),
                    averages,
                    squares,
                    [],
                    steps,
                    lr=params.learning_rate,
                    beta1=params.beta1,
                    beta2=params.beta2,
                    weight_decay=params.weight_decay,
                    eps=params.eps,
                    amsgrad=False,
                    maximize=False,
                )
        self._clear_gradients()
        # Outside of a pass nothing else ends the threads, and steps of the batch may come before it.
        release_threads()
        return norm

    def weights(self) -> Mapping[str, LoRAWeights]:
        return {
            projection: LoRAWeights(
                _array(self._halves[f"{projection}.A"]), _array(self._halves[f"{projection}.B"])
            )
            for projection in self._spec.target_modules
        }

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        return {name: _array(tensor) for name, tensor in self._state.items()}

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        for name, tensor in self._state.items():
            array = state.get(name)
            shape = tuple(tensor.shape) or (1,)
            if array is None or np.atleast_1d(array).shape != shape or not np.isfinite(array).all():
                raise ValueError(f"the saved session does not fit: {name}")
        self._clear_gradients()
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(_tensor(state[name]).reshape(tensor.shape))

    def _clear_gradients(self) -> None:
        for half in self._halves.values():
            half.grad = None

    def close(self) -> None:
        self._references.clear()
        self._state.clear()
        if self.is_open:
            self.is_open = False
            self.model.close_session()


@dataclass(frozen=True)
class _SessionTerms:
    """Losses of one session that share a pass."""

    session: TorchSession
    terms: Sequence[Loss]

    @cached_property
    def continuations(self) -> list[Continuation]:
        """The continuations of all losses, each once."""
        return list(dict.fromkeys(item for term in self.terms for item in term.continuations))


class TrainingPasses:
    """The passes of ``TrainingBackend`` over several sessions. A subclass sets ``_model``."""

    _model: ModelRunner

    def advance(
        self, sessions: Sequence[Session], terms: Sequence[Sequence[Loss]], rates: Sequence[float]
    ) -> tuple[float, ...]:
        """See ``TrainingBackend.advance``."""
        if not len(sessions) == len(terms) == len(rates):
            raise ValueError("sessions, terms and rates must have the same length")
        parts = list(map(_SessionTerms, self._torch_sessions(sessions), terms))
        losses: list[float] = []
        sizes = [len(pack(part.continuations).tokens) for part in parts]
        for group in split_by_size(sizes, PASS_TOKENS):
            losses += _step(parts[group], rates[group])
        return tuple(losses)

    def forward_backward(
        self,
        sessions: Sequence[Session],
        terms: Sequence[Sequence[Loss]],
        *,
        backward: bool = True,
        logprobs: bool = False,
        between: Callable[[], None] = lambda: None,
    ) -> tuple[tuple[ForwardResult, ...], ...]:
        """See ``TrainingBackend.forward_backward``.

        The losses of a session are split over passes, since their gradients add up.
        """
        if len(sessions) != len(terms):
            raise ValueError("sessions and terms must have the same length")
        torch_sessions = self._torch_sessions(sessions)
        units = [
            _SessionTerms(session, [term])
            for session, own in zip(torch_sessions, terms, strict=True)
            for term in own
        ]
        results: dict[TorchSession, list[ForwardResult]] = {each: [] for each in torch_sessions}
        limit = FORWARD_TOKENS.get(self._model.where.device.type, FORWARD_TOKENS["cpu"])
        sizes = [len(pack(unit.continuations).tokens) for unit in units]
        for group in split_by_size(sizes, limit):
            # Units of one session are neighbours, so its part of a pass is one range of tokens.
            parts = [
                _SessionTerms(session, [term for unit in own for term in unit.terms])
                for session, own in groupby(units[group], key=lambda unit: unit.session)
            ]
            between()
            passed = _run_pass(parts, backward=backward, logprobs=logprobs)
            for part, (_, own_results) in zip(parts, passed, strict=True):
                results[part.session] += own_results
        return tuple(tuple(results[session]) for session in torch_sessions)

    def _torch_sessions(self, sessions: Sequence[Session]) -> list[TorchSession]:
        """Return the sessions, checked. Raises ``ValueError``."""
        own = dict.fromkeys(
            session
            for session in sessions
            if isinstance(session, TorchSession)
            and session.is_open
            and session.model is self._model
        )
        if len(own) < len(sessions):
            raise ValueError("sessions must be distinct open sessions of this backend")
        return list(own)


def _step(parts: Sequence[_SessionTerms], rates: Sequence[float]) -> list[float]:
    """Take one step of each session in one pass, and return their losses."""
    results = _run_pass(parts, backward=True, logprobs=False)
    for part, rate in zip(parts, rates, strict=True):
        part.session.optim_step(part.session.default_params(rate))
    return [loss for loss, _ in results]


def _run_pass(
    parts: Sequence[_SessionTerms], *, backward: bool, logprobs: bool
) -> list[tuple[float, list[ForwardResult]]]:
    """Run one forward pass and perhaps one backward pass. The latter adds to the gradients.

    Return the losses of each session, after their sum as the pass computed it.
    """
    model = parts[0].session.model
    packed = pack(*(part.continuations for part in parts))
    segments = [part.session.segment(each) for part, each in zip(parts, packed.groups, strict=True)]
    with (
        model.exclusive(TrainedSegments(segments, model.where.device)),
        torch.set_grad_enabled(backward),
    ):
        items = [item for part in parts for item in part.continuations]
        outputs = iter(read_outputs(model, items, packed))
        read = [{item: next(outputs) for item in part.continuations} for part in parts]
        losses = []
        for part, own in zip(parts, read, strict=True):
            model.let_step_go_first()
            losses.append(part.session.losses(part.terms, own))
        totals = [each.sum() for each in losses]
        if backward:
            torch.stack(totals).sum().backward()
            for part, segment in zip(parts, segments, strict=True):
                model.let_step_go_first()
                part.session.add_gradients(segment.gradients())
        results = []
        for part, own, each, total in zip(parts, read, losses, totals, strict=True):
            found = [
                [_array(own[item].token_logp) for item in term.continuations if logprobs]
                for term in part.terms
            ]
            own_results = [
                ForwardResult(loss, tuple(arrays))
                for loss, arrays in zip(each.tolist(), found, strict=True)
            ]
            results.append((float(total.detach()), own_results))
        return results


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
            shape = (architecture.blocks, spec.rank, inputs)
            a = torch.rand(shape, generator=generator) * 2 * limit - limit
            b = torch.zeros((architecture.blocks, outputs, spec.rank))
        halves[f"{projection}.A"] = a.to(device).requires_grad_(True)
        halves[f"{projection}.B"] = b.to(device).requires_grad_(True)
    return halves


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().cpu().numpy().astype(np.float32, copy=True)


def _tensor(array: npt.NDArray[np.float32]) -> Tensor:
    # A copy: arrays of files are read-only, and torch would write to them.
    return torch.from_numpy(array.astype(np.float32, copy=True))
