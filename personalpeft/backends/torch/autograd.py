"""Autograd functions with gradients written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
