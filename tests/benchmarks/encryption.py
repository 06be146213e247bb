"""``bench encryption``: what an encrypted home costs.

Two equal homes, one plain and one encrypted with a key in a file, take turns. First token: a reply
of one token by a learned layer whose adapter is read from its file. Learn: a layer built from
nothing. Commit: one durable fact. Open: the home alone, without a model; once with a passphrase.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks.figures import alternate, medians, ranges, ratio, spread
from benchmarks.homes import temporary_folder
from personalpeft import Runtime, User
from personalpeft.clock import SYSTEM
from personalpeft.settings import KeySettings
from personalpeft.store.home import open_store

_EDITS, _COMMITS = 8, 20
_PASSPHRASE = "a passphrase of a benchmark"
_Act = Callable[[int], float]


def bench_encryption(
    base_name: str, backend: str, *, repetitions: int, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Measure each act in both homes alternately.

    ``ratios`` are those of the encrypted home to the plain one, within a repetition. ``spread`` has
    the least and the most.
    """
    with temporary_folder() as folder, ExitStack() as open_ones:
        keys = KeySettings(folder / "keys", _PASSPHRASE)
        os.environ["PERSONALPEFT_KEYS"] = str(keys.folder)
        runtimes = {}
        for name in ("plain", "encrypted"):
            if name == "encrypted":
                personalpeft.encrypt(folder / name, "file")
            runtime = personalpeft.open(folder / name, base_name, backend)
            runtimes[name] = open_ones.enter_context(runtime)
            _teach(runtime)
        personalpeft.encrypt(folder / "passphrase", "passphrase", passphrase=_PASSPHRASE)

        def each(act: Callable[[Runtime, int], float]) -> dict[str, _Act]:
            return {
                name: lambda repetition, runtime=runtime: act(runtime, repetition)
                for name, runtime in runtimes.items()
            }

        def opening(name: str) -> _Act:
            return lambda repetition: _open(folder / name, keys)

        acts = {
            "first token": each(_first_token),
            "learn": each(_learn),
            "commit": each(_commit),
            "open": {name: opening(name) for name in (*runtimes, "passphrase")},
        }
        found = {}
        for act, contestants in acts.items():
            for run in contestants.values():
                run(0)
            found[act] = alternate(
                contestants, repetitions, lambda text, act=act: echo(f"{act}, {text}")
            )
    ratios = {
        act: ratio(figures["encrypted"], figures["plain"])
        for act, figures in found.items()
        if act != "open"
    }
    times = {
        f"{act}, {name}": spread([1000 * figure for figure in values])
        for act, figures in found.items()
        for name, values in figures.items()
    }
    return {
        "bench": "encryption",
        "base": base_name,
        "repetitions": repetitions,
        "ratios": medians(ratios),
        "milliseconds": medians(times),
        "spread": ranges(ratios | times),
    }


def _teach(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    for number in range(_EDITS):
        _edit(ada, f"task {number}")
    ada.learn("style", accept=True)


def _edit(user: User, task: str) -> None:
    reply = user.chat(f"How do I do {task}?", temperature=0, max_tokens=4)
    user.feedback(reply, edit=f"Ahoy! Do {task} slowly. Arrr!")


def _first_token(runtime: Runtime, repetition: int) -> float:
    ada = runtime.user("ada")
    runtime._services.drop_user_caches("ada")
    began = time.perf_counter()
    ada.chat(f"How do I do job {repetition}?", temperature=0, max_tokens=1)
    return time.perf_counter() - began


def _learn(runtime: Runtime, repetition: int) -> float:
    ada = runtime.user("ada")
    # Nothing is built twice from the same feedback.
    _edit(ada, f"errand {repetition}")
    began = time.perf_counter()
    report = ada.learn("style", start="scratch", accept=True)
    assert report.revision, "nothing was built"
    return time.perf_counter() - began


def _commit(runtime: Runtime, repetition: int) -> float:
    """Return the mean of some commits of a user, who is erased so that the homes stay equal."""
    user = runtime.user("bo")
    began = time.perf_counter()
    for number in range(_COMMITS):
        user.remember(f"My number {number} of {repetition} is {number * 7}.")
    seconds = time.perf_counter() - began
    runtime.forget_user("bo")
    return seconds / _COMMITS


def _open(home: Path, keys: KeySettings) -> float:
    began = time.perf_counter()
    open_store(home, now=SYSTEM.now, entropy=SYSTEM.entropy, keys=keys).close()
    return time.perf_counter() - began
