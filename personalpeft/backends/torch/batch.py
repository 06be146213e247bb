"""The batch of the torch backend: each step gives every row whose prompt is read its next token.

A step is one pass over the tokens of many rows laid end to end: one token of each row that is being
decoded, then as much of the waiting prompts as fits the step.

Invariants: a row has blocks for its tokens so far, and takes one more when they are full. A row's
numbers depend on its own tokens and slot alone. What a row held is free once it was removed. A row
that is admitted again reads its tokens as a prompt, which gives the same keys and values as writing
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from personalpeft.backends.base import Occupancy, OutOfBlocks, Piece, Row
from personalpeft.backends.sequence_output import Writing, read_on
from personalpeft.backends.tokenizer import Text
from personalpeft.backends.torch.block_manager import BlockManager, block_hash, prefix_hashes
from personalpeft.backends.torch.kv_cache import Pass, Pool
from personalpeft.backends.torch.lora_bank import SlotBank
from personalpeft.backends.torch.model_runner import Model
from personalpeft.backends.torch.openmp import release_threads
from personalpeft.backends.torch.ops.base import BLOCK, Chunk, Places
from personalpeft.backends.torch.sampling import Picker, logprobs, pick

# Prompt tokens in one step beside rows that are being decoded, and when there are none: the first
# keeps the other rows' next tokens from waiting, the second is where more no longer makes a token
# cheaper.
_PROMPT_TOKENS_BESIDE_DECODING = {"cpu": 64, "cuda": 512}
_PROMPT_TOKENS_ALONE = {"cpu": 1024, "cuda": 2048}


@dataclass(slots=True)
class _RowState:
    """What a row has on the device. ``hash_`` is that of its last full block, of ``num_hashed``.

    ``tokens`` is the row's own list.
    """

    number: int
    row: Row
    tokens: list[int]
    writing: Writing
    slot: int
    blocks: list[int]
    table: torch.Tensor
    read: int
    num_hashed: int
    hash_: bytes

    @property
    def pending(self) -> int:
        """How many tokens are still to be read."""
        return len(self.tokens) - self.read


class Batch:
    """Up to ``rows`` rows at once. Not thread-safe: one thread runs it."""

    def __init__(
        self, model: Model, text: Text, bank: SlotBank, pool: Pool, blocks: int, *, rows: int
    ) -> None:
        self._model, self._text, self._bank, self._pool = model, text, bank, pool
        self._rows = rows
        self._blocks = BlockManager(blocks)
        self._live: dict[int, _RowState] = {}
        self._numbers = itertools.count()
        self._reused = 0

    def admit(self, row: Row) -> int | None:
        """See ``Backend.admit``."""
        longest = len(row.tokens) + row.sampling.max_tokens
        if longest > self._blocks.num_blocks * BLOCK:
            raise ValueError(f"a row of {longest} tokens is longer than the cache")
        if len(self._live) >= self._rows:
            return None
        slot = self._bank.slot_of(row.stack)
        # At least the last token is read anew, since the next token comes from it.
        hashes = list(prefix_hashes(self._model.base.digest, row, row.token_ids[:-1]))
        count = -(-len(row.token_ids) // BLOCK)
        # With a spare block for each other row, a new row is not removed again at once.
        allocated = self._blocks.allocate(count, hashes[1:], spare=len(self._live))
        if allocated is None:
            return None
        blocks, found = allocated
        number = next(self._numbers)
        if row.sampler is None:
            row.sampler = Picker.of(row.sampling)
            self._reused += found * BLOCK
        self._live[number] = _RowState(
            number=number,
            row=row,
            tokens=row.token_ids,
            writing=Writing.of(number, row, self._text),
            slot=slot,
            blocks=blocks,
            table=self._table(blocks),
            read=found * BLOCK,
            num_hashed=found,
            hash_=hashes[found],
        )
        return number

    def step(self) -> Sequence[Piece]:
        """See ``Backend.step``."""
        decoding = [live for live in self._live.values() if live.pending == 1]
        for live in decoding:
            if len(live.tokens) > len(live.blocks) * BLOCK:
                if not self._blocks.append(live.blocks):
                    raise OutOfBlocks
                live.table = self._table(live.blocks)
        budget = _PROMPT_TOKENS_BESIDE_DECODING if decoding else _PROMPT_TOKENS_ALONE
        reading = list(
            read_on(budget.get(self._model.where.device.type, budget["cpu"]), self._live.values())
        )
        if not decoding and not reading:
            return ()
        answering = decoding + [live for live, count in reading if count == live.pending]
        logits = self._pass(decoding, reading)
        picked = pick(logits, [live.row.sampler for live in answering], self._pool.kernels)
        wanted = {index: live.row.top for index, live in enumerate(answering) if live.row.logprobs}
        known = logprobs(logits, picked, wanted)
        for live in decoding:
            self._has_read(live, 1)
        for live, count in reading:
            self._has_read(live, count)
        pieces = []
        for index, (live, token) in enumerate(zip(answering, picked, strict=True)):
            piece = live.writing.take(token, known.get(index))
            if piece.finish is not None:
                self.remove(live.number)
            pieces.append(piece)
        if not self._live:
            release_threads()
        return pieces

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        live = self._live.pop(number, None)
        if live is not None:
            self._blocks.free(live.blocks)

    def uses(self, stack: str) -> bool:
        """Return whether a row of the batch uses a stack."""
        return any(live.row.stack == stack for live in self._live.values())

    def forget(self) -> None:
        """See ``Backend.forget``."""
        dirty = torch.tensor(
            self._blocks.clear_cache(), dtype=torch.long, device=self._pool.keys.device
        )
        self._pool.keys[:, dirty] = 0
        self._pool.values[:, dirty] = 0

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``."""
        blocks = self._blocks
        return Occupancy(
            len(self._live),
            blocks.num_used * BLOCK,
            blocks.num_cached * BLOCK,
            blocks.num_blocks * BLOCK,
            self._reused,
        )

    def check_integrity(self) -> None:
        """See ``Backend.check_integrity``."""
        self._blocks.check_integrity([live.blocks for live in self._live.values()])

    def _table(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int32, device=self._model.where.device)

    def _pass(
        self, decoding: Sequence[_RowState], reading: Sequence[tuple[_RowState, int]]
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
        lengths = [live.read + 1 for live in decoding]
        places = Places(
            torch.tensor(writes).to(device),
            table,
            torch.tensor(lengths, dtype=torch.int32).to(device),
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

    def _has_read(self, live: _RowState, count: int) -> None:
        live.read += count
        while (live.num_hashed + 1) * BLOCK <= live.read:
            begin = live.num_hashed * BLOCK
            live.hash_ = block_hash(live.hash_, live.tokens[begin : begin + BLOCK])
            self._blocks.cache(live.blocks[live.num_hashed], live.hash_)
            live.num_hashed += 1
