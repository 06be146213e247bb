"""The batch of the torch backend. Each step gives the next token to every row with a read prompt.

A step is one pass over the tokens of all rows laid end to end. First comes one token of each
decoding row, then as much of the waiting prompts as fits the step.

Invariants: a row has blocks for its tokens so far, and takes one more when they are full. A row's
numbers depend on its own tokens and slot alone. A removed row frees all that it held. A row that is
admitted again reads its tokens as a prompt, with the same keys and values as before.

Rows of one owner and stack share the keys and values of what their tokens have in common at the
beginning: whole blocks by reference, the rest as a copy. A row whose next block is being read for
another row waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from personalpeft.backends.base import Occupancy, OutOfBlocks
from personalpeft.backends.batch_backend import SequenceBatch
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.sequence import OutputChunk, SequenceState
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.backends.torch.batch_sampling import sample_tokens
from personalpeft.backends.torch.block_manager import BlockManager, prefix_hashes
from personalpeft.backends.torch.decode_graphs import DecodeGraphs, DecodeInputs
from personalpeft.backends.torch.host_to_device import to_device
from personalpeft.backends.torch.kv_cache import ForwardContext, PagedKVCache
from personalpeft.backends.torch.lora_bank import LoRABank
from personalpeft.backends.torch.model_runner import ModelRunner
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE, AttentionMetadata, PrefillChunk

# Prompt tokens in one step, beside rows that are being decoded and alone. The first limit keeps
# those rows from waiting. Beyond the second, more tokens do not make a token cheaper.
_PROMPT_TOKENS_BESIDE_DECODING = {"cpu": 64, "cuda": 512}
_PROMPT_TOKENS_ALONE = {"cpu": 1024, "cuda": 2048}


@dataclass(slots=True)
class _PagedSequence:
    """A running sequence, with what it has on the device.

    Attributes:
        table: ``blocks`` as an array.
        hashes: The root hash, and those of the prompt's full blocks.
        num_read: How many of its tokens the model has read.
        num_hashed: How many of the first blocks are full and have their hash.
        hash_: The hash of the last of these.
    """

    sequence: SequenceState
    slot: int
    blocks: list[int]
    table: npt.NDArray[np.int32]
    hashes: Sequence[bytes]
    num_read: int
    num_hashed: int
    hash_: bytes

    @property
    def tokens(self) -> list[int]:
        return self.sequence.token_ids

    @property
    def pending(self) -> int:
        """How many tokens are still to be read; 1 while the row is being decoded."""
        return len(self.tokens) - self.num_read


class Batch(SequenceBatch[_PagedSequence]):
    """The batch. Steps that read no prompts run as ``graphs``, if they are given."""

    def __init__(
        self,
        model: ModelRunner,
        tokenizer: ChatTokenizer,
        bank: LoRABank,
        kv_cache: PagedKVCache,
        *,
        rows: int,
        max_length: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        super().__init__(tokenizer, rows=rows, max_length=max_length)
        self._model, self._bank, self._kv_cache, self._graphs = model, bank, kv_cache, graphs
        self._blocks = BlockManager(kv_cache.num_blocks)
        self._reused = 0

    def _allocate(self, sequence: SequenceState) -> _PagedSequence | None:
        """Give a row its adapter's slot, and key-value blocks for its prompt."""
        slot = self._bank.slot_of(sequence.adapter_key)
        # At least the last token is read again, since the next token comes from it.
        hashes = list(prefix_hashes(self._model.base.digest, sequence, sequence.token_ids[:-1]))
        count = -(-len(sequence.token_ids) // KV_BLOCK_SIZE)
        # With a spare block for each other row, a new row is not removed again at once.
        allocated = self._blocks.allocate(count, hashes[1:], spare=len(self._running))
        if allocated is None:
            return None
        blocks, found = allocated
        return _PagedSequence(
            sequence=sequence,
            slot=slot,
            blocks=blocks,
            table=np.array(blocks, np.int32),
            hashes=hashes,
            num_read=0,
            num_hashed=found,
            hash_=hashes[found],
        )

    def step(self) -> Sequence[OutputChunk]:
        decoding = [row for row in self._running.values() if row.pending == 1]
        for row in decoding:
            if len(row.tokens) > len(row.blocks) * KV_BLOCK_SIZE:
                more = self._blocks.allocate(1)
                if more is None:
                    raise OutOfBlocks
                row.blocks += more[0]
                row.table = np.array(row.blocks, np.int32)
        reading = self._choose_prompts(beside_decoding=bool(decoding))
        if not decoding and not reading:
            return ()
        parts = [*((row, 1) for row in decoding), *reading]
        sampled = [row for row, count in parts if count == row.pending]
        logits = self._forward(parts, len(decoding))
        wanted = {
            index: row.sequence.request.top_logprobs
            for index, row in enumerate(sampled)
            if row.sequence.logprobs
        }
        samplers = [row.sequence.sampler for row in sampled]
        picks, known = sample_tokens(logits, samplers, wanted, self._model.ops)
        for row, count in parts:
            self._advance(row, count)
        chunks = []
        for index, (row, token) in enumerate(zip(sampled, picks, strict=True)):
            chunk = row.sequence.append(token, known.get(index))
            if chunk.finish is not None:
                self.remove(chunk.index)
            chunks.append(chunk)
        if not self._running:
            release_threads()
        return chunks

    def _release(self, running: _PagedSequence) -> None:
        self._blocks.free(running.blocks)

    def clear_cache(self) -> None:
        """See ``Backend.clear_cache``."""
        # Cleared first: what the allocator keeps of the memory must not hold a user's words.
        self._kv_cache.clear(self._blocks.clear_cache())
        if not self._blocks.num_used and self._graphs is None:
            self._kv_cache.release()
        if not self._running:
            release_threads()

    def occupancy(self) -> Occupancy:
        blocks = self._blocks
        return Occupancy(
            len(self._running),
            blocks.num_used * KV_BLOCK_SIZE,
            blocks.num_blocks * KV_BLOCK_SIZE,
            self._reused,
        )

    def check_integrity(self) -> None:
        """See ``Backend.check_integrity``."""
        self._blocks.check_integrity([row.blocks for row in self._running.values()])

    def _choose_prompts(self, *, beside_decoding: bool) -> list[tuple[_PagedSequence, int]]:
        """Return the prompts to read in this step, oldest first, and how many tokens of each."""
        budgets = _PROMPT_TOKENS_BESIDE_DECODING if beside_decoding else _PROMPT_TOKENS_ALONE
        budget = budgets.get(self._model.where.device.type, budgets["cpu"])
        chosen = []
        being_read: set[bytes] = set()
        for row in self._running.values():
            if row.pending == 1 or not budget:
                continue
            if not row.num_read and not self._begin(row, being_read):
                continue
            being_read.update(row.hashes[row.num_hashed + 1 :])
            count = min(budget, row.pending)
            budget -= count
            chosen.append((row, count))
        return chosen

    def _begin(self, row: _PagedSequence, being_read: Set[bytes]) -> bool:
        """Give a row the keys and values that are cached for the beginning of its tokens.

        Return False if the row should wait, since ``being_read`` has the hash of its next block.
        """
        found = self._blocks.find_again(row.blocks, row.num_hashed, row.hashes[1:])
        row.num_hashed, row.hash_ = found, row.hashes[found]
        if found + 1 < len(row.hashes) and row.hashes[found + 1] in being_read:
            return False
        row.table = np.array(row.blocks, np.int32)
        row.num_read = found * KV_BLOCK_SIZE
        source, same = self._blocks.find_partial(row.hash_, row.tokens[row.num_read : -1])
        if same:
            self._kv_cache.copy(source, row.blocks[found], same)
            row.num_read += same
        if not row.sequence.num_output_tokens:
            self._reused += row.num_read
        return True

    def _forward(
        self, parts: Sequence[tuple[_PagedSequence, int]], num_decoding: int
    ) -> torch.Tensor:
        """Run the model once for all rows, each on the slot that ``admit`` gave it.

        Args:
            parts: The rows, and how many tokens of each to read.
            num_decoding: How many of the first rows are being decoded.

        Returns:
            The logits after each decoded token, then after the last token of each prompt.
        """
        rows = [row for row, _ in parts]
        tokens = [row.tokens[row.num_read : row.num_read + count] for row, count in parts]
        counts = np.array([count for _, count in parts])
        ends = counts.cumsum()
        # For each token of the pass its row, and its position there.
        row_of = np.arange(len(rows)).repeat(counts)
        first = np.array([row.num_read for row in rows])
        positions = np.arange(ends[-1]) + (first - ends + counts)[row_of]
        blocks = _block_table(rows)[row_of, positions // KV_BLOCK_SIZE].astype(np.int64)
        slots = np.array([row.slot for row in rows], np.int32)
        inputs = DecodeInputs(
            np.array(list(chain.from_iterable(tokens)), np.int64),
            positions,
            blocks * KV_BLOCK_SIZE + positions % KV_BLOCK_SIZE,
            slots[row_of],
            (first[:num_decoding] + 1).astype(np.int32),
            _block_table(rows[:num_decoding]),
        )
        if self._graphs is not None and num_decoding == len(rows):
            return self._graphs.step(inputs)
        is_whole = np.array([count == row.pending for row, count in parts])
        read_ids, input_ids, position_ids, written, slot_ids, lengths, table, *tables = to_device(
            [ends[is_whole] - 1, *inputs, *(row.table for row in rows[num_decoding:])],
            self._model.where.device,
        )
        chunks = [
            PrefillChunk(end - count, end, row.num_read + count, blocks)
            for (row, count), end, blocks in zip(
                parts[num_decoding:], ends[num_decoding:].tolist(), tables, strict=True
            )
        ]
        metadata = AttentionMetadata(written, table, lengths)
        return self._model.step(
            input_ids,
            position_ids,
            read_ids,
            ForwardContext(self._kv_cache, metadata, chunks),
            self._bank.batched_lora(slot_ids) if slots.any() else None,
            length=int(positions.max()) + 1,
        )

    def _advance(self, row: _PagedSequence, count: int) -> None:
        row.num_read += count
        while (row.num_hashed + 1) * KV_BLOCK_SIZE <= row.num_read:
            begin = row.num_hashed * KV_BLOCK_SIZE
            tokens = row.tokens[begin : begin + KV_BLOCK_SIZE]
            row.hash_ = self._blocks.cache(row.blocks[row.num_hashed], row.hash_, tokens)
            row.num_hashed += 1


def _block_table(rows: Sequence[_PagedSequence]) -> npt.NDArray[np.int32]:
    """Return the rows' blocks, ``[rows, most blocks of a row]``."""
    table = np.zeros((len(rows), max((len(row.table) for row in rows), default=0)), np.int32)
    for index, row in enumerate(rows):
        table[index, : len(row.table)] = row.table
    return table
