"""``bench gate``: do bad updates stay out, and do good ones become live?

Each batch of ``learn_batches.py`` is recorded and learned after the same past: twelve edits and
five facts, learned and live. The past is made once a run for each of three personas, and its home
copied for each batch. A batch is live if a live revision contains it. A good batch that was learned
and is not live counts as refused, whether the gate refused or abstained. Results are cached at
once.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks.homes import temporary_folder
from benchmarks.learn_batches import BAD, GOOD, Batch, batches, describe_outcomes, record_and_learn
from benchmarks.learn_course import edits, facts_of, learn, state_facts
from benchmarks.personas import Persona, load_personas, pools
from benchmarks.result_cache import Figures, ResultCache, make_key
from personalpeft.types import Progress

PASTS = ("bruno", "dmitri", "hana")
_SAID_BEFORE = 12
_FIRST_FACTS = 3


def bench_gate(
    bad: int,
    good: int,
    *,
    base: str,
    backend: str,
    seed: int,
    keep: ResultCache,
    echo: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Try the first bad and good batches that are not cached, and summarize all.

    ``by_kind`` counts the batches that ``ran`` and are ``live``. A case has the layer, verdict and
    reason of each learn of a batch, and the seconds of all of them.
    """
    chosen = {
        make_key(each.kind, each.name, base, seed): each
        for each in (*batches(BAD)[:bad], *batches(GOOD)[:good])
    }
    # The past depends on the batch's position among all, whatever else is tried.
    whose = {
        each: load_personas()[PASTS[place % len(PASTS)]]
        for place, each in enumerate((*batches(BAD), *batches(GOOD)))
    }
    with ExitStack() as ends:
        work = ends.enter_context(temporary_folder())
        pasts: dict[str, Path] = {}

        def measure(batch: Batch, before: float) -> Figures:
            person = whose[batch]
            progress(f"{batch.kind}: {batch.name}", before)
            if person.name not in pasts:
                pasts[person.name] = _past(person, work / person.name, base, backend)
            return _tried(batch, person, pasts[person.name], work / "now", base, backend, seed)

        def show_result(batch: Batch, case: Figures) -> None:
            live = "live" if case["live"] else "not live"
            echo(f"{batch.kind}, {batch.name}: {live}; {'; '.join(case['learns'])}")

        kept = keep.complete(chosen, measure, show_result)
    names = ("kind", "name", "person", "live", "learns", "seconds")
    cases = [{name: case[name] for name in names} for case in kept.values()]
    bad_cases = [case for case in cases if case["kind"] in BAD]
    good_cases = [case for case in cases if case["kind"] in GOOD]
    return {
        "bench": "gate",
        "base": base,
        "bad": len(bad_cases),
        "bad_accepted": sum(case["live"] for case in bad_cases),
        "good": len(good_cases),
        "good_refused": sum(not case["live"] for case in good_cases),
        "by_kind": {
            ("" if kind in BAD else "good: ") + kind: {
                "ran": sum(case["kind"] == kind for case in cases),
                "live": sum(case["live"] for case in cases if case["kind"] == kind),
            }
            for kind in dict.fromkeys(case["kind"] for case in cases)
        },
        "cases": cases,
    }


def _past(person: Persona, home: Path, base: str, backend: str) -> Path:
    """Create a home with a learned style, and learned facts where the base can learn them."""
    with personalpeft.open(home, base, backend) as runtime:
        user = runtime.user(person.name)
        edits(user, pools().everyday[:_SAID_BEFORE], person.habit)
        learn(user)
        state_facts(user, facts_of(person, _FIRST_FACTS))
        learn(user)
    return home


def _tried(
    batch: Batch, person: Persona, past: Path, home: Path, base: str, backend: str, seed: int
) -> Figures:
    shutil.copytree(past, home)
    try:
        with personalpeft.open(home, base, backend) as runtime:
            user = runtime.user(person.name)
            live, reports = record_and_learn(
                user, batch.acts(person, random.Random(f"{seed} {batch.kind} {batch.name}"))
            )
    finally:
        shutil.rmtree(home)
    return {
        "kind": batch.kind,
        "name": batch.name,
        "person": person.name,
        "live": live,
        "learns": describe_outcomes(reports),
        "seconds": round(sum(report.seconds for report in reports), 2),
    }
