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
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import personalpeft
from benchmarks.learn_batches import BAD, GOOD, Batch, batches, describe_outcomes, record_and_learn
from benchmarks.learn_course import edits, facts_of, learn, tell
from benchmarks.personas import Persona, load_personas, pools
from benchmarks.result_cache import Figures, ResultCache, make_key
from personalpeft.types import Progress

PASTS = ("bruno", "dmitri", "hana")
_SAID_BEFORE = 12
_FIRST_FACTS = 3


@dataclass(frozen=True, slots=True)
class Case:
    """One batch's result: whether it is live, and layer, verdict and reason of each learn.

    ``seconds`` are those of all its learns.
    """

    kind: str
    name: str
    person: str
    live: bool
    learns: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class GateBench:
    """The object that ``--json`` prints.

    ``by_kind`` counts the batches that ``ran`` and are ``live``.
    """

    bench: str
    base: str
    bad: int
    bad_accepted: int
    good: int
    good_refused: int
    by_kind: Mapping[str, Mapping[str, int]]
    cases: tuple[Case, ...]


def bench_gate(
    bad: int,
    good: int,
    *,
    base: str,
    backend: str,
    seed: int,
    keep: ResultCache,
    note: Callable[[str], None],
    progress: Progress,
) -> GateBench:
    """Try the first bad and good batches that are not cached, and summarize all."""
    chosen = {_key(each, base, seed): each for each in (*batches(BAD)[:bad], *batches(GOOD)[:good])}
    # The past depends on the batch's position among all, whatever else is tried.
    whose = {
        each: load_personas()[PASTS[place % len(PASTS)]]
        for place, each in enumerate((*batches(BAD), *batches(GOOD)))
    }
    order = list(chosen)
    with ExitStack() as ends:
        work = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="personalpeft-bench-")))
        pasts: dict[str, Path] = {}

        def measure(key: str) -> Figures:
            batch = chosen[key]
            person = whose[batch]
            progress(f"{batch.kind}: {batch.name}", order.index(key) / len(order))
            if person.name not in pasts:
                pasts[person.name] = _past(person, work / person.name, base, backend)
            return _tried(batch, person, pasts[person.name], work / "now", base, backend, seed)

        for key in keep.complete(chosen, measure):
            case = _case(keep.figures()[key])
            note(
                f"{case.kind}, {case.name}: {'live' if case.live else 'not live'}; {'; '.join(case.learns)}"
            )
    kept = keep.figures()
    cases = tuple(_case(kept[key]) for key in order if key in kept)
    bad_cases = [case for case in cases if case.kind in BAD]
    good_cases = [case for case in cases if case.kind in GOOD]
    return GateBench(
        bench="gate",
        base=base,
        bad=len(bad_cases),
        bad_accepted=sum(case.live for case in bad_cases),
        good=len(good_cases),
        good_refused=sum(not case.live for case in good_cases),
        by_kind={
            ("" if kind in BAD else "good: ") + kind: {
                "ran": sum(case.kind == kind for case in cases),
                "live": sum(case.live for case in cases if case.kind == kind),
            }
            for kind in dict.fromkeys(case.kind for case in cases)
        },
        cases=cases,
    )


def _past(person: Persona, home: Path, base: str, backend: str) -> Path:
    """Create a home with a learned style, and learned facts where the base can learn them."""
    with personalpeft.open(home, base, backend) as runtime:
        user = runtime.user(person.name)
        edits(user, pools().everyday[:_SAID_BEFORE], person.habit)
        learn(user)
        tell(user, facts_of(person, _FIRST_FACTS))
        learn(user)
    return home


def _tried(
    batch: Batch, person: Persona, past: Path, home: Path, base: str, backend: str, seed: int
) -> Mapping[str, object]:
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


def _case(figures: Figures) -> Case:
    learns: Sequence[str] = figures["learns"]
    own = {key: figures[key] for key in ("kind", "name", "person", "live", "seconds")}
    return Case(**own, learns=tuple(learns))


def _key(batch: Batch, base: str, seed: int) -> str:
    return make_key(batch.kind, batch.name, base, seed)
