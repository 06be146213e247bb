"""Where adapters meet the model: LoRA beside each adapted projection, and the bank of slots that rows of a batch point
to.

Invariants: the base's own weights are only ever read; slot 0 is all zeros and means the bare base; what is bound lasts
for one forward pass and is bound and released by whoever holds the device's turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from personalpeft.adapters.base import Composed
from personalpeft.types import Architecture


class Bound(Protocol):
    """Adapters as one forward pass sees them."""

    def change(self, projection: str, block: int, x: Tensor) -> Tensor | None:
        """What to add to the output of a projection for input ``[rows, tokens, inputs]``; None for nothing."""
        ...

    def keep(self, rows: Sequence[int]) -> Bound | None:
        """The same for some rows of the batch, in this order; None when those are all the bare base."""
        ...


class Attachment:
    """What is bound to the model at this moment; all its ``LoraLinear`` look here."""

    def __init__(self) -> None:
        self.bound: tuple[Bound, ...] = ()

    @contextmanager
    def holding(self, *bound: Bound | None) -> Iterator[None]:
        """Binds for one forward (and backward) pass."""
        self.bound = tuple(b for b in bound if b is not None)
        try:
            yield
        finally:
            self.bound = ()


class LoraLinear(nn.Module):
    """A frozen linear projection and whatever is bound beside it."""

    def __init__(self, inner: nn.Module, projection: str, block: int, attachment: Attachment) -> None:
        super().__init__()
        self.inner = inner
        self._projection = projection
        self._block = block
        self._attachment = attachment

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        for bound in self._attachment.bound:
            change = bound.change(self._projection, self._block, x)
            if change is not None:
                y = y + change
        return y


def install(model: nn.Module, architecture: Architecture) -> Attachment:
    """Wraps every projection that the architecture names; without anything bound the model computes as before."""
    attachment = Attachment()
    for block in range(architecture.blocks):
        for projection in architecture.projections:
            parent_path, _, name = f"{architecture.block_path}.{block}.{projection}".rpartition(".")
            parent = model.get_submodule(parent_path)
            setattr(parent, name, LoraLinear(getattr(parent, name), projection, block, attachment))
    return attachment


class OneForAll:
    """The same adapter for every row. ``a[projection][block]`` is ``[rank, inputs]``, ``b`` ``[outputs, rank]``;
    scaling is inside b.
    """

    def __init__(self, a: Mapping[str, Sequence[Tensor]], b: Mapping[str, Sequence[Tensor]]) -> None:
        self._a, self._b = a, b

    def change(self, projection: str, block: int, x: Tensor) -> Tensor | None:
        if projection not in self._a:
            return None
        return linear(linear(x, self._a[projection][block]), self._b[projection][block])

    def keep(self, rows: Sequence[int]) -> Bound | None:
        return self


class OnePerRow:
    """Each row its own adapter: ``a[projection]`` is ``[rows, blocks, rank, inputs]``, ``b`` ``[rows, blocks, outputs,
    rank]``. ``slots`` says which rows are alike, 0 which are the bare base.
    """

    def __init__(self, slots: Sequence[int], a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        self._slots = tuple(slots)
        self._a, self._b = a, b

    def change(self, projection: str, block: int, x: Tensor) -> Tensor | None:
        if projection not in self._a:
            return None
        narrow = torch.bmm(x, self._a[projection][:, block].transpose(1, 2))
        return torch.bmm(narrow, self._b[projection][:, block].transpose(1, 2))

    def keep(self, rows: Sequence[int]) -> Bound | None:
        slots = [self._slots[row] for row in rows]
        if not any(slots):
            return None
        if len(set(slots)) == 1:
            return OneForAll(
                {p: t[rows[0]].unbind(0) for p, t in self._a.items()},
                {p: t[rows[0]].unbind(0) for p, t in self._b.items()},
            )
        index = torch.tensor(rows)
        return OnePerRow(
            slots,
            {p: t[index.to(t.device)] for p, t in self._a.items()},
            {p: t[index.to(t.device)] for p, t in self._b.items()},
        )


class SlotBank:
    """A fixed number of slots for composed stacks on one device; the rank that they hold grows with the largest seen.

    Rows of one batch may point to different slots. The memory of a slot is taken when it is first used.
    """

    def __init__(self, architecture: Architecture, *, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._architecture = architecture
        self._dtype, self._device = dtype, device
        self._free = list(range(slots, 0, -1))
        self._slot_of: dict[str, int] = {}
        self._rank = 0
        self._slots = slots
        self._a: dict[str, Tensor] = {}
        self._b: dict[str, Tensor] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._slot_of

    def put(self, key: str, adapter: Composed) -> None:
        """Fills a free slot. Raises ``RuntimeError`` when none is free: whoever decides about residency has to free one
        first.
        """
        if key in self._slot_of:
            return
        if not self._free:
            raise RuntimeError(f"all {self._slots} slots are taken")
        self._make_room(adapter.rank)
        slot = self._free.pop()
        for projection in self._architecture.projections:
            a, b = self._a[projection][slot], self._b[projection][slot]
            a.zero_()
            b.zero_()
            pair = adapter.pairs.get(projection)
            if pair is not None:
                rank = pair.a.shape[1]
                a[:, :rank].copy_(torch.from_numpy(pair.a.copy()))
                b[:, :, :rank].copy_(torch.from_numpy(pair.b.copy()))
        self._slot_of[key] = slot

    def drop(self, key: str) -> None:
        """Frees a slot; a key without one is fine."""
        slot = self._slot_of.pop(key, None)
        if slot is not None:
            self._free.append(slot)

    def bind(self, keys: Sequence[str | None]) -> Bound | None:
        """What a batch of rows with these stacks needs; None when all are the bare base. An unknown key raises
        ``KeyError``.

        It is a copy: a slot that is freed and filled anew can never change what a running batch or session sees.
        """
        slots = [0 if key is None else self._slot_of[key] for key in keys]
        if not any(slots):
            return None
        if len(set(slots)) == 1:
            return OneForAll(
                {p: t[slots[0]].clone().unbind(0) for p, t in self._a.items()},
                {p: t[slots[0]].clone().unbind(0) for p, t in self._b.items()},
            )
        index = torch.tensor(slots, device=self._device)
        return OnePerRow(slots, {p: t[index] for p, t in self._a.items()}, {p: t[index] for p, t in self._b.items()})

    def _make_room(self, rank: int) -> None:
        if rank <= self._rank:
            return
        for projection, (inputs, outputs) in self._architecture.projections.items():
            shape = (self._slots + 1, self._architecture.blocks)
            a = torch.zeros((*shape, rank, inputs), dtype=self._dtype, device=self._device)
            b = torch.zeros((*shape, outputs, rank), dtype=self._dtype, device=self._device)
            if self._rank:
                a[:, :, : self._rank] = self._a[projection]
                b[..., : self._rank] = self._b[projection]
            self._a[projection], self._b[projection] = a, b
        self._rank = rank
