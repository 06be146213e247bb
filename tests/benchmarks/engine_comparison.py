"""Prompts and measures by which ``bench engines`` and parity tests compare engines."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.load_users import question
from personalpeft.backends.sequence import Tokens
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
"""The text whose log-probs are compared, if both engines report them."""


@dataclass(frozen=True, slots=True)
class GreedyTokens:
    """The first greedy tokens after each prompt, and their log-probs (nats) where requested."""

    tokens: tuple[Tokens, ...]
    logprobs: tuple[tuple[float, ...], ...]


def prompts(stack: Stack) -> list[Request]:
    """Return the prompts of a stack, as ``read_greedy_tokens`` sends them."""
    return [
        Request("somebody", (Message("user", text),), stack, Sampling(max_tokens=AGREE))
        for text in PROMPTS
    ]


def read_greedy_tokens(engine: Engine, stack: Stack, *, logprobs: bool = False) -> GreedyTokens:
    """Return an engine's greedy tokens after the prompts."""
    asked = [replace(request, logprobs=logprobs) for request in prompts(stack)]
    tokens: list[Tokens] = [() for _ in asked]
    known: list[tuple[float, ...]] = [() for _ in asked]
    for piece in engine.stream(asked):
        tokens[piece.index] += piece.tokens
        known[piece.index] += piece.logprobs
    return GreedyTokens(tuple(tokens), tuple(known))


def agreement(
    one: GreedyTokens, other: GreedyTokens, logprobs: Sequence[float], others: Sequence[float]
) -> dict[str, float]:
    """Compare the replies of two engines and their log-probs of the same tokens.

    Of ``prompts``, ``same`` have equal greedy beginnings on both engines. ``tokens_alike`` is the
    mean number of equal first tokens. ``logprob_difference`` is the mean absolute difference of
    log-probs (nats) of one text: a fixed one, or the one engine's reply.
    """
    alike = [_alike(a, b) for a, b in zip(one.tokens, other.tokens, strict=True)]
    differences = [abs(a - b) for a, b in zip(logprobs, others, strict=True)]
    return {
        "prompts": len(alike),
        "same": sum(count >= AGREE for count in alike),
        "tokens_alike": round(statistics.fmean(alike), 1),
        "logprob_difference": round(statistics.fmean(differences), 4),
    }


def first_token(engine: Engine, stack: Stack, number: int) -> float:
    """Return the milliseconds to the first token of a new prompt of an uncached user."""
    request = Request(f"somebody-{number}", question(number, number), stack, Sampling(max_tokens=1))
    began = time.perf_counter()
    engine.complete([request])
    return (time.perf_counter() - began) * 1000


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal first tokens; all of them if both ended alike."""
    if tuple(one) == tuple(other):
        return AGREE
    return next(n for n in range(len(one) + 1) if one[: n + 1] != other[: n + 1])
