"""Try whether replies depend on what is cached or on who shares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from personalpeft.backends.base import Piece
from personalpeft.engine.engine import Engine
from personalpeft.engine.request import Replies, Request
from personalpeft.types import Message, Sampling, Stack

_TOKENS = 8
# Lengths of prompts, in words: shorter than a block of the cache, of several blocks, and longer than what is read at once beside
# other replies.
_WORDS = (2, 9, 40, 150)


@dataclass(frozen=True, slots=True)
class InvarianceReport:
    """How many replies were asked for again, and how many of them differed in a token or in a bit of a log-prob."""

    replies: int
    differing: int


def check_batch_invariance(
    engine: Engine, random: Random, *, prompts: int = 8, rounds: int = 3
) -> InvarianceReport:
    """Ask for replies alone from an empty cache, then again with a full cache and beside one another.

    Args:
        engine: Serves the bare base. What it has cached is dropped.
        random: Draws prompts, settings, and who joins when.
        prompts: How many different requests are asked.
        rounds: How often all of them are asked together.

    Raises:
        ServingFailed: The model failed.
    """
    requests = [_request(engine, random, number) for number in range(prompts)]
    alone = []
    for request in requests:
        engine.forget()
        alone.append(_outputs(engine.replies([request])))
    again = [
        (number, _outputs(engine.replies([request]))) for number, request in enumerate(requests)
    ]
    for _ in range(rounds):
        order = random.sample(range(prompts), prompts)
        begun: list[tuple[int, Replies, list[Piece]]] = []
        for number in order:
            replies = engine.replies([requests[number]])
            replies.begin()
            begun.append((number, replies, []))
            # The next one joins while this one has written some of its tokens.
            for _ in range(random.randrange(3)):
                piece = next(replies, None)
                begun[-1][2].extend([piece] if piece else [])
        again += [(number, _outputs(replies, pieces)) for number, replies, pieces in begun]
        if random.random() < 0.5:
            engine.forget()
    return InvarianceReport(len(again), sum(found != alone[number] for number, found in again))


def _request(engine: Engine, random: Random, number: int) -> Request:
    words = " ".join(
        f"{random.choice(_SYLLABLES)}{random.choice(_SYLLABLES)}"
        for _ in range(random.choice(_WORDS))
    )
    sampling = Sampling(temperature=random.choice((0.0, 0.0, 0.8)), max_tokens=_TOKENS, seed=number)
    stack = Stack(engine.backend.base.digest)
    return Request(
        "doctor", (Message("user", words),), stack, sampling, background=True, logprobs=True
    )


_SYLLABLES = ("ba", "do", "ki", "lu", "me", "no", "ri", "sa", "te", "vo")


def _outputs(
    replies: Replies, begun: Sequence[Piece] = ()
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    pieces = [*begun, *replies]
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return tokens, tuple(logprob for piece in pieces for logprob in piece.logprobs)
