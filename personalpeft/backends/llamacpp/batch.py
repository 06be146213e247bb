"""The batch: sequences join and leave between steps, and a step advances each of them.

A step makes one call of llama.cpp for each decoding sequence. Then it makes one for each chunk of
the waiting prompts, as many as fit the step. A call computes one sequence: one picked token, or
tokens of its prompt between two multiples of ``CHUNK``.

Invariants: the numbers of a sequence depend on its own tokens and stack alone, to the bit. Its
memory is free as soon as it has left.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Occupancy, OutputChunk, SequenceState
from personalpeft.backends.detokenizer import SequenceOutput
from personalpeft.backends.llamacpp.adapters import LoadedAdapters
from personalpeft.backends.llamacpp.binding import Logits
from personalpeft.backends.llamacpp.context_pool import CHUNK, ContextPool, SequenceSlot
from personalpeft.backends.sampler import Sampler, token_logprobs
from personalpeft.backends.tokenizer import ChatTokenizer

# Prompt tokens in one step, beside sequences that are decoding and without any.
_PREFILL_BESIDE_DECODE, _PREFILL_ALONE = CHUNK, 4 * CHUNK


# eq=False: two sequences with the same fields are two sequences.
@dataclass(eq=False, slots=True)
class _Sequence:
    """A sequence in the batch. Its first ``num_read`` tokens are in its slot."""

    number: int
    state: SequenceState
    slot: SequenceSlot
    output: SequenceOutput
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
        logits = self.slot.decode(ids[start:end], start, int(end == len(ids)))
        self.num_read = end
        return logits

    def sample(self, logits: Logits) -> OutputChunk:
        """Pick the next token, and return what it adds to the reply."""
        state = self.state
        token = state.sampler.sample(logits)
        logprobs = token_logprobs(logits, token, state.top_logprobs) if state.logprobs else None
        return self.output.append(token, logprobs)

    def release(self) -> None:
        """Free its slot, and cache what was read of its prompt."""
        self.slot.release(self.state.owner, self.state.prompt_tokens[: self.num_read])


class Batch:
    """Up to ``rows`` sequences at once. Not thread-safe: one thread runs it."""

    def __init__(
        self,
        pool: ContextPool,
        adapters: LoadedAdapters,
        tokenizer: ChatTokenizer,
        *,
        rows: int,
        max_length: int,
    ) -> None:
        self._pool, self._adapters, self._tokenizer = pool, adapters, tokenizer
        self._rows, self._max_length = rows, max_length
        self._sequences: dict[int, _Sequence] = {}
        self._numbers = itertools.count()
        self._reused_tokens = 0

    def admit(self, state: SequenceState) -> int | None:
        """See ``Backend.admit``."""
        length = len(state.prompt_tokens) + state.sampling.max_tokens
        if length > self._max_length:
            raise ValueError(f"{length} tokens do not fit in memory: {self._max_length} do")
        if len(self._sequences) >= self._rows:
            return None
        key, owner, prompt = state.adapter_key, state.owner, state.prompt_tokens
        adapter = None if key is None else self._adapters.get(key)
        slot = self._pool.find_slot(adapter, owner, prompt, length)
        if slot is None:
            return None
        number = next(self._numbers)
        if state.sampler is None:
            state.sampler = Sampler(state.sampling)
        # The slot is acquired last, after all that can fail.
        output = SequenceOutput.of(number, state, self._tokenizer)
        num_cached = slot.acquire(owner, prompt)
        self._reused_tokens += num_cached
        self._sequences[number] = _Sequence(number, state, slot, output, num_cached)
        return number

    def step(self) -> Sequence[OutputChunk]:
        """See ``Backend.step``."""
        sequences = tuple(self._sequences.values())
        chunks = [self._advance(each) for each in sequences if each.num_pending == 1]
        budget = _PREFILL_BESIDE_DECODE if chunks else _PREFILL_ALONE
        for each in sequences:
            while each.num_pending > 1 and each.next_size <= budget:
                budget -= each.next_size
                chunks.append(self._advance(each))
        return [chunk for chunk in chunks if chunk is not None]

    def remove(self, number: int) -> None:
        """See ``Backend.remove``."""
        sequence = self._sequences.pop(number, None)
        if sequence is not None:
            sequence.release()

    def uses(self, key: str) -> bool:
        """Return whether a sequence of the batch uses a stack."""
        return any(each.state.adapter_key == key for each in self._sequences.values())

    def drop(self, key: str) -> None:
        """Free a stack that no sequence uses."""
        if adapter := self._adapters.drop(key):
            # It is removed from all contexts before it is freed.
            self._pool.remove_adapter(adapter)
            adapter.close()

    def clear_cache(self) -> None:
        """See ``Backend.clear_cache``."""
        for slot in self._pool:
            slot.clear_cache()

    def occupancy(self) -> Occupancy:
        """See ``Backend.occupancy``."""
        used = sum(each.num_read for each in self._sequences.values())
        total = self._pool.budget.n_ctx
        return Occupancy(len(self._sequences), used, total, self._reused_tokens)

    def close(self) -> None:
        """Drop all sequences and free all contexts."""
        self._sequences.clear()
        self._pool.close()

    def check_integrity(self) -> None:
        """See ``Backend.check_integrity``."""
        in_use = {id(slot) for slot in self._pool if slot.in_use}
        if in_use != {id(each.slot) for each in self._sequences.values()}:
            raise RuntimeError("the slots in use are not those of the sequences")

    def _advance(self, sequence: _Sequence) -> OutputChunk | None:
        logits = sequence.decode()
        if sequence.num_pending:
            return None
        chunk = sequence.sample(logits[0])
        if chunk.finish is not None:
            self.remove(sequence.number)
        return chunk
