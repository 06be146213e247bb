"""The rows of ``bench engines`` on vLLM: a real server on the real base, served through our backend and engine.

What a user's first reply costs more where the server has never heard of their stack, what sixteen requests lose by going
through us and not straight to the server, and whether vLLM and torch say the same.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import personalpeft
from benchmarks import vllm
from benchmarks.engines_asked import (
    Agreement,
    Said,
    agreement,
    first_token,
    prompts,
    said,
)
from benchmarks.figures import Spread, ratio, spread, taking_turns
from benchmarks.load_users import RANK, Crowd, crowd, question
from personalpeft.backends.base import Continuation
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine, Request
from personalpeft.settings import VllmServer
from personalpeft.types import Sampling, Stack

REQUESTS, STACKS = 16, 4
"""How many requests are written at once, and over how many stacks they are spread."""
# Users of each repetition whom the server has never seen.
_UNSEEN = 4
_WARM_UP = 4
_LONGEST = 2048


@dataclass(frozen=True, slots=True)
class VllmFigures:
    """``first_token_ms`` is to the first token of a user whom the server has never seen (``unseen``) and of the same user asked
    anew at once after that (``seen``), ``unseen_ms`` what the one takes more than the other, by user. ``tokens_per_second`` is
    that of all requests together, through our engine (``engine``) and from a client that sends the same ones straight to the
    server (``direct``), ``engine_over_direct`` the one over the other. ``agreement`` is with torch, its log-probs those of
    what vLLM wrote.
    """

    users: int
    requests: int
    stacks: int
    first_token_ms: dict[str, Spread]
    unseen_ms: Spread
    tokens_per_second: dict[str, Spread]
    engine_over_direct: Spread
    agreement: dict[str, Agreement]


def bench_vllm(
    base_name: str, python: Path, *, repetitions: int, tokens: int, say: Callable[[str], None]
) -> VllmFigures:
    """Starts the server from this Python and runs everything on it. Raises ``MissingPackage``, ``ServingFailed``."""
    users = STACKS + repetitions * _UNSEEN
    with tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as work:
        base = prepared(base_name, Path(work))
        with (
            vllm.served(
                python,
                base.folder,
                Path(work) / "vllm.log",
                # One place more than there are stacks: rows on the bare base take it.
                slots=STACKS + 1,
                rank=RANK,
                longest=min(_LONGEST, base.card.context),
                say=say,
            ) as server,
            crowd(
                base_name, users, backend="vllm", server=VllmServer(server.url), say=say
            ) as people,
        ):
            stacks = {"bare": Stack(base.digest), "stack": people.stack(0)}
            say("warming up")
            names = _names(people, server)
            rates = _rates(people, server, names, repetitions, tokens, say)
            told = {key: said(people.engine, stack, logprobs=True) for key, stack in stacks.items()}
            unseen, seen = _first_tokens(people, range(STACKS, users), say)
    with crowd(base_name, 1, say=say) as people:
        agreed = {key: _agreement(people.engine, stacks[key], each) for key, each in told.items()}
    return VllmFigures(
        users=len(unseen),
        requests=REQUESTS,
        stacks=STACKS,
        first_token_ms={"unseen": spread(unseen), "seen": spread(seen)},
        unseen_ms=spread([a - b for a, b in zip(unseen, seen, strict=True)]),
        tokens_per_second={key: spread(each) for key, each in rates.items()},
        engine_over_direct=ratio(rates["engine"], rates["direct"]),
        agreement=agreed,
    )


def prepared(base_name: str, work: Path) -> Base:
    """The base, before there is a server to open it with."""
    with personalpeft.open(work / "home", base_name) as runtime:
        return runtime.base()


def _names(people: Crowd, server: vllm.Server) -> list[str]:
    """What the server calls the stacks that all requests are spread over, each of which is asked once."""
    names: list[str] = []
    for number in range(STACKS):
        before = set(server.models())
        first_token(people.engine, people.stack(number), number)
        names += set(server.models()) - before
    return names


def _rates(
    people: Crowd,
    server: vllm.Server,
    names: Sequence[str],
    repetitions: int,
    tokens: int,
    say: Callable[[str], None],
) -> dict[str, list[float]]:
    """Tokens a second of all requests together, from handing them in to the last token."""
    engine = people.engine
    stacks = [people.stack(number) for number in range(STACKS)]

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
    return taking_turns({"engine": through_us, "direct": direct}, repetitions, say)


def rate(engine: Engine, stacks: Sequence[Stack], repetition: int, tokens: int) -> float:
    """Tokens a second of all requests together through an engine, from handing them in to the last token."""
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
    people: Crowd, users: Sequence[int], say: Callable[[str], None]
) -> tuple[list[float], list[float]]:
    """Milliseconds to the first token of each user, when nobody has asked for them and then asked anew."""
    unseen, seen = [], []
    for user in users:
        stack = people.stack(user)
        unseen.append(first_token(people.engine, stack, 2 * user))
        seen.append(first_token(people.engine, stack, 2 * user + 1))
        say(f"user {user}: unseen {unseen[-1]:.4g}, seen {seen[-1]:.4g}")
    return unseen, seen


def _agreement(torch: Engine, stack: Stack, told: Said) -> Agreement:
    """Of torch with what vLLM wrote."""
    items = [
        Continuation(torch.tokenize(request), tokens)
        for request, tokens in zip(prompts(stack), told.tokens, strict=True)
    ]
    ours = [logp for score in torch.score(items, stack) for logp in score.token_logprobs]
    theirs = [logp for row in told.logprobs for logp in row]
    return agreement(told, said(torch, stack), theirs, ours)
