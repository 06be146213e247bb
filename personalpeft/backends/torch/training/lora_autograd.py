"""Layers in training as a pass over the base sees them: each session's tokens go through its own halves.

The halves of a group of projections lie side by side, so that each group costs one narrow product down and one up; what
is frozen below takes part in the same two. Their gradients are written by hand beside the base's, into buffers that the
session reads after the pass: autograd would keep, cast and add thirty blocks' worth of small tensors for each.

Invariant: what is computed of one segment's tokens depends on that segment's halves alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from personalpeft.backends.torch.lora_layers import FrozenLinear, ProjectionGroup
from personalpeft.backends.torch.openmp import limit_threads


@dataclass(frozen=True, slots=True)
class FusedLoRAWeights:
    """The halves of one group for all blocks: ``a`` ``[blocks, rows, inputs]``, ``b`` ``[blocks, rows, outputs]``, where
    each row of ``b`` is zero outside of its own projection's outputs.
    """

    a: Tensor
    b: Tensor


@dataclass(eq=False, slots=True)
class _Slice:
    """One segment's part of one group, block by block: what is frozen comes first, so that ``own`` is where the trained
    rows begin. The gradients, of those alone, are ``[blocks, rows, ...]``.
    """

    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]
    own: int
    a_grad: Tensor
    b_grad: Tensor


@dataclass(eq=False, slots=True)
class TrainedSegment:
    """The tokens ``begin`` to ``end`` of a pass and the halves that they go through. None: a group that nothing
    adapts.
    """

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
    """A session's halves (``<projection>.A`` ``[blocks, rank, inputs]`` and ``.B`` ``[blocks, outputs, rank]``) for its
    part of a pass.
    """
    slices: list[_Slice | None] = []
    for group, frozen in zip(groups, below, strict=True):
        own = _own_columns(halves, scaling, group, dtype)
        parts = [wide for wide in (frozen, own) if wide is not None]
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
    having = [
        (n, s) for n, s in zip(group.names, group.sections, strict=True) if f"{n}.A" in halves
    ]
    if not having:
        return None
    with torch.no_grad():
        a = torch.cat([halves[f"{name}.A"] for name, _ in having], dim=1).to(dtype)
        b = torch.zeros((*a.shape[:2], group.outputs), dtype=dtype, device=a.device)
        row = 0
        for name, (begin, end) in having:
            half = halves[f"{name}.B"]
            b[:, row : row + half.shape[2], begin:end] = half.transpose(1, 2) * scaling
            row += half.shape[2]
    return FusedLoRAWeights(a, b)


def gradients(
    done: TrainedSegment,
    halves: Mapping[str, Tensor],
    scaling: float,
    groups: Sequence[ProjectionGroup],
) -> dict[str, Tensor]:
    """What a pass left for each half, float32."""
    found: dict[str, Tensor] = {}
    for group, part in zip(groups, done.slices, strict=True):
        row = 0
        for name, (begin, end) in zip(group.names, group.sections, strict=True):
            if part is None or f"{name}.A" not in halves:
                continue
            rows = slice(row, row + halves[f"{name}.A"].shape[1])
            # Contiguous, since the fused optimizer takes that for granted.
            found[f"{name}.A"] = part.a_grad[:, rows].float().contiguous()
            # Scaled after it is widened: what is lost to rounding is lost once.
            found[f"{name}.B"] = (
                part.b_grad[:, rows, begin:end].transpose(1, 2).float().contiguous() * scaling
            )
            row = rows.stop
    return found


class TrainedSegments:
    """What is bound for a pass over the tokens of several sessions; see ``Training`` in linear.py."""

    def __init__(self, segments: Sequence[TrainedSegment], device: torch.device) -> None:
        self._segments = segments
        # Nothing in the pass has a gradient by itself, since the halves' are written by hand: this one makes it flow.
        self._flow = torch.zeros((), device=device, requires_grad=True)

    def product(self, frozen: FrozenLinear, group: int, block: int, x: Tensor) -> Tensor:
        slices = [
            (s.begin, s.end, part) for s in self._segments if (part := s.slices[group]) is not None
        ]
        y: Tensor = _Product.apply(x, self._flow, frozen, slices, block)  # type: ignore[no-untyped-call]  # torch's own
        return y


class _Product(torch.autograd.Function):
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
        flat, out = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        narrow = []
        for begin, end, part in slices:
            with _one_order(flat):
                narrow.append(_rows(flat, begin, end) @ part.a[block].t())
                _rows(out, begin, end).addmm_(narrow[-1], part.b[block])
        ctx.save_for_backward(flat, *narrow)
        ctx.about = frozen, slices, block
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flat, *narrow = ctx.saved_tensors
        frozen, slices, block = ctx.about
        grad = grads[0].contiguous()
        given = grad.view(-1, grad.shape[-1])
        # The first block's inputs are the embeddings, which nobody asks the gradient of.
        back = frozen.back(grad) if ctx.needs_input_grad[0] else None
        for (begin, end, part), h in zip(slices, narrow, strict=True):
            own, inputs = _rows(given, begin, end), _rows(flat, begin, end)
            with _one_order(flat):
                slope = own @ part.b[block].t()
                if back is not None:
                    _rows(back.view(-1, back.shape[-1]), begin, end).addmm_(slope, part.a[block])
                if part.own:
                    slope, h = slope[:, part.own :], h[:, part.own :]
                torch.mm(slope.t(), inputs, out=part.a_grad[block])
                torch.mm(h.t(), own, out=part.b_grad[block])
        return back, None, None, None, None


def _rows(of: Tensor, begin: int, end: int) -> Tensor:
    return of if end - begin == len(of) else of[begin:end]


def _one_order(x: Tensor) -> AbstractContextManager[None]:
    """Compute narrow products in one order, whatever the number of threads: in float32 their library shares them out by it.

    They are a few hundredths of a pass, so one thread is enough.
    """
    return (
        limit_threads(1) if x.dtype == torch.float32 and x.device.type == "cpu" else nullcontext()
    )
