"""Which token comes next, for each row by its own numbers and its own random sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from personalpeft.backends.sequence_output import Known
from personalpeft.backends.torch.ops import Kernels
from personalpeft.types import MAX_TOP_LOGPROBS, Sampling

# Colder than this, float32 overflows; the draw is as good as greedy long before.
_COLDEST = 1e-4


@dataclass(frozen=True, slots=True)
class Picker:
    """How one row picks. The generator's state is its own, so what else is in the batch changes nothing."""

    sampling: Sampling
    generator: torch.Generator

    @staticmethod
    def of(sampling: Sampling) -> Picker:
        return Picker(sampling, torch.Generator().manual_seed(sampling.seed))


def pick(logits: Tensor, pickers: Sequence[Picker], kernels: Kernels) -> list[int]:
    """The next token of each row, from ``[rows, vocabulary]`` logits."""
    picked: list[int] = kernels.largest(logits).tolist() if pickers else []
    for row, picker in enumerate(pickers):
        if picker.sampling.temperature > 0:
            picked[row] = _draw(logits[row], picker)
    return picked


def _draw(logits: Tensor, picker: Picker) -> int:
    """A draw from the smallest set of tokens that holds ``top_p`` (Holtzman et al. 2019, section 3.1)."""
    sampling = picker.sampling
    chances = torch.softmax(logits.float().cpu() / max(sampling.temperature, _COLDEST), dim=-1)
    if sampling.top_p < 1:
        ordered, order = chances.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p
        # The likeliest token is always in: in float32 even an allowed top_p can be as good as 0.
        beyond[0] = False
        chances = torch.zeros_like(chances).scatter_(0, order, ordered.masked_fill(beyond, 0.0))
    return int(torch.multinomial(chances, 1, generator=picker.generator))


def logprobs(logits: Tensor, picked: Sequence[int], rows: Mapping[int, int]) -> dict[int, Known]:
    """Of what the named rows picked, each with as many of the likeliest as it asks for."""
    if not rows:
        return {}
    wide = logits[list(rows)].float()
    all_of_it = _logsumexp(wide)
    own = wide[torch.arange(len(rows)), torch.tensor([picked[row] for row in rows])] - all_of_it
    known = {row: Known(each) for row, each in zip(rows, own.tolist(), strict=True)}
    asking = [place for place, row in enumerate(rows) if rows[row]]
    if asking:
        # Always as many: of equals the choice may depend on how many are taken, and one row must not decide that for another.
        values, tokens = wide[asking].topk(min(MAX_TOP_LOGPROBS, wide.shape[-1]), sorted=True)
        said = zip(tokens.tolist(), (values - all_of_it[asking, None]).tolist(), strict=True)
        numbers = list(rows)
        for place, (row_tokens, row_values) in zip(asking, said, strict=True):
            row = numbers[place]
            top = tuple(zip(row_tokens, row_values, strict=True))[: rows[row]]
            known[row] = Known(known[row].logprob, top)
    return known


# Numbers that are added up first, for each row apart.
_RUN = 512


def _logsumexp(x: Tensor) -> Tensor:
    """Return ``log(sum(exp(row)))`` of each row of ``[rows, n]``, with the same bits for any number of rows.

    The framework shares one long row out to its threads and several rows whole, and so adds up in other orders. Runs of fixed
    length are added up whole in both cases.
    """
    rest = -x.shape[-1] % _RUN
    runs = torch.nn.functional.pad(x, (0, rest), value=-torch.inf).view(len(x), -1, _RUN)
    return runs.logsumexp(-1).logsumexp(-1)
