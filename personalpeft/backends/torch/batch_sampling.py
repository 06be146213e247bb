"""Pick the next token of each row of a batch, and report log-probs, from tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from personalpeft.backends.sampler import Sampler, TokenLogprobs
from personalpeft.backends.torch.ops import Ops
from personalpeft.types import MAX_TOP_LOGPROBS

# Numbers of one row that are added up together.
_CHUNK = 512


def sample_tokens(logits: Tensor, samplers: Sequence[Sampler], ops: Ops) -> list[int]:
    """Return the next token of each row.

    Args:
        logits: ``[rows, vocabulary]``.
        samplers: That of each row.
        ops: For the greedy rows.
    """
    tokens: list[int] = ops.argmax(logits).tolist() if samplers else []
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    if drawn:
        values = logits[drawn].float().cpu().numpy()
        for row, row_logits in zip(drawn, values, strict=True):
            tokens[row] = samplers[row].sample(row_logits)
    return tokens


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
    selected = logits[rows].float()
    totals = _logsumexp(selected)
    picked = torch.tensor([tokens[row] for row in rows])
    logprobs = (selected[torch.arange(len(rows)), picked] - totals).tolist()
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
