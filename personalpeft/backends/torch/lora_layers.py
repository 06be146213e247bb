"""Linear layers of the model with LoRA: fused where they read the same input.

Invariants: the base's weights are only read. Adapters are active for one pass, under the model's
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeAlias

import torch
from torch import Tensor, nn

from personalpeft.backends.torch.autograd import differentiable
from personalpeft.backends.torch.batch_invariant_matmul import (
    BatchInvariantProduct,
    ProductChooser,
    ProductShape,
)
from personalpeft.types import Architecture

# Projections with one input. One product is faster than two or three.
_FUSED_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Projections of every layer with the same input; ``ends`` is where each one's outputs end."""

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
    projections = architecture.projections
    groups: list[ProjectionGroup] = []
    grouped: set[str] = set()
    for name, (inputs, _) in projections.items():
        if name in grouped:
            continue
        path, _, last = name.rpartition(".")
        fused = next((fused for fused in _FUSED_PROJECTIONS if last in fused), (last,))
        names = tuple(f"{path}.{each}".lstrip(".") for each in fused)
        if not all(each in projections for each in names):
            names = (name,)
        grouped.update(names)
        ends = accumulate(projections[each][1] for each in names)
        groups.append(ProjectionGroup(names, inputs, tuple(ends)))
    return tuple(groups)


class ActiveLoRA(Protocol):
    """Adapters of one pass."""

    def multiply(self, frozen: FrozenLinear, group: int, layer: int, x: Tensor) -> Tensor:
        """Return a group's outputs ``[rows, tokens, outputs]`` in one layer, with the adapters.

        Args:
            frozen: The base's weights.
            group: Number of the group.
            layer: Number of the model's layer.
            x: ``[rows, tokens, inputs]``.
        """


@dataclass(slots=True)
class LoRAContext:
    """The adapters of the running pass, None for the bare base; all layers of the model read it."""

    active: ActiveLoRA | None = None


class FrozenLinear(nn.Module):
    """A linear layer with frozen weights. A row's outputs have the same bits in any batch."""

    copies_weights = False
    """Whether it needs the tensors that it was made from no longer."""

    def enable_backward(self) -> None:
        """Prepare for gradients, until ``disable_backward``."""

    def disable_backward(self) -> None:
        """Free what ``enable_backward`` stored."""

    def forward(self, x: Tensor) -> Tensor:
        return differentiable(self.multiply, lambda x, grad: self.multiply_transposed(grad), x)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the outputs, without a gradient."""
        raise NotImplementedError

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        """Return the gradient with respect to the inputs."""
        raise NotImplementedError


class LoadedLinear(FrozenLinear):
    """Weights in memory, stored once in the CPU's fastest order.

    Between ``enable_backward`` and ``disable_backward`` they are also stored transposed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chooser: ProductChooser) -> None:
        super().__init__()
        self._chooser = chooser
        self._product = BatchInvariantProduct(weight, bias, chooser)
        self._transposed: BatchInvariantProduct | None = None
        self.copies_weights = self._product.is_packed
        if self._product.is_packed:
            # Chosen now: it may exclude thread counts, and the first pass needs to know those.
            chooser.choose(ProductShape(weight.shape[0], weight.shape[1], weight.dtype, bias=False))

    def enable_backward(self) -> None:
        if self._product.is_packed and self._transposed is None:
            transposed = self._product.weight.t().contiguous()
            self._transposed = BatchInvariantProduct(transposed, None, self._chooser)

    def disable_backward(self) -> None:
        self._transposed = None

    def multiply(self, x: Tensor) -> Tensor:
        return self._product(x)

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        if self._transposed is not None:
            return self._transposed(grad)
        return grad @ self._product.weight


LinearFactory: TypeAlias = Callable[[Sequence[tuple[str, nn.Linear]]], FrozenLinear]
"""Makes one layer of the linear layers at these paths, which read the same input."""


def fuse_loaded_linears(
    members: Sequence[tuple[str, nn.Linear]], chooser: ProductChooser
) -> LoadedLinear:
    """Return one layer with the weights of the model's loaded layers."""
    weights = [member.weight.detach() for _, member in members]
    biases = [member.bias.detach() for _, member in members if member.bias is not None]
    # A single member is not copied, so its weights stay in the loaded file's memory.
    weight = torch.cat(weights) if len(weights) > 1 else weights[0]
    return LoadedLinear(weight, torch.cat(biases) if biases else None, chooser)


class GroupedLinear:
    """The product of one group in one layer, with its adapters.

    The model calls each projection separately. The first call computes all of them. The others
    return their part of it if their input is the same tensor.
    """

    def __init__(self, frozen: FrozenLinear, group: int, layer: int, context: LoRAContext) -> None:
        self.frozen = frozen
        self._group, self._layer, self._context = group, layer, context
        self._last: tuple[Tensor, Tensor] | None = None

    def shared_outputs(self, x: Tensor, *, is_last: bool) -> Tensor:
        """Return all outputs, computed once for one input; the last call frees them."""
        if self._last is None or self._last[0] is not x:
            self._last = x, self.all_outputs(x)
        _, y = self._last
        if is_last:
            self._last = None
        return y

    def all_outputs(self, x: Tensor) -> Tensor:
        """Return the outputs of all projections of the group, side by side."""
        active = self._context.active
        if active is not None:
            return active.multiply(self.frozen, self._group, self._layer, x)
        y: Tensor = self.frozen(x)
        return y


class LoRALinear(nn.Module):
    """Replace one linear layer of the model, which is one of a group."""

    def __init__(self, grouped: GroupedLinear, begin: int, end: int, *, is_last: bool) -> None:
        super().__init__()
        self.grouped = grouped
        self._begin, self._end, self._is_last = begin, end, is_last

    def forward(self, x: Tensor) -> Tensor:
        return self.grouped.shared_outputs(x, is_last=self._is_last)[..., self._begin : self._end]


def install_lora_layers(
    model: nn.Module, architecture: Architecture, make_linear: LinearFactory, context: LoRAContext
) -> list[FrozenLinear]:
    """Replace each projection of a model that the architecture names.

    Args:
        model: The model, which is changed.
        architecture: Names the projections.
        make_linear: Makes the frozen product of the layers that share an input.
        context: The owner sets it for each pass.

    Returns:
        The product of each group in each layer.
    """
    products: list[FrozenLinear] = []
    for layer in range(architecture.blocks):
        root = f"{architecture.block_path}.{layer}."
        for number, group in enumerate(group_projections(architecture)):
            members = [
                (root + name, _as_linear(model.get_submodule(root + name))) for name in group.names
            ]
            grouped = GroupedLinear(make_linear(members), number, layer, context)
            products.append(grouped.frozen)
            for name, (begin, end) in zip(group.names, group.sections, strict=True):
                parent, _, attribute = (root + name).rpartition(".")
                linear = LoRALinear(grouped, begin, end, is_last=name == group.names[-1])
                setattr(model.get_submodule(parent), attribute, linear)
    return products


def _as_linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"projections must be nn.Linear, got {type(module).__name__}")
    return module
