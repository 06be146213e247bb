"""Where adapters meet the model: the projections of a block, computed together where they read the same input, with
whatever is bound added to their outputs.

Invariants: the base's own weights are only ever read; what is bound lasts for one pass and is bound by whoever holds
the device's turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from personalpeft.backends.torch.row_counts import (
    PLAIN,
    ProductChooser,
    ProductKind,
    ProductShape,
    make_product,
)
from personalpeft.types import Architecture

# Projections that read one input, in models that keep them apart: one product is quicker than two or three.
_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class ProjectionGroup:
    """Projections of every block that read the same input, in order; ``ends`` is where each one's outputs end."""

    names: tuple[str, ...]
    inputs: int
    ends: tuple[int, ...]

    @property
    def outputs(self) -> int:
        return self.ends[-1]

    @property
    def sections(self) -> tuple[tuple[int, int], ...]:
        """Where each projection's outputs begin and end."""
        return tuple(zip((0, *self.ends), self.ends, strict=False))


def group_projections(architecture: Architecture) -> tuple[ProjectionGroup, ...]:
    """The base's adapted projections, each in one group, in the architecture's order."""
    groups: list[ProjectionGroup] = []
    taken: set[str] = set()
    for name, (inputs, _) in architecture.projections.items():
        if name in taken:
            continue
        path, _, last = name.rpartition(".")
        siblings = [
            tuple(f"{path}.{t}".lstrip(".") for t in together)
            for together in _TOGETHER
            if last in together
        ]
        names = next(
            (s for s in siblings if all(member in architecture.projections for member in s)),
            (name,),
        )
        taken.update(names)
        ends, end = [], 0
        for member in names:
            end += architecture.projections[member][1]
            ends.append(end)
        groups.append(ProjectionGroup(names, inputs, tuple(ends)))
    return tuple(groups)


class ActiveLoRA(Protocol):
    """Adapters as one pass sees them."""

    def add(self, group: int, block: int, x: Tensor, y: Tensor) -> Tensor:
        """The outputs ``[rows, tokens, outputs]`` of a group with what is bound added, perhaps in place."""
        ...


class TrainedLoRA(Protocol):
    """Adapters in training as one pass sees them: they take the base's product over, to give its gradient by hand."""

    def product(self, frozen: FrozenLinear, group: int, block: int, x: Tensor) -> Tensor:
        """The outputs of a group with all adapters added, through which a gradient passes."""
        ...


class LoRAContext:
    """What is bound to the model at this moment; all its projections look here."""

    def __init__(self) -> None:
        self.bound: ActiveLoRA | None = None
        self.training: TrainedLoRA | None = None

    @contextmanager
    def holding(
        self, bound: ActiveLoRA | None, training: TrainedLoRA | None = None
    ) -> Iterator[None]:
        """Binds for one forward (and backward) pass."""
        self.bound, self.training = bound, training
        try:
            yield
        finally:
            self.bound = self.training = None


class FrozenLinear(nn.Module):
    """A linear map with frozen weights, whose outputs for a row are the same bits in any batch.

    The weights are held once, in the order that the processor multiplies fastest in. A gradient needs them the other way
    round: they are held that way too from ``open_back`` to ``close_back``.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, chooser: ProductChooser | None) -> None:
        super().__init__()
        self._chooser = chooser
        self._product = _BatchInvariantProduct(weight, bias, chooser)
        self._back: _BatchInvariantProduct | None = None
        if chooser is not None and self._product.packed:
            # Tried now: what it says of the numbers of threads has to be known before the first pass.
            chooser.choose(ProductShape(weight.shape[0], weight.shape[1], weight.dtype, bias=False))

    @property
    def weight(self) -> Tensor:
        """The weights as the model has them, ``[outputs, inputs]``."""
        return self._product.weight

    @property
    def bias(self) -> Tensor | None:
        return self._product.bias

    def enable_backward(self) -> None:
        """Get ready for many gradients."""
        if self._product.packed and self._back is None:
            self._back = _BatchInvariantProduct(self.weight.t().contiguous(), None, self._chooser)

    def disable_backward(self) -> None:
        """Free what ``open_back`` took."""
        self._back = None

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            result: Tensor = _Multiply.apply(x, self)  # type: ignore[no-untyped-call]  # torch's own
            return result
        return self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Return the outputs, without a gradient."""
        return self._product(x)

    def multiply_transposed(self, grad: Tensor) -> Tensor:
        """Return the gradient to the inputs."""
        if self._back is not None:
            return self._back(grad)
        return grad @ self.weight


class _BatchInvariantProduct:
    """A product with ``[outputs, inputs]`` weights, computed as the chooser says; without one as the framework does."""

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


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: FrozenLinear) -> Tensor:
        ctx.product = product
        return product.multiply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.product.back(grads[0]), None


class GroupedLinear:
    """The base's product for one group of one block, and what is bound beside it.

    The model asks for each projection on its own. The first to ask computes all of them; the others take their part of
    that, as long as they ask about the very same input.
    """

    def __init__(
        self,
        members: Sequence[nn.Linear],
        group: int,
        block: int,
        attachment: LoRAContext,
        chooser: ProductChooser | None,
    ) -> None:
        weights = [member.weight.detach() for member in members]
        biases = [member.bias.detach() for member in members if member.bias is not None]
        # One member is not copied: where weights keep their order, they stay the very memory that was loaded.
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        self.product = FrozenLinear(weight, torch.cat(biases) if biases else None, chooser)
        self._group, self._block, self._attachment = group, block, attachment
        self._asked: Tensor | None = None
        self._said: Tensor | None = None

    def outputs(self, x: Tensor, begin: int, end: int, *, last: bool) -> Tensor:
        """The outputs ``begin`` to ``end``; ``last`` says that nobody will ask about this input again."""
        y = self._said if self._asked is x and self._said is not None else self._compute(x)
        self._asked, self._said = (None, None) if last else (x, y)
        return y[..., begin:end]

    def all_outputs(self, x: Tensor) -> Tensor:
        """Those of every member at once."""
        return self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        training = self._attachment.training
        if training is not None:
            return training.product(self.product, self._group, self._block, x)
        y: Tensor = self.product(x)
        bound = self._attachment.bound
        return y if bound is None else bound.add(self._group, self._block, x, y)


class LoRALinear(nn.Module):
    """Stands where one of the model's linear projections stood."""

    def __init__(self, whole: GroupedLinear, begin: int, end: int, *, last: bool) -> None:
        super().__init__()
        self._whole = whole
        self._begin, self._end, self._last = begin, end, last

    def shares_with(self, other: object) -> bool:
        """Whether the two are computed together."""
        return isinstance(other, LoRALinear) and other._whole is self._whole

    def together(self, x: Tensor) -> Tensor:
        """The outputs of all that are computed together, side by side."""
        return self._whole.all_outputs(x)

    def forward(self, x: Tensor) -> Tensor:
        return self._whole.outputs(x, self._begin, self._end, last=self._last)


def install_lora_layers(
    model: nn.Module, architecture: Architecture, chooser: ProductChooser | None
) -> tuple[LoRAContext, dict[str, FrozenLinear]]:
    """Replaces every projection that the architecture names; without anything bound the model computes as before.

    Also returns the products by the path of their group's first projection.
    """
    attachment = LoRAContext()
    products: dict[str, FrozenLinear] = {}
    for block in range(architecture.blocks):
        root = f"{architecture.block_path}.{block}."
        for number, group in enumerate(group_projections(architecture)):
            members = [model.get_submodule(root + name) for name in group.names]
            whole = GroupedLinear(
                [_as_linear(m) for m in members], number, block, attachment, chooser
            )
            products[root + group.names[0]] = whole.product
            for name, (begin, end) in zip(group.names, group.sections, strict=True):
                path, _, last = (root + name).rpartition(".")
                stands_in = LoRALinear(whole, begin, end, last=name == group.names[-1])
                setattr(model.get_submodule(path), last, stands_in)
    return attachment, products


def _as_linear(module: nn.Module) -> nn.Linear:
    if not isinstance(module, nn.Linear):
        raise TypeError(f"{type(module).__name__} is no linear projection")
    return module
