"""What the owner of the key-value blocks promises: nobody's block is written to, or found, by anybody else."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from example_counts import examples
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from personalpeft.backends.base import Row
from personalpeft.backends.torch.block_manager import Blocks, first_name, next_name, whole_blocks
from personalpeft.backends.torch.ops.base import BLOCK
from personalpeft.types import Sampling

COUNT = 12


def names_of(row: Row, base: str = "base") -> list[bytes]:
    return list(
        itertools.accumulate(whole_blocks(row.tokens), next_name, initial=first_name(base, row))
    )[1:]


def row(tokens: Sequence[int], owner: str = "ada", stack: str | None = None) -> Row:
    return Row(tuple(tokens), stack, Sampling(), owner)


class Sharing(RuleBasedStateMachine):
    """Rows of three users come, fill blocks and go; what each block holds is kept beside, as it would be in memory."""

    rows = Bundle("rows")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(COUNT)
        self.memory: dict[int, bytes] = {}
        self.held: list[list[int]] = []

    @rule(
        target=rows,
        owner=st.sampled_from(["ada", "bo", "cy"]),
        prompt=st.lists(st.sampled_from([1, 2]), min_size=0, max_size=4),
        more=st.integers(0, 2),
    )
    def admit(self, owner: str, prompt: list[int], more: int) -> tuple[list[int], list[bytes]]:
        names = names_of(row([token for token in prompt for _ in range(BLOCK)], owner))
        taken = self.blocks.take(len(names) + more, names)
        if taken is None:
            assert len(names) + more > COUNT - self.blocks.used
            return [], []
        blocks, found = taken
        assert len(set(blocks)) == len(blocks) == len(names) + more
        for block, name in zip(blocks[:found], names, strict=False):
            assert self.memory[block] == name, "found what was not computed for it"
        in_use = {block for others in self.held for block in others}
        assert not in_use & set(blocks[found:]), "another row's block would be written to"
        for block, name in zip(blocks[found:], names[found:], strict=False):
            self.memory[block] = name
            self.blocks.seal(block, name)
        for block in blocks[len(names) :]:
            self.memory[block] = b"unnamed"
        self.held.append(blocks)
        return blocks, names

    @rule(row=consumes(rows))
    def leave(self, row: tuple[list[int], list[bytes]]) -> None:
        blocks, _ = row
        if blocks:
            self.held.remove(blocks)
            self.blocks.give_back(blocks)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        in_use = {block for others in self.held for block in others}
        assert self.blocks.used == len(in_use)
        assert self.blocks.used + self.blocks.kept <= COUNT


TestSharing = Sharing.TestCase
TestSharing.settings = examples(60, stateful_step_count=40)

TOKENS = st.lists(st.integers(0, 3), min_size=2 * BLOCK, max_size=2 * BLOCK)


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
def test_a_name_is_shared_only_by_the_same_owner_base_stack_and_tokens(
    first: tuple[list[int], str, str | None, str], second: tuple[list[int], str, str | None, str]
) -> None:
    one, other = (names_of(row(t, owner, stack), base) for t, owner, stack, base in (first, second))
    assert (one[1] == other[1]) == (first == second)
    assert (one[0] == other[0]) == (
        (first[0][:BLOCK], *first[1:]) == (second[0][:BLOCK], *second[1:])
    )
    assert one[0] != one[1]


def test_what_was_left_is_found_again_until_the_room_is_needed() -> None:
    blocks = Blocks(4)
    names = names_of(row(range(3 * BLOCK)))
    taken, found = blocks.take(3, names) or ([], -1)
    assert found == 0
    for block, name in zip(taken, names, strict=True):
        blocks.seal(block, name)
    blocks.give_back(taken)
    again, found = blocks.take(4, names) or ([], -1)
    assert (again[:3], found) == (taken, 3)
    blocks.give_back(again)
    other, found = blocks.take(2, []) or ([], -1)
    blocks.give_back(other)
    # The end of the prompt had to go first, since its beginning can be found without it.
    rest, found = blocks.take(3, names) or ([], -1)
    assert (rest[:2], found) == (taken[:2], 2)


def test_a_row_that_does_not_fit_changes_nothing() -> None:
    blocks = Blocks(3)
    held, _ = blocks.take(2, []) or ([], -1)
    assert blocks.take(2, []) is None
    assert (blocks.used, blocks.kept) == (2, 0)
    blocks.give_back(held)
    assert blocks.take(3, []) is not None


@pytest.mark.parametrize("tokens", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_only_whole_blocks_have_names(tokens: int) -> None:
    assert len(names_of(row(range(tokens)))) == tokens // BLOCK


def test_what_is_forgotten_is_found_by_nobody_and_what_is_in_use_stays() -> None:
    blocks = Blocks(COUNT)
    left, held = row(range(2 * BLOCK)), row(range(BLOCK), owner="bo")
    taken, _ = blocks.take(3, names_of(left)) or ([], 0)
    kept, _ = blocks.take(1, names_of(held)) or ([], 0)
    for block, name in zip(taken, names_of(left), strict=False):
        blocks.seal(block, name)
    blocks.seal(kept[0], names_of(held)[0])
    blocks.give_back(taken)
    assert blocks.forget() == sorted(taken)
    assert (blocks.kept, blocks.used) == (0, 1)
    anew = blocks.take(3, names_of(left))
    assert anew is not None
    assert anew[1] == 0
    assert blocks.take(1, names_of(held)) == (kept, 1)
    assert blocks.forget() == []
