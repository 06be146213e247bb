"""Slots for adapters on one device (S-LoRA, Sheng et al. 2023), and views of them for a pass.

Invariants: slot 0 is all zeros and means the bare base. A slot keeps its contents until it is freed.
The caller frees no slot that a row uses. Training reads copies.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from personalpeft.adapters.compose import overflow_error
from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.torch.device import DeviceChoice, memory_to_plan
from personalpeft.backends.torch.host_to_device import CopyStream, can_pin
from personalpeft.backends.torch.lora_layers import ActiveLoRA, FrozenLinear, group_projections
from personalpeft.backends.torch.ops.base import LoRAMapping, Ops, StackedLoRAWeights
from personalpeft.backends.torch.training.lora_autograd import FusedLoRAWeights
from personalpeft.settings import DEFAULT_SLOTS
from personalpeft.types import Architecture

# The rank that memory is planned for: that of several layers.
_PLANNED_RANK = 64
# Share of a GPU's free memory for slots.
_MEMORY_SHARE = 1 / 4
# The bank's rank is a multiple of this, so that mixed ranks do not reallocate it each time.
_RANK_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A stack in the slots' layout, in host memory, which is pinned if the slots are on a GPU.

    Attributes:
        rank: The stack's rank.
        a: For each group ``[layers, sections, rank, inputs]``.
        b: For each group ``[layers, rank, outputs]``.
    """

    rank: int
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.a, *self.b))


@dataclass(frozen=True, slots=True)
class SingleAdapterLoRA:
    """One adapter for all tokens of a pass without a gradient; see ``ActiveLoRA``.

    For each group and layer ``a`` is ``[sections * rank, inputs]``. For each section ``b`` is
    ``[rank, outputs]``.
    """

    a: Sequence[Sequence[Tensor]]
    b: Sequence[Sequence[Sequence[Tensor]]]

    def multiply(self, frozen: FrozenLinear, group: int, layer: int, x: Tensor) -> Tensor:
        sections = [section[layer] for section in self.b[group]]
        shrunk = linear(x, self.a[group][layer]).chunk(len(sections), dim=-1)
        deltas = [part @ section for part, section in zip(shrunk, sections, strict=True)]
        return frozen.multiply(x) + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))


@dataclass(frozen=True, slots=True)
class BatchedLoRA:
    """One slot for each token of a pass without a gradient; see ``ActiveLoRA``."""

    ops: Ops
    mapping: LoRAMapping
    weights: Sequence[StackedLoRAWeights]

    def multiply(self, frozen: FrozenLinear, group: int, layer: int, x: Tensor) -> Tensor:
        y = frozen.multiply(x)
        rows, outputs = x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1])
        self.ops.apply_lora(rows, outputs, self.mapping, self.weights[group], layer)
        return y


def default_slots(architecture: Architecture, where: DeviceChoice, rows: int) -> int:
    """Return how many stacks a device has room for by default.

    Args:
        architecture: Gives the size of a stack.
        where: The device. On a GPU each row may have a stack of its own, as far as the free memory
            allows.
        rows: The rows of the largest batch.
    """
    if where.device.type != "cuda":
        return DEFAULT_SLOTS
    numbers = sum(
        len(group.names) * group.inputs + group.outputs for group in group_projections(architecture)
    )
    size = architecture.blocks * _PLANNED_RANK * numbers * where.dtype.itemsize
    fits = int(memory_to_plan(where.device) * _MEMORY_SHARE) // size
    return max(DEFAULT_SLOTS, min(rows, fits))


class LoRABank:
    """A fixed number of slots. Their rank grows with the largest stack. Thread-safe."""

    def __init__(self, architecture: Architecture, slots: int, ops: Ops) -> None:
        self._architecture = architecture
        self._groups = group_projections(architecture)
        self._ops = ops
        self._copies = CopyStream(ops.device)
        self._slots = slots
        self._lock = threading.Lock()
        self._fill_lock = threading.Lock()
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[str, int] = {}
        # Kept twice: reading ranks back from a GPU would wait for the running step.
        self._ranks = torch.zeros(slots + 1, dtype=torch.int32, device=ops.device)
        self._rank_of = [0] * (slots + 1)
        # The slots of each group. They are other tensors after a larger stack came.
        self.weights = self._allocate(_RANK_MULTIPLE)

    def stage(self, stack: AdapterStack) -> StagedWeights:
        """Convert a stack to the slots' layout in host memory.

        Raises:
            AdapterError: A factor makes a weight overflow.
        """
        layers, rank = self._architecture.blocks, stack.rank
        a, b = [], []
        for group in self._groups:
            a_out = self._host_zeros(layers, len(group.names), rank, group.inputs)
            b_out = self._host_zeros(layers, rank, group.outputs)
            for section, (name, (begin, end)) in enumerate(
                zip(group.names, group.sections, strict=True)
            ):
                row = 0
                for lora in stack.loras.get(name, ()):
                    rows = slice(row, row + lora.weights.a.shape[1])
                    finite = self._ops.pack_weights(lora.weights.a, a_out[:, section, rows], 1.0)
                    finite &= self._ops.pack_weights(
                        lora.weights.b, b_out[:, rows, begin:end].transpose(1, 2), lora.factor
                    )
                    if not finite:
                        raise overflow_error(name)
                    row = rows.stop
            a.append(a_out)
            b.append(b_out)
        return StagedWeights(rank, tuple(a), tuple(b))

    def _host_zeros(self, *shape: int) -> Tensor:
        zeros = torch.empty(shape, dtype=self._ops.dtype, pin_memory=can_pin(self._ops.device))
        # Not torch's zeros: they would start a second thread team beside the decoding one.
        zeros.view(torch.uint8).numpy()[...] = 0
        return zeros

    def fill_slot(self, key: str, staged: StagedWeights) -> None:
        """Copy a stack to a free slot."""
        with self._fill_lock:
            with self._lock:
                slot = self._free.pop()
            self._grow_rank(staged.rank)
            # Without the lock that each step takes: no row points to this slot yet.
            before = self._rank_of[slot]
            with self._copies.after_queued():
                for weights, a, b in zip(self.weights, staged.a, staged.b, strict=True):
                    a_slot, b_slot = weights.slot(slot, max(staged.rank, before))
                    _copy(a_slot[:, :, : staged.rank], a)
                    _copy(b_slot[:, : staged.rank], b)
                    a_slot[:, :, staged.rank :] = 0
                    b_slot[:, staged.rank :] = 0
                self._ranks[slot] = self._rank_of[slot] = staged.rank
            with self._lock:
                self._slot_of[key] = slot

    def free_slot(self, key: str) -> None:
        """Free the slot of a key that no row uses. A key without a slot is fine."""
        with self._lock:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def slot_of(self, key: str | None) -> int:
        """Return the slot of a key, 0 for the bare base. Raises ``KeyError``."""
        return 0 if key is None else self._slot_of[key]

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless each slot is free or holds one key. For an idle bank."""
        with self._lock:
            if sorted([*self._free, *self._slot_of.values()]) != list(range(1, self._slots + 1)):
                raise RuntimeError("free and used slots must together be all slots")

    def batched_lora(self, slots: Tensor) -> BatchedLoRA:
        """Return the adapters of a pass whose tokens have these slots (int32 ``[tokens]``)."""
        return BatchedLoRA(self._ops, LoRAMapping(slots, self._ranks), self.weights)

    def single_adapter_lora(self, key: str | None) -> ActiveLoRA | None:
        """Return a copy of one stack for all tokens; None for the bare base. Raises ``KeyError``."""
        if key is None:
            return None
        with self._lock:
            views = self._views(key)
            a = [a_slot.flatten(1, 2).clone().unbind(0) for a_slot, _ in views]
            b = [
                [b_slot[:, :, begin:end].clone().unbind(0) for begin, end in group.sections]
                for group, (_, b_slot) in zip(self._groups, views, strict=True)
            ]
        return SingleAdapterLoRA(a, b)

    def fused_weights(self, key: str | None) -> tuple[FusedLoRAWeights | None, ...]:
        """Return a copy of one stack for each group, for training above it. Raises ``KeyError``."""
        if key is None:
            return (None,) * len(self._groups)
        with self._lock:
            fused = []
            for group, (a_slot, b_slot) in zip(self._groups, self._views(key), strict=True):
                b = b_slot.new_zeros((*a_slot.shape[:3], group.outputs))
                for section, (begin, end) in enumerate(group.sections):
                    b[:, section, :, begin:end] = b_slot[:, :, begin:end]
                fused.append(FusedLoRAWeights(a_slot.flatten(1, 2).clone(), b.flatten(1, 2)))
        return tuple(fused)

    def _views(self, key: str) -> list[tuple[Tensor, Tensor]]:
        slot = self._slot_of[key]
        return [weights.slot(slot, self._rank_of[slot]) for weights in self.weights]

    def _grow_rank(self, rank: int) -> None:
        """Enlarge the slots. A running pass keeps the former ones. They hold the same numbers."""
        old_rank = self.weights[0].max_rank
        if rank <= old_rank:
            return
        grown = self._allocate(-(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE)
        with self._lock:
            filled = tuple(self._slot_of.values())
        with self._copies.after_queued():
            for new, old in zip(grown, self.weights, strict=True):
                for slot in filled:
                    for target, source in zip(
                        new.slot(slot, old_rank), old.slot(slot, old_rank), strict=True
                    ):
                        _copy(target, source)
        with self._lock:
            self.weights = grown

    def _allocate(self, max_rank: int) -> tuple[StackedLoRAWeights, ...]:
        """Return empty slots for each group."""
        shape = (self._slots + 1, self._architecture.blocks)
        return tuple(
            StackedLoRAWeights(
                self._ops.zeros(*shape, len(group.names) * max_rank, group.inputs),
                self._ops.zeros(*shape, max_rank, group.outputs),
                group.ends,
            )
            for group in self._groups
        )


def _copy(target: Tensor, source: Tensor) -> None:
    if target.device.type != "cpu":
        target.copy_(source, non_blocking=True)
    else:
        # Not torch's copy: it would start a second thread team beside the decoding one.
        np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())
