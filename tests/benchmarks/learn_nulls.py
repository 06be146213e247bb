"""``bench nulls``: does the gate refuse learns without a lesson, and how far do two seeds differ?

Two kinds of nulls for each style of ``edits/``:
- shuffled: twelve edits whose wanted answers belong to other prompts.
- seeds: after a learn of the true edits the same lessons are built again with other seeds. The
  spread of a holdout lesson's log-prob between two such builds is what ``tie_margin`` of a
  base's card should be.
Results are cached at once, so that an interrupted run resumes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import personalpeft
from benchmarks.cards import write_card
from benchmarks.edit_styles import EditStyle, load_styles
from benchmarks.homes import temporary_folder
from benchmarks.result_cache import Figures, ResultCache
from personalpeft import Runtime
from personalpeft.base_models.registry import find_card
from personalpeft.learning.report import LearnReport
from personalpeft.types import Progress

SHUFFLED, SEEDS = "shuffled", "seeds"
_SEEDS_PER_STYLE = 4
_USER = "ada"


def bench_nulls(
    number: int,
    *,
    base: str,
    backend: str,
    seed: int,
    keep: ResultCache,
    echo: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """Run the first nulls of each kind that are not cached, and summarize.

    ``kinds`` counts the nulls of a kind that ``ran``, are ``live``, and are live ``for_good``.
    ``spread`` compares ``pairs`` of builds that differ only in the seed. It is the root mean square
    change (nats a token) of a holdout lesson.
    """
    styles = [each for each in load_styles().values() if len(each.lessons) >= 12]
    families = (number + _SEEDS_PER_STYLE - 1) // _SEEDS_PER_STYLE
    keys = [
        f"{kind}-{place}-{base}-{seed}"
        for kind, count in ((SEEDS, families), (SHUFFLED, number))
        for place in range(count)
    ]

    def measure(key: str, before: float) -> Figures:
        kind, place = key.split("-")[:2]
        style = styles[int(place) % len(styles)]
        progress(f"{kind}: {style.name}", before)
        rng = random.Random(f"{seed} {key}")
        with temporary_folder() as work:
            if kind == SHUFFLED:
                return _try_shuffled(style, work, base, backend, rng)
            return _try_seeds(style, work, base, backend)

    def show(key: str, case: Figures) -> None:
        echo(f"{case['kind']}, {case['style']}: {'; '.join(case['learns'])}")

    cases = list(keep.complete({key: key for key in keys}, measure, show).values())
    changes = [change for case in cases for change in case.get("changes", ())]
    return {
        "bench": "nulls",
        "base": base,
        "kinds": {
            kind: {
                name: sum(case[name] for case in cases if case["kind"] == kind)
                for name in ("ran", "live", "for_good")
            }
            for kind in (SHUFFLED, SEEDS)
        },
        "spread": round(fmean(change * change for change in changes) ** 0.5, 4)
        if changes
        else None,
        "pairs": len(changes),
        "cases": cases,
    }


def _try_shuffled(
    style: EditStyle, home: Path, base: str, backend: str, rng: random.Random
) -> Figures:
    answers = [case.answer for case in style.lessons]
    shift = rng.randrange(1, len(answers))
    moved = [
        replace(case, answer=answers[(n + shift) % len(answers)])
        for n, case in enumerate(style.lessons)
    ]
    with personalpeft.open(home, base, backend) as runtime:
        report = _learn(runtime, replace(style, lessons=tuple(moved)))
    return _figures(SHUFFLED, style, [report])


def _try_seeds(style: EditStyle, folder: Path, base: str, backend: str) -> Figures:
    """Learn a style, and build it again with other seeds; only these are the nulls."""
    card = find_card(base)
    reports: list[LearnReport] = []
    scores: list[dict[str, float]] = []
    for seed in range(_SEEDS_PER_STYLE + 1):
        learning = {**card.learning, "style": {**card.learning.get("style", {}), "seed": seed}}
        path = write_card(card, folder / f"{seed}.toml", learning=learning)
        with personalpeft.open(folder / "home", path, backend) as runtime:
            if seed:
                report = runtime.user(_USER).learn("style", start="scratch")
                reports.append(report)
            else:
                report = _learn(runtime, style, accept=True)
        scores.append(
            {item: each["after"] for item, each in (report.scores or {}).get("items", {}).items()}
        )
    return {**_figures(SEEDS, style, reports), "changes": list(_changes(scores))}


def _changes(scores: Sequence[Mapping[str, float]]) -> Iterator[float]:
    for one, other in combinations(scores, 2):
        yield from (round(other[item] - one[item], 4) for item in one.keys() & other.keys())


def _learn(runtime: Runtime, style: EditStyle, *, accept: bool = False) -> LearnReport:
    user = runtime.user(_USER)
    for case in style.lessons[:12]:
        user.feedback(user.chat(case.prompt, temperature=0, max_tokens=40), edit=case.answer)
    return user.learn("style", accept=accept)


def _figures(kind: str, style: EditStyle, reports: Sequence[LearnReport]) -> Figures:
    live = [report for report in reports if report.live]
    return {
        "kind": kind,
        "style": style.name,
        "ran": len(reports),
        "live": len(live),
        "for_good": sum(not report.probation for report in live),
        "learns": [f"{report.outcome}: {report.reason}" for report in reports],
    }
