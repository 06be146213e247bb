"""The bank of slots for stacks on one device, and the ways in which a pass sees what they hold.

Invariants: slot 0 is all zeros and means the bare base; a slot keeps its contents until its key is dropped, and the
caller drops no key that a row uses; what is bound for training is a copy.
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

# Slots are made for ranks of whole eights, so that a catalogue of mixed ranks does not make them anew each time.
_STEP = 8


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A stack as slots hold it: for each group ``a`` ``[blocks, sections, rank, inputs]`` and ``b`` ``[blocks, rank,
    outputs]``.
    """

    rank: int
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.a, *self.b))


class UniformLoRA:
    """The same adapter for every row, through which a gradient can pass: for each group and block ``a`` ``[sections *
    rank, inputs]`` and, for each section, ``b`` ``[rank, outputs of it]``. None stands for a group that nothing adapts.
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
        narrow = linear(x, a[block]).chunk(len([p for p in parts if p is not None]), dim=-1)
        having = iter(narrow)
        changes = [
            x.new_zeros((*x.shape[:-1], end - begin)) if part is None else next(having) @ part
            for part, (begin, end) in zip(parts, self._groups[group].sections, strict=True)
        ]
        return y + (changes[0] if len(changes) == 1 else torch.cat(changes, dim=-1))


class BatchedLoRA:
    """Each token the slot that it points to. Adds in place: for passes without a gradient."""

    def __init__(
        self, kernels: Ops, pointers: LoRAMapping, shelves: Sequence[StackedLoRAWeights]
    ) -> None:
        self._kernels, self._pointers, self._shelves = kernels, pointers, shelves

    def add(self, group: int, block: int, x: Tensor, y: Tensor) -> Tensor:
        shelf = self._shelves[group]
        self._kernels.apply_lora(
            x.view(-1, x.shape[-1]), y.view(-1, y.shape[-1]), self._pointers, shelf, block
        )
        return y


class LoRABank:
    """A fixed number of slots; the rank that they hold grows with the largest seen. Safe to use from several threads.

    Memory is taken when a slot is first filled.
    """

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
        self._turn = threading.Lock()
        self._filling = threading.Lock()
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[str, int] = {}
        self._number_of: dict[str, int] = {}
        self._numbers = itertools.count(1)
        # The same numbers twice: reading them back from a device would wait for the step that runs there.
        self._ranks = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._rank_of = [0] * (slots + 1)
        self._shelves: tuple[StackedLoRAWeights, ...] = tuple(
            self._weights_of(group, _STEP) for group in self._groups
        )

    def stage(self, stack: AdapterStack) -> StagedWeights:
        """Brings a stack into the form of the slots, in host memory. Raises ``AdapterError`` where a factor makes it too
        large.
        """
        blocks, rank = self._architecture.blocks, stack.rank
        a, b = [], []
        for group in self._groups:
            # Zeros where something stays empty, else whatever is there, since all of it is written to.
            full = all(
                sum(s.pair.a.shape[1] for s in stack.shares.get(name, ())) == rank
                for name in group.names
            )
            make = torch.empty if full else torch.zeros
            wide_a = make((blocks, len(group.names), rank, group.inputs), dtype=self._dtype)
            wide_b = make((blocks, rank, group.outputs), dtype=self._dtype)
            for section, (name, (begin, end)) in enumerate(
                zip(group.names, group.sections, strict=True)
            ):
                row = 0
                for share in stack.shares.get(name, ()):
                    rows = slice(row, row + share.pair.a.shape[1])
                    fits = self._kernels.pack_weights(share.pair.a, wide_a[:, section, rows], 1.0)
                    fits &= self._kernels.pack_weights(
                        share.pair.b, wide_b[:, rows, begin:end].transpose(1, 2), share.factor
                    )
                    if not fits:
                        raise overflow_error(name)
                    row = rows.stop
            a.append(wide_a)
            b.append(wide_b)
        return StagedWeights(rank, tuple(a), tuple(b))

    def put(self, key: str, stack: StagedWeights) -> None:
        """Fills a free slot. Raises ``RuntimeError`` when none is free: whoever decides about residency has to free one
        first.
        """
        with self._filling:
            with self._turn:
                if key in self._slot_of:
                    return
                if not self._free:
                    raise RuntimeError(f"all {self._slots} slots are taken")
                slot = self._free.pop()
            self._make_room(stack.rank)
            # Outside the turn, which every step takes: nothing points to this slot yet, so nobody sees half of it.
            before = self._rank_of[slot]
            for shelf, a, b in zip(self._shelves, stack.a, stack.b, strict=True):
                blocks, sections, rank, inputs = a.shape
                place = shelf.a[slot].view(blocks, sections, shelf.max_rank, inputs)
                _copy(place[:, :, :rank], a)
                _copy(shelf.b[slot, :, :rank], b)
                if before > rank:
                    place[:, :, rank:before] = 0
                    shelf.b[slot, :, rank:before] = 0
            self._ranks[slot] = self._rank_of[slot] = stack.rank
            with self._turn:
                self._slot_of[key] = slot
                self._number_of[key] = next(self._numbers)

    def drop(self, key: str) -> None:
        """Free the slot of a key that no row uses. A key without a slot is fine."""
        with self._turn:
            slot = self._slot_of.pop(key, None)
            self._number_of.pop(key, None)
            if slot is not None:
                self._free.append(slot)

    def slot_of(self, key: str | None) -> int:
        """Return the slot of a key, 0 for the bare base. Raises ``KeyError``."""
        with self._turn:
            return 0 if key is None else self._slot_of[key]

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` unless each slot is free or holds one key. For an idle bank."""
        with self._turn:
            if sorted([*self._free, *self._slot_of.values()]) != list(range(1, self._slots + 1)):
                raise RuntimeError("free slots and those of keys together are not all slots")
            if self._slot_of.keys() != self._number_of.keys():
                raise RuntimeError("a stack in a slot has no number, or a detached one has")

    def batched(self, slots: Tensor) -> BatchedLoRA:
        """What a pass needs whose tokens point to these slots (int32 ``[tokens]``)."""
        with self._turn:
            return BatchedLoRA(self._kernels, LoRAMapping(slots, self._ranks), self._shelves)

    def uniform(self, key: str | None) -> ActiveLoRA | None:
        """A copy of one stack, for a pass in which every row has it; None for the bare base. Raises ``KeyError``."""
        if key is None:
            return None
        with self._turn:
            slot = self._slot_of[key]
            rank = self._rank_of[slot]
            a: list[Sequence[Tensor]] = []
            b: list[list[Sequence[Tensor]]] = []
            for group, shelf in zip(self._groups, self._shelves, strict=True):
                blocks, inputs = self._architecture.blocks, group.inputs
                whole = shelf.a[slot].view(blocks, len(group.names), shelf.max_rank, inputs)[
                    :, :, :rank
                ]
                a.append(whole.reshape(blocks, -1, inputs).clone().unbind(0))
                b.append(
                    [
                        shelf.b[slot, :, :rank, begin:end].clone().unbind(0)
                        for begin, end in group.sections
                    ]
                )
        return UniformLoRA(a, b, self._groups)

    def number(self, key: str | None) -> int:
        """What tells this stack from every other that was ever put here, even under the same key; 0 for the bare base.
        Raises ``KeyError``.
        """
        with self._turn:
            return 0 if key is None else self._number_of[key]

    def below(self, key: str | None) -> tuple[FusedLoRAWeights | None, ...]:
        """A copy of one stack for each group, as what is trained above it needs it. Raises ``KeyError``."""
        if key is None:
            return (None,) * len(self._groups)
        with self._turn:
            slot = self._slot_of[key]
            rank = self._rank_of[slot]
            found = []
            for group, shelf in zip(self._groups, self._shelves, strict=True):
                blocks, sections = self._architecture.blocks, len(group.names)
                whole = shelf.a[slot].view(blocks, sections, shelf.max_rank, group.inputs)[
                    :, :, :rank
                ]
                b = torch.zeros(
                    (blocks, sections * rank, group.outputs), dtype=self._dtype, device=self._device
                )
                for section, (begin, end) in enumerate(group.sections):
                    b[:, section * rank : (section + 1) * rank, begin:end] = shelf.b[
                        slot, :, :rank, begin:end
                    ]
                found.append(FusedLoRAWeights(whole.reshape(blocks, -1, group.inputs).clone(), b))
        return tuple(found)

    def _make_room(self, rank: int) -> None:
        """Makes the slots wide enough. A pass that runs goes on with the former ones, whose numbers are the same."""
        old = self._shelves
        if rank <= old[0].max_rank:
            return
        capacity = -(-rank // _STEP) * _STEP
        with self._turn:
            filled = tuple(self._slot_of.values())
        shelves = tuple(self._weights_of(group, capacity) for group in self._groups)
        for new, was in zip(shelves, old, strict=True):
            blocks, sections = new.a.shape[1], len(new.ends)
            for slot in filled:
                wide = new.a[slot].view(blocks, sections, capacity, -1)
                _copy(
                    wide[:, :, : was.max_rank], was.a[slot].view(blocks, sections, was.max_rank, -1)
                )
                _copy(new.b[slot, :, : was.max_rank], was.b[slot])
        with self._turn:
            self._shelves = shelves

    def _weights_of(self, group: ProjectionGroup, capacity: int) -> StackedLoRAWeights:
        slots, blocks = self._slots + 1, self._architecture.blocks
        a = lazy_zeros(
            (slots, blocks, len(group.names) * capacity, group.inputs), self._dtype, self._device
        )
        b = lazy_zeros((slots, blocks, capacity, group.outputs), self._dtype, self._device)
        return StackedLoRAWeights(a, b, group.ends)


def _copy(place: Tensor, tensor: Tensor) -> None:
    if place.device.type != "cpu":
        place.copy_(tensor)
    else:
        # Not the framework's copy: it would call up a second team of threads, to spin beside the one that decodes.
        np.copyto(_view_as_bits(place), _view_as_bits(tensor))


def _view_as_bits(tensor: Tensor) -> npt.NDArray[np.uint8]:
    return tensor.view(torch.uint8).numpy()


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a processor of memory that is only taken, page by page, when something is written to it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    width = torch.empty((), dtype=dtype).element_size()
    return (
        torch.from_numpy(np.zeros(int(np.prod(shape)) * width, dtype=np.uint8))
        .view(dtype)
        .view(shape)
    )
