"""Pack continuations into one sequence, without padding and with shared prefixes read once.

Each group of continuations is a trie. A node is one token after one prefix. It sees itself and its
ancestors, and its position is its depth. So the model computes for each continuation what it would
compute for it alone. Tokens that no continuation reads fill a group up. Groups are concatenated and
share nothing, so each can have its own adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from personalpeft.backends.base import Continuation
from personalpeft.backends.sequence import count_common_prefix
from personalpeft.backends.torch.ops.training_ops import Segments

# Groups are filled up to a multiple of this. Libraries keep compiled code for each number of rows
# of each product, 0.7 MB for one: half a gigabyte in a learn where every step had another number.
_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Tokens of many continuations. Tensors are int64 in host memory.

    Attributes:
        tokens: ``[n]``.
        positions: ``[n]``.
        segments: Runs of nodes, each the child of the one before. Each node is in one of them.
        reads: For each continuation the nodes whose outputs predict its completion tokens.
        groups: The tokens of each group.
    """

    tokens: Tensor
    positions: Tensor
    segments: Segments
    reads: tuple[Tensor, ...]
    groups: tuple[slice, ...]

    @property
    def visible(self) -> Tensor:
        """Bool ``[n, n]``: whether node i sees node j. For models without fused attention."""
        ancestors = self.segments.ancestors
        seen = torch.zeros((len(self.tokens), len(self.tokens)), dtype=torch.bool)
        for begin, end, depth, first, _ in self.segments.table.tolist():
            seen[begin:end, ancestors[first : first + depth]] = True
            seen[begin:end, begin:end] = torch.ones((end - begin,) * 2, dtype=torch.bool).tril()
        return seen


def pack(*groups: Sequence[Continuation]) -> PackedSequence:
    """Pack each group into a trie. Raise ``ValueError`` for an empty prompt or completion."""
    tokens: list[int] = []
    positions: list[int] = []
    table: list[tuple[int, ...]] = []
    ancestors: list[int] = []
    total = 0
    reads = []
    spans = []
    for group in groups:
        first = len(tokens)
        children: dict[tuple[int, int], int] = {}
        for item in group:
            if not item.prompt or not item.completion:
                raise ValueError("a continuation must have a prompt and a completion, got none")
            node, path, begin = -1, [], len(tokens)
            # The last completion token predicts nothing that is scored.
            for depth, token in enumerate((*item.prompt, *item.completion[:-1])):
                known = children.get((node, token))
                if known is None:
                    known = children[node, token] = len(tokens)
                    tokens.append(token)
                    positions.append(depth)
                node = known
                path.append(node)
            if len(tokens) > begin:
                shared = path[: begin - len(tokens)]
                table.append((begin, len(tokens), len(shared), len(ancestors), total))
                ancestors += shared
                total += len(path)
            reads.append(torch.tensor(path[len(item.prompt) - 1 :]))
        if missing := -len(tokens) % _MULTIPLE:
            table.append((len(tokens), len(tokens) + missing, 0, len(ancestors), total))
            tokens += [group[0].prompt[0]] * missing
            positions += range(missing)
            total += missing
        spans.append(slice(first, len(tokens)))
    segments = Segments(
        torch.tensor(table, dtype=torch.int64), torch.tensor(ancestors, dtype=torch.int64), total
    )
    return PackedSequence(
        torch.tensor(tokens, dtype=torch.int64),
        torch.tensor(positions, dtype=torch.int64),
        segments,
        tuple(reads),
        tuple(spans),
    )


def group_by_prefix(
    items: Sequence[Continuation], max_tokens: int, max_reads: int
) -> list[list[int]]:
    """Group continuations whose prompts begin alike, and return the places of each group.

    Args:
        items: The continuations.
        max_tokens: The most tokens of a group. A larger continuation is alone.
        max_reads: The most completion tokens of a group.
    """
    groups: list[list[int]] = []
    tokens, reads, before = 0, 0, tuple[int, ...]()
    for place in sorted(range(len(items)), key=lambda place: items[place].prompt):
        prompt, size = tuple(items[place].prompt), len(items[place].completion)
        shared = count_common_prefix(before, prompt)
        tokens, reads, before = tokens + len(prompt) - shared + size, reads + size, prompt
        if not groups or tokens > max_tokens or reads > max_reads:
            groups.append([])
            tokens, reads = len(prompt) + size, size
        groups[-1].append(place)
    return groups


def split_by_size(sizes: Sequence[int], max_size: int) -> list[slice]:
    """Group neighbours up to ``max_size`` together; a larger one is a group of its own."""
    groups: list[slice] = []
    first, total = 0, 0
    for number, size in enumerate(sizes):
        if number > first and total + size > max_size:
            groups.append(slice(first, number))
            first, total = number, 0
        total += size
    return [*groups, slice(first, len(sizes))] if sizes else []
