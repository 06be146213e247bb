"""LoRA layers in training: each session's tokens go through its own A and B.

The layers of a group of projections are concatenated, with the frozen ones below, into one product
down and one up. Their gradients are written by hand into buffers that the session reads after the
pass. Autograd would keep, cast and add many small tensors for each block.

Invariant: the results of one segment's tokens depend on that segment's weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from personalpeft.backends.torch.lora_layers import (
    FrozenLinear,
    ProjectionGroup,
    apply_function,
)
from personalpeft.backends.torch.openmp import limit_threads


@dataclass(frozen=True, slots=True)
class FusedLoRAWeights:
    """A and B of one group for all blocks.

    Attributes:
        a: ``[blocks, rows, inputs]``.
        b: ``[blocks, rows, outputs]``; each row is zero outside its own projection's outputs.
    """

    a: Tensor
    b: Tensor


@dataclass(eq=False, slots=True)
class _Slice:
    """One segment's part of one group, block by block.

    Frozen rows come first, trained rows from ``trained_from`` on. Gradients are of these alone,
    ``[blocks, rows, ...]``.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    trained_from: int
    a_grad: Tensor
    b_grad: Tensor


@dataclass(eq=False, slots=True)
class TrainedSegment:
    """Tokens ``begin`` to ``end`` of a pass and their weights; None for a group without any."""

    begin: int
    end: int
    slices: Sequence[_Slice | None] = field(default_factory=tuple)


def make_segment(
    begin: int,
    end: int,
    halves: Mapping[str, Tensor],
    scaling: float,
    below: Sequence[FusedLoRAWeights | None],
    groups: Sequence[ProjectionGroup],
    dtype: torch.dtype,
) -> TrainedSegment:
    """Return a session's weights for its tokens of a pass.

    Args:
        begin: The first token.
        end: The end of its tokens.
        halves: ``<projection>.A`` ``[blocks, rank, inputs]`` and ``.B`` ``[blocks, outputs,
            rank]``.
        scaling: Factor of B (alpha / rank).
        below: The frozen stack, by group.
        groups: The model's groups.
        dtype: Of the base.
    """
    slices: list[_Slice | None] = []
    for group, frozen in zip(groups, below, strict=True):
        own = _own_columns(halves, scaling, group, dtype)
        parts = [weights for weights in (frozen, own) if weights is not None]
        if not parts:
            slices.append(None)
            continue
        a, b = (
            torch.cat([part.a for part in parts], dim=1),
            torch.cat([part.b for part in parts], dim=1),
        )
        rows = 0 if own is None else own.a.shape[1]
        first = a.shape[1] - rows
        a_grad, b_grad = torch.empty_like(a[:, first:]), torch.empty_like(b[:, first:])
        slices.append(_Slice(a.unbind(0), b.unbind(0), first, a_grad, b_grad))
    return TrainedSegment(begin, end, slices)


def _own_columns(
    halves: Mapping[str, Tensor], scaling: float, group: ProjectionGroup, dtype: torch.dtype
) -> FusedLoRAWeights | None:
    present = [
        (n, s) for n, s in zip(group.names, group.sections, strict=True) if f"{n}.A" in halves
    ]
    if not present:
        return None
    with torch.no_grad():
        a = torch.cat([halves[f"{name}.A"] for name, _ in present], dim=1).to(dtype)
        b = torch.zeros((*a.shape[:2], group.outputs), dtype=dtype, device=a.device)
        row = 0
        for name, (begin, end) in present:
            half = halves[f"{name}.B"]
            b[:, row : row + half.shape[2], begin:end] = half.transpose(1, 2) * scaling
            row += half.shape[2]
    return FusedLoRAWeights(a, b)


def gradients(
    segment: TrainedSegment,
    halves: Mapping[str, Tensor],
    scaling: float,
    groups: Sequence[ProjectionGroup],
) -> dict[str, Tensor]:
    """Return each half's gradient from a pass, float32."""
    grads_by_name: dict[str, Tensor] = {}
    for group, part in zip(groups, segment.slices, strict=True):
        row = 0
        for name, (begin, end) in zip(group.names, group.sections, strict=True):
            if part is None or f"{name}.A" not in halves:
                continue
            rows = slice(row, row + halves[f"{name}.A"].shape[1])
            # Contiguous: the fused optimizer silently assumes it.
            grads_by_name[f"{name}.A"] = part.a_grad[:, rows].float().contiguous()
            # Scaled in float32, so it is rounded once.
            grads_by_name[f"{name}.B"] = (
                part.b_grad[:, rows, begin:end].transpose(1, 2).float().contiguous() * scaling
            )
            row = rows.stop
    return grads_by_name


class TrainedSegments:
    """The sessions of one pass; see ``TrainedLoRA``."""

    def __init__(self, segments: Sequence[TrainedSegment], device: torch.device) -> None:
        self._segments = segments
        # No tensor of the pass requires a gradient, so this one makes autograd run.
        self._flow = torch.zeros((), device=device, requires_grad=True)

    def product(self, frozen: FrozenLinear, group: int, block: int, x: Tensor) -> Tensor:
        slices = [
            (s.begin, s.end, part) for s in self._segments if (part := s.slices[group]) is not None
        ]
        y: Tensor = apply_function(_LoRAProductFunction, x, self._flow, frozen, slices, block)
        return y


class _LoRAProductFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        flow: Tensor,
        frozen: FrozenLinear,
        slices: list[tuple[int, int, _Slice]],
        block: int,
    ) -> Tensor:
        y = frozen.multiply(x)
        x_rows, out = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        shrunk = []
        for begin, end, part in slices:
            with _fixed_order(x_rows):
                shrunk.append(_rows(x_rows, begin, end) @ part.a[block].t())
                _rows(out, begin, end).addmm_(shrunk[-1], part.b[block])
        ctx.save_for_backward(x_rows, *shrunk)
        ctx.args = frozen, slices, block
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_rows, *shrunk = ctx.saved_tensors
        frozen, slices, block = ctx.args
        grad = grads[0].contiguous()
        grad_rows = grad.view(-1, grad.shape[-1])
        # The first block's inputs are embeddings and need no gradient.
        input_grad = frozen.multiply_transposed(grad) if ctx.needs_input_grad[0] else None
        for (begin, end, part), shrunk_rows in zip(slices, shrunk, strict=True):
            out_grad, inputs = _rows(grad_rows, begin, end), _rows(x_rows, begin, end)
            with _fixed_order(x_rows):
                shrunk_grad = out_grad @ part.b[block].t()
                if input_grad is not None:
                    _rows(input_grad.view(-1, input_grad.shape[-1]), begin, end).addmm_(
                        shrunk_grad, part.a[block]
                    )
                if part.trained_from:
                    shrunk_grad, shrunk_rows = (
                        shrunk_grad[:, part.trained_from :],
                        shrunk_rows[:, part.trained_from :],
                    )
                torch.mm(shrunk_grad.t(), inputs, out=part.a_grad[block])
                torch.mm(shrunk_rows.t(), out_grad, out=part.b_grad[block])
        return input_grad, None, None, None, None


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor if end - begin == len(tensor) else tensor[begin:end]


def _fixed_order(x: Tensor) -> AbstractContextManager[None]:
    """Compute small products in an order that does not depend on the number of threads.

    In float32 the library divides them by it. They take little of a pass, so one thread suffices.
    """
    return (
        limit_threads(1) if x.dtype == torch.float32 and x.device.type == "cpu" else nullcontext()
    )
