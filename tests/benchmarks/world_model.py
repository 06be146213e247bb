"""``bench world``: does a world model predict games that it never saw, and does that help an agent?

One home on games of TextWorld, through the plugin and the public surface alone. The model learns
from the first games, and everything is measured on the games after them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks import world_agents as agents
from benchmarks.result_cache import Figures, ResultCache
from personalpeft import User, file_system
from personalpeft_world_model import (
    Outcome,
    Policy,
    Rate,
    Training,
    Trajectory,
    Verification,
    WorldModel,
    begins_with,
    imagine,
    measure_consistency,
    measure_fidelity,
    noisy,
    record,
    run_policy,
)
from personalpeft_world_model.exact_match import ExactMatch
from personalpeft_world_model.textworld_games import TextWorldGame, make_game

PARTS = ("fidelity", "consistency", "verification", "warm-start", "synthetic")
_USER, _RECORDING_SEED, _UNSEEN_SEED = "world", 0, 1
_NOISE, _BUDGET, _MAX_STEPS = 0.3, 10, 20
# Steps of the agent's skill. They are few, so that what it starts from can matter.
_SKILL_STEPS = 60


@dataclass(frozen=True, slots=True)
class WorldBench:
    """The object that ``--json`` prints. ``figures`` are by part; a part that did not run is not there."""

    bench: str
    base: str
    game: str
    games: int
    unseen: int
    epochs: float
    figures: Mapping[str, Figures]


@dataclass(frozen=True)
class _Bench:
    """One open home with the games to learn from and those to measure on."""

    runtime: personalpeft.Runtime
    game: str
    games: int
    unseen_games: int
    training: Training
    seeds: int
    folder: Path
    echo: Callable[[str], None]

    @cached_property
    def model(self) -> WorldModel:
        """The model, which learns here unless the home has it."""
        model = WorldModel(self.runtime.user(_USER), self.game)
        if any(layer.name == model.layer and layer.head for layer in model.user.layers()):
            self.echo("the model of an earlier run is there")
            return model
        self.echo(f"playing {self.games} games of {self.game}")
        new = model.teach(record(self._open(range(1, self.games + 1)), seed=_RECORDING_SEED))
        self.echo(f"{new} new transitions")
        # What the gate refuses is measured too; the verdict is one of the figures.
        report = model.learn(self.training, accept=True, progress=_in_tenths(self.echo))
        self.echo(f"{report.verdict}: {report.reason}; {report.seconds:.0f} s")
        return model

    @cached_property
    def unseen(self) -> Sequence[TextWorldGame]:
        """The games after those of the model."""
        return list(self._open(range(self.games + 1, self.games + self.unseen_games + 1)))

    @property
    def agent(self) -> Policy:
        """The scripted agent of the game."""
        return agents.collect if self.game == "coin" else agents.cook

    @property
    def clumsy(self) -> Policy:
        """The scripted agent with mistakes."""
        mistake = agents.wander if self.game == "coin" else agents.meddle
        return noisy(self.agent, _NOISE, mistake)

    def _open(self, seeds: range) -> Sequence[TextWorldGame]:
        return [TextWorldGame(make_game(self.game, seed, self.folder)) for seed in seeds]

    def measure(self, part: str) -> Figures:
        """Return the figures of one part."""
        began = time.perf_counter()
        figures = getattr(self, f"_{part.replace('-', '_')}")()
        return {**figures, "seconds": round(time.perf_counter() - began, 1)}

    def _fidelity(self) -> Figures:
        (*_, revision) = self.model.user.revisions(self.model.layer)
        runs = list(record(self.unseen, seed=_UNSEEN_SEED))
        found = measure_fidelity(self.model, runs, progress=_tenths(self.echo, "predicting"))
        self.echo(f"exact match {found.matched}; copy {found.copied}; seen {found.seen}")
        roles = list(revision.signals.values())
        return {
            "verdict": revision.verdict,
            "transitions": roles.count("trained"),
            "steps": revision.recipe["steps"],
            "learn_seconds": round(revision.seconds, 1),
            "gate": {key: revision.scores["tasks"][key] for key in ("asked", "passed_after")},
            "exact_match": _as_json(found.matched),
            "copied": _as_json(found.copied),
            "seen": _as_json(found.seen),
        }

    def _consistency(self) -> Figures:
        found = measure_consistency(
            self.model, self.unseen, self.clumsy, seed=_UNSEEN_SEED, max_steps=_MAX_STEPS
        )
        self.echo(f"scripted agent with noise: real {found.real}, replayed {found.replayed}")
        acting = agents.skill_agent(self._learn_skill("acts", self._demonstrate()), "acts")
        skilled = measure_consistency(
            self.model, self.unseen, acting, seed=_UNSEEN_SEED, max_steps=_MAX_STEPS
        )
        self.echo(f"skill layer: real {skilled.real}, replayed {skilled.replayed}")
        return {
            name: {
                "real": _as_json(each.real),
                "replayed": _as_json(each.replayed),
                "ratio": round(each.ratio, 3),
            }
            for name, each in (("scripted", found), ("skill", skilled))
        }

    def _verification(self) -> Figures:
        def ends(budget: int) -> dict[str, Any]:
            outcomes, checks = [], 0
            for number, game in enumerate(self.unseen):
                agent = Verification(self.model, self.clumsy, begins_with(["cook", "eat"]), budget)
                rng = random.Random(f"{_UNSEEN_SEED} {number}")
                outcomes.append(run_policy(game, agent, rng, max_steps=_MAX_STEPS).final.outcome)
                checks += agent.checks
            counts = {str(each): outcomes.count(each) for each in (Outcome.WON, Outcome.LOST)}
            self.echo(f"{budget} checks a game: {counts} of {len(outcomes)}, {checks} checks")
            return {**counts, "games": len(outcomes), "checks": checks}

        return {"without": ends(0), "with": ends(_BUDGET), "budget": _BUDGET}

    def _warm_start(self) -> Figures:
        rates: dict[str, list[float]] = {"without": [], "with": []}
        for seed in range(self.seeds):
            for name, start in (("without", None), ("with", self.model)):
                skill = f"{name}-{seed}"
                user = self._learn_skill(skill, self._demonstrate(), seed=seed, start=start)
                rates[name].append(self._success(user, skill))
                self.echo(f"seed {seed}, {name} warm start: {rates[name][-1]:.2f}")
        return {**rates, "games": len(self.unseen), "skill_steps": _SKILL_STEPS}

    def _synthetic(self) -> Figures:
        count = self.games
        real = self._demonstrate()
        imagined = list(
            imagine(
                self.model,
                self._open(range(1, count + 1)),
                self.agent,
                count,
                seed=_RECORDING_SEED,
                max_steps=_MAX_STEPS,
            )
        )
        found = {}
        for name, runs in (("real", real), ("imagined", imagined), ("both", [*real, *imagined])):
            solved = [run for run in runs if run.final.outcome is Outcome.WON]
            success = 0.0
            if solved:
                user = self._learn_skill(f"of-{name}", solved)
                success = self._success(user, f"of-{name}")
            found[name] = {"trajectories": len(solved), "success": success}
            self.echo(f"skill of {name} trajectories: {found[name]}")
        return found

    def _demonstrate(self) -> list[Trajectory]:
        """Return the scripted agent's runs in the games of the model."""
        return [
            run_policy(game, self.agent, random.Random(0), max_steps=_MAX_STEPS)
            for game in self._open(range(1, self.games + 1))
        ]

    def _learn_skill(
        self,
        skill: str,
        runs: Sequence[Trajectory],
        *,
        seed: int = 0,
        start: WorldModel | None = None,
    ) -> User:
        """Return a user whose skill learned to act as some trajectories do."""
        user = self.runtime.user(f"acts.{self.game}.{skill}")
        if start is not None:
            # As ``warm_start``, for a user who has nothing else of the model.
            with file_system.temporary_folder() as folder:
                path = start.user.export_peft(folder / "adapter", layer=start.layer)
                user.import_peft(path, layer=f"skill.{skill}")
        user.teach_many(agents.action_demonstrations(runs), skill=skill)
        user.scope(f"skill.{skill}", "never")
        recipe = replace(self.training, holdout=0.05).recipe
        steps = {"min_steps": _SKILL_STEPS, "max_steps": _SKILL_STEPS, "seed": seed}
        user.learn(f"skill.{skill}", recipe={**recipe, **steps}, verifier=ExactMatch(), accept=True)
        return user

    def _success(self, user: User, skill: str) -> float:
        agent = agents.skill_agent(user, skill)
        runs = [
            run_policy(game, agent, random.Random(0), max_steps=_MAX_STEPS) for game in self.unseen
        ]
        won = [run.final.outcome is Outcome.WON for run in runs]
        return round(sum(won) / len(won), 3)


def bench_world(
    base: str,
    backend: str,
    *,
    game: str,
    games: int,
    unseen: int,
    epochs: float,
    seeds: int,
    parts: Sequence[str],
    keep: Path,
    echo: Callable[[str], None],
) -> WorldBench:
    """Measure some parts, and those that ``keep`` has already are not measured again.

    Args:
        base, backend: As for ``personalpeft.open``.
        game: The kind of games.
        games: How many games the model learns from.
        unseen: How many other games everything is measured on.
        epochs: How often each transition is trained on.
        seeds: How often a warm start is compared.
        parts: Some of ``PARTS``.
        keep: The folder of games, the home and the figures.
        echo: Called with each line of progress.

    Raises:
        MissingPackage: TextWorld is not installed.
    """
    cache = ResultCache(keep, f"world-{game}-{games}-{unseen}-{epochs:g}")
    with personalpeft.open(keep / f"home-{games}-{epochs:g}", base, backend) as runtime:
        bench = _Bench(
            runtime, game, games, unseen, Training(epochs=epochs), seeds, keep / "games", echo
        )
        for part in cache.complete(parts, bench.measure):
            echo(f"{part} is kept in {cache.path}")
    figures = {key: each for key, each in cache.figures().items() if key in parts}
    return WorldBench("world", base, game, games, unseen, epochs, figures)


def _as_json(rate: Rate) -> dict[str, Any]:
    return {"right": rate.right, "asked": rate.asked, "rate": round(rate.value, 4)}


def _tenths(echo: Callable[[str], None], stage: str) -> Callable[[float], None]:
    """Return a function that prints each tenth of a stage."""
    told = {0}

    def show(done: float) -> None:
        if int(10 * done) not in told:
            told.add(int(10 * done))
            echo(f"{stage}: {done:.0%}")

    return show


def _in_tenths(echo: Callable[[str], None]) -> Callable[[str, float], None]:
    stages: dict[str, Callable[[float], None]] = {}

    def show(stage: str, done: float) -> None:
        stages.setdefault(stage, _tenths(echo, stage.lower()))(done)

    return show
