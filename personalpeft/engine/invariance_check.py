"""Test whether replies depend on what is cached or on the other requests in the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from personalpeft.backends.sequence import OutputChunk, Request
from personalpeft.engine.engine import Engine
from personalpeft.engine.request import OutputStream
from personalpeft.types import Message, Sampling, Stack

_MAX_TOKENS = 8
# Prompts shorter than a cache block, of several blocks, and longer than what one step reads beside
# other requests.
_WORD_COUNTS = (2, 9, 40, 150)
_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ri", "sa", "te", "vo")
# The tokens and log-probs of one reply.
_Reply: TypeAlias = tuple[tuple[int, ...], tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """How many replies were repeated, and how many differed in a token or a bit of a log-prob."""

    replies: int
    differing: int


def check_batch_invariance(
    engine: Engine, random: Random, *, prompts: int = 8, rounds: int = 3
) -> InvarianceReport:
    """Generate replies alone with empty caches, then again with full caches and beside one another.

    Args:
        engine: Serves the bare base. Its caches are cleared.
        random: Draws prompts, settings, and which request joins when.
        prompts: How many different requests to use.
        rounds: How often to run all of them together.

    Raises:
        ServingFailed: The model failed.
    """
    requests = [_request(engine, random, number) for number in range(prompts)]
    alone = []
    for request in requests:
        engine.clear_caches()
        alone.append(_read(engine.stream([request])))
    repeated = [(number, _read(engine.stream([r]))) for number, r in enumerate(requests)]
    for _ in range(rounds):
        started: list[tuple[int, OutputStream, list[OutputChunk]]] = []
        for number in random.sample(range(prompts), prompts):
            stream = engine.stream([requests[number]])
            stream.begin()
            # The next request joins while this one has generated some of its tokens.
            chunks = [next(stream, None) for _ in range(random.randrange(3))]
            started.append((number, stream, [chunk for chunk in chunks if chunk is not None]))
        repeated += [(number, _read(stream, chunks)) for number, stream, chunks in started]
        if random.random() < 0.5:
            engine.clear_caches()
    return InvarianceReport(
        len(repeated), sum(reply != alone[number] for number, reply in repeated)
    )


def _request(engine: Engine, random: Random, number: int) -> Request:
    words = " ".join(
        f"{random.choice(_SYLLABLES)}{random.choice(_SYLLABLES)}"
        for _ in range(random.choice(_WORD_COUNTS))
    )
    temperature = random.choice((0.0, 0.0, 0.8))
    sampling = Sampling(temperature=temperature, max_tokens=_MAX_TOKENS, seed=number)
    stack = Stack(engine.backend.base.digest)
    return Request(
        "doctor", (Message("user", words),), stack, sampling, background=True, logprobs=True
    )


def _read(stream: OutputStream, started: Sequence[OutputChunk] = ()) -> _Reply:
    chunks = [*started, *stream]
    tokens = tuple(token for chunk in chunks for token in chunk.tokens)
    return tokens, tuple(logprob for chunk in chunks for logprob in chunk.logprobs)
