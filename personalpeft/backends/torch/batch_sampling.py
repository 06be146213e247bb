"""Pick the next token of each row of a batch, and report log-probs, from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from personalpeft.backends.sampler import Draw, Sampler, TokenLogprobs
from personalpeft.backends.torch.host_to_device import to_device
from personalpeft.backends.torch.ops import Ops
from personalpeft.types import MAX_TOP_LOGPROBS

# Numbers of one row that are added up together.
_CHUNK = 512


def sample_tokens(logits: Tensor, samplers: Sequence[Sampler], ops: Ops) -> list[int]:
    """Return the next token of each row. On a GPU this is the only wait of a step.

    Args:
        logits: ``[rows, vocabulary]``.
        samplers: That of each row.
        ops: For the greedy rows.
    """
    if not samplers:
        return []
    tokens = ops.argmax(logits)
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if drawn and logits.device.type == "cpu":
        for row, row_logits in zip(drawn, logits[drawn].float().numpy(), strict=True):
            tokens[row] = samplers[row].sample(row_logits)
    elif drawn:
        draws = [samplers[row].draw() for row in drawn]
        (rows,) = to_device([np.array(drawn, np.int64)], logits.device)
        tokens = tokens.index_copy(0, rows, draw_tokens(logits[rows].float(), draws))
    picked: list[int] = tokens.tolist()
    return picked


def draw_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return each row's token as ``Sampler.sample`` would, up to the rounding of exp and sums.

    Args:
        logits: ``[rows, vocabulary]``, float32.
        draws: That of each row.

    Returns:
        The tokens on the logits' device. Nothing waits for them.
    """
    size = logits.shape[-1]
    (numbers,) = to_device([np.array(draws, np.float64)], logits.device)
    temperature, top_p, top_k, number = numbers[:, :, None].unbind(1)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperature.float()).exp()
    if any(0 < draw.top_k < size for draw in draws):
        order = logits.sort(dim=-1, descending=True, stable=True).indices
        ranks = torch.arange(size, device=logits.device)
        kept = ranks < top_k.where(top_k > 0, size)
        weights = weights * torch.zeros_like(kept).scatter(1, order, kept)
    tokens = torch.arange(size, device=logits.device).expand(logits.shape)
    if any(draw.top_p < 1 for draw in draws):
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        weights, tokens = ordered.where(top_p < 1, weights), order.where(top_p < 1, tokens)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    # The last token of the top-p set; without one, the last token of any weight.
    last = torch.searchsorted(cumulative, top_p * cumulative[:, -1:]).clamp(max=size - 1)
    drawn = torch.searchsorted(cumulative, number * cumulative.gather(1, last), right=True)
    return tokens.gather(1, drawn.minimum(last))[:, 0]


def compute_logprobs(
    logits: Tensor, tokens: Sequence[int], top_counts: Mapping[int, int]
) -> dict[int, TokenLogprobs]:
    """Return the log-probs of the tokens that some rows picked.

    Args:
        logits: ``[rows, vocabulary]``.
        tokens: The token that each row picked.
        top_counts: How many of the likeliest tokens to report, by row.
    """
    if not top_counts:
        return {}
    rows = list(top_counts)
    indices, picked = to_device(
        [np.array(rows, np.int64), np.array([[tokens[row]] for row in rows], np.int64)],
        logits.device,
    )
    selected = logits[indices].float()
    totals = _logsumexp(selected)
    logprobs = (selected.gather(1, picked)[:, 0] - totals).tolist()
    # The same k for every row: the order in which topk returns equal tokens depends on k. One row
    # must not change the result of another.
    top_values, top_tokens = selected.topk(min(MAX_TOP_LOGPROBS, selected.shape[-1]), sorted=True)
    tops = [
        tuple(zip(*pair, strict=True))[: top_counts[row]]
        for row, *pair in zip(
            rows, top_tokens.tolist(), (top_values - totals[:, None]).tolist(), strict=True
        )
    ]
    return {
        row: TokenLogprobs(logprob, top)
        for row, logprob, top in zip(rows, logprobs, tops, strict=True)
    }


def _logsumexp(x: Tensor) -> Tensor:
    """Return ``log(sum(exp(row)))`` of each row of ``[rows, n]``.

    The bits are the same for any number of rows. Torch divides one long row between threads, but
    not several rows. That changes the order of its sums. Chunks of a fixed length do not.
    """
    padding = -x.shape[-1] % _CHUNK
    chunks = torch.nn.functional.pad(x, (0, padding), value=-torch.inf).view(len(x), -1, _CHUNK)
    return chunks.logsumexp(-1).logsumexp(-1)
