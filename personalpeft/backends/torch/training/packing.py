"""Many continuations as one sequence without padding and without reading any shared beginning twice.

The continuations of a group are laid into a trie: each distinct prefix is one node, computed once, however many
continuations share it (a system prompt, a question with a chosen and a rejected answer). A node sees itself and its
ancestors, and its position is its depth, so the model computes for each continuation just what it would compute for it
alone. Groups lie one after another and share nothing, so each can have adapters of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from personalpeft.backends.base import Continuation


@dataclass(frozen=True, slots=True)
class Segment:
    """The nodes ``begin`` to ``end``, each the child of the one before, after the nodes ``ancestors`` from the root on."""

    begin: int
    end: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """``tokens`` and ``positions`` are ``[n]``; every node is in one of ``stretches``; ``reads[k]`` are the nodes whose
    output predicts the completion of continuation k, one for each of its tokens; ``ends`` is where each group ends.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    reads: tuple[npt.NDArray[np.int64], ...]
    ends: tuple[int, ...]

    @property
    def visible(self) -> npt.NDArray[np.bool_]:
        """``[n, n]``: whether node i sees node j. The square of the pack, so only for who has no other way."""
        seen = np.zeros((len(self.tokens), len(self.tokens)), dtype=np.bool_)
        for stretch in self.segments:
            own = np.arange(stretch.begin, stretch.end)
            seen[stretch.begin : stretch.end, list(stretch.ancestors)] = True
            seen[stretch.begin : stretch.end, stretch.begin : stretch.end] = (
                own[None, :] <= own[:, None]
            )
        return seen


def pack(*groups: Sequence[Continuation]) -> PackedSequence:
    """Lays each group of continuations into one trie. Each needs a prompt and a completion of at least one token."""
    tokens: list[int] = []
    positions: list[int] = []
    stretches: list[Segment] = []
    reads = []
    ends = []
    for group in groups:
        children: dict[tuple[int, int], int] = {}
        for item in group:
            if not item.prompt or not item.completion:
                raise ValueError("a continuation needs a prompt and a completion")
            node, path, begin = -1, [], len(tokens)
            # The last token of a completion predicts nothing that is asked for, so it is not read.
            for depth, token in enumerate((*item.prompt, *item.completion[:-1])):
                known = children.get((node, token))
                if known is None:
                    known = children[node, token] = len(tokens)
                    tokens.append(token)
                    positions.append(depth)
                node = known
                path.append(node)
            new = len(tokens) - begin
            if new:
                stretches.append(Segment(begin, len(tokens), tuple(path[: len(path) - new])))
            reads.append(np.array(path[len(item.prompt) - 1 :], dtype=np.int64))
        ends.append(len(tokens))
    return PackedSequence(
        np.array(tokens, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        tuple(stretches),
        tuple(reads),
        tuple(ends),
    )
