"""Linear layers of the model with LoRA: fused where they read the same input.

Invariants: the base's weights are only read. Adapters are active for one pass, under the model's
lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from personalpeft.backends.torch.batch_invariant_matmul import (
    PLAIN,
    ProductChooser,
    ProductKind,
    ProductShape,
    make_product,
)
from personalpeft.types import Architecture

# Projections with one input. One product is faster than two or three.
_FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Projections of every block with the same input; ``ends`` is where each one's outputs end."""

    names: tuple[str, ...]
    inputs: int
    ends: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return self.ends[-1]

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each projection's outputs."""
        return tuple(zip((0, *self.ends), self.ends, strict=False))


def group_projections(architecture: Architecture) -> tuple[ProjectionGroup, ...]:
    """Return the base's adapted projections, each in one group, in the architecture's order."""
    groups: list[ProjectionGroup] = []
    assigned: set[str] = set()
    for name, (inputs, _) in architecture.projections.items():
        if name in assigned:
            continue
        path, _, last = name.rpartition(".")
        siblings = [
            tuple(f"{path}.{t}".lstrip(".") for t in fused)
            for fused in _FUSED_PROJECTIONS
            if last in fused
        ]
        names = next(
            (s for s in siblings if all(member in architecture.projections for member in s)),
            (name,),
        )
        assigned.update(names)
        ends, end = [], 0
        for member in names:
            end += architecture.projections[member][1]
            ends.append(end)
        groups.append(ProjectionGroup(names, inputs, tuple(ends)))
    return tuple(groups)


class ActiveLoRA(Protocol):
    """Adapters of one pass."""

    def add(self, group: int, block: int, x: Tensor, y: Tensor) -> Tensor:
        """Return outputs ``[rows, tokens, outputs]`` plus the adapters' part, maybe in place."""
        ...


class TrainedLoRA(Protocol):
    """Adapters in training. They compute the base's product too, for its gradient."""

    def product(self, frozen: FrozenLinear, group: int, block: int, x: Tensor) -> Tensor:
        """Return a group's outputs with all adapters, differentiable."""
        ...


class LoRAContext:
    """The adapters that are active now; all layers of the model read them here."""

    def __init__(self) -> None:
        self.active: ActiveLoRA | None = None
        self.training: TrainedLoRA | None = None

    @contextmanager
    def activate(
        self, active: ActiveLoRA | None, training: TrainedLoRA | None = None
    ) -> Iterator[None]:
        """Activate adapters for one forward (and backward) pass."""
        self.active, self.training = active, training
        try:
            yield
        finally:
            self.active = self.training = None


class FrozenLinear(nn.Module):
    """A linear layer with frozen weights, whose outputs for a row are the same bits in any batch.

    The weights are stored once, in the CPU's fastest order. Between ``enable_backward`` and
    ``disable_backward`` they are also stored transposed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chooser: ProductChooser | None) -> None:
        super().__init__()
        self._chooser = chooser
        self._product = _BatchInvariantProduct(weight, bias, chooser)
        self._transposed: _BatchInvariantProduct | None = None
        if chooser is not None and self._product.packed:
            # Chosen now: it may exclude thread counts, which must be known before the first pass.
            chooser.choose(ProductShape(weight.shape[0], weight.shape[1], weight.dtype, bias=False))

    @property
    def weight(self) -> Tensor:
        """The weights, ``[outputs, inputs]``."""
        return self._product.weight

    @property
    def bias(self) -> Tensor | None:
        return self._product.bias

    def enable_backward(self) -> None:
        """Store the transposed weights, which gradients need."""
        if self._product.packed and self._transposed is None:
            self._transposed = _BatchInvariantProduct(
                self.weight.t().contiguous(), None, self._chooser
            )

    def disable_backward(self) -> None:
        """Free the transposed weights."""
        self._transposed = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = apply_function(_MultiplyFunction, x, self)
            return result
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the outputs, without a gradient."""
        return self._product(x)

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        """Return the gradient with respect to the inputs."""
        if self._transposed is not None:
            return self._transposed(grad)
        return grad @ self.weight


class _BatchInvariantProduct:
    """A product with ``[outputs, inputs]`` weights, computed as the chooser decides."""

    def __init__(self, weight: Tensor, bias: Tensor | None, chooser: ProductChooser | None) -> None:
        outputs, inputs = weight.shape
        choice = (
            PLAIN
            if chooser is None
            else chooser.choose(ProductShape(inputs, outputs, weight.dtype, bias is not None))
        )
        self.packed = choice.kind is ProductKind.PACKED
        self.bias = bias
        self._outputs = outputs
        self._rows = choice.rows
        self._product, self._weight = make_product(choice.kind, weight, bias)

    @property
    def weight(self) -> Tensor:
        return self._weight.to_dense() if self.packed else self._weight

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = self._product(rows) if self._rows is None else self._rows.apply(self._product, rows)
        return y.view(*x.shape[:-1], self._outputs)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Apply an autograd function; torch declares ``apply`` without types."""
    return function.apply(*args)


class _MultiplyFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: FrozenLinear) -> Tensor:
        ctx.product = product
        return product.multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.product.multiply_transposed(grads[0]), None


class GroupedLinear:
    """The product of one group in one block, with its adapters.

    The model calls each projection separately. The first call computes all of them. The others
    return their part of it if their input is the same tensor.
    """

    def __init__(
        self,
        members: Sequence[nn.Linear],
        group: int,
        block: int,
        context: LoRAContext,
        chooser: ProductChooser | None,
    ) -> None:
        weights = [member.weight.detach() for member in members]
        biases = [member.bias.detach() for member in members if member.bias is not None]
        # A single member is not copied, so its weights stay in the loaded file's memory.
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.product = FrozenLinear(weight, torch.cat(biases) if biases else None, chooser)
        self._group, self._block, self._context = group, block, context
        self._last_input: Tensor | None = None
        self._last_output: Tensor | None = None

    def outputs(self, x: Tensor, begin: int, end: int, *, last: bool) -> Tensor:
        """Return the outputs ``begin`` to ``end``; ``last`` frees the stored outputs."""
        y = (
            self._last_output
            if self._last_input is x and self._last_output is not None
            else self._compute(x)
        )
        self._last_input, self._last_output = (None, None) if last else (x, y)
        return y[..., begin:end]

    def all_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of all projections of the group."""
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        training = self._context.training
        if training is not None:
            return training.product(self.product, self._group, self._block, x)
        y: Tensor = self.product(x)
        active = self._context.active
        return y if active is None else active.add(self._group, self._block, x, y)


class LoRALinear(nn.Module):
    """Replace one linear layer of the model."""

    def __init__(self, group_linear: GroupedLinear, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        self._group_linear = group_linear
        self._begin, self._end, self._last = begin, end, last

    def shares_with(self, other: object) -> bool:
        """Return whether both layers are in one group."""
        return isinstance(other, LoRALinear) and other._group_linear is self._group_linear

    def all_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of the whole group, side by side."""
        return self._group_linear.all_outputs(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._group_linear.outputs(x, self._begin, self._end, last=self._last)


def install_lora_layers(
    model: nn.Module, architecture: Architecture, chooser: ProductChooser | None
) -> tuple[LoRAContext, dict[str, FrozenLinear]]:
    """Replace each projection that the architecture names.

    Returns:
        The context that activates adapters, and the products by the path of their group's first
            projection.
    """
    context = LoRAContext()
    products: dict[str, FrozenLinear] = {}
    for block in range(architecture.blocks):
        root = f"{architecture.block_path}.{block}."
        for number, group in enumerate(group_projections(architecture)):
            members = [model.get_submodule(root + name) for name in group.names]
            group_linear = GroupedLinear(
                [_as_linear(m) for m in members], number, block, context, chooser
            )
            products[root + group.names[0]] = group_linear.product
            for name, (begin, end) in zip(group.names, group.sections, strict=True):
                path, _, last = (root + name).rpartition(".")
                layer = LoRALinear(group_linear, begin, end, last=name == group.names[-1])
                setattr(model.get_submodule(path), last, layer)
    return context, products


def _as_linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"projections must be nn.Linear, got {type(module).__name__}")
    return module
