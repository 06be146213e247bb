"""``bench learn``: do lessons last over rounds of learning while everything else stays the same?

Personas (``personas.py``) live through eight rounds each (``learn_course.py``) in a temporary home.
Each is asked in four ways: ``base``, ``retrieval``, ``adapter`` and ``both``. ``retrieval`` has
rules and facts in the prompt and no layer, ``adapter`` has layers alone. For the first few personas
a plain PEFT loop (``learn_trainer.py``) trains on the same rounds.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from benchmarks.homes import temporary_home
from benchmarks.learn_batches import BAD, batches, describe_outcomes, record_and_learn
from benchmarks.learn_course import (
    WAYS,
    Evaluator,
    Round,
    UserSampler,
    known_to_base,
    simulate_round,
)
from benchmarks.learn_together import APART, TOGETHER, compare_joint_and_sequential
from benchmarks.learn_trainer import generic_texts, run_plain_loop
from benchmarks.personas import Persona, load_personas
from benchmarks.result_cache import Figures, ResultCache, make_key
from personalpeft.types import Progress

OURS = ("adapter", "both")
TRAINER = "trainer"
FIGURES = ("recall", "locality", "retention", "overwrite")
MOMENTS = ("after_12_edits", "after_24_mixed", "after_the_change", "at_the_end")
_STYLE_NIGHTS = (1, 2, 7)

Nights: TypeAlias = Sequence[Sequence[Mapping[str, Any]]]
"""The learns of a persona by round."""


@dataclass(frozen=True, slots=True)
class Course:
    """What to run: the ``nights`` (rounds) and personas.

    The plain loop runs for the first few personas too. ``together`` users learn jointly and one
    after another.
    """

    people: tuple[Persona, ...]
    nights: int
    seed: int
    trainer_people: int
    together: int
    base: str
    backend: str

    def key(self, person: Persona) -> str:
        """Return the cache key of a persona's figures: all inputs except the code."""
        plain = "-plain" if person in self.people[: self.trainer_people] else ""
        return make_key(person.name, self.base, self.nights, f"{self.seed}{plain}")

    @property
    def together_key(self) -> str:
        return make_key("together", self.together, self.base)


def bench_learn(
    course: Course, keep: ResultCache, *, echo: Callable[[str], None], progress: Progress
) -> dict[str, Any]:
    """Run what is neither cached nor run by another process, and summarize these personas.

    Figures are by method: a share from 0 to 1 of ``counts`` questions. ``seconds_per_learn`` are
    medians by layer. ``tokens_per_second`` is of replies to unseen questions. ``locality_by_night``
    is locality over the rounds with layers alone. ``by_person`` has each persona's tallies by
    method. ``verdicts`` are of all learns, ``refused`` the reasons of those that left nothing live.
    ``ratios`` are how many times as long the others took. ``together`` are the figures behind the
    last ratio (``learn_together.py``), empty where it was not run.
    """
    keys = {course.key(person): person for person in course.people}

    def measure(person: Persona, before: float) -> Figures:
        return _measured(
            course, person, echo, lambda stage, done: progress(stage, before + done / len(keys))
        )

    def compare(users: int, before: float) -> Figures:
        progress("Users who learn together", 0.0)
        return compare_joint_and_sequential(users, course.base, course.backend)

    kept = keep.complete(keys, measure, lambda person, _: echo(f"{person.name}: done"))
    # Last, when this process has no other work beside it.
    together = keep.complete(
        {course.together_key: course.together} if course.together else {},
        compare,
        lambda users, _: echo(f"{users} users together: done"),
    )
    missing = [person.name for key, person in keys.items() if key not in kept]
    if missing:
        echo(f"not yet there: {', '.join(missing)}")
    own = {keys[key].name: figures for key, figures in kept.items()}
    return _summed_up(course, own, together.get(course.together_key))


def _measured(
    course: Course, person: Persona, echo: Callable[[str], None], progress: Progress
) -> Figures:
    """One person's course."""
    with temporary_home(course.base, course.backend) as runtime:
        runtime.engine()
        user = runtime.user(person.name)
        sampler = UserSampler(user)
        evaluators = {way: Evaluator(sampler.way(way), nightly=way == "adapter") for way in WAYS}
        known = known_to_base(sampler.way("base"))
        nights: list[Round] = []
        for number in range(1, course.nights + 1):
            progress(f"{person.name}, night {number}", (number - 1) / course.nights)
            nights.append(simulate_round(user, person, number, course.seed))
            before = set(evaluators["adapter"].figures)
            for evaluator in evaluators.values():
                evaluator.evaluate(person, number, course.nights, known)
            echo(_format_night(person, number, nights[-1], evaluators["adapter"], before))
        batch = batches(BAD)[list(load_personas()).index(person.name) % len(batches(BAD))]
        accepted, reports = record_and_learn(
            user, batch.acts(person, random.Random(f"{course.seed} {person.name}"))
        )
        figures: dict[str, Any] = {way: evaluator.figures for way, evaluator in evaluators.items()}
        seconds, tokens = dict(sampler.seconds), dict(sampler.tokens)
        times: tuple[float, ...] = ()
        if person in course.people[: course.trainer_people]:
            progress(f"{person.name}, the plain loop", 1.0)
            generic = generic_texts(sampler.way("base"))
            backend = runtime.engine().backend
            plain = run_plain_loop(
                runtime.model_folder(), backend, person, nights, generic, known, course.seed
            )
            figures[TRAINER], times = plain.figures, plain.nights
            seconds[TRAINER], tokens[TRAINER] = plain.seconds, plain.tokens
    return {
        "figures": figures,
        "general": evaluators["adapter"].general,
        "known": len(known),
        "bad": {
            "batch": f"{batch.kind}: {batch.name}",
            "accepted": accepted,
            "learns": describe_outcomes(reports),
        },
        "learns": [night.learns for night in nights],
        "plain_seconds": times,
        "tokens": tokens,
        "seconds": seconds,
    }


def _format_night(
    person: Persona, number: int, night: Round, asked: Evaluator, before: set[str]
) -> str:
    """Format a round: its learns, new recall with layers alone, and right general answers."""
    learns = (
        "; ".join(
            f"{each['layer']} {each['verdict']} in {each['seconds']:.0f} s" for each in night.learns
        )
        or "nothing"
    )
    new = {figure: tally for figure, tally in asked.figures.items() if figure not in before}
    figures = {**new, "general": asked.general[-1]}
    return f"{person.name}, night {number}: {learns}; {', '.join(f'{f} {n}/{of}' for f, (n, of) in figures.items())}"


def _summed_up(
    course: Course, kept: Mapping[str, Figures], together: Figures | None
) -> dict[str, Any]:
    contestants = [
        *WAYS,
        *([TRAINER] if any(TRAINER in figures["figures"] for figures in kept.values()) else []),
    ]
    tallies = {
        contestant: {
            figure: [
                f["figures"][contestant][figure]
                for f in kept.values()
                if figure in f["figures"].get(contestant, {})
            ]
            for figure in (*(f"adherence.{moment}" for moment in MOMENTS), *FIGURES)
        }
        for contestant in contestants
    }

    def shares(figure: str) -> dict[str, float | None]:
        return {contestant: _share(tallies[contestant][figure]) for contestant in contestants}

    learns = [figures["learns"] for figures in kept.values()]
    plain = [figures["plain_seconds"] for figures in kept.values()]
    verdicts = Counter(each["verdict"] for person in learns for night in person for each in night)
    return {
        "bench": "learn",
        "base": course.base,
        "people": list(kept),
        "nights": course.nights,
        "seed": course.seed,
        "adherence": {
            contestant: {
                moment: _share(tallies[contestant][f"adherence.{moment}"]) for moment in MOMENTS
            }
            for contestant in contestants
        },
        **{figure: shares(figure) for figure in FIGURES},
        "bad_updates_accepted": dict.fromkeys(
            OURS, sum(f["bad"]["accepted"] for f in kept.values())
        ),
        "seconds_per_learn": _seconds_per_learn(learns, plain),
        "tokens_per_second": {
            contestant: _rate(
                sum(f["tokens"].get(contestant, 0) for f in kept.values()),
                sum(f["seconds"].get(contestant, 0) for f in kept.values()),
            )
            for contestant in contestants
        },
        "ratios": {
            "learn_vs_trainer": _against_plain(learns, plain),
            "many_vs_sequential": together
            and round(together[APART]["seconds"] / together[TOGETHER]["seconds"], 3),
        },
        "together": {way: together[way] for way in (APART, TOGETHER)} if together else {},
        "counts": {
            c: {figure: sum(of for _, of in each) for figure, each in tallies[c].items()}
            for c in contestants
        },
        "locality_by_night": [
            _share([f["general"][night] for f in kept.values()])
            for night in range(course.nights if kept else 0)
        ],
        "by_person": {name: f["figures"] for name, f in kept.items()},
        "verdicts": dict(sorted(verdicts.items())),
        "refused": [
            f"{name}, night {number}, {each['layer']}: {each['reason']}"
            for name, person in zip(kept, learns, strict=True)
            for number, night in enumerate(person, 1)
            for each in night
            if not each["live"]
        ],
    }


def _seconds_per_learn(
    learns: Sequence[Nights], plain: Iterable[Sequence[float]]
) -> dict[str, dict[str, float]]:
    own: dict[str, list[float]] = {}
    for each in (each for person in learns for night in person for each in night):
        own.setdefault(each["layer"], []).append(each["seconds"])
    trained: dict[str, list[float]] = {}
    for times in plain:
        for number, seconds in enumerate(times, 1):
            if seconds:
                trained.setdefault("style" if number in _STYLE_NIGHTS else "memory", []).append(
                    seconds
                )
    medians = {
        name: _medians(times) for name, times in (*((way, own) for way in OURS), (TRAINER, trained))
    }
    return {name: times for name, times in medians.items() if times}


def _against_plain(learns: Sequence[Nights], plain: Iterable[Sequence[float]]) -> float | None:
    """Return how many times as long the plain loop takes as our learns of the same rounds."""
    own = theirs = 0.0
    for person, times in zip(learns, plain, strict=True):
        for night, seconds in zip(person, times, strict=False):
            if seconds:
                own += sum(each["seconds"] for each in night)
                theirs += seconds
    return round(theirs / own, 3) if own else None


def _medians(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {layer: round(statistics.median(seconds), 2) for layer, seconds in sorted(times.items())}


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 1) if seconds else None


def _share(tallies: Sequence[Sequence[int]]) -> float | None:
    of = sum(each for _, each in tallies)
    return round(sum(hits for hits, _ in tallies) / of, 4) if of else None
