"""``bench world``: does a world model predict games that it never saw, and does that help an agent?

One home on games of TextWorld, through the plugin and the public surface alone. The model learns
from the first games, and everything is measured on the games after them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks import world_agents as agents
from benchmarks.result_cache import Figures, ResultCache
from personalpeft import User
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
    measure_success,
    noisy,
    read_jsonl,
    record,
    run_policy,
    warm_start,
    write_jsonl,
)
from personalpeft_world_model.exact_match import EXACT_MATCH
from personalpeft_world_model.textworld_games import TextWorldGame, make_game

_USER, _RECORDING_SEED, _UNSEEN_SEED = "world", 0, 1
_NOISE, _BUDGET, _MAX_STEPS = 0.3, 10, 20
# Steps of the agent's skill. They are few, so that what it starts from can matter.
_SKILL_STEPS = 60
# The seed of the first game beside those of the model, for more trajectories. It is behind all
# unseen games.
_MORE_GAMES = 1_000_001
# Imagined trajectories of a file. An interrupted part goes on after the last file.
_FILE_SIZE = 50


@dataclass(frozen=True)
class _Bench:
    """One open home with the games to learn from and those to measure on."""

    runtime: personalpeft.Runtime
    game: str
    games: int
    unseen_games: int
    training: Training
    seeds: int
    trajectories: int
    verified_games: int
    warm_start_steps: int
    folder: Path
    imagined_folder: Path
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
        return self._open_unseen(self.unseen_games)

    @property
    def agent(self) -> Policy:
        """The scripted agent of the game."""
        return agents.collect if self.game == "coin" else agents.cook

    @property
    def clumsy(self) -> Policy:
        """The scripted agent with mistakes."""
        mistake = agents.wander if self.game == "coin" else agents.meddle
        return noisy(self.agent, _NOISE, mistake)

    def _open_unseen(self, count: int) -> Sequence[TextWorldGame]:
        return self._open(range(self.games + 1, self.games + count + 1))

    def _open(self, seeds: Iterable[int]) -> Sequence[TextWorldGame]:
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
        user, skill = self._learn_skill("acts", self._demonstrate(self._games_of_model))
        acting = agents.skill_agent(user, skill)
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
        games = self._open_unseen(self.verified_games)

        def ends(budget: int) -> dict[str, Any]:
            outcomes, checks = [], 0
            for number, game in enumerate(games):
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
        runs, steps = self._demonstrate(self._games_of_model), self.warm_start_steps
        budget = "" if steps == _SKILL_STEPS else f"-{steps}"
        for seed in range(self.seeds):
            for name, start in (("without", None), ("with", self.model)):
                user, skill = self._learn_skill(
                    f"{name}-{seed}{budget}", runs, seed=seed, start=start, steps=steps
                )
                rates[name].append(self._success(user, skill))
                self.echo(f"seed {seed}, {name} warm start: {rates[name][-1]:.2f}")
        return {**rates, "games": len(self.unseen), "skill_steps": steps}

    def _synthetic(self) -> Figures:
        count = self.trajectories
        more = range(_MORE_GAMES, _MORE_GAMES + max(0, count - self.games))
        seeds = [*self._games_of_model[:count], *more]
        real, imagined = self._demonstrate(seeds), self._imagine(seeds)
        found = {}
        for name, runs in (("real", real), ("imagined", imagined), ("both", [*real, *imagined])):
            solved = [run for run in runs if run.final.outcome is Outcome.WON]
            success = 0.0
            if solved:
                user, skill = self._learn_skill(f"of-{name}-{count}", solved)
                success = self._success(user, skill)
            found[name] = {"trajectories": len(solved), "success": success}
            self.echo(f"skill of {name} trajectories: {found[name]}")
        return {**found, "games": count}

    @property
    def _games_of_model(self) -> range:
        """The seeds of the games that the model learned from."""
        return range(1, self.games + 1)

    def _demonstrate(self, seeds: Iterable[int]) -> list[Trajectory]:
        """Return the scripted agent's runs in some games."""
        return [
            run_policy(game, self.agent, random.Random(0), max_steps=_MAX_STEPS)
            for seed in seeds
            for game in self._open([seed])  # One at a time: each takes memory.
        ]

    def _imagine(self, seeds: Sequence[int]) -> list[Trajectory]:
        """Return the scripted agent's runs inside the model, from the first states of some games.

        They are kept in files: a thousand took 19 minutes on one thread.
        """
        self.imagined_folder.mkdir(exist_ok=True)
        found: list[Trajectory] = []
        for first in range(0, len(seeds), _FILE_SIZE):
            part = seeds[first : first + _FILE_SIZE]
            file = self.imagined_folder / f"{self.game}-{part[0]}-{part[-1]}.jsonl"
            if not file.exists():
                runs = imagine(
                    self.model,
                    self._open(part),
                    self.agent,
                    len(part),
                    seed=_RECORDING_SEED,
                    max_steps=_MAX_STEPS,
                )
                write_jsonl(file, runs)
            found += read_jsonl(file)
            self.echo(f"imagined {len(found)} of {len(seeds)} trajectories")
        return found

    def _learn_skill(
        self,
        name: str,
        runs: Sequence[Trajectory],
        *,
        seed: int = 0,
        start: WorldModel | None = None,
        steps: int = _SKILL_STEPS,
    ) -> tuple[User, str]:
        """Return a user and a skill of the user that learned to act as some trajectories do.

        A skill that starts from the model is one of the model's user. What an interrupted run did
        for it is not done again.
        """
        skill = f"{self.game}-{name}"
        user = start.user if start else self.runtime.user(f"acts.{skill}")
        layer = f"skill.{skill}"
        if any(each.layer == layer and each.signals for each in user.revisions()):
            self.echo(f"{layer} of an earlier run is there")
            return user, skill
        if start and not any(each.name == layer and each.head for each in user.layers()):
            warm_start(start, user, skill)
        if not any(each.payload.get("skill") == skill for each in user.signals()):
            user.teach_many(agents.action_demonstrations(runs), skill=skill)
        user.scope(layer, "never")
        recipe = replace(self.training, holdout=0.05).recipe
        fixed = {
            "min_steps": steps,
            "max_steps": steps,
            # A skill that starts from the model has fewer steps for less than this many batches.
            "min_steps_batches": 1,
            "seed": seed,
        }
        user.learn(layer, recipe={**recipe, **fixed}, verifier=EXACT_MATCH, accept=True)
        return user, skill

    def _success(self, user: User, skill: str) -> float:
        """Return the share of unseen games that a skill wins."""
        agent = agents.skill_agent(user, skill)
        won = measure_success(self.unseen, agent, seed=_UNSEEN_SEED, max_steps=_MAX_STEPS)
        return round(won.value, 3)


def bench_world(
    base: str,
    backend: str,
    *,
    game: str,
    games: int,
    unseen: int,
    epochs: float,
    seeds: int,
    trajectories: int | None = None,
    verified_games: int | None = None,
    warm_start_steps: int | None = None,
    parts: Sequence[str],
    keep: Path,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Measure some parts, and those that ``keep`` has already are not measured again.

    ``figures`` are by part; a part that did not run is not there.

    Args:
        base, backend: As for ``personalpeft.open``.
        game: The kind of games.
        games: How many games the model learns from.
        unseen: How many other games everything is measured on.
        epochs: How often each transition is trained on.
        seeds: How often a warm start is compared.
        trajectories: How many real and how many imagined ones skills learn from; default ``games``.
        verified_games: How many unseen games are played with checks and without; default ``unseen``.
        warm_start_steps: How long the skills of the warm start train; default 60 steps.
        parts: Some of "fidelity", "consistency", "verification", "warm-start" and "synthetic".
        keep: The folder of games, the home and the figures.
        echo: Called with each line of progress.

    Raises:
        MissingPackage: TextWorld is not installed.
    """
    # A part of another size than the default is another figure.
    sizes = {
        "synthetic": trajectories,
        "verification": verified_games,
        "warm-start": warm_start_steps,
    }
    keys = {part: f"{part}-{size}" if (size := sizes.get(part)) else part for part in parts}
    work = {key: part for part, key in keys.items()}
    cache = ResultCache(keep, f"world-{game}-{games}-{unseen}-{epochs:g}")
    with personalpeft.open(keep / f"home-{games}-{epochs:g}", base, backend) as runtime:
        bench = _Bench(
            runtime,
            game,
            games,
            unseen,
            Training(epochs=epochs),
            seeds,
            trajectories or games,
            verified_games or unseen,
            warm_start_steps or _SKILL_STEPS,
            keep / "games",
            keep / f"imagined-{games}-{epochs:g}",
            echo,
        )
        kept = cache.complete(
            work,
            lambda part, _: bench.measure(part),
            lambda part, _: echo(f"{keys[part]} is kept in {cache.path}"),
        )
    return {
        "bench": "world",
        "base": base,
        "game": game,
        "games": games,
        "unseen": unseen,
        "epochs": epochs,
        "figures": {work[key]: figures for key, figures in kept.items()},
    }


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
