"""Pack continuations into one sequence, without padding and with shared prefixes read once.

Each group of continuations is a trie. A node is one token after one prefix. It sees itself and its
ancestors, and its position is its depth. So the model computes for each continuation what it would
compute for it alone. Groups are concatenated and share nothing, so each can have its own adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from personalpeft.backends.base import Continuation


@dataclass(frozen=True, slots=True)
class Segment:
    """Nodes ``begin`` to ``end``, each the child of the one before, after ``ancestors``."""

    begin: int
    end: int
    ancestors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """Tokens of many continuations.

    Attributes:
        tokens: ``[n]``.
        positions: ``[n]``.
        segments: Each node is in one of them.
        reads: For each continuation the nodes whose outputs predict its completion tokens.
        ends: Where each group ends.
    """

    tokens: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    segments: tuple[Segment, ...]
    reads: tuple[npt.NDArray[np.int64], ...]
    ends: tuple[int, ...]

    @property
    def visible(self) -> npt.NDArray[np.bool_]:
        """``[n, n]``: whether node i sees node j. For models without fused attention."""
        seen = np.zeros((len(self.tokens), len(self.tokens)), dtype=np.bool_)
        for segment in self.segments:
            own = np.arange(segment.begin, segment.end)
            seen[segment.begin : segment.end, list(segment.ancestors)] = True
            seen[segment.begin : segment.end, segment.begin : segment.end] = (
                own[None, :] <= own[:, None]
            )
        return seen


def pack(*groups: Sequence[Continuation]) -> PackedSequence:
    """Pack each group into a trie. Raise ``ValueError`` for an empty prompt or completion."""
    tokens: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    reads = []
    ends = []
    for group in groups:
        children: dict[tuple[int, int], int] = {}
        for item in group:
            if not item.prompt or not item.completion:
                raise ValueError(
                    "a continuation needs a prompt and a completion of at least one token"
                )
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
            new = len(tokens) - begin
            if new:
                segments.append(Segment(begin, len(tokens), tuple(path[: len(path) - new])))
            reads.append(np.array(path[len(item.prompt) - 1 :], dtype=np.int64))
        ends.append(len(tokens))
    return PackedSequence(
        np.array(tokens, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        tuple(segments),
        tuple(reads),
        tuple(ends),
    )
