"""Autograd functions with gradients written by hand, and activation checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply an autograd function; torch declares ``apply`` without types."""
    return function.apply(*args)


def differentiable(
    operation: Callable[..., Tensor], gradient: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    """Return an operation's result. Autograd differentiates it with respect to the first tensor.

    Args:
        operation: Computes the result from the tensors.
        gradient: Computes the first tensor's gradient from the tensors and the result's gradient.
        tensors: Kept until the gradient is computed.
    """
    if not torch.is_grad_enabled():
        return operation(*tensors)
    result: Tensor = apply_function(_Operation, operation, gradient, *tensors)
    return result


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: Callable[..., Tensor],
        gradient: Callable[..., Tensor],
        *tensors: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.gradient = gradient
        return operation(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        gradient = ctx.gradient(*tensors, grads[0].contiguous())
        return None, None, gradient, *(None for _ in tensors[1:])


class BlockCheckpoints:
    """Makes blocks keep their input alone while ``active``, and compute again for gradients.

    Chen et al. 2016 (Training Deep Nets with Sublinear Memory Cost). A pass takes half as long
    again. Gradients have the same bits as without, because a block computes the same bits again.

    Args:
        blocks: The model's blocks. Each takes hidden states first and returns them alone.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.active = False
        for block in blocks:
            block.forward = self._checkpointed(block.forward)

    def _checkpointed(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not (self.active and torch.is_grad_enabled()):
                return forward(hidden, *args, **kwargs)
            # The first block's input needs no gradient, but its adapters do.
            flow = torch.zeros((), requires_grad=True)

            def compute(hidden: Tensor, flow: Tensor) -> Tensor:
                return forward(hidden, *args, **kwargs)

            # Not torch's ``checkpoint``: its first use in a process imports torch's compiler.
            result: Tensor = apply_function(CheckpointFunction, compute, False, hidden, flow)
            return result

        return run
