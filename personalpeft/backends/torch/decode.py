"""A batch of rows from prompt to last token: prefill, then one token a row and step; rows leave as they finish.

Invariants: a row's draws come from its own seed, whatever else is in the batch; a cancelled or finished row is not
computed again; nothing of a batch outlives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from personalpeft.backends.base import Piece, Row
from personalpeft.backends.text import Text, TextStream
from personalpeft.backends.torch.model import Model
from personalpeft.backends.torch.slots import SlotBank
from personalpeft.types import FinishReason, Sampling

# Colder than this, float32 overflows; the draw is as good as greedy long before.
_COLDEST = 1e-4


class _Live:
    """One row that is still being written."""

    def __init__(self, index: int, row: Row, text: Text) -> None:
        self.index = index
        self.row = row
        self.stream = TextStream(text, row.sampling.stop)
        self.written = 0
        self._generator = torch.Generator().manual_seed(row.sampling.seed)

    def pick(self, logits: Tensor) -> int:
        """The next token from ``[vocabulary]`` logits."""
        return pick(logits, self.row.sampling, self._generator)

    def take(self, token: int, stop_tokens: frozenset[int]) -> Piece:
        """What this token adds to the reply, and whether it ends it."""
        if token in stop_tokens:
            return Piece(self.index, self.stream.finish(), 0, "stop")
        self.written += 1
        piece = self.stream.push(token)
        if self.stream.stopped:
            return Piece(self.index, piece, 1, "stop")
        if self.written >= self.row.sampling.max_tokens:
            piece += self.stream.finish()
            return Piece(self.index, piece, 1, "stop" if self.stream.stopped else "length")
        return Piece(self.index, piece, 1)

    def abandon(self, why: FinishReason) -> Piece:
        return Piece(self.index, self.stream.finish(), 0, why)


def pick(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Greedy at temperature 0, else a draw from the smallest set of tokens that holds ``top_p`` (Holtzman et al. 2019,
    section 3.1).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    chances = torch.softmax(logits.float().cpu() / max(sampling.temperature, _COLDEST), dim=-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        # The likeliest token is always in: in float32 even an allowed top_p can be as good as 0.
        beyond[0] = False
        chances = torch.zeros_like(chances).scatter_(0, order, ordered.masked_fill(beyond, 0.0))
    return int(torch.multinomial(chances, 1, generator=generator))


def generate(
    model: Model, text: Text, bank: SlotBank, rows: Sequence[Row], cancelled: Callable[[], bool]
) -> Iterator[Piece]:
    """Yields the pieces of all rows in turn until each has finished."""
    from transformers import DynamicCache

    live = [_Live(index, row, text) for index, row in enumerate(rows)]
    with model.turn():
        bound = bank.bind([entry.row.stack for entry in live])
    cache = DynamicCache(config=model.module.config)
    longest = max(len(row.tokens) for row in rows)
    # Padding goes to the left, so that the last column is every row's newest token.
    tokens = torch.tensor([[0] * (longest - len(row.tokens)) + list(row.tokens) for row in rows])
    mask = torch.tensor([[0] * (longest - len(row.tokens)) + [1] * len(row.tokens) for row in rows])
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    while live:
        if cancelled():
            yield from (entry.abandon("cancelled") for entry in live)
            return
        with torch.inference_mode(), model.turn(bound):
            logits = model.module(
                input_ids=tokens.to(model.where.device),
                # A batch without padding needs no mask, and the fused kernels are faster without one.
                attention_mask=None if bool(mask.all()) else mask.to(model.where.device),
                position_ids=positions.to(model.where.device),
                past_key_values=cache,
                logits_to_keep=1,
            ).logits[:, -1]
        picked = [entry.pick(logits[column]) for column, entry in enumerate(live)]
        pieces = [entry.take(token, text.stop_tokens) for entry, token in zip(live, picked, strict=True)]
        yield from (p for p in pieces if p.text or p.tokens or p.finish)
        kept = [column for column, piece in enumerate(pieces) if piece.finish is None]
        if len(kept) < len(live):
            live = [live[column] for column in kept]
            if not live:
                return
            index = torch.tensor(kept)
            cache.batch_select_indices(index.to(model.where.device))
            mask, positions = mask[index], positions[index]
            # Of what was bound at first, not bound anew: the slots may hold something else by now.
            bound = None if bound is None else bound.keep(kept)
        tokens = torch.tensor([[picked[column]] for column in kept])
        mask = torch.cat([mask, torch.ones(len(kept), 1, dtype=mask.dtype)], dim=1)
        positions = positions[:, -1:] + 1
