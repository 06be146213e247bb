"""``bench engines`` on vLLM: a real server with the real base behind our backend and engine.

Measures the extra time of a new user's first reply, and whether vLLM and torch agree. Measures the
throughput of sixteen requests against direct ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks import vllm
from benchmarks.engine_comparison import (
    GreedyTokens,
    agreement,
    first_token,
    prompts,
    read_greedy_tokens,
)
from benchmarks.figures import alternate, ratio, spread
from benchmarks.homes import temporary_folder
from benchmarks.load_users import RANK, LoadedUsers, load_users, question
from personalpeft.backends.base import Continuation
from personalpeft.base_models.resolve import unpacked_folder
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine, Request
from personalpeft.settings import VllmServer
from personalpeft.types import Sampling, Stack

REQUESTS, STACKS = 16, 4
"""How many requests are written at once, and over how many stacks they are spread."""
# New users of each repetition.
_UNSEEN = 4
_WARM_UP = 4
_LONGEST = 2048


def bench_vllm(
    base_name: str, python: Path, *, repetitions: int, tokens: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Start the server from this Python and measure everything on it.

    ``first_token_ms`` is to the first token of a new user (``unseen``), and of the same user right
    after (``seen``). ``unseen_ms`` is their difference by user. ``tokens_per_second`` is that of
    all requests together. They go through our engine (``engine``) or to the server directly
    (``direct``). ``engine_over_direct`` is the ratio.

    Raises:
        MissingPackage: The Python has no vLLM.
        ServingFailed: The server does not work.
    """
    users = STACKS + repetitions * _UNSEEN
    with temporary_folder() as work:
        base = prepared(base_name, work)
        with (
            vllm.run_server(
                python,
                unpacked_folder(base),
                work / "vllm.log",
                # One slot more than there are stacks, for rows on the bare base.
                slots=STACKS + 1,
                rank=RANK,
                longest=min(_LONGEST, base.card.context),
                echo=echo,
            ) as server,
            load_users(
                base_name, users, backend="vllm", server=VllmServer(server.url), echo=echo
            ) as loaded,
        ):
            stacks = {"bare": Stack(base.digest), "stack": loaded.stack(0)}
            echo("warming up")
            names = _names(loaded, server)
            rates = _rates(loaded, server, names, repetitions, tokens, echo)
            greedy = {
                key: read_greedy_tokens(loaded.engine, stack, logprobs=True)
                for key, stack in stacks.items()
            }
            unseen, seen = _first_tokens(loaded, range(STACKS, users), echo)
    with load_users(base_name, 1, echo=echo) as loaded:
        agreed = {key: _agreement(loaded.engine, stacks[key], each) for key, each in greedy.items()}
    return {
        "users": len(unseen),
        "requests": REQUESTS,
        "stacks": STACKS,
        "first_token_ms": {"unseen": spread(unseen), "seen": spread(seen)},
        "unseen_ms": spread([a - b for a, b in zip(unseen, seen, strict=True)]),
        "tokens_per_second": {key: spread(each) for key, each in rates.items()},
        "engine_over_direct": ratio(rates["engine"], rates["direct"]),
        "agreement": agreed,
    }


def prepared(base_name: str, work: Path) -> Base:
    """Resolve the base that a server is started on."""
    with personalpeft.open(work / "home", base_name) as runtime:
        return runtime.base()


def _names(loaded: LoadedUsers, server: vllm.Server) -> list[str]:
    """Return the server's names of the stacks, after one request to each."""
    names: list[str] = []
    for number in range(STACKS):
        before = set(server.models())
        first_token(loaded.engine, loaded.stack(number), number)
        names += set(server.models()) - before
    return names


def _rates(
    loaded: LoadedUsers,
    server: vllm.Server,
    names: Sequence[str],
    repetitions: int,
    tokens: int,
    echo: Callable[[str], None],
) -> dict[str, list[float]]:
    """Measure the tokens a second of all requests together, through the engine and directly."""
    engine = loaded.engine
    stacks = [loaded.stack(number) for number in range(STACKS)]

    def through_us(repetition: int, count: int = tokens) -> float:
        return rate(engine, stacks, repetition, count)

    def direct(repetition: int, count: int = tokens) -> float:
        sent = [engine.tokenize(request) for request in _requests(stacks, repetition, count)]
        called = [names[n % STACKS] for n in range(REQUESTS)]
        began = time.perf_counter()
        written = server.stream(sent, called, count, engine.backend.end_of_turn)
        return written / (time.perf_counter() - began)

    for contestant in (through_us, direct):
        contestant(0, _WARM_UP)
    return alternate({"engine": through_us, "direct": direct}, repetitions, echo)


def rate(engine: Engine, stacks: Sequence[Stack], repetition: int, tokens: int) -> float:
    """Return the tokens a second of concurrent requests through an engine, until the last token."""
    asked = _requests(stacks, repetition, tokens)
    began = time.perf_counter()
    written = sum(len(piece.tokens) for piece in engine.stream(asked))
    return written / (time.perf_counter() - began)


def _requests(stacks: Sequence[Stack], repetition: int, tokens: int) -> list[Request]:
    return [
        Request(
            f"user-{n}",
            question(n, repetition),
            stacks[n % len(stacks)],
            Sampling(max_tokens=tokens),
        )
        for n in range(REQUESTS)
    ]


def _first_tokens(
    loaded: LoadedUsers, users: Sequence[int], echo: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Return the milliseconds to each user's first token, on the first request and on the next."""
    unseen, seen = [], []
    for user in users:
        stack = loaded.stack(user)
        unseen.append(first_token(loaded.engine, stack, 2 * user))
        seen.append(first_token(loaded.engine, stack, 2 * user + 1))
        echo(f"user {user}: unseen {unseen[-1]:.4g}, seen {seen[-1]:.4g}")
    return unseen, seen


def _agreement(torch: Engine, stack: Stack, greedy: GreedyTokens) -> dict[str, float]:
    """Compare torch with the replies of vLLM."""
    items = [
        Continuation(torch.tokenize(request), tokens)
        for request, tokens in zip(prompts(stack), greedy.tokens, strict=True)
    ]
    ours = [logp for score in torch.score(items, stack) for logp in score.token_logprobs]
    theirs = [logp for row in greedy.logprobs for logp in row]
    return agreement(greedy, read_greedy_tokens(torch, stack), theirs, ours)
