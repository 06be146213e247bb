"""The temporary state of one update: the layer being built, its optimizer, and what the stack below said.

Invariants: gradients reach the layer's own halves alone; the same spec and steps give the same bytes; what ``state``
returns is enough to go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from personalpeft.adapters.base import Pair
from personalpeft.backends.base import Continuation, SessionSpec, Term
from personalpeft.backends.torch.linear import Bound
from personalpeft.backends.torch.model import Model
from personalpeft.backends.torch.slots import bind_trained

_CHUNK = 512


@dataclass(frozen=True)
class TensorOutputs:
    """What the model gave for one continuation, from its logits ``[n, vocabulary]``."""

    logits: Tensor
    tokens: Tensor

    @cached_property
    def logp(self) -> Tensor:
        return torch.log_softmax(self.logits, dim=-1)

    @cached_property
    def token_logp(self) -> Tensor:
        picked = self.logits.gather(1, self.tokens[:, None])[:, 0]
        return picked - torch.logsumexp(self.logits, dim=-1)


@dataclass(frozen=True)
class TokenOutputs:
    """As much of the outputs as most terms need; a whole distribution is ten thousand times as large."""

    token_logp: Tensor

    @property
    def logp(self) -> Tensor:
        raise LookupError("this term asked for the reference's tokens only")


def read(model: Model, items: Sequence[Continuation]) -> list[TensorOutputs]:
    """The outputs of each continuation, in one pass. Needs the model's turn."""
    device = model.where.device
    return [
        TensorOutputs(logits, torch.tensor(item.completion, device=device))
        for item, logits in zip(items, model.logits(items), strict=True)
    ]


class TorchSession:
    """AdamW (Loshchilov & Hutter 2019) on one layer's halves, kept in float32 over a base of any precision."""

    def __init__(self, model: Model, spec: SessionSpec, below: Bound | None) -> None:
        unknown = set(spec.targets) - set(model.base.architecture.projections)
        if unknown:
            raise ValueError(f"the base has no projection {sorted(unknown)}")
        self._model, self._spec, self._below = model, spec, below
        self._halves = _initial(model, spec)
        self._optimizer = torch.optim.AdamW(
            self._halves.values(), lr=0.0, betas=(0.9, 0.95), weight_decay=spec.weight_decay
        )
        self._references: dict[Continuation, TensorOutputs | TokenOutputs] = {}

    def refer(self, terms: Sequence[Term]) -> None:
        """Reads what the stack below says of all that these terms will need, in one order and one grouping: what is
        read together changes the last bits, and a session that resumes must see the same ones.
        """
        wanted: dict[Continuation, bool] = {}
        for term in terms:
            for item in term.references:
                wanted[item] = wanted.get(item, False) or term.whole
        for chunk in chunks(list(wanted), _CHUNK):
            with torch.inference_mode(), self._model.turn(self._below):
                for item, said in zip(chunk, read(self._model, chunk), strict=True):
                    self._references[item] = said if wanted[item] else TokenOutputs(said.token_logp)

    def step(self, terms: Sequence[Term], learning_rate: float) -> float:
        """One optimizer step on the sum of the terms' losses; returns that loss."""
        items = list(dict.fromkeys(item for term in terms for item in term.continuations))
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with self._model.turn(self._below, self._bound()), torch.enable_grad():
            outputs = dict(zip(items, read(self._model, items), strict=True))
            loss = torch.stack(
                [
                    term.loss(
                        [outputs[item] for item in term.continuations],
                        [self._references[item] for item in term.references],
                    )
                    for term in terms
                ]
            ).sum()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self._halves.values(), self._spec.clip)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    def pairs(self) -> Mapping[str, Pair]:
        """The layer as it is now, copied out."""
        return {
            projection: Pair(_array(self._halves[f"{projection}.A"]), _array(self._halves[f"{projection}.B"]))
            for projection in self._spec.targets
        }

    def state(self) -> Mapping[str, npt.NDArray[np.float32]]:
        """The halves, AdamW's two moments and its count."""
        arrays: dict[str, npt.NDArray[np.float32]] = {}
        for name, half in self._halves.items():
            moments = self._optimizer.state[half] or _no_moments(half)
            arrays |= {name: _array(half), **{f"{name}.{moment}": _array(value) for moment, value in moments.items()}}
        return arrays

    def restore(self, state: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Goes on from the state of a session of the same spec. Looks at all of it before it changes anything."""
        for name, half in self._halves.items():
            shape = tuple(half.shape)
            for wanted in (name, f"{name}.exp_avg", f"{name}.exp_avg_sq"):
                if wanted not in state or state[wanted].shape != shape or not np.isfinite(state[wanted]).all():
                    raise ValueError(f"the saved session does not fit: {wanted}")
            count = state.get(f"{name}.step")
            if count is None or count.size != 1 or not np.isfinite(count).all():
                raise ValueError(f"the saved session does not fit: {name}.step")
        with torch.no_grad():
            for name, half in self._halves.items():
                half.copy_(_tensor(state[name]))
                self._optimizer.state[half] = {
                    "step": _tensor(state[f"{name}.step"]).reshape(()),
                    "exp_avg": _tensor(state[f"{name}.exp_avg"]).to(half.device),
                    "exp_avg_sq": _tensor(state[f"{name}.exp_avg_sq"]).to(half.device),
                }

    def close(self) -> None:
        """Frees the session's memory."""
        self._references.clear()
        self._optimizer.state.clear()

    def _bound(self) -> Bound:
        dtype = self._model.where.dtype
        halves = {name: half.to(dtype) for name, half in self._scaled().items()}
        return bind_trained(halves, self._model.base.architecture)

    def _scaled(self) -> dict[str, Tensor]:
        return {n: half * self._spec.scaling if n.endswith(".B") else half for n, half in self._halves.items()}


def _no_moments(half: Tensor) -> dict[str, Tensor]:
    """What AdamW begins with, under its own names."""
    return {"step": torch.zeros(()), "exp_avg": torch.zeros_like(half), "exp_avg_sq": torch.zeros_like(half)}


def chunks(items: Sequence[Continuation], tokens: int) -> list[list[Continuation]]:
    """Continuations in order, in groups of about so many tokens: attention over a pack costs the square of its length."""
    groups: list[list[Continuation]] = []
    size = tokens
    for item in items:
        length = len(item.prompt) + len(item.completion)
        if size + length > tokens:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += length
    return groups


def _initial(model: Model, spec: SessionSpec) -> dict[str, Tensor]:
    """The parent's halves, or A uniform as ``nn.Linear`` begins (Hu et al. 2021, section 4.1: A random, B zero)."""
    generator = torch.Generator().manual_seed(spec.seed)
    architecture, device = model.base.architecture, model.where.device
    halves = {}
    for projection in spec.targets:
        inputs, outputs = architecture.projections[projection]
        if spec.start is not None:
            pair = spec.start[projection]
            a, b = _tensor(pair.a), _tensor(pair.b)
            if a.shape[1] != spec.rank:
                raise ValueError(f"the parent has rank {a.shape[1]}, the recipe {spec.rank}")
        else:
            limit = 1 / math.sqrt(inputs)
            a = torch.rand((architecture.blocks, spec.rank, inputs), generator=generator) * 2 * limit - limit
            b = torch.zeros((architecture.blocks, outputs, spec.rank))
        halves[f"{projection}.A"] = a.to(device).requires_grad_(True)
        halves[f"{projection}.B"] = b.to(device).requires_grad_(True)
    return halves


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    return tensor.detach().cpu().numpy().astype(np.float32, copy=True)


def _tensor(array: npt.NDArray[np.float32]) -> Tensor:
    # A copy, since what comes from a file is read-only and torch would write through.
    return torch.from_numpy(array.astype(np.float32, copy=True))
