"""Many continuations as one sequence without padding and without reading any shared beginning twice.

The continuations of a batch are laid into a trie: each distinct prefix is one node, computed once, however many
continuations share it (a system prompt, a question with a chosen and a rejected answer). A node sees itself and its
ancestors, and its position is its depth, so the model computes for each continuation just what it would compute for it
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from personalpeft.backends.base import Continuation


@dataclass(frozen=True, slots=True)
class Packed:
    """``tokens`` and ``positions`` are ``[n]``; ``visible[i, j]`` says whether node i sees node j; ``reads[k]`` are the
    nodes whose output predicts the completion of continuation k, one for each of its tokens.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    visible: npt.NDArray[np.bool_]
    reads: tuple[npt.NDArray[np.int64], ...]


def pack(continuations: Sequence[Continuation]) -> Packed:
    """Lays continuations into one trie. Each needs a prompt and a completion of at least one token."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    reads = []
    for item in continuations:
        if not item.prompt or not item.completion:
            raise ValueError("a continuation needs a prompt and a completion")
        node, path = -1, []
        # The last token of a completion predicts nothing that is asked for, so it is not read.
        for depth, token in enumerate((*item.prompt, *item.completion[:-1])):
            known = children.get((node, token))
            if known is None:
                known = children[node, token] = len(tokens)
                tokens.append(token)
                positions.append(depth)
                parents.append(node)
            node = known
            path.append(node)
        reads.append(np.array(path[len(item.prompt) - 1 :], dtype=np.int64))
    visible = np.zeros((len(tokens), len(tokens)), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, node] = True
    return Packed(np.array(tokens, dtype=np.int64), np.array(positions, dtype=np.int64), visible, tuple(reads))
