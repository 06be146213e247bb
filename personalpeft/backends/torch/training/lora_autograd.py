"""Adapters in training: each session's tokens go through its own A and B.

The adapters of a group of projections and the frozen ones below are concatenated. They make one
product down and one up. Hand-written gradients go to buffers that the session reads after the pass.
Autograd would keep, cast and add many small tensors for each layer.

Invariant: the results of one segment's tokens depend on that segment's weights alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from personalpeft.backends.openmp import limit_threads
from personalpeft.backends.torch.autograd import apply_function
from personalpeft.backends.torch.lora_layers import FrozenLinear, ProjectionGroup


class FusedLoRAWeights(NamedTuple):
    """A and B of one group for all layers.

    Attributes:
        a: ``[layers, rows, inputs]``.
        b: ``[layers, rows, outputs]``; each row is zero outside its own projection's outputs.
    """

    a: Tensor
    b: Tensor


@dataclass(eq=False, slots=True)
class _Slice:
    """One segment's part of one group, layer by layer.

    Frozen rows come first, trained rows from ``trained_from`` on. Gradients are of these alone,
    ``[layers, rows, ...]``.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    trained_from: int
    a_grad: Tensor
    b_grad: Tensor


class TrainedSegment:
    """Tokens of a pass that go through one session's A and B, and through frozen ones below.

    Args:
        tokens: Which ones.
        halves: ``<projection>.A`` ``[layers, rank, inputs]`` and ``.B`` ``[layers, outputs, rank]``.
        scaling: Factor of B (alpha / rank).
        groups: The model's groups of projections.
        below: The frozen weights of each group, None for a group without any.
        dtype: The dtype of the base.

    Attributes:
        slices: The weights of each group, None for a group without any.
    """

    def __init__(
        self,
        tokens: slice,
        halves: Mapping[str, Tensor],
        scaling: float,
        groups: Sequence[ProjectionGroup],
        below: Sequence[FusedLoRAWeights | None],
        dtype: torch.dtype,
    ) -> None:
        self.tokens = tokens
        self._halves, self._scaling, self._groups = halves, scaling, groups
        self.slices: list[_Slice | None] = []
        for group, frozen in zip(groups, below, strict=True):
            parts = [part for part in (frozen, self._fuse(group, dtype)) if part is not None]
            if not parts:
                self.slices.append(None)
                continue
            a, b = (torch.cat(halves, dim=1) for halves in zip(*parts, strict=True))
            first = 0 if frozen is None else frozen.a.shape[1]
            a_grad, b_grad = torch.empty_like(a[:, first:]), torch.empty_like(b[:, first:])
            self.slices.append(_Slice(a.unbind(0), b.unbind(0), first, a_grad, b_grad))

    def gradients(self) -> dict[str, Tensor]:
        """Return each half's gradient, float32, after the backward pass."""
        grads: dict[str, Tensor] = {}
        for group, part in zip(self._groups, self.slices, strict=True):
            if part is None:
                continue
            for name, rows, begin, end in self._sections(group):
                # Contiguous: the fused optimizer silently assumes it.
                grads[f"{name}.A"] = part.a_grad[:, rows].float().contiguous()
                # Scaled in float32, so it is rounded once.
                b_grad = part.b_grad[:, rows, begin:end].transpose(1, 2).float().contiguous()
                grads[f"{name}.B"] = b_grad * self._scaling
        return grads

    def _sections(self, group: ProjectionGroup) -> Iterator[tuple[str, slice, int, int]]:
        """Yield each trained projection of a group: name, rows, begin and end of its outputs."""
        row = 0
        for name, (begin, end) in zip(group.names, group.sections, strict=True):
            if f"{name}.A" in self._halves:
                rows = slice(row, row + self._halves[f"{name}.A"].shape[1])
                yield name, rows, begin, end
                row = rows.stop

    def _fuse(self, group: ProjectionGroup, dtype: torch.dtype) -> FusedLoRAWeights | None:
        """Return the trained weights of one group in the base's dtype; None if it has none."""
        sections = list(self._sections(group))
        if not sections:
            return None
        with torch.no_grad():
            a = torch.cat([self._halves[f"{name}.A"] for name, *_ in sections], dim=1).to(dtype)
            b = torch.zeros((*a.shape[:2], group.outputs), dtype=dtype, device=a.device)
            for name, rows, begin, end in sections:
                b[:, rows, begin:end] = self._halves[f"{name}.B"].transpose(1, 2) * self._scaling
        return FusedLoRAWeights(a, b)


class TrainedSegments:
    """The sessions of one pass; see ``ActiveLoRA``."""

    def __init__(self, segments: Sequence[TrainedSegment], device: torch.device) -> None:
        self._segments = segments
        # No tensor of the pass requires a gradient, so this one makes autograd run.
        self._flow = torch.zeros((), device=device, requires_grad=True)

    def multiply(self, frozen: FrozenLinear, group: int, layer: int, x: Tensor) -> Tensor:
        slices = [(s.tokens, part) for s in self._segments if (part := s.slices[group]) is not None]
        y: Tensor = apply_function(_LoRAProductFunction, x, self._flow, frozen, slices, layer)
        return y


class _LoRAProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        flow: Tensor,
        frozen: FrozenLinear,
        slices: list[tuple[slice, _Slice]],
        layer: int,
    ) -> Tensor:
        y = frozen.multiply(x)
        x_rows, out = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        shrunk = []
        for tokens, part in slices:
            with _fixed_order(x_rows):
                shrunk.append(x_rows[tokens] @ part.a[layer].t())
                out[tokens].addmm_(shrunk[-1], part.b[layer])
        ctx.save_for_backward(x_rows, *shrunk)
        ctx.args = frozen, slices, layer
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_rows, *shrunk = ctx.saved_tensors
        frozen, slices, layer = ctx.args
        grad = grads[0].contiguous()
        grad_rows = grad.view(-1, grad.shape[-1])
        # The first layer's inputs are embeddings and need no gradient.
        input_grad = frozen.multiply_transposed(grad) if ctx.needs_input_grad[0] else None
        for (tokens, part), shrunk_rows in zip(slices, shrunk, strict=True):
            out_grad, inputs = grad_rows[tokens], x_rows[tokens]
            with _fixed_order(x_rows):
                shrunk_grad = out_grad @ part.b[layer].t()
                if input_grad is not None:
                    input_rows = input_grad.view(-1, input_grad.shape[-1])
                    input_rows[tokens].addmm_(shrunk_grad, part.a[layer])
                trained = slice(part.trained_from, None)
                torch.mm(shrunk_grad[:, trained].t(), inputs, out=part.a_grad[layer])
                torch.mm(shrunk_rows[:, trained].t(), out_grad, out=part.b_grad[layer])
        return input_grad, None, None, None, None


def _fixed_order(x: Tensor) -> AbstractContextManager[None]:
    """Compute small products in an order that does not depend on the number of threads.

    In float32 the library divides them by it. They take little of a pass, so one thread suffices.
    """
    is_divided = x.dtype == torch.float32 and x.device.type == "cpu"
    return limit_threads(1) if is_divided else nullcontext()
