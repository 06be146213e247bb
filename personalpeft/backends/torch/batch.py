"""The batch: rows join and leave between steps, and each step gives every row that is ready its next token.

A step is one pass over the tokens of many rows laid end to end: one token of each row that is being decoded, then as
much of the waiting prompts as fits the step, so that a long prompt is read in parts beside the others' tokens.

Invariants: a row is given, when it joins, all the room that its prompt and its longest reply can need, so it never runs
out of it; a row's numbers depend on its own tokens and slot alone; what a row held is free as soon as it has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from personalpeft.backends.base import Occupancy, Piece, Row
from personalpeft.backends.sequence_output import Writing, read_on
from personalpeft.backends.tokenizer import Text
from personalpeft.backends.torch.block_manager import Blocks, first_name, next_name, whole_blocks
from personalpeft.backends.torch.kv_cache import Pass, Pool
from personalpeft.backends.torch.lora_bank import SlotBank
from personalpeft.backends.torch.model_runner import Model
from personalpeft.backends.torch.openmp import release_threads
from personalpeft.backends.torch.ops.base import BLOCK, Chunk, Places
from personalpeft.backends.torch.sampling import Picker, logprobs, pick

# Prompt tokens in one step beside rows that are being decoded, and when there are none: the first keeps the others'
# next tokens from waiting long, the second is where more no longer makes a token cheaper.
_BESIDE_OTHERS = {"cpu": 64, "cuda": 512}
_ALONE = {"cpu": 1024, "cuda": 2048}


@dataclass(slots=True)
class _Live:
    """A row in the batch. ``tokens`` are the prompt and what was picked, of which the model has read ``read``; ``name``
    is that of its last sealed block.
    """

    number: int
    row: Row
    slot: int
    blocks: list[int]
    name: bytes
    tokens: list[int]
    read: int
    sealed: int
    picker: Picker
    writing: Writing
    table: torch.Tensor

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.read


class Batch:
    """Up to ``rows`` rows at once. Not thread-safe: one thread runs it."""

    def __init__(
        self, model: Model, text: Text, bank: SlotBank, pool: Pool, blocks: int, *, rows: int
    ) -> None:
        self._model, self._text, self._bank, self._pool = model, text, bank, pool
        self._rows = rows
        self._blocks = Blocks(blocks)
        self._live: dict[int, _Live] = {}
        self._numbers = itertools.count()
        self._reused = 0

    def admit(self, row: Row) -> int | None:
        """See ``Backend.admit``."""
        need = -(-(len(row.tokens) + row.sampling.max_tokens) // BLOCK)
        if need > self._blocks.count:
            raise ValueError(f"a row of {need * BLOCK} tokens is longer than the cache")
        if len(self._live) >= self._rows:
            return None
        slot = self._bank.point(row.stack)
        # Its last token at least is read anew, since that is what the first token of the reply comes from.
        findable = row.tokens[: len(row.tokens) - 1]
        names = list(
            itertools.accumulate(
                whole_blocks(findable), next_name, initial=first_name(self._model.base.digest, row)
            )
        )
        taken = self._blocks.take(need, names[1:])
        if taken is None:
            self._bank.let_go(slot)
            return None
        blocks, found = taken
        number = next(self._numbers)
        self._reused += found * BLOCK
        self._live[number] = _Live(
            number=number,
            row=row,
            slot=slot,
            blocks=blocks,
            name=names[found],
            tokens=list(row.tokens),
            read=found * BLOCK,
            sealed=found,
            picker=Picker.of(row.sampling),
            writing=Writing(number, row, self._text),
            table=torch.tensor(blocks, dtype=torch.int32, device=self._model.where.device),
        )
        return number

    def step(self) -> Sequence[Piece]:
        """See ``Backend.step``."""
        decoding = [live for live in self._live.values() if live.pending == 1]
        budget = _BESIDE_OTHERS if decoding else _ALONE
        reading = list(
            read_on(budget.get(self._model.where.device.type, budget["cpu"]), self._live.values())
        )
        if not decoding and not reading:
            return ()
        answering = decoding + [live for live, count in reading if count == live.pending]
        logits = self._pass(decoding, reading)
        picked = pick(logits, [live.picker for live in answering], self._pool.kernels)
        wanted = {index: live.row.top for index, live in enumerate(answering) if live.row.logprobs}
        known = logprobs(logits, picked, wanted)
        for live in decoding:
            self._has_read(live, 1)
        for live, count in reading:
            self._has_read(live, count)
        pieces = []
        for index, (live, token) in enumerate(zip(answering, picked, strict=True)):
            piece = live.writing.take(token, known.get(index))
            live.tokens += piece.tokens
            if piece.finish is not None:
                self._remove(live)
            pieces.append(piece)
        if not self._live:
            release_threads()
        return pieces

    def leave(self, number: int) -> Piece | None:
        """See ``Backend.leave``."""
        live = self._live.get(number)
        if live is None:
            return None
        self._remove(live)
        return live.writing.end("cancelled")

    def forget(self) -> None:
        """See ``Backend.forget``."""
        left = torch.tensor(self._blocks.forget(), dtype=torch.long, device=self._pool.keys.device)
        self._pool.keys[:, left] = 0
        self._pool.values[:, left] = 0

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``."""
        blocks = self._blocks
        return Occupancy(
            len(self._live),
            blocks.used * BLOCK,
            blocks.kept * BLOCK,
            blocks.count * BLOCK,
            self._reused,
        )

    def _pass(
        self, decoding: Sequence[_Live], reading: Sequence[tuple[_Live, int]]
    ) -> torch.Tensor:
        """The logits of each decoded row's token and of each prompt's last token, in that order."""
        tokens: list[int] = []
        positions: list[int] = []
        writes: list[int] = []
        slots: list[int] = []
        chunks, reads = [], list(range(len(decoding)))
        for live, count in (*((live, 1) for live in decoding), *reading):
            begin = len(tokens)
            tokens += live.tokens[live.read : live.read + count]
            positions += range(live.read, live.read + count)
            writes += (
                live.blocks[p // BLOCK] * BLOCK + p % BLOCK
                for p in range(live.read, live.read + count)
            )
            slots += [live.slot] * count
            if begin >= len(decoding):
                chunks.append(Chunk(begin, len(tokens), live.read + count, live.table))
                if count == live.pending:
                    reads.append(len(tokens) - 1)
        device = self._model.where.device
        longest = max((len(live.table) for live in decoding), default=0)
        table = torch.zeros((len(decoding), longest), dtype=torch.int32, device=device)
        for index, live in enumerate(decoding):
            table[index, : len(live.table)] = live.table
        places = Places(
            torch.tensor(writes).to(device),
            table,
            torch.tensor([len(live.tokens) for live in decoding], dtype=torch.int32).to(device),
        )
        return self._model.step(
            tokens,
            positions,
            reads,
            Pass(self._pool, places, chunks),
            self._bank.each_its_own(torch.tensor(slots, dtype=torch.int32).to(device))
            if any(slots)
            else None,
        )

    def _has_read(self, live: _Live, count: int) -> None:
        live.read += count
        while (live.sealed + 1) * BLOCK <= live.read:
            begin = live.sealed * BLOCK
            live.name = next_name(live.name, live.tokens[begin : begin + BLOCK])
            self._blocks.seal(live.blocks[live.sealed], live.name)
            live.sealed += 1

    def _remove(self, live: _Live) -> None:
        del self._live[live.number]
        self._blocks.give_back(live.blocks)
        self._bank.let_go(live.slot)
