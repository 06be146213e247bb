"""Which blocks of the key-value cache are free, in use, or cached for a later prompt.

It handles numbers, tokens and hashes only, no tensors. A block's hash covers the owner, the base,
the stack and every token up to the end of the block. So a row finds only blocks of its own owner
and stack.

Invariants: a block is free, in use, or cached without a user. A block with a hash holds exactly
what its hash covers and is never written again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect, bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from operator import itemgetter

import numpy as np

from personalpeft.backends.sequence import SequenceState, Tokens, count_common_prefix
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE
from personalpeft.types import canonical_digest


def block_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of the block with these tokens, after the block with the hash ``parent``."""
    return hashlib.sha256(parent + np.asarray(tokens, dtype="<i8").tobytes()).digest()


def prefix_hashes(base: str, sequence: SequenceState, tokens: Sequence[int]) -> Iterator[bytes]:
    """Yield the root hash of a sequence, then the hash of each full block of its tokens.

    Args:
        base: The base's digest, which covers weights, tokenizer and chat template.
        sequence: Names owner and stack.
        tokens: The sequence's tokens, or the first of them.
    """
    root = bytes.fromhex(canonical_digest([sequence.owner, base, sequence.adapter_key]))
    full = range(0, len(tokens) - KV_BLOCK_SIZE + 1, KV_BLOCK_SIZE)
    return accumulate((tokens[at : at + KV_BLOCK_SIZE] for at in full), block_hash, initial=root)


@dataclass(frozen=True, slots=True)
class _FullBlock:
    """What a block with a hash holds: ``tokens``, after the block with the hash ``parent``."""

    hash_: bytes
    parent: bytes
    tokens: Tokens


class BlockManager:
    """Owns ``num_blocks`` blocks. Not thread-safe: it belongs to the batch."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # Taken from the end: the memory of the block that was freed last is warm.
        self._free = list(range(num_blocks - 1, -1, -1))
        self._ref_counts: dict[int, int] = {}
        self._block_of: dict[bytes, int] = {}
        self._full: dict[int, _FullBlock] = {}
        # The full blocks after each hash, in the lexical order of their tokens.
        self._children: dict[bytes, list[tuple[Tokens, int]]] = {}
        # Blocks without a user that a later prompt may find. The oldest is reused first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Free blocks that still hold what a row wrote.
        self._dirty: set[int] = set()

    @property
    def num_used(self) -> int:
        """How many blocks rows use."""
        return len(self._ref_counts)

    def allocate(
        self, count: int, hashes: Iterable[bytes] = (), *, spare: int = 0
    ) -> tuple[list[int], int] | None:
        """Take blocks for a row.

        Args:
            count: How many blocks.
            hashes: Hashes of the row's first full blocks.
            spare: How many blocks have to stay available afterwards.

        Returns:
            The blocks, and how many of the first were found by their hashes. None if there are too
            few; then nothing has changed.
        """
        found = self._find(hashes)
        available = len(self._free) + len(self._cached) - sum(b in self._cached for b in found)
        if count - len(found) + spare > available:
            return None
        for block in found:
            self._share(block)
        return found + [self._take() for _ in range(count - len(found))], len(found)

    def find_again(self, blocks: list[int], found: int, hashes: Sequence[bytes]) -> int:
        """Exchange blocks of a row that has read nothing since ``allocate`` for cached ones.

        Args:
            blocks: The row's blocks.
            found: How many of the first were found before.
            hashes: Hashes of the row's first full blocks.

        Returns:
            How many of the first are found now.
        """
        for block in self._find(hashes[found:]):
            self._share(block)
            self.free([blocks[found]])
            blocks[found] = block
            found += 1
        return found

    def find_partial(self, parent: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the full block that begins with the most of a row's next tokens.

        Args:
            parent: The hash of the block before them.
            tokens: The tokens.

        Returns:
            The block, and with how many of the tokens it begins; 0 if there is none.
        """
        wanted = (*tokens[:KV_BLOCK_SIZE],)
        siblings = self._children.get(parent, [])
        # In lexical order, the longest common beginning is that of one of the two neighbours.
        place = bisect(siblings, (wanted, 0))
        found = [
            (block, count_common_prefix(wanted, each))
            for each, block in siblings[max(0, place - 1) : place + 1]
        ]
        return max(found, key=itemgetter(1), default=(0, 0))

    def cache(self, block: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Give a full block its hash. Where another block has the hash, that one keeps it.

        Args:
            block: The block.
            parent: The hash of the block before it.
            tokens: The block's tokens.

        Returns:
            The hash.
        """
        hash_ = block_hash(parent, tokens)
        if hash_ not in self._block_of and block not in self._full:
            self._block_of[hash_] = block
            full = self._full[block] = _FullBlock(hash_, parent, (*tokens,))
            insort(self._children.setdefault(parent, []), (full.tokens, block))
        return hash_

    def free(self, blocks: Sequence[int]) -> None:
        """End a row's use. Blocks with a hash stay cached until their memory is needed."""
        # The last block is freed first, so it is reused first. It is useless without those before.
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            del self._ref_counts[block]
            if block in self._full:
                self._cached[block] = None
            else:
                self._free.append(block)
                self._dirty.add(block)

    def clear_cache(self) -> list[int]:
        """Forget cached blocks. Return the free blocks that still hold what a row wrote."""
        for block in self._cached:
            self._forget(block)
            self._free.append(block)
        dirty = sorted(self._dirty | self._cached.keys())
        self._cached.clear()
        self._dirty.clear()
        return dirty

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise ``RuntimeError`` unless each block is free, cached, or used as often as ``tables``
        say.
        """
        blocks = [*self._free, *self._cached, *self._ref_counts]
        if sorted(blocks) != list(range(self.num_blocks)):
            raise RuntimeError("free, cached and used blocks together are not all blocks")
        if self._ref_counts != Counter(block for table in tables for block in table):
            raise RuntimeError("the reference counts of blocks differ from the tables of rows")
        hashes = {block: full.hash_ for block, full in self._full.items()}
        if {block: hash_ for hash_, block in self._block_of.items()} != hashes:
            raise RuntimeError("hashes and blocks do not match one to one")
        if self._dirty & self._full.keys() or not self._cached.keys() <= self._full.keys():
            raise RuntimeError("a cached block has no hash, or a free one has")
        children: dict[bytes, list[tuple[Tokens, int]]] = {}
        for block, full in self._full.items():
            children.setdefault(full.parent, []).append((full.tokens, block))
        if self._children != {parent: sorted(each) for parent, each in children.items()}:
            raise RuntimeError("a block is not filed under the block before it")

    def _find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks with the first of the hashes, up to one that no block has."""
        known = takewhile(self._block_of.__contains__, hashes)
        return [self._block_of[each] for each in known]

    def _share(self, block: int) -> None:
        """Count one more user of a block with a hash."""
        self._cached.pop(block, None)
        self._ref_counts[block] = self._ref_counts.get(block, 0) + 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
            self._dirty.discard(block)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._ref_counts[block] = 1
        return block

    def _forget(self, block: int) -> None:
        full = self._full.pop(block)
        del self._block_of[full.hash_]
        siblings = self._children[full.parent]
        del siblings[bisect_left(siblings, (full.tokens, block))]
        if not siblings:
            del self._children[full.parent]
