"""Which blocks of the key-value pool belong to whom. Pure: knows numbers and names, not tensors.

Invariants: a block is free, in use by rows, or kept under its name for a later row; a block with a name holds exactly
what its name says and is never written to again; a name is made of the owner, the base, the stack and every token up to
the block's end, so nothing can be found by anybody for whom it was not computed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from personalpeft.backends.base import Row
from personalpeft.backends.torch.ops.base import BLOCK
from personalpeft.types import canonical_digest


def first_name(base: str, row: Row) -> bytes:
    """What the names of a row's blocks begin with. The base's digest covers weights, tokenizer and chat template."""
    return bytes.fromhex(canonical_digest([row.owner, base, row.stack]))


def next_name(before: bytes, tokens: Sequence[int]) -> bytes:
    """The name of the block with these tokens, after the one called ``before``."""
    return hashlib.sha256(before + np.asarray(tokens, dtype="<i8").tobytes()).digest()


def whole_blocks(tokens: Sequence[int]) -> Iterator[Sequence[int]]:
    """The tokens in blocks, without what does not fill one."""
    return (tokens[begin : begin + BLOCK] for begin in range(0, len(tokens) - BLOCK + 1, BLOCK))


class Blocks:
    """The owner of ``count`` blocks. Not thread-safe: it belongs to the batch."""

    def __init__(self, count: int) -> None:
        self.count = count
        # Taken from the end: the block that was freed last is the one whose memory is warm.
        self._free = list(range(count - 1, -1, -1))
        self._uses: dict[int, int] = {}
        self._by_name: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # Nobody uses these, but somebody may ask for them by name; the oldest goes first.
        self._kept: OrderedDict[int, None] = OrderedDict()
        # Free, with what a row left in them.
        self._left: set[int] = set()

    @property
    def used(self) -> int:
        """How many blocks rows hold."""
        return len(self._uses)

    @property
    def kept(self) -> int:
        """How many are kept for later."""
        return len(self._kept)

    def take(self, count: int, names: Sequence[bytes]) -> tuple[list[int], int] | None:
        """``count`` blocks for a row, and how many of the first are those that ``names`` name, found as they were left;
        None, with nothing changed, when there are not so many.
        """
        found = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        fresh = count - len(found)
        if fresh > len(self._free) + len(self._kept) - sum(block in self._kept for block in found):
            return None
        for block in found:
            self._kept.pop(block, None)
            self._uses[block] = self._uses.get(block, 0) + 1
        return found + [self._fresh() for _ in range(fresh)], len(found)

    def seal(self, block: int, name: bytes) -> None:
        """Names a block that is full and will not be written to again. Where another has the name, that one keeps it."""
        if name not in self._by_name and block not in self._name_of:
            self._by_name[name] = block
            self._name_of[block] = name

    def give_back(self, blocks: Sequence[int]) -> None:
        """Ends a row's use. Named blocks are kept as long as nobody needs the room."""
        # The end of a row first: without its beginning it can never be found again, so it should go before that.
        for block in reversed(blocks):
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            del self._uses[block]
            if block in self._name_of:
                self._kept[block] = None
            else:
                self._free.append(block)
                self._left.add(block)

    def forget(self) -> list[int]:
        """Keeps nothing for a later row any more; the blocks in which rows have left something, all of them free now."""
        for block in self._kept:
            del self._by_name[self._name_of.pop(block)]
            self._free.append(block)
        left = sorted(self._left | self._kept.keys())
        self._kept.clear()
        self._left.clear()
        return left

    def _fresh(self) -> int:
        if self._free:
            block = self._free.pop()
            self._left.discard(block)
        else:
            block, _ = self._kept.popitem(last=False)
            del self._by_name[self._name_of.pop(block)]
        self._uses[block] = 1
        return block
