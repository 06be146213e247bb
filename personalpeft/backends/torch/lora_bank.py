"""Slots for adapters on one device (S-LoRA, Sheng et al. 2023), and views of them for a pass.

Invariants: slot 0 is all zeros and means the bare base. A slot keeps its contents until its key is
dropped. The caller drops no key that a row uses. Training reads copies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import linear

from personalpeft.adapters.compose import overflow_error
from personalpeft.adapters.types import AdapterStack
from personalpeft.backends.torch.lora_layers import ActiveLoRA, ProjectionGroup, group_projections
from personalpeft.backends.torch.ops.base import LoRAMapping, Ops, StackedLoRAWeights
from personalpeft.backends.torch.training.lora_autograd import FusedLoRAWeights
from personalpeft.types import Architecture

# The bank's rank is a multiple of this, so that mixed ranks do not reallocate it each time.
_RANK_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A stack in the slots' layout, in host memory.

    Attributes:
        rank: The stack's rank.
        a: For each group ``[blocks, sections, rank, inputs]``.
        b: For each group ``[blocks, rank, outputs]``.
    """

    rank: int
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.a, *self.b))


class SingleAdapterLoRA:
    """One adapter for all rows, differentiable.

    For each group and block ``a`` is ``[sections * rank, inputs]``. For each section ``b`` is
    ``[rank, outputs]``. None means no adapter.
    """

    def __init__(
        self,
        a: Sequence[Sequence[Tensor] | None],
        b: Sequence[Sequence[Sequence[Tensor | None]]],
        groups: Sequence[ProjectionGroup],
    ) -> None:
        self._a, self._b, self._groups = a, b, groups

    def add(self, group: int, block: int, x: Tensor, y: Tensor) -> Tensor:
        a = self._a[group]
        if a is None:
            return y
        parts = [section[block] for section in self._b[group]]
        shrunk = linear(x, a[block]).chunk(len([p for p in parts if p is not None]), dim=-1)
        present = iter(shrunk)
        deltas = [
            x.new_zeros((*x.shape[:-1], end - begin)) if part is None else next(present) @ part
            for part, (begin, end) in zip(parts, self._groups[group].sections, strict=True)
        ]
        return y + (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))


class BatchedLoRA:
    """One slot per token. Adds in place, without a gradient."""

    def __init__(
        self, kernels: Ops, mapping: LoRAMapping, stacked_weights: Sequence[StackedLoRAWeights]
    ) -> None:
        self._kernels, self._mapping, self._stacked_weights = kernels, mapping, stacked_weights

    def add(self, group: int, block: int, x: Tensor, y: Tensor) -> Tensor:
        weights = self._stacked_weights[group]
        self._kernels.apply_lora(
            x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), self._mapping, weights, block
        )
        return y


class LoRABank:
    """A fixed number of slots, whose rank grows with the largest stack. Thread-safe."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Ops,
    ) -> None:
        self._architecture = architecture
        self._groups = group_projections(architecture)
        self._dtype, self._device, self._kernels = dtype, device, kernels
        self._slots = slots
        self._lock = threading.Lock()
        self._fill_lock = threading.Lock()
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[str, int] = {}
        self._attachment_ids: dict[str, int] = {}
        self._next_id = itertools.count(1)
        # Kept twice: reading ranks back from a GPU would wait for the running step.
        self._ranks = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._rank_of = [0] * (slots + 1)
        self._stacked_weights: tuple[StackedLoRAWeights, ...] = tuple(
            self._weights_of(group, _RANK_MULTIPLE) for group in self._groups
        )

    def stage(self, stack: AdapterStack) -> StagedWeights:
        """Convert a stack to the slots' layout in host memory.

        Raises:
            AdapterError: A factor makes a weight overflow.
        """
        blocks, rank = self._architecture.blocks, stack.rank
        a, b = [], []
        for group in self._groups:
            # Zeros only if a part stays empty; otherwise all of it is written.
            filled = all(
                sum(s.pair.a.shape[1] for s in stack.shares.get(name, ())) == rank
                for name in group.names
            )
            allocate = torch.empty if filled else torch.zeros
            a_out = allocate((blocks, len(group.names), rank, group.inputs), dtype=self._dtype)
            b_out = allocate((blocks, rank, group.outputs), dtype=self._dtype)
            for section, (name, (begin, end)) in enumerate(
                zip(group.names, group.sections, strict=True)
            ):
                row = 0
                for share in stack.shares.get(name, ()):
                    rows = slice(row, row + share.pair.a.shape[1])
                    finite = self._kernels.pack_weights(share.pair.a, a_out[:, section, rows], 1.0)
                    finite &= self._kernels.pack_weights(
                        share.pair.b, b_out[:, rows, begin:end].transpose(1, 2), share.factor
                    )
                    if not finite:
                        raise overflow_error(name)
                    row = rows.stop
            a.append(a_out)
            b.append(b_out)
        return StagedWeights(rank, tuple(a), tuple(b))

    def put(self, key: str, stack: StagedWeights) -> None:
        """Write a stack to a free slot.

        Raises:
            RuntimeError: No slot is free. Drop a key first.
        """
        with self._fill_lock:
            with self._lock:
                if key in self._slot_of:
                    return
                if not self._free:
                    raise RuntimeError(f"all {self._slots} slots are in use; drop a key first")
                slot = self._free.pop()
            self._grow_rank(stack.rank)
            # Without the lock, which each step takes: no row points to this slot yet.
            before = self._rank_of[slot]
            for weights, a, b in zip(self._stacked_weights, stack.a, stack.b, strict=True):
                blocks, sections, rank, inputs = a.shape
                target = weights.a[slot].view(blocks, sections, weights.max_rank, inputs)
                _copy(target[:, :, :rank], a)
                _copy(weights.b[slot, :, :rank], b)
                if before > rank:
                    target[:, :, rank:before] = 0
                    weights.b[slot, :, rank:before] = 0
            self._ranks[slot] = self._rank_of[slot] = stack.rank
            with self._lock:
                self._slot_of[key] = slot
                self._attachment_ids[key] = next(self._next_id)

    def drop(self, key: str) -> None:
        """Free the slot of a key that no row uses. A key without a slot is fine."""
        with self._lock:
            slot = self._slot_of.pop(key, None)
            self._attachment_ids.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def slot_of(self, key: str | None) -> int:
        """Return the slot of a key, 0 for the bare base. Raises ``KeyError``."""
        with self._lock:
            return 0 if key is None else self._slot_of[key]

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless each slot is free or holds one key. For an idle bank."""
        with self._lock:
            if sorted([*self._free, *self._slot_of.values()]) != list(range(1, self._slots + 1)):
                raise RuntimeError("free and used slots must together be all slots")
            if self._slot_of.keys() != self._attachment_ids.keys():
                raise RuntimeError("keys with a slot must be those with an attachment id")

    def batched_lora(self, slots: Tensor) -> BatchedLoRA:
        """Return the adapters of a pass whose tokens have these slots (int32 ``[tokens]``)."""
        with self._lock:
            return BatchedLoRA(
                self._kernels, LoRAMapping(slots, self._ranks), self._stacked_weights
            )

    def single_adapter_lora(self, key: str | None) -> ActiveLoRA | None:
        """Return a copy of one stack for all rows; None for the bare base. Raises ``KeyError``."""
        if key is None:
            return None
        with self._lock:
            slot = self._slot_of[key]
            rank = self._rank_of[slot]
            a: list[Sequence[Tensor]] = []
            b: list[list[Sequence[Tensor]]] = []
            for group, weights in zip(self._groups, self._stacked_weights, strict=True):
                blocks, inputs = self._architecture.blocks, group.inputs
                a_slot = weights.a[slot].view(blocks, len(group.names), weights.max_rank, inputs)[
                    :, :, :rank
                ]
                a.append(a_slot.reshape(blocks, -1, inputs).clone().unbind(0))
                b.append(
                    [
                        weights.b[slot, :, :rank, begin:end].clone().unbind(0)
                        for begin, end in group.sections
                    ]
                )
        return SingleAdapterLoRA(a, b, self._groups)

    def attachment_id(self, key: str | None) -> int:
        """Return the id of this attachment, 0 for the bare base. Ids are never reused, keys may be.

        Raises:
            KeyError: No slot holds the key.
        """
        with self._lock:
            return 0 if key is None else self._attachment_ids[key]

    def fused_weights(self, key: str | None) -> tuple[FusedLoRAWeights | None, ...]:
        """Return a copy of one stack for each group, for training above it. Raises ``KeyError``."""
        if key is None:
            return (None,) * len(self._groups)
        with self._lock:
            slot = self._slot_of[key]
            rank = self._rank_of[slot]
            fused = []
            for group, weights in zip(self._groups, self._stacked_weights, strict=True):
                blocks, sections = self._architecture.blocks, len(group.names)
                a_slot = weights.a[slot].view(blocks, sections, weights.max_rank, group.inputs)[
                    :, :, :rank
                ]
                b = torch.zeros(
                    (blocks, sections * rank, group.outputs), dtype=self._dtype, device=self._device
                )
                for section, (begin, end) in enumerate(group.sections):
                    b[:, section * rank : (section + 1) * rank, begin:end] = weights.b[
                        slot, :, :rank, begin:end
                    ]
                fused.append(FusedLoRAWeights(a_slot.reshape(blocks, -1, group.inputs).clone(), b))
        return tuple(fused)

    def _grow_rank(self, rank: int) -> None:
        """Enlarge the slots. A running pass keeps the former ones, which hold the same numbers."""
        old = self._stacked_weights
        if rank <= old[0].max_rank:
            return
        max_rank = -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE
        with self._lock:
            filled = tuple(self._slot_of.values())
        stacked_weights = tuple(self._weights_of(group, max_rank) for group in self._groups)
        for new, previous in zip(stacked_weights, old, strict=True):
            blocks, sections = new.a.shape[1], len(new.ends)
            for slot in filled:
                wide = new.a[slot].view(blocks, sections, max_rank, -1)
                _copy(
                    wide[:, :, : previous.max_rank],
                    previous.a[slot].view(blocks, sections, previous.max_rank, -1),
                )
                _copy(new.b[slot, :, : previous.max_rank], previous.b[slot])
        with self._lock:
            self._stacked_weights = stacked_weights

    def _weights_of(self, group: ProjectionGroup, max_rank: int) -> StackedLoRAWeights:
        slots, blocks = self._slots + 1, self._architecture.blocks
        a = lazy_zeros(
            (slots, blocks, len(group.names) * max_rank, group.inputs), self._dtype, self._device
        )
        b = lazy_zeros((slots, blocks, max_rank, group.outputs), self._dtype, self._device)
        return StackedLoRAWeights(a, b, group.ends)


def _copy(target: Tensor, tensor: Tensor) -> None:
    if target.device.type != "cpu":
        target.copy_(tensor)
    else:
        # Not torch's copy: it would start a second thread team beside the decoding one.
        np.copyto(_view_as_bits(target), _view_as_bits(tensor))


def _view_as_bits(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros; on a CPU, pages of memory are taken when first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    width = torch.empty((), dtype=dtype).element_size()
    return (
        torch.from_numpy(np.zeros(int(np.prod(shape)) * width, dtype=np.uint8))
        .view(dtype)
        .view(shape)
    )
