"""``bench engines``: other engines than torch, each beside what it would be without us, and whether it says the same.

llama.cpp: one user's reply with a layer of rank 8 and without one; what a request costs more when the one before was another
user's, with the adapter in memory and from its file; the same text's log-probs on both engines; and how much memory a
process has that chats and has not loaded torch.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from personalpeft.backends.base import Continuation
from personalpeft.serving.engine import Engine, Request
from personalpeft.settings import Serving
from personalpeft.types import Message, Sampling, Stack
from personalpeft_app.bench.crowd import Crowd, crowd, name, question
from personalpeft_app.bench.figures import Spread, spread, taking_turns

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
FIXED = (
    " A good answer begins with what matters most, says it in plain words, and ends where there is nothing left to say."
)
"""The text whose log-probs they are compared by."""
_SWITCHES = 6
_CHAT = """
import sys
import personalpeft
from personalpeft_app.bench.peak import peak_mb
with personalpeft.open(sys.argv[1], sys.argv[2], "llamacpp") as runtime:
    runtime.user(sys.argv[3], create=False).chat("Hello, who are you?", temperature=0, max_tokens=64, memory=False)
    print(peak_mb() or -1, int("torch" in sys.modules))
"""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of so many prompts, how many begin with the same greedy tokens on both engines, how many tokens on average are the same
    before the first that differs, and the mean absolute difference of the log-probs of a fixed continuation (nats).
    """

    prompts: int
    same: int
    tokens_alike: float
    logprob_difference: float


@dataclass(frozen=True, slots=True)
class EnginesBench:
    """The object that ``--json`` prints. ``switch_ms`` is what a first token takes more when the request before was another
    user's: whose adapter is in memory, or has to come from its file. ``memory_mb`` is the most that a process had that opened the
    home, chatted with one user's layer, and did not load torch.
    """

    bench: str
    base: str
    repetitions: int
    tokens: int
    tokens_per_second: dict[str, Spread]
    stack_over_bare: Spread
    first_token_ms: dict[str, Spread]
    switch_ms: dict[str, Spread]
    agreement: dict[str, Agreement]
    memory_mb: int | None
    torch_loaded: bool


def bench_engines(base_name: str, *, repetitions: int, tokens: int, say: Callable[[str], None]) -> EnginesBench:
    """Runs the contestants in turns. Needs nothing but what is installed."""
    with crowd(base_name, 3, backend="llamacpp", say=say) as people:
        engine, bare = people.engine, Stack(people.base.digest)
        stacks = [people.stack(number) for number in range(3)]

        def rate(stack: Stack) -> Callable[[int], float]:
            return lambda repetition: _rate(engine, stack, repetition, tokens)

        say("warming up")
        for stack in (bare, *stacks):
            _first_token(engine, stack, 0)
        rates = taking_turns({"bare": rate(bare), "stack": rate(stacks[0])}, repetitions, say)
        agreement = {"bare": _agreement(people, base_name, None, say), "stack": _agreement(people, base_name, 0, say)}
        first = taking_turns(
            {
                "same": lambda n: _median([_first_token(engine, stacks[0], n * 100 + i) for i in range(_SWITCHES)]),
                "resident": lambda n: _median(
                    [_first_token(engine, stacks[1 + i % 2], n * 100 + 50 + i) for i in range(_SWITCHES)]
                ),
            },
            repetitions,
            say,
        )
        memory, loaded = _memory(people, base_name)
    with crowd(base_name, 3, backend="llamacpp", serving=Serving(slots=1, host_bytes=0), say=say) as people:
        stacks = [people.stack(number) for number in range(3)]
        engine = people.engine
        first |= taking_turns(
            {
                "same, one slot": lambda n: _after(engine, stacks[0], stacks[0], n),
                "from disk": lambda n: _after(engine, stacks[1], stacks[2], n),
            },
            repetitions,
            say,
        )
    more = {
        "resident": [b - a for a, b in zip(first["same"], first["resident"], strict=True)],
        "from disk": [b - a for a, b in zip(first["same, one slot"], first["from disk"], strict=True)],
    }
    return EnginesBench(
        bench="engines",
        base=base_name,
        repetitions=repetitions,
        tokens=tokens,
        tokens_per_second={key: spread(each) for key, each in rates.items()},
        stack_over_bare=spread([a / b for a, b in zip(rates["stack"], rates["bare"], strict=True)]),
        first_token_ms={key: spread(each) for key, each in first.items()},
        switch_ms={key: spread(each) for key, each in more.items()},
        agreement=agreement,
        memory_mb=memory,
        torch_loaded=loaded,
    )


def _rate(engine: Engine, stack: Stack, repetition: int, tokens: int) -> float:
    """Tokens a second of one reply, from its first token to its last."""
    request = Request("somebody", question(0, repetition), stack, Sampling(max_tokens=tokens))
    times = [time.perf_counter() for piece in engine.replies([request]) if piece.tokens]
    return (len(times) - 1) / (times[-1] - times[0])


def _first_token(engine: Engine, stack: Stack, number: int) -> float:
    """Milliseconds to the first token of somebody of whom nothing is kept."""
    request = Request(f"somebody-{number}", question(number, number), stack, Sampling(max_tokens=1))
    began = time.perf_counter()
    engine.texts([request])
    return (time.perf_counter() - began) * 1000


def _after(engine: Engine, before: Stack, stack: Stack, repetition: int) -> float:
    """As ``_first_token``, when the request before was for another stack; the median of some."""
    times = []
    for number in range(_SWITCHES):
        _first_token(engine, before, repetition * 1000 + 2 * number)
        times.append(_first_token(engine, stack, repetition * 1000 + 2 * number + 1))
    return _median(times)


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


def _agreement(people: Crowd, base_name: str, user: int | None, say: Callable[[str], None]) -> Agreement:
    """Both engines on the same prompts, with one user's layer or none."""
    with crowd(base_name, 1, say=say) as others:
        said = [_said(each, None if user is None else each.stack(user)) for each in (people, others)]
    alike = [_alike(a, b) for a, b in zip(said[0][0], said[1][0], strict=True)]
    apart = [abs(a - b) for a, b in zip(said[0][1], said[1][1], strict=True)]
    return Agreement(
        prompts=len(alike),
        same=sum(count >= AGREE for count in alike),
        tokens_alike=round(sum(alike) / len(alike), 1),
        logprob_difference=round(sum(apart) / len(apart), 4),
    )


def _said(people: Crowd, stack: Stack | None) -> tuple[list[tuple[int, ...]], list[float]]:
    """The first greedy tokens after each prompt, and the log-probs of the fixed continuation after all of them."""
    engine = people.engine
    stack = stack or Stack(people.base.digest)
    requests = [Request("somebody", (Message("user", p),), stack, Sampling(max_tokens=AGREE)) for p in PROMPTS]
    written: list[tuple[int, ...]] = [() for _ in requests]
    for piece in engine.replies(requests):
        written[piece.row] += piece.tokens
    fixed = engine.backend.encode(FIXED)
    items = [Continuation(engine.tokens(request), fixed) for request in requests]
    return written, [logp for score in engine.score(items, stack) for logp in score.tokens]


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are the same from the first on; all that are compared where both ended alike."""
    if tuple(one) == tuple(other):
        return AGREE
    return next(n for n in range(len(one) + 1) if one[: n + 1] != other[: n + 1])


def _memory(people: Crowd, base_name: str) -> tuple[int | None, bool]:
    home = str(people.runtime.settings.home)
    done = subprocess.run(
        [sys.executable, "-c", _CHAT, home, base_name, name(0)], capture_output=True, text=True, check=True
    )
    peak, torch = done.stdout.split()
    return (int(peak) if int(peak) > 0 else None), torch == "1"
