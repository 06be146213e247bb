"""``bench engines``: compare other engines with themselves without us, and with torch.

For llama.cpp it measures:

- one user's reply with a layer of rank 8 and without
- the cost of a switch between users, with the adapter in memory and from its file
- log-probs of the same text on both engines
- the memory of a process that chats and never trains

``engines_vllm.py`` measures vLLM, ``engines_fleet.py`` fleets of it.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import child_environment
from benchmarks.engine_comparison import (
    FIXED,
    agreement,
    first_token,
    prompts,
    read_greedy_tokens,
)
from benchmarks.engines_fleet import bench_fleet
from benchmarks.engines_vllm import bench_vllm
from benchmarks.figures import alternate, percentile, ratio, spread
from benchmarks.load_users import LoadedUsers, both_samplings, load_users, name, question
from benchmarks.vllm import python_with_vllm
from personalpeft.backends.base import Continuation
from personalpeft.engine.engine import Engine, Request
from personalpeft.settings import Serving
from personalpeft.types import Message, Sampling, Stack

_SWITCHES = 6
# The context of the process whose memory is measured, in tokens; the last of them are the reply.
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


def bench_engines(
    base_name: str, *, repetitions: int, tokens: int, with_vllm: bool, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure the engines alternately.

    vLLM takes part with ``with_vllm`` where its Python is named. ``vllm`` and ``fleet`` are None
    where they did not run.

    ``switch_ms`` is the extra time to the first token after another user's request. The adapter is
    in memory or in its file. ``memory_mb`` is the peak of a process that never loaded torch. It
    opened the home and answered a long question with one user's layer (``memory_tokens`` of
    context). ``sampled`` is with the card's sampling, and the others are greedy.

    Raises:
        InvalidInput: The named Python does not exist.
        MissingPackage: It has no vLLM.
        ServingFailed: The server does not work.
    """
    python = python_with_vllm() if with_vllm else None
    with load_users(base_name, 3, backend="llamacpp", echo=echo) as loaded:
        engine, bare = loaded.engine, Stack(loaded.base.digest)
        stacks = [loaded.stack(number) for number in range(3)]
        samplings = both_samplings(loaded.base.card, tokens)

        def rate(stack: Stack, sampling: str = "greedy") -> Callable[[int], float]:
            return lambda repetition: _rate(engine, stack, repetition, samplings[sampling])

        echo("warming up")
        for stack in (bare, *stacks):
            first_token(engine, stack, 0)
        contestants = {
            "bare": rate(bare),
            "stack": rate(stacks[0]),
            "stack, sampled": rate(stacks[0], "sampled"),
        }
        rates = alternate(contestants, repetitions, echo)
        agreed = _agreement(loaded, base_name, echo)
        same, resident = [stacks[0]] * _SWITCHES, stacks[1:] * (_SWITCHES // 2)
        first = alternate(
            {
                "same": lambda n: _median_first(engine, same, n * 100),
                "resident": lambda n: _median_first(engine, resident, n * 100 + 50),
            },
            repetitions,
            echo,
        )
        memory, filled, torch_loaded = _memory(loaded, base_name)
    with load_users(
        base_name, 3, backend="llamacpp", serving=Serving(slots=1, host_bytes=0), echo=echo
    ) as loaded:
        stacks = [loaded.stack(number) for number in range(3)]
        engine = loaded.engine
        first |= alternate(
            {
                "same, one slot": lambda n: _after(engine, stacks[0], stacks[0], n),
                "from disk": lambda n: _after(engine, stacks[1], stacks[2], n),
            },
            repetitions,
            echo,
        )
    switches = {"resident": "same", "from disk": "same, one slot"}
    more = {
        to: [b - a for a, b in zip(first[stays], first[to], strict=True)]
        for to, stays in switches.items()
    }
    vllm = fleet = None
    if python is not None:
        vllm = bench_vllm(base_name, python, repetitions=repetitions, tokens=tokens, echo=echo)
        fleet = bench_fleet(base_name, python, repetitions=repetitions, tokens=tokens, echo=echo)
    return {
        "bench": "engines",
        "base": base_name,
        "repetitions": repetitions,
        "tokens": tokens,
        "tokens_per_second": {key: spread(each) for key, each in rates.items()},
        "stack_over_bare": ratio(rates["stack"], rates["bare"]),
        "sampled_vs_greedy": ratio(rates["stack, sampled"], rates["stack"]),
        "first_token_ms": {key: spread(each) for key, each in first.items()},
        "switch_ms": {key: spread(each) for key, each in more.items()},
        "agreement": agreed,
        "memory_mb": memory,
        "memory_tokens": filled,
        "torch_loaded": torch_loaded,
        "vllm": vllm,
        "fleet": fleet,
    }


def _rate(engine: Engine, stack: Stack, repetition: int, sampling: Sampling) -> float:
    """Return the tokens a second of one reply, from its first token to its last."""
    request = Request("somebody", question(0, repetition), stack, sampling)
    times = [time.perf_counter() for piece in engine.stream([request]) if piece.tokens]
    return (len(times) - 1) / (times[-1] - times[0])


def _median_first(engine: Engine, stacks: Sequence[Stack], number: int) -> float:
    """Return the median of ``first_token`` over requests for some stacks."""
    return percentile([first_token(engine, each, number + i) for i, each in enumerate(stacks)], 50)


def _after(engine: Engine, before: Stack, stack: Stack, repetition: int) -> float:
    """Return the median of ``first_token`` after a request for another stack."""
    times = []
    for number in range(_SWITCHES):
        first_token(engine, before, repetition * 1000 + 2 * number)
        times.append(first_token(engine, stack, repetition * 1000 + 2 * number + 1))
    return percentile(times, 50)


def _agreement(
    loaded: LoadedUsers, base_name: str, echo: Callable[[str], None]
) -> dict[str, dict[str, float]]:
    """Compare both engines on the same prompts, with one user's layer and without."""
    stacks = {"bare": Stack(loaded.base.digest), "stack": loaded.stack(0)}
    with load_users(base_name, 1, echo=echo) as others:
        both = (loaded.engine, others.engine)
        return {
            key: agreement(
                *(read_greedy_tokens(each, stack) for each in both),
                *(_fixed(each, stack) for each in both),
            )
            for key, stack in stacks.items()
        }


def _fixed(engine: Engine, stack: Stack) -> list[float]:
    """Return the log-probs of the fixed continuation after each prompt."""
    fixed = engine.backend.encode(FIXED)
    items = [Continuation(engine.tokenize(request), fixed) for request in prompts(stack)]
    return [logp for score in engine.score(items, stack) for logp in score.token_logprobs]


def _memory(loaded: LoadedUsers, base_name: str) -> tuple[int | None, int, bool]:
    """Return a new process's peak memory, the context it filled, and whether it loaded torch."""
    home, most = str(loaded.runtime.settings.home), min(_CONTEXT, loaded.engine.backend.max_length)
    done = subprocess.run(
        [sys.executable, "-c", _CHAT, home, base_name, name(0), str(_REPLY)],
        input=_filling(loaded, most - _REPLY),
        env=child_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    peak, filled, torch = map(int, done.stdout.split())
    return (peak if peak > 0 else None), filled, bool(torch)


def _filling(loaded: LoadedUsers, room: int) -> str:
    """Return a message that fills this many tokens together with its template."""
    text = ""
    for number in itertools.count():
        longer = f"{text}{question(number, number)[0].content} "
        if len(loaded.engine.backend.render([Message("user", longer)])) > room:
            break
        text = longer
    return text
