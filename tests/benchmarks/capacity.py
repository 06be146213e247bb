"""``bench capacity``: how many facts a memory layer recalls on unseen phrasings, without retrieval.

A run gives a new user made-up facts (``facts.py``), learns them at once and asks with the memory
layer alone. Layers of small rank fill up sooner. So a few hundred facts show the whole curve of
tokens for each parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import personalpeft
from benchmarks.cards import write_card
from benchmarks.facts import facts
from benchmarks.homes import temporary_folder, temporary_home
from benchmarks.learn_course import chat_all
from benchmarks.result_cache import Figures, ResultCache
from benchmarks.sweep import general
from personalpeft import User
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.types import ModelCard
from personalpeft.learning.train.config import TrainingConfig, load_training_configs
from personalpeft.types import canonical_digest

_ANSWER = 24
_USER = "bench"
_LAYER = "memory"


@dataclass(frozen=True, slots=True)
class _Run:
    facts: int
    recipe: TrainingConfig

    @property
    def key(self) -> str:
        return canonical_digest([self.recipe.to_stored(), self.facts])[:16]


def bench_capacity(
    *,
    base: str,
    counts: Sequence[int],
    ranks: Sequence[int],
    seeds: int,
    keep: Path,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Run what is not cached, at the default rank without ``ranks``, and return all of these runs.

    ``rank`` is the default.
    """
    card = find_card(base)
    with temporary_home(base) as runtime:
        projections = runtime.base().architecture.projections

    def recipe(**changes: int) -> TrainingConfig:
        learning = {**card.learning, _LAYER: {**card.learning.get(_LAYER, {}), **changes}}
        return load_training_configs(card.name, learning, projections).memory

    rank = recipe().rank
    planned = [
        _Run(count, recipe(rank=each, seed=seed))
        for seed, each, count in product(range(seeds), ranks or [rank], counts)
    ]
    runs = {run.key: run for run in planned}
    kept = ResultCache(keep, "capacity")
    known: list[bool] = []

    def measure(run: _Run, before: float) -> Figures:
        echo(f"{run.facts} facts, rank {run.recipe.rank}, seed {run.recipe.seed}")
        if not known:
            with temporary_home(base) as runtime:
                known.extend(general(runtime.user(_USER), layers=[]))
        return _measured(run, card, known, base=base)

    def show(run: _Run, load: Figures) -> None:
        recalled, right = f"{load['recalled']}/{load['facts']}", f"{load['kept']}/{load['known']}"
        echo(f"  {recalled} recalled, {right} kept, {load['seconds']:.0f} s")

    kept.complete(runs, measure, show)
    loads = [figures for key, figures in kept.figures().items() if key in runs]
    return {"bench": "capacity", "base": base, "rank": rank, "loads": loads}


def _measured(run: _Run, card: ModelCard, known: Sequence[bool], *, base: str) -> Figures:
    """Measure one run.

    Of ``facts``, ``recalled`` were right on the unseen phrasing and the next field on the first
    learned one. The lessons took ``tokens`` of the layer's trained ``parameters``. The base had
    ``known`` general answers right; ``kept`` of them are still right. ``kl`` is in nats a token
    from the base.
    """
    told = facts(run.facts, run.recipe.seed)
    learning = {**card.learning, _LAYER: run.recipe.model_dump(mode="json")}
    with temporary_folder() as folder:
        changed = write_card(card, folder / "card.toml", learning=learning)
        with personalpeft.open(folder / "home", changed) as runtime:
            user = runtime.user(_USER)
            for fact in told:
                user.remember(fact.text, questions=fact.questions, answer=fact.answer)
            report = user.learn(_LAYER, accept=True)
            live = report.live
            unseen = _answers(user, [fact.unseen for fact in told]) if live else [""] * len(told)
            as_told = (
                _answers(user, [fact.questions[0] for fact in told]) if live else [""] * len(told)
            )
            right = general(user, layers=[_LAYER]) if live else [False] * len(known)
    return {
        "base": base,
        "facts": run.facts,
        "rank": run.recipe.rank,
        "seed": run.recipe.seed,
        "tokens": report.capacity["tokens"],
        "parameters": report.capacity["parameters"],
        "recalled": sum(fact.is_in(text) for fact, text in zip(told, unseen, strict=True)),
        "recalled_as_told": sum(fact.is_in(text) for fact, text in zip(told, as_told, strict=True)),
        "kept": sum(now and before for now, before in zip(right, known, strict=True)),
        "known": sum(known),
        "kl": report.scores["probes"]["kl"] if report.scores else None,
        "verdict": str(report.verdict),
        "seconds": report.seconds,
    }


def _answers(user: User, questions: Sequence[str]) -> list[str]:
    # Retrieval is off, and the layer is attached to every question, whatever its scope.
    return [
        reply.text for reply in chat_all(user, questions, _ANSWER, memory=False, layers=[_LAYER])
    ]
