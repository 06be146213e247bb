"""The batch: sequences join and leave between steps, and a step advances each of them.

A step makes one call of llama.cpp for each decoding sequence. Then it makes one for each chunk of
the waiting prompts, as many as fit the step. A call computes one sequence: one picked token, or
tokens of its prompt between two multiples of ``CHUNK``.

Invariants: the numbers of a sequence depend on its own tokens and stack alone, to the bit. Its
memory is free as soon as it has left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Occupancy
from personalpeft.backends.batch_backend import SequenceBatch
from personalpeft.backends.llamacpp.binding import Logits, LoraAdapter
from personalpeft.backends.llamacpp.context_pool import CHUNK, ContextPool, SequenceSlot
from personalpeft.backends.openmp import release_threads
from personalpeft.backends.sampler import token_logprobs
from personalpeft.backends.sequence import OutputChunk, SequenceState
from personalpeft.backends.tokenizer import ChatTokenizer

# Prompt tokens in one step, beside sequences that are decoding and without any.
_PREFILL_BESIDE_DECODE, _PREFILL_ALONE = CHUNK, 4 * CHUNK


# eq=False: two sequences with the same fields are two sequences.
@dataclass(eq=False, slots=True)
class _SlotSequence:
    """A sequence in the batch. Its first ``num_read`` tokens are in its slot."""

    state: SequenceState
    slot: SequenceSlot
    num_read: int

    @property
    def num_pending(self) -> int:
        return len(self.state.token_ids) - self.num_read

    @property
    def next_size(self) -> int:
        """How many tokens its next call computes."""
        return min(CHUNK - self.num_read % CHUNK, self.num_pending)

    def decode(self) -> Logits:
        """Compute the next tokens. Return the logits after the last token, if that is included."""
        ids, start, end = self.state.token_ids, self.num_read, self.num_read + self.next_size
        logits = self.slot.context.decode(ids[start:end], start, int(end == len(ids)))
        self.num_read = end
        return logits

    def sample(self, logits: Logits) -> OutputChunk:
        """Pick the next token, and return what it adds to the reply."""
        state = self.state
        token = state.sampler.sample(logits)
        top = state.request.top_logprobs
        return state.append(token, token_logprobs(logits, token, top) if state.logprobs else None)


class Batch(SequenceBatch[_SlotSequence]):
    """The batch. ``adapters`` are the attached stacks."""

    def __init__(
        self,
        pool: ContextPool,
        adapters: Mapping[str, LoraAdapter],
        tokenizer: ChatTokenizer,
        *,
        rows: int,
        max_length: int,
    ) -> None:
        super().__init__(tokenizer, rows=rows, max_length=max_length)
        self._pool, self._adapters = pool, adapters
        self._reused_tokens = 0

    def _allocate(self, sequence: SequenceState) -> _SlotSequence | None:
        key, owner, prompt = sequence.adapter_key, sequence.owner, sequence.prompt_tokens
        adapter = None if key is None else self._adapters[key]
        slot = self._pool.find_slot(adapter, owner, prompt, sequence.max_length)
        if slot is None:
            return None
        num_cached = slot.acquire(owner, prompt)
        self._reused_tokens += num_cached
        return _SlotSequence(sequence, slot, num_cached)

    def step(self) -> Sequence[OutputChunk]:
        sequences = tuple(self._running.values())
        chunks = [self._advance(each) for each in sequences if each.num_pending == 1]
        budget = _PREFILL_BESIDE_DECODE if chunks else _PREFILL_ALONE
        for each in sequences:
            while each.num_pending > 1 and each.next_size <= budget:
                budget -= each.next_size
                chunks.append(self._advance(each))
        if not self._running:
            release_threads()
        return [chunk for chunk in chunks if chunk is not None]

    def _release(self, running: _SlotSequence) -> None:
        """Free its slot, and cache what was read of its prompt."""
        state = running.state
        running.slot.release(state.owner, state.prompt_tokens[: running.num_read])

    def clear_cache(self) -> None:
        """See ``Backend.clear_cache``."""
        for slot in self._pool:
            slot.clear_cache()

    def occupancy(self) -> Occupancy:
        used = sum(each.num_read for each in self._running.values())
        total = self._pool.budget.n_ctx
        return Occupancy(len(self._running), used, total, self._reused_tokens)

    def close(self) -> None:
        """Drop all sequences and free all contexts."""
        self._running.clear()
        self._pool.close()

    def check_integrity(self) -> None:
        """See ``Backend.check_integrity``."""
        in_use = {id(slot) for slot in self._pool if slot.in_use}
        if in_use != {id(each.slot) for each in self._running.values()}:
            raise RuntimeError("the slots in use are not those of the sequences")

    def _advance(self, sequence: _SlotSequence) -> OutputChunk | None:
        logits = sequence.decode()
        if sequence.num_pending:
            return None
        chunk = sequence.sample(logits[0])
        if chunk.finish is not None:
            self.remove(chunk.index)
        return chunk
