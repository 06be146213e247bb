"""``bench engines``: other engines than torch, each beside what it would be without us, and whether it says the same.

llama.cpp: one user's reply with a layer of rank 8 and without one; what a request costs more when the one before was another
user's, with the adapter in memory and from its file; the same text's log-probs on both engines; and how much memory a
process has that chats and has not loaded torch. vLLM's rows are in ``engines_vllm``, those of a fleet in ``engines_fleet``.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.engines_asked import (
    FIXED,
    Agreement,
    agreement,
    first_token,
    prompts,
    said,
)
from benchmarks.engines_fleet import FleetFigures, bench_fleet
from benchmarks.engines_vllm import VllmFigures, bench_vllm
from benchmarks.figures import Spread, spread, taking_turns
from benchmarks.load_users import Crowd, crowd, name, question
from benchmarks.vllm import python_with_vllm
from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Engine, Request
from personalpeft.settings import Serving
from personalpeft.types import Message, Sampling, Stack

_SWITCHES = 6
# The conversation of the process whose memory is looked at: so many tokens of context, of which the last are the reply.
_CONTEXT, _REPLY = 2048, 64
_CHAT = """
import sys
import personalpeft
from benchmarks.peak import peak_mb
home, base, user, most = sys.argv[1:]
with personalpeft.open(home, base, "llamacpp") as runtime:
    user = runtime.user(user, create=False)
    usage = user.chat(sys.stdin.read(), temperature=0, max_tokens=int(most), memory=False).usage
    print(peak_mb() or -1, usage.prompt_tokens + usage.completion_tokens, int("torch" in sys.modules))
"""


@dataclass(frozen=True, slots=True)
class EnginesBench:
    """The object that ``--json`` prints. ``switch_ms`` is what a first token takes more when the request before was another
    user's: whose adapter is in memory, or has to come from its file. ``memory_mb`` is the most that a process had that opened the
    home, answered a long question with one user's layer, so that ``memory_tokens`` of context were filled, and did not load torch.
    ``vllm`` and ``fleet`` are None where they were not run; all else is llama.cpp's.
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
    memory_tokens: int
    torch_loaded: bool
    vllm: VllmFigures | None
    fleet: FleetFigures | None


def bench_engines(
    base_name: str, *, repetitions: int, tokens: int, with_vllm: bool, say: Callable[[str], None]
) -> EnginesBench:
    """Runs the contestants in turns. vLLM takes part where its Python is named and ``with_vllm``; all else needs nothing but
    what is installed. Raises ``InvalidInput`` for a Python that is not there, ``MissingPackage`` for one without vLLM,
    ``ServingFailed``.
    """
    python = python_with_vllm() if with_vllm else None
    with crowd(base_name, 3, backend="llamacpp", say=say) as people:
        engine, bare = people.engine, Stack(people.base.digest)
        stacks = [people.stack(number) for number in range(3)]

        def rate(stack: Stack) -> Callable[[int], float]:
            return lambda repetition: _rate(engine, stack, repetition, tokens)

        say("warming up")
        for stack in (bare, *stacks):
            first_token(engine, stack, 0)
        rates = taking_turns({"bare": rate(bare), "stack": rate(stacks[0])}, repetitions, say)
        agreed = _agreement(people, base_name, say)
        first = taking_turns(
            {
                "same": lambda n: _median(
                    [first_token(engine, stacks[0], n * 100 + i) for i in range(_SWITCHES)]
                ),
                "resident": lambda n: _median(
                    [
                        first_token(engine, stacks[1 + i % 2], n * 100 + 50 + i)
                        for i in range(_SWITCHES)
                    ]
                ),
            },
            repetitions,
            say,
        )
        memory, filled, loaded = _memory(people, base_name)
    with crowd(
        base_name, 3, backend="llamacpp", serving=Serving(slots=1, host_bytes=0), say=say
    ) as people:
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
        "from disk": [
            b - a for a, b in zip(first["same, one slot"], first["from disk"], strict=True)
        ],
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
        agreement=agreed,
        memory_mb=memory,
        memory_tokens=filled,
        torch_loaded=loaded,
        vllm=bench_vllm(base_name, python, repetitions=repetitions, tokens=tokens, say=say)
        if python
        else None,
        fleet=bench_fleet(base_name, python, repetitions=repetitions, tokens=tokens, say=say)
        if python
        else None,
    )


def _rate(engine: Engine, stack: Stack, repetition: int, tokens: int) -> float:
    """Tokens a second of one reply, from its first token to its last."""
    request = Request("somebody", question(0, repetition), stack, Sampling(max_tokens=tokens))
    times = [time.perf_counter() for piece in engine.stream([request]) if piece.tokens]
    return (len(times) - 1) / (times[-1] - times[0])


def _after(engine: Engine, before: Stack, stack: Stack, repetition: int) -> float:
    """As ``first_token``, when the request before was for another stack; the median of some."""
    times = []
    for number in range(_SWITCHES):
        first_token(engine, before, repetition * 1000 + 2 * number)
        times.append(first_token(engine, stack, repetition * 1000 + 2 * number + 1))
    return _median(times)


def _median(times: Sequence[float]) -> float:
    return sorted(times)[len(times) // 2]


def _agreement(people: Crowd, base_name: str, say: Callable[[str], None]) -> dict[str, Agreement]:
    """Both engines on the same prompts, with one user's layer and without one."""
    stacks = {"bare": Stack(people.base.digest), "stack": people.stack(0)}
    with crowd(base_name, 1, say=say) as others:
        both = (people.engine, others.engine)
        return {
            key: agreement(
                *(said(each, stack) for each in both), *(_fixed(each, stack) for each in both)
            )
            for key, stack in stacks.items()
        }


def _fixed(engine: Engine, stack: Stack) -> list[float]:
    """The log-probs of the fixed continuation after each of the prompts."""
    fixed = engine.backend.encode(FIXED)
    items = [Continuation(engine.tokenize(request), fixed) for request in prompts(stack)]
    return [logp for score in engine.score(items, stack) for logp in score.token_logprobs]


def _memory(people: Crowd, base_name: str) -> tuple[int | None, int, bool]:
    """Of a process of its own: the most memory that it had, how many tokens of context it filled, and whether it loaded torch."""
    home, most = str(people.runtime.settings.home), min(_CONTEXT, people.engine.backend.max_length)
    done = subprocess.run(
        [sys.executable, "-c", _CHAT, home, base_name, name(0), str(_REPLY)],
        input=_filling(people, most - _REPLY),
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    peak, filled, torch = map(int, done.stdout.split())
    return (peak if peak > 0 else None), filled, bool(torch)


def _filling(people: Crowd, room: int) -> str:
    """A message as long as goes into so many tokens, with what the template puts around it."""
    text = ""
    for number in itertools.count():
        longer = f"{text}{question(number, number)[0].content} "
        if len(people.engine.backend.render([Message("user", longer)])) > room:
            break
        text = longer
    return text
