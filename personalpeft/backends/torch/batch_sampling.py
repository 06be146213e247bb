"""Pick the next token of each row of a batch, and report log-probs, from tensors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from personalpeft.backends.sampler import MAX_WEIGHT, Draw, Sampler, TokenLogprobs
from personalpeft.backends.torch.host_to_device import to_device
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.types import MAX_TOP_LOGPROBS

# Numbers of one row that are added up together.
_CHUNK = 512
# How many of the likeliest tokens a device orders at first. One kernel of CUDA sorts that many.
_LIKELIEST = 4096


def sample_tokens(
    logits: Tensor, samplers: Sequence[Sampler], top_counts: Mapping[int, int], ops: Ops
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Return the next token of each row, and the log-probs of the tokens of some rows.

    Args:
        logits: ``[rows, vocabulary]``.
        samplers: That of each row.
        top_counts: How many of the likeliest tokens to report, by row.
        ops: For the greedy rows.
    """
    if not samplers:
        return [], {}
    if logits.device.type != "cpu":
        return sample_on_device(logits, samplers, top_counts, ops)
    tokens = ops.argmax(logits)
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    for row, row_logits in zip(drawn, logits[drawn].float().numpy(), strict=True):
        tokens[row] = samplers[row].sample(row_logits)
    reported = torch.tensor(list(top_counts), dtype=torch.int64)
    picked, *logprobs = _read(tokens, *_compute_logprobs(logits, tokens, reported))
    return list(map(int, picked)), _by_row(top_counts, *logprobs)


def sample_on_device(
    logits: Tensor, samplers: Sequence[Sampler], top_counts: Mapping[int, int], ops: Ops
) -> tuple[list[int], dict[int, TokenLogprobs]]:
    """Return what ``sample_tokens`` does. The host sends at most one copy, and waits once.

    A top-p set of more than some thousand tokens costs a second wait.
    """
    drawn = [row for row, sampler in enumerate(samplers) if not sampler.is_greedy]
    draws = [samplers[row].draw() for row in drawn]
    tokens = ops.argmax(logits)
    if not drawn and not top_counts:
        return tokens.tolist(), {}
    rows, reported, numbers = to_device(
        [
            np.array(drawn, np.int64),
            np.array(list(top_counts), np.int64),
            np.array(draws, np.float64).reshape(len(draws), len(Draw._fields)),
        ],
        logits.device,
    )
    is_found = tokens.new_empty(0)
    for most in (_LIKELIEST, logits.shape[-1]):
        if drawn:
            found, is_found = draw_tokens(logits[rows].float(), draws, numbers, most)
            tokens = tokens.index_copy(0, rows, found)
        picked, all_found, *logprobs = _read(
            tokens, is_found, *_compute_logprobs(logits, tokens, reported)
        )
        if all(all_found):
            break
    return list(map(int, picked)), _by_row(top_counts, *logprobs)


def draw_tokens(
    logits: Tensor, draws: Sequence[Draw], numbers: Tensor, most: int
) -> tuple[Tensor, Tensor]:
    """Return each row's token as ``Sampler.sample`` would, up to the rounding of exp.

    Args:
        logits: ``[rows, vocabulary]``, float32.
        draws: That of each row.
        numbers: The draws on the logits' device, float64.
        most: How many of the likeliest tokens to order for a row without ``top_k``.

    Returns:
        The tokens, and whether each is right. It is not where a top-p set has more than ``most``
        tokens. Nothing waits for them.
    """
    size = logits.shape[-1]
    temperature, top_p, top_k, number = numbers[:, :, None].unbind(1)
    drops = logits.amax(-1, keepdim=True) - logits
    weights = (drops / -temperature.float()).exp().mul(MAX_WEIGHT).round()
    counts = [draw.top_k or most for draw in draws if draw.top_k or draw.top_p < 1]
    if counts:
        count = min(size, max(counts))
        # As integers, numbers that are not negative are in the same order. No two keys are equal.
        keys = drops.view(torch.int32).long() << 32 | torch.arange(size, device=logits.device)
        first = keys.topk(count, largest=False).values
        last = first.gather(1, (top_k.long() - 1).clamp(0, count - 1))
        weights = weights.where((top_k == 0) | (keys <= last), 0)
    in_order = weights.cumsum(-1, dtype=torch.float64)
    total = in_order[:, -1:]
    tokens = torch.searchsorted(in_order, number * total, right=True).clamp(max=size - 1)
    if all(draw.top_p >= 1 for draw in draws):
        return tokens[:, 0], torch.ones_like(tokens, dtype=torch.bool)[:, 0]
    likeliest = first & 0xFFFFFFFF
    cumulative = weights.gather(1, likeliest).cumsum(-1, dtype=torch.float64)
    end = torch.searchsorted(cumulative, top_p * total).clamp(max=count - 1)
    place = torch.searchsorted(cumulative, number * cumulative.gather(1, end), right=True)
    drawn = likeliest.gather(1, place.clamp(max=count - 1))
    is_found = (top_p >= 1) | (cumulative[:, -1:] >= top_p * total)
    return drawn.where(top_p < 1, tokens)[:, 0], is_found[:, 0]


def _compute_logprobs(logits: Tensor, tokens: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Return the log-probs of some rows' tokens, and of the likeliest tokens; none without rows.

    They are log-probs ``[n]``, the largest log-probs ``[n, k]`` and their tokens ``[n, k]``.
    """
    if not len(rows):
        return ()
    selected = logits[rows].float()
    totals = _logsumexp(selected)[:, None]
    # The same k for every row: the order in which topk returns equal tokens depends on k. One row
    # must not change the result of another.
    top_values, top_tokens = selected.topk(min(MAX_TOP_LOGPROBS, selected.shape[-1]), sorted=True)
    return selected.gather(1, tokens[rows][:, None]) - totals, top_values - totals, top_tokens


def _read(*tensors: Tensor) -> list[list[float]]:
    """Return the numbers of tensors, after one wait for the device."""
    numbers = iter(torch.cat([tensor.flatten().double() for tensor in tensors]).tolist())
    return [list(itertools.islice(numbers, tensor.numel())) for tensor in tensors]


def _by_row(top_counts: Mapping[int, int], *logprobs: Sequence[float]) -> dict[int, TokenLogprobs]:
    """Return what ``_compute_logprobs`` computed, by row."""
    if not top_counts:
        return {}
    chosen, values, tokens = logprobs
    begins = range(0, len(values), len(values) // len(top_counts))
    return {
        row: TokenLogprobs(
            logprob,
            tuple(
                zip(map(int, tokens[begin : begin + top]), values[begin : begin + top], strict=True)
            ),
        )
        for (row, top), logprob, begin in zip(top_counts.items(), chosen, begins, strict=True)
    }


def _logsumexp(x: Tensor) -> Tensor:
    """Return ``log(sum(exp(row)))`` of each row of ``[rows, n]``.

    The bits are the same for any number of rows. Torch divides one long row between threads, but
    not several rows. That changes the order of its sums. Chunks of a fixed length do not.
    """
    padding = -x.shape[-1] % _CHUNK
    chunks = torch.nn.functional.pad(x, (0, padding), value=-torch.inf).view(len(x), -1, _CHUNK)
    return chunks.logsumexp(-1).logsumexp(-1)
