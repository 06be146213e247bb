"""``bench sweep``: the effect of each number of the recipe, one at a time around the default.

A run is one learn of one user's style from twelve edits, with one number changed by a card. The
candidate is measured even if the gate refuses it: it is made live by name. ``replay`` takes two
learns. The user then also wants short messages marked as drafts, and the rest of the first style is
measured. A run's key has the whole recipe, the style and the seed. So a run of the default counts
for every number, and figures of different defaults are never mixed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import personalpeft
from benchmarks.cards import write_card
from benchmarks.learn_course import chat_all
from benchmarks.result_cache import Figures, ResultCache
from benchmarks.style import is_right
from benchmarks.styles import (
    DRAFT,
    GENERAL,
    LESSONS,
    MESSAGES,
    STYLES,
    UNSEEN,
    UNSEEN_MESSAGES,
    Style,
)
from personalpeft import Runtime, User
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import InvalidInput, suggest_nearest
from personalpeft.learning.train.config import TrainingConfig, load_training_configs
from personalpeft.types import canonical_digest

Value: TypeAlias = float | str

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_REPLAY = "replay"
DEFAULT = "default"

SWEPT: Mapping[str, tuple[Value, ...]] = {
    "learning_rate": (1e-4, 2.5e-4, 5e-4, 1e-3, 1.6e-3),
    "steps": (12, 18, 26, 40),
    "anchor_weight": (0, 1, 2, 4),
    "targets": ("attention", "mlp", "all"),
    "rank": (2, 4, 8, 16, 32),
    _REPLAY: (0, 0.25, 0.5, 0.75),
    "few_shot_replies": (0, 1, 2, 4),
}
"""The values to try for each number, the most important number first."""

_LONG, _SHORT, _REPLY = 96, 48, 40
_USER = "bench"


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe and style. ``number`` differs from the default (with ``value``), or is empty."""

    number: str
    value: Value
    style: str
    recipe: TrainingConfig

    @property
    def key(self) -> str:
        """Return the run's cache key."""
        return canonical_digest([self.recipe.to_stored(), self.style, self.learns])[:16]

    @property
    def learns(self) -> int:
        return 2 if self.number == _REPLAY else 1


def bench_sweep(
    *,
    base: str,
    only: Sequence[str],
    styles: Sequence[str],
    seeds: int,
    keep: Path,
    echo: Callable[[str], None],
    swept: Mapping[str, tuple[Value, ...]] = SWEPT,
) -> dict[str, Any]:
    """Run the points that are not cached, and return all of these numbers and styles.

    Raises:
        InvalidInput: A number or a style is unknown.
    """
    _check(only, swept, "number")
    _check(styles, [style.name for style in STYLES], "style")
    card = find_card(base)
    default = default_recipe(card)
    runs = {
        run.key: run
        for run in planned(card, {name: swept[name] for name in only or swept}, styles, seeds)
    }
    kept = ResultCache(keep, "sweep")
    with ExitStack() as stack:
        place: HomeTemplates | None = None

        def measure(run: Run, before: float) -> Figures:
            nonlocal place
            what = "the default" if run.number == DEFAULT else f"{run.number} = {run.value}"
            echo(f"{what}, {run.style}, seed {run.recipe.seed}")
            if place is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                place = HomeTemplates(card, folder, echo)
            return measured(run, place, base=base)

        def show(run: Run, found: Figures) -> None:
            right = f"{found['kept']}/{found['known']} kept"
            echo(f"  {found['in_style']}/10 in style, {right}, {found['seconds']:.0f} s")

        kept.complete(runs, measure, show)
    return {
        "bench": "sweep",
        "base": base,
        "defaults": {name: value_of(name, default, card) for name in only or swept},
        "points": [figures for key, figures in kept.figures().items() if key in runs],
    }


def by_value(found: Mapping[str, Any]) -> dict[str, dict[Value, list[Figures]]]:
    """Return the points of each number by ascending value, with those of the default."""
    sorted_out: dict[str, dict[Value, list[Figures]]] = {}
    for number, default in found["defaults"].items():
        values = sorted_out.setdefault(number, {value: [] for value in SWEPT[number]})
        for point in found["points"]:
            if point["number"] == number:
                values.setdefault(point["value"], []).append(point)
            elif point["number"] == DEFAULT and number != _REPLAY:
                values.setdefault(default, []).append(point)
    return sorted_out


def default_recipe(card: ModelCard) -> TrainingConfig:
    """Return a style layer's recipe on a base, with targets named as in the card."""
    return load_training_configs(
        card.name, card.learning, dict.fromkeys(card.targets, (1, 1))
    ).style


def value_of(number: str, recipe: TrainingConfig, card: ModelCard) -> Value:
    """Return a recipe's number in the form of ``SWEPT``."""
    if number != "targets":
        value: Value = recipe.to_digest()[number]
        return value
    named = {_ATTENTION: "attention", _MLP: "mlp", card.targets: "all"}
    return named.get(recipe.target_modules, "others")


def planned(
    card: ModelCard, swept: Mapping[str, tuple[Value, ...]], styles: Sequence[str], seeds: int
) -> Iterator[Run]:
    """Return every run, the most important first; one shared by several numbers repeats."""
    default = default_recipe(card)
    for style, (number, values) in product(styles, swept.items()):
        # One seed of every value before the next, so that an interrupted sweep covers all values.
        for seed, value in product(range(seeds), values):
            plain = number != _REPLAY and value == value_of(number, default, card)
            changes = {} if plain else _changes(number, value, card)
            yield Run(
                DEFAULT if plain else number,
                "" if plain else value,
                style,
                TrainingConfig.model_validate({**default.model_dump(), **changes, "seed": seed}),
            )


def _changes(number: str, value: Value, card: ModelCard) -> dict[str, Any]:
    if number == "targets":
        return {
            "target_modules": {"attention": _ATTENTION, "mlp": _MLP, "all": card.targets}[
                str(value)
            ]
        }
    if number == "anchor_weight" and value == 0:
        # With weight 0 they would still be read in every step.
        return {"kl_prompts": 0}
    return {TrainingConfig.FORMER_NAMES.get(number, number): value}


class HomeTemplates:
    """Homes that are made once and copied for every run.

    The bare base's answers are computed once.
    """

    def __init__(self, card: ModelCard, folder: Path, echo: Callable[[str], None]) -> None:
        self.card = card
        self._folder = folder
        self._say = echo
        self._known: list[bool] | None = None

    def opened(self, name: str, recipe: TrainingConfig) -> Runtime:
        """Open a home here, on the base with this recipe."""
        learning = {**self.card.learning, "style": recipe.model_dump(mode="json")}
        card = write_card(self.card, self._folder / f"{name}.toml", learning=learning)
        return personalpeft.open(self._folder / name, card)

    def copied(self, name: str, to: str) -> None:
        """Copy a home to another name, and replace the former copy."""
        shutil.rmtree(self._folder / to, ignore_errors=True)
        shutil.copytree(self._folder / name, self._folder / to)

    def edited(self, style: Style) -> str:
        """Return a home with twelve edits in this style and no learn."""
        name = f"edited-{style.name.replace(' ', '-')}"
        if not (self._folder / name).exists():
            self._say(f"{style.name}: twelve edits")
            with self.opened(name, default_recipe(self.card)) as runtime:
                _edit(runtime.user(_USER), LESSONS, style)
        return name

    def learned(self, style: Style, recipe: TrainingConfig) -> str:
        """Return a home that learned the style, and in which eight messages were marked as drafts."""
        name = f"learned-{style.name.replace(' ', '-')}-{recipe.seed}"
        if not (self._folder / name).exists():
            self.copied(self.edited(style), name)
            self._say(f"{style.name}: the first learn")
            with self.opened(name, recipe) as runtime:
                user = runtime.user(_USER)
                user.learn(accept=True)
                _edit(user, MESSAGES, DRAFT)
        return name

    def known(self) -> list[bool]:
        """Return the general questions that the bare base answers rightly."""
        if self._known is None:
            self._say("asking the bare base")
            with self.opened("bare", default_recipe(self.card)) as runtime:
                self._known = general(runtime.user(_USER))
        return self._known


def measured(run: Run, place: HomeTemplates, *, base: str) -> Figures:
    """Measure one run in a home of its own. A candidate without results has nothing right.

    Of ten unseen answers ``in_style`` have the style. Of ``known`` general answers ``kept`` stay
    right. Of five unseen messages ``drafts`` are marked after a second learn. ``kl`` is in nats a
    token from the base. ``held_back`` is the mean log-prob a token of the first learn's holdout.
    ``seconds`` are of the last learn. ``default`` is the key of the default recipe, ``defaults``
    its numbers.
    """
    style = next(style for style in STYLES if style.name == run.style)
    known = place.known()
    default = default_recipe(place.card)
    before = default.model_copy(update={"seed": run.recipe.seed})
    place.copied(place.edited(style) if run.learns == 1 else place.learned(style, before), "run")
    with place.opened("run", run.recipe) as runtime:
        user = runtime.user(_USER)
        report = user.learn(accept=True)
        unseen = chat_all(user, UNSEEN, _LONG) if report.live else []
        right = general(user) if report.live else [False] * len(known)
        drafts = chat_all(user, UNSEEN_MESSAGES, _SHORT) if report.live and run.learns == 2 else []
    return {
        "base": base,
        "default": canonical_digest(default.to_stored())[:16],
        "defaults": {name: value_of(name, default, place.card) for name in SWEPT},
        "number": run.number,
        "value": run.value,
        "style": run.style,
        "seed": run.recipe.seed,
        "verdict": str(report.verdict),
        "in_style": sum(style.holds(reply.text) for reply in unseen),
        "kept": sum(now and before for now, before in zip(right, known, strict=True)),
        "known": sum(known),
        "drafts": sum(DRAFT.holds(reply.text) for reply in drafts) if run.learns == 2 else None,
        "kl": report.scores["probes"]["kl"],
        "held_back": report.scores["target" if run.learns == 1 else "retention"]["after"],
        "seconds": report.seconds,
    }


def general(user: User, **how: Any) -> list[bool]:
    """Return the general questions with right answers. ``how`` is passed to ``User.chat``."""
    said = chat_all(user, [question for question, _ in GENERAL], _SHORT, **how)
    return [is_right(words, reply.text) for (_, words), reply in zip(GENERAL, said, strict=True)]


def _edit(user: User, lessons: Sequence[tuple[str, str]], style: Style) -> None:
    # Asked at once but corrected in order, since the newest are held out.
    replies = chat_all(user, [prompt for prompt, _ in lessons], _REPLY)
    for reply, (_, answer) in zip(replies, lessons, strict=True):
        user.feedback(reply, edit=style.apply(answer))


def _check(names: Sequence[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"There is no {what} called {name!r} here.",
                hint=suggest_nearest(name, known, what=what),
            )
