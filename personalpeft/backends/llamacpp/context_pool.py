"""Contexts of llama.cpp. Each computes one sequence at a time, with one stack.

The numbers of a sequence depend on where its keys and values lie in a context. They also depend on
the number of tokens in one call. Figures are in docs/how-to/engines.md. So sequences share neither
contexts nor calls. Keys and values lie in a context from its beginning, without gaps.

Invariants:

- All contexts together stay within a bound of tokens and memory, except while one grows.
- A sequence gets room for its prompt and its longest reply when it is admitted.
- A cached prompt is found only with the same stack and owner. It consists of whole chunks of
  ``CHUNK`` tokens that were read as a prompt.
- Keys and values are never read under another stack than they were written under.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from personalpeft.backends.llamacpp.binding import Context, ContextParams, LoraAdapter
from personalpeft.backends.sequence import Tokens, count_common_prefix

CHUNK = 64
"""Tokens of a prompt in one call. A prompt is cut at multiples of it, whatever is cached."""

# The size that a context begins with. llama.cpp rounds sizes up to multiples of the step.
_MIN_CTX, _CTX_STEP = 512, 256
NewContext = Callable[[ContextParams, LoraAdapter | None], Context]


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What all contexts may take together.

    Attributes:
        n_ctx: Tokens of all contexts.
        memory: Bytes of all contexts.
        bytes_per_token: Bytes for each token of a context.
        bytes_per_context: Bytes for each context besides its tokens.
    """

    n_ctx: int
    memory: int
    bytes_per_token: int
    bytes_per_context: int

    def remaining(self, sizes: Sequence[int]) -> int:
        """Return how large one more context may be, beside contexts of these sizes."""
        memory = self.memory - (len(sizes) + 1) * self.bytes_per_context
        n_ctx = min(self.n_ctx, memory // self.bytes_per_token)
        return (n_ctx - sum(sizes)) // _CTX_STEP * _CTX_STEP


class SequenceSlot:
    """A context for one sequence at a time, and a cached prompt. Not thread-safe."""

    def __init__(self, context: Context, new_context: NewContext) -> None:
        self.context, self._new_context = context, new_context
        self._owner = ""
        self._cached: Tokens = ()
        self.in_use = False

    @property
    def n_ctx(self) -> int:
        """How many tokens it has room for."""
        return self.context.params.n_ctx

    @property
    def num_cached(self) -> int:
        """How many tokens are cached of a sequence that has left."""
        return len(self._cached)

    def num_shared(self, owner: str, prompt: Tokens) -> int:
        """Return how many tokens of a prompt are cached, in whole chunks.

        The last token is never one of them: the first token of the reply is computed from it.
        """
        if owner != self._owner:
            return 0
        return count_common_prefix(self._cached, prompt[: len(prompt) - 1]) // CHUNK * CHUNK

    def acquire(self, owner: str, prompt: Tokens) -> int:
        """Take the slot for a sequence. Return how many tokens of its prompt are cached."""
        num_cached = self._truncate(self.num_shared(owner, prompt))
        self._cached, self.in_use = (), True
        return num_cached

    def release(self, owner: str, tokens: Tokens) -> None:
        """Free the slot, and cache the whole chunks of the prompt tokens that were read."""
        num_cached = self._truncate(len(tokens) // CHUNK * CHUNK)
        self._owner, self._cached, self.in_use = owner, tokens[:num_cached], False

    def set_adapter(self, adapter: LoraAdapter | None) -> None:
        """Compute with another adapter from now on. The cached prompt is dropped."""
        self._cached = ()
        if adapter is not self.context.adapter:
            self.context.set_adapter(adapter)

    def grow(self, n_ctx: int) -> None:
        """Move into a context of another size, with all that it holds."""
        old = self.context
        new = self._new_context(replace(old.params, n_ctx=n_ctx), old.adapter)
        try:
            new.copy_state(old)
        except BaseException:
            new.close()
            raise
        self.context = new
        old.clear()
        old.close()

    def clear_cache(self) -> None:
        """Overwrite what is cached of sequences that have left."""
        if self.in_use:
            # Only what its sequence has read is copied.
            self.grow(self.n_ctx)
        else:
            self._cached = ()
            self.context.clear()

    def close(self) -> None:
        """Free its memory."""
        self.context.close()

    def _truncate(self, length: int) -> int:
        return length if self.context.truncate(length) else 0


class ContextPool:
    """The slots of all sequences, within ``budget`` together. Not thread-safe.

    A free slot is kept for the next turn of its conversation, or recycled. Making a context takes
    longer than loading an adapter. No slot is made while ``max_free`` slots are free.
    """

    def __init__(
        self, budget: MemoryBudget, params: ContextParams, new_context: NewContext, *, max_free: int
    ) -> None:
        self.budget = budget
        self._params, self._new_context, self._max_free = params, new_context, max_free
        # Least recently used first.
        self._slots: OrderedDict[SequenceSlot, None] = OrderedDict()

    def __iter__(self) -> Iterator[SequenceSlot]:
        return iter(self._slots)

    def find_slot(
        self, adapter: LoraAdapter | None, owner: str, prompt: Tokens, length: int
    ) -> SequenceSlot | None:
        """Return a slot for a sequence, still to be acquired; None while others use the memory.

        The slot that has most of the prompt cached is preferred. Free slots are closed for room.

        Args:
            adapter: The adapter that the sequence uses.
            owner: The user whose cached prompts may be used.
            prompt: The prompt.
            length: Tokens of prompt and longest reply.
        """
        size = -(-length // _CTX_STEP) * _CTX_STEP
        slot = self._best_match(adapter, owner, prompt)
        if slot is not None and slot.n_ctx < size:
            grown = self._make_room(slot, minimum=size, wanted=2 * slot.n_ctx)
            if grown is None:
                return None
            slot.grow(grown)
        if slot is None:
            slot = self._recycle(adapter, size) or self._create(adapter, size)
        if slot is not None:
            self._slots.move_to_end(slot)
        return slot

    def remove_adapter(self, adapter: LoraAdapter) -> None:
        """Drop what was computed with an adapter that no sequence uses, before it is freed."""
        for slot in self._slots:
            if slot.context.adapter is adapter:
                slot.set_adapter(None)

    def close(self) -> None:
        """Close every slot."""
        for slot in tuple(self._slots):
            self._close(slot)

    def _best_match(
        self, adapter: LoraAdapter | None, owner: str, prompt: Tokens
    ) -> SequenceSlot | None:
        shared = {
            slot: slot.num_shared(owner, prompt)
            for slot in self._free()
            if slot.context.adapter is adapter
        }
        best = max(shared, key=shared.__getitem__, default=None)
        return best if best is not None and shared[best] else None

    def _recycle(self, adapter: LoraAdapter | None, size: int) -> SequenceSlot | None:
        """Return a slot with nothing cached, or the oldest one if no other may be made."""
        free = self._free()
        full = len(free) >= self._max_free or self._remaining() < size
        slot = next((s for s in free if s.n_ctx >= size and (full or not s.num_cached)), None)
        if slot is not None:
            slot.set_adapter(adapter)
        elif len(free) >= self._max_free:
            self._close(free[0])
        return slot

    def _create(self, adapter: LoraAdapter | None, minimum: int) -> SequenceSlot | None:
        size = self._make_room(None, minimum=minimum, wanted=_MIN_CTX)
        if size is None:
            return None
        context = self._new_context(replace(self._params, n_ctx=size), adapter)
        slot = SequenceSlot(context, self._new_context)
        self._slots[slot] = None
        return slot

    def _make_room(self, slot: SequenceSlot | None, *, minimum: int, wanted: int) -> int | None:
        """Close free slots as needed, and return the size for one slot; None without room."""
        if self.budget.remaining([each.n_ctx for each in self if each.in_use]) < minimum:
            return None
        for free in self._free():
            if self._remaining(slot) >= minimum:
                break
            if free is not slot:
                self._close(free)
        return min(max(minimum, wanted), self._remaining(slot))

    def _remaining(self, excluded: SequenceSlot | None = None) -> int:
        return self.budget.remaining([each.n_ctx for each in self if each is not excluded])

    def _free(self) -> list[SequenceSlot]:
        return [slot for slot in self._slots if not slot.in_use]

    def _close(self, slot: SequenceSlot) -> None:
        del self._slots[slot]
        slot.close()
