"""What ``bench engines`` and the tests of parity ask of every engine: what to write, what to find likely, how soon to begin."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.load_users import question
from personalpeft.backends.base import Tokens
from personalpeft.engine.engine import Engine, Request
from personalpeft.types import Message, Sampling, Stack

AGREE = 32
"""How many of the first greedy tokens are compared."""
PROMPTS = (
    "What is the capital of France?",
    "Write a short note to a neighbour about a parcel.",
    "How do I boil an egg?",
    "Explain why the sky is blue to a child.",
    "Give me three names for a black cat.",
    "What should I pack for a weekend in the mountains?",
    "Translate 'good morning' into Spanish.",
    "Tell me something about the moon.",
    "How does one make tea?",
    "Write one sentence about the sea.",
)
"""What engines are asked to say the same to."""
FIXED = " A good answer begins with what matters most, says it in plain words, and ends where there is nothing left to say."
"""The text whose log-probs they are compared by, where both can be asked for those."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of so many prompts, how many begin with the same greedy tokens on both engines, how many tokens on average are the same
    before the first that differs, and the mean absolute difference of the log-probs of one continuation (nats): a fixed one,
    or what the one engine wrote.
    """

    prompts: int
    same: int
    tokens_alike: float
    logprob_difference: float


@dataclass(frozen=True, slots=True)
class Said:
    """The first greedy tokens after each prompt, and how likely each was (nats) where that was asked for."""

    tokens: tuple[Tokens, ...]
    logprobs: tuple[tuple[float, ...], ...]


def prompts(stack: Stack) -> list[Request]:
    """The prompts for a stack, as ``said`` asks them."""
    return [
        Request("somebody", (Message("user", text),), stack, Sampling(max_tokens=AGREE))
        for text in PROMPTS
    ]


def said(engine: Engine, stack: Stack, *, logprobs: bool = False) -> Said:
    """What an engine writes after the prompts."""
    asked = [replace(request, logprobs=logprobs) for request in prompts(stack)]
    tokens: list[Tokens] = [() for _ in asked]
    known: list[tuple[float, ...]] = [() for _ in asked]
    for piece in engine.stream(asked):
        tokens[piece.index] += piece.tokens
        known[piece.index] += piece.logprobs
    return Said(tuple(tokens), tuple(known))


def agreement(
    one: Said, other: Said, logprobs: Sequence[float], others: Sequence[float]
) -> Agreement:
    """Of what two engines wrote, and of the log-probs that they give to the same tokens."""
    alike = [_alike(a, b) for a, b in zip(one.tokens, other.tokens, strict=True)]
    return Agreement(
        prompts=len(alike),
        same=sum(count >= AGREE for count in alike),
        tokens_alike=round(statistics.fmean(alike), 1),
        logprob_difference=round(
            statistics.fmean(abs(a - b) for a, b in zip(logprobs, others, strict=True)), 4
        ),
    )


def first_token(engine: Engine, stack: Stack, number: int) -> float:
    """Milliseconds to the first token of somebody of whom nothing is kept; another number asks something else."""
    request = Request(f"somebody-{number}", question(number, number), stack, Sampling(max_tokens=1))
    began = time.perf_counter()
    engine.complete([request])
    return (time.perf_counter() - began) * 1000


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the first on; all that are compared where both ended alike."""
    if tuple(one) == tuple(other):
        return AGREE
    return next(n for n in range(len(one) + 1) if one[: n + 1] != other[: n + 1])
