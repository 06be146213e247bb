"""A reply's bits depend on its own request alone, in this process and the next (real base)."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backend_makers import (
    INSTRUCTION_SETS,
    Output,
    attach,
    bits,
    generate_staggered,
    generate_uncached,
    random_stack,
    row,
)

import personalpeft
from personalpeft.backends.base import Backend
from personalpeft.backends.sequence import SequenceState
from personalpeft.base_models.types import Base
from personalpeft.engine.invariance_check import check_batch_invariance
from personalpeft.host import cpu_flags

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

ROWS = 12
PROMPTS = (
    "What is the capital of France?",
    "Write a poem about rain.",
    "How do I boil an egg?",
    "Tell me a story about a dog. " * 12,
)


@pytest.fixture(scope="module")
def real_base(shared_cache: Path) -> Base:
    from personalpeft.base_models.registry import find_card
    from personalpeft.base_models.resolve import resolve_base

    return resolve_base(find_card("smollm2-135m-instruct"), cache=shared_cache)


def open_backend(dtype: str, base: Base, cache: Path) -> Backend:
    from personalpeft.backends.torch.backend import TorchBackend
    from personalpeft.backends.torch.device import DeviceChoice, choose_device

    if dtype == "bfloat16" and choose_device().dtype != torch.bfloat16:
        pytest.skip("the processor does not multiply bfloat16")
    where = DeviceChoice(torch.device("cpu"), getattr(torch, dtype), "for tests")
    backend = TorchBackend(base, where=where, cache=cache, slots=ROWS, rows=ROWS)
    assert backend.batch_invariant
    for seed in range(ROWS):
        attach(backend, f"s{seed}", random_stack(backend, seed, rank=1 + seed, size=0.02))
    return backend


def rows_of(backend: Backend) -> list[SequenceState]:
    return [
        row(
            backend,
            PROMPTS[seed % len(PROMPTS)],
            f"s{seed}" if seed % 4 else None,
            owner=f"user{seed % 5}",
            logprobs=True,
            max_tokens=16,
            temperature=0.7 if seed % 5 == 1 else 0.0,
            seed=seed,
        )
        for seed in range(ROWS)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reply_has_the_same_bits_alone_and_batched_uncached_and_cached(
    dtype: str, real_base: Base, shared_cache: Path
) -> None:
    backend = open_backend(dtype, real_base, shared_cache)
    rows = rows_of(backend)
    alone = [bits(generate_uncached(backend, each)) for each in rows]
    for steps in ([0] * ROWS, [2] * ROWS, [number % 5 for number in range(ROWS)]):
        before = backend.occupancy().reused_tokens
        found: list[Output] = generate_staggered(backend, rows, steps)
        assert [bits(reply) for reply in found] == alone
        assert backend.occupancy().reused_tokens > before


_ASK = """
import json, sys
import personalpeft
from personalpeft.host import cpu_flags
with personalpeft.open(sys.argv[1]) as runtime:
    ada = runtime.user("ada")
    for question in json.loads(sys.argv[2]):
        reply = ada.chat(question, temperature=0, max_tokens=16, logprobs=True)
        print(json.dumps([reply.text, [token.logprob.hex() for token in reply.logprobs]]))
"""


def test_another_process_with_other_threads_gives_the_same_bits(
    tmp_path: Path, shared_cache: Path
) -> None:
    replies = set()
    for number, more in enumerate(({}, {"OMP_NUM_THREADS": "1"}, {})):
        done = subprocess.run(
            [sys.executable, "-c", _ASK, str(tmp_path / f"home{number}"), json.dumps(PROMPTS)],
            env={**os.environ, "PERSONALPEFT_CACHE": str(shared_cache), **more},
            capture_output=True,
            text=True,
            check=True,
        )
        replies.add(done.stdout)
    assert len(replies) == 1


def test_repeated_requests_for_200_replies_differ_in_no_bit(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home") as runtime:
        report = check_batch_invariance(runtime.engine(), random.Random(1), prompts=200, rounds=1)
    assert (report.replies, report.differing) == (400, 0)


@pytest.mark.parametrize(
    "name", [name for name, (flag, _) in INSTRUCTION_SETS.items() if flag in cpu_flags().split()]
)
def test_doctor_confirms_batch_invariance_with_each_instruction_set(
    name: str, tmp_path: Path, shared_cache: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "personalpeft_app",
            "--home",
            str(tmp_path / "home"),
            "doctor",
            "--load",
            "--json",
        ],
        env={**os.environ, "PERSONALPEFT_CACHE": str(shared_cache), **INSTRUCTION_SETS[name][1]},
        capture_output=True,
        text=True,
        check=False,
    )
    found = {each["name"]: each for each in json.loads(done.stdout)["checks"]}["batch invariance"]
    assert found["ok"], found
