"""The block manager never lets a user's key-value block be written or found by another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import pytest
from backend_makers import sequence
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
)

from personalpeft.backends.sequence import SequenceState
from personalpeft.backends.torch.block_manager import BlockManager, prefix_hashes
from personalpeft.backends.torch.ops.base import KV_BLOCK_SIZE

COUNT = 12


def hashes_of(row: SequenceState, base: str = "base") -> list[bytes]:
    return list(prefix_hashes(base, row, row.prompt_tokens))[1:]


def cache_all(blocks: BlockManager, taken: Sequence[int], row: SequenceState) -> None:
    """Give full blocks of a row their hashes."""
    hash_ = next(prefix_hashes("base", row, ()))
    for number, block in enumerate(taken):
        begin = number * KV_BLOCK_SIZE
        tokens = row.prompt_tokens[begin : begin + KV_BLOCK_SIZE]
        hash_ = blocks.cache(block, hash_, tokens)


def row(tokens: Sequence[int], owner: str = "ada", stack: str | None = None) -> SequenceState:
    return sequence(tokens, stack, owner=owner)


class SharingMachine(RuleBasedStateMachine):
    """Rows of three users come, fill blocks and leave; the expected contents are tracked beside."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(COUNT)
        self.memory: dict[int, bytes] = {}
        self.held: list[list[int]] = []

    @rule(
        target=rows,
        owner=st.sampled_from(["ada", "bo", "cy"]),
        prompt=st.lists(st.sampled_from([1, 2]), min_size=0, max_size=4),
        more=st.integers(0, 2),
    )
    def admit(self, owner: str, prompt: list[int], more: int) -> tuple[list[int], list[bytes]]:
        whole = row([token for token in prompt for _ in range(KV_BLOCK_SIZE)], owner)
        names = hashes_of(whole)
        taken = self.blocks.allocate(len(names) + more, names)
        if taken is None:
            assert len(names) + more > COUNT - self.blocks.num_used
            return [], []
        blocks, found = taken
        assert len(set(blocks)) == len(blocks) == len(names) + more
        for block, name in zip(blocks[:found], names, strict=False):
            assert self.memory[block] == name, "found what was not computed for it"
        in_use = {block for others in self.held for block in others}
        assert not in_use & set(blocks[found:]), "another row's block would be written to"
        self.memory.update(zip(blocks[found:], names[found:], strict=False))
        cache_all(self.blocks, blocks[: len(names)], whole)
        for block in blocks[len(names) :]:
            self.memory[block] = b"unnamed"
        self.held.append(blocks)
        return blocks, names

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        before, in_use = list(blocks), {block for others in self.held for block in others}
        more = self.blocks.allocate(1)
        assert (more is not None) == (len(in_use) < COUNT)
        blocks += more[0] if more else []
        assert not in_use & set(blocks[len(before) :])
        for block in blocks[len(before) :]:
            self.memory[block] = b"unnamed"

    @rule(row=consumes(rows))
    def leave(self, row: tuple[list[int], list[bytes]]) -> None:
        blocks, _ = row
        if blocks:
            self.held = [each for each in self.held if each is not blocks]
            self.blocks.free(blocks)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        in_use = {block for others in self.held for block in others}
        assert self.blocks.num_used == len(in_use)
        self.blocks.check_integrity(self.held)


TestSharing = SharingMachine.TestCase
TestSharing.settings = examples(25, stateful_step_count=30)

TOKENS = st.lists(st.integers(0, 3), min_size=2 * KV_BLOCK_SIZE, max_size=2 * KV_BLOCK_SIZE)


@examples(40)
@given(
    first=st.tuples(
        TOKENS,
        st.sampled_from(["ada", "bo"]),
        st.sampled_from([None, "s1", "s2"]),
        st.sampled_from("ab"),
    ),
    second=st.tuples(
        TOKENS,
        st.sampled_from(["ada", "bo"]),
        st.sampled_from([None, "s1", "s2"]),
        st.sampled_from("ab"),
    ),
)
def test_a_block_hash_is_shared_only_by_the_same_owner_base_stack_and_tokens(
    first: tuple[list[int], str, str | None, str], second: tuple[list[int], str, str | None, str]
) -> None:
    one, other = (
        hashes_of(row(t, owner, stack), base) for t, owner, stack, base in (first, second)
    )
    assert (one[1] == other[1]) == (first == second)
    assert (one[0] == other[0]) == (
        (first[0][:KV_BLOCK_SIZE], *first[1:]) == (second[0][:KV_BLOCK_SIZE], *second[1:])
    )
    assert one[0] != one[1]


def test_freed_blocks_are_found_again_until_their_memory_is_needed() -> None:
    blocks = BlockManager(4)
    prompt = row(range(3 * KV_BLOCK_SIZE))
    names = hashes_of(prompt)
    taken, found = blocks.allocate(3, names) or ([], -1)
    assert found == 0
    cache_all(blocks, taken, prompt)
    blocks.free(taken)
    again, found = blocks.allocate(4, names) or ([], -1)
    assert (again[:3], found) == (taken, 3)
    blocks.free(again)
    other, found = blocks.allocate(2, []) or ([], -1)
    blocks.free(other)
    # The end of the prompt is evicted first, since its beginning is useless without nothing before
    # it.
    rest, found = blocks.allocate(3, names) or ([], -1)
    assert (rest[:2], found) == (taken[:2], 2)


def test_a_row_that_has_read_nothing_takes_blocks_that_were_filled_meanwhile() -> None:
    blocks = BlockManager(8)
    prompt = row(range(3 * KV_BLOCK_SIZE))
    names = hashes_of(prompt)
    first, _ = blocks.allocate(3, names) or ([], -1)
    second, found = blocks.allocate(4, names) or ([], -1)
    assert found == 0
    cache_all(blocks, first[:2], prompt)
    assert blocks.find_again(second, 0, names) == 2
    assert second[:2] == first[:2]
    blocks.check_integrity([first, second])
    assert blocks.num_used == 5
    assert blocks.find_again(second, 2, names) == 2


@examples(60)
@given(st.lists(TOKENS, min_size=1, max_size=5), TOKENS, st.integers(0, KV_BLOCK_SIZE))
def test_the_block_with_the_longest_common_beginning_is_found(
    cached: list[list[int]], wanted: list[int], like_first: int
) -> None:
    wanted = [*cached[0][:like_first], *wanted[like_first:]]
    blocks = BlockManager(len(cached))
    held: list[tuple[int, list[int]]] = []
    for tokens in cached:
        (block,), _ = blocks.allocate(1) or ([0], -1)
        cache_all(blocks, [block], row(tokens))
        held.append((block, tokens))
    root = next(prefix_hashes("base", row(wanted), ()))
    block, same = blocks.find_partial(root, wanted)

    def common(tokens: list[int]) -> int:
        pairs = zip(tokens, wanted[:KV_BLOCK_SIZE], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    assert same == max(common(tokens) for _, tokens in held)
    assert same == 0 or same in {common(tokens) for number, tokens in held if number == block}
    assert blocks.find_partial(next(prefix_hashes("base", row(wanted, "bo"), ())), wanted)[1] == 0


def test_a_row_is_admitted_only_with_spare_blocks_for_the_others() -> None:
    blocks = BlockManager(4)
    assert blocks.allocate(3, spare=2) is None
    assert blocks.allocate(3, spare=1) is not None
    blocks.check_integrity([[0, 1, 2]])
    with pytest.raises(RuntimeError, match="rows"):
        blocks.check_integrity([[0, 1]])


def test_a_refused_row_changes_nothing() -> None:
    blocks = BlockManager(3)
    held, _ = blocks.allocate(2, []) or ([], -1)
    assert blocks.allocate(2, []) is None
    assert blocks.num_used == 2
    blocks.free(held)
    assert blocks.allocate(3, []) is not None


@pytest.mark.parametrize(
    "tokens", [0, 1, KV_BLOCK_SIZE - 1, KV_BLOCK_SIZE, KV_BLOCK_SIZE + 1, 3 * KV_BLOCK_SIZE]
)
def test_only_whole_blocks_have_hashes(tokens: int) -> None:
    assert len(hashes_of(row(range(tokens)))) == tokens // KV_BLOCK_SIZE


def test_cleared_blocks_are_never_found_and_blocks_in_use_stay() -> None:
    blocks = BlockManager(COUNT)
    left, held = row(range(2 * KV_BLOCK_SIZE)), row(range(KV_BLOCK_SIZE), owner="bo")
    taken, _ = blocks.allocate(3, hashes_of(left)) or ([], 0)
    kept, _ = blocks.allocate(1, hashes_of(held)) or ([], 0)
    cache_all(blocks, taken[:2], left)
    cache_all(blocks, kept, held)
    blocks.free(taken)
    assert blocks.clear_cache() == sorted(taken)
    assert blocks.num_used == 1
    again = blocks.allocate(3, hashes_of(left))
    assert again is not None
    assert again[1] == 0
    assert blocks.allocate(1, hashes_of(held)) == (kept, 1)
    assert blocks.clear_cache() == []
