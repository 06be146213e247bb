"""``bench sweep``: what each number of the recipe does, one at a time around the default, for some seeds.

A run is one learn of one made-up person's style from twelve edits, with one number changed by a card. What is measured is
the candidate, also where the gate refuses it: it is made live by name. ``replay`` takes two learns: then the person also
wants short messages marked as drafts, and what is measured is how much of the first habit is left.

A run is known by all that decides it (the whole recipe, the style, the seed), so a run of the default counts for every
number, and figures of another default are never mixed with those of this one.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import personalpeft
from benchmarks.cards import write_card
from benchmarks.result_cache import ResultCache
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
from personalpeft import Reply, Runtime, User
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
    "content": (0.1, 0.3, 1),
}
"""What is tried of each number, the most important number first."""

_LONG, _SHORT, _REPLY, _AT_ONCE = 96, 48, 40, 16
_USER = "bench"


@dataclass(frozen=True, slots=True)
class Run:
    """One recipe, one style. ``number`` is what differs from the default (with ``value``), which may be nothing."""

    number: str
    value: Value
    style: str
    recipe: TrainingConfig

    @property
    def key(self) -> str:
        """Names the run by what decides it."""
        return canonical_digest([self.recipe.to_stored(), self.style, self.learns])[:16]

    @property
    def learns(self) -> int:
        return 2 if self.number == _REPLAY else 1


@dataclass(frozen=True, slots=True)
class Point:
    """What one run gave. Of ten unseen questions so many answers are ``in_style``; of the general answers that were
    ``known`` before, so many are ``kept``; ``drafts`` of five unseen messages are marked as such after a second learn.
    ``kl`` is in nats a token from the base; ``held_back`` the mean log-prob a token of the edits that were held back from
    the first learn; ``seconds`` those of the last learn. ``default`` names the whole default recipe that it is one step
    from, ``defaults`` says its numbers.
    """

    key: str
    base: str
    default: str
    defaults: dict[str, Value]
    number: str
    value: Value
    style: str
    seed: int
    verdict: str
    in_style: int
    kept: int
    known: int
    drafts: int | None
    kl: float | None
    held_back: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SweepBench:
    """The object that ``--json`` prints: the points of these numbers and styles around this default, kept ones too."""

    bench: str
    base: str
    defaults: dict[str, Value]
    points: tuple[Point, ...]


def bench_sweep(
    *,
    base: str,
    only: Sequence[str],
    styles: Sequence[str],
    seeds: int,
    keep: Path,
    say: Callable[[str], None],
    swept: Mapping[str, tuple[Value, ...]] = SWEPT,
) -> SweepBench:
    """Runs what is not kept yet. Raises ``InvalidInput`` for a number or a style that there is not."""
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
        place: Place | None = None

        def measure(key: str) -> Mapping[str, Any]:
            nonlocal place
            run = runs[key]
            what = "the default" if run.number == DEFAULT else f"{run.number} = {run.value}"
            say(f"{what}, {run.style}, seed {run.recipe.seed}")
            if place is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                place = Place(card, folder, say)
            return asdict(measured(run, place, base=base))

        for key in kept.complete(runs, measure):
            found = kept.figures()[key]
            say(
                f"  {found['in_style']}/10 in style, {found['kept']}/{found['known']} kept, {found['seconds']:.0f} s"
            )
    points = tuple(Point(**figures) for key, figures in kept.figures().items() if key in runs)
    return SweepBench(
        "sweep", base, {name: value_of(name, default, card) for name in only or swept}, points
    )


def by_value(found: SweepBench) -> dict[str, dict[Value, list[Point]]]:
    """The points of each number by its value, smaller ones first; those of the default are among each number's."""
    sorted_out: dict[str, dict[Value, list[Point]]] = {}
    for number, default in found.defaults.items():
        values = sorted_out.setdefault(number, {value: [] for value in SWEPT[number]})
        for point in found.points:
            if point.number == number:
                values.setdefault(point.value, []).append(point)
            elif point.number == DEFAULT and number != _REPLAY:
                values.setdefault(default, []).append(point)
    return sorted_out


def default_recipe(card: ModelCard) -> TrainingConfig:
    """The recipe of a style on a base; its targets are named as the card does."""
    return load_training_configs(
        card.name, card.learning, dict.fromkeys(card.targets, (1, 1))
    ).style


def value_of(number: str, recipe: TrainingConfig, card: ModelCard) -> Value:
    """What a recipe says of a number, as it is listed in ``SWEPT``."""
    if number != "targets":
        value: Value = recipe.to_stored()[number]
        return value
    named = {_ATTENTION: "attention", _MLP: "mlp", card.targets: "all"}
    return named.get(recipe.target_modules, "others")


def planned(
    card: ModelCard, swept: Mapping[str, tuple[Value, ...]], styles: Sequence[str], seeds: int
) -> Iterator[Run]:
    """Every run, the most important first; one that several numbers share comes once for each of them."""
    default = default_recipe(card)
    for style, (number, values) in product(styles, swept.items()):
        # One seed of every value before the next, so that a sweep that is stopped has something to say of all.
        for seed, value in product(range(seeds), values):
            plain = number != _REPLAY and value == value_of(number, default, card)
            changes = {} if plain else _changes(number, value, card)
            yield Run(
                DEFAULT if plain else number,
                "" if plain else value,
                style,
                TrainingConfig.from_stored({**default.to_stored(), **changes, "seed": seed}),
            )


def _changes(number: str, value: Value, card: ModelCard) -> dict[str, Any]:
    if number == "targets":
        return {"targets": {"attention": _ATTENTION, "mlp": _MLP, "all": card.targets}[str(value)]}
    if number == "anchor_weight" and value == 0:
        # Without weight they would still be read in every step.
        return {"anchors": 0}
    return {number: value}


class Place:
    """Homes to learn in, each made once and copied for every run: with a style's twelve edits, and with what a first learn
    made of them. What the bare base says is asked once.
    """

    def __init__(self, card: ModelCard, folder: Path, say: Callable[[str], None]) -> None:
        self.card = card
        self._folder = folder
        self._say = say
        self._known: list[bool] | None = None

    def opened(self, name: str, recipe: TrainingConfig) -> Runtime:
        """A home in this place, on the base with this recipe."""
        learning = {**self.card.learning, "style": recipe.model_dump(mode="json")}
        card = write_card(self.card, self._folder / f"{name}.toml", learning=learning)
        return personalpeft.open(self._folder / name, card)

    def copied(self, name: str, to: str) -> None:
        """A home under another name, instead of what was there."""
        shutil.rmtree(self._folder / to, ignore_errors=True)
        shutil.copytree(self._folder / name, self._folder / to)

    def edited(self, style: Style) -> str:
        """The name of the home of somebody who put twelve answers into this style and has learned nothing yet."""
        name = f"edited-{style.name.replace(' ', '-')}"
        if not (self._folder / name).exists():
            self._say(f"{style.name}: twelve edits")
            with self.opened(name, default_recipe(self.card)) as runtime:
                _edit(runtime.user(_USER), LESSONS, style)
        return name

    def learned(self, style: Style, recipe: TrainingConfig) -> str:
        """The name of a home where that was learned, and where eight messages were then marked as drafts."""
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
        """Which of the general questions the bare base answers rightly."""
        if self._known is None:
            self._say("asking the bare base")
            with self.opened("bare", default_recipe(self.card)) as runtime:
                self._known = general(runtime.user(_USER))
        return self._known


def measured(run: Run, place: Place, *, base: str) -> Point:
    """One run in a home of its own. A candidate of which nothing can be measured has nothing right."""
    style = next(style for style in STYLES if style.name == run.style)
    known = place.known()
    default = default_recipe(place.card)
    before = default.model_copy(update={"seed": run.recipe.seed})
    place.copied(place.edited(style) if run.learns == 1 else place.learned(style, before), "run")
    with place.opened("run", run.recipe) as runtime:
        user = runtime.user(_USER)
        report = user.learn(accept=True)
        unseen = asked(user, UNSEEN, _LONG) if report.live else []
        right = general(user) if report.live else [False] * len(known)
        drafts = asked(user, UNSEEN_MESSAGES, _SHORT) if report.live and run.learns == 2 else []
    return Point(
        key=run.key,
        base=base,
        default=canonical_digest(default.to_stored())[:16],
        defaults={name: value_of(name, default, place.card) for name in SWEPT},
        number=run.number,
        value=run.value,
        style=run.style,
        seed=run.recipe.seed,
        verdict=str(report.verdict),
        in_style=sum(style.holds(reply.text) for reply in unseen),
        kept=sum(now and before for now, before in zip(right, known, strict=True)),
        known=sum(known),
        drafts=sum(DRAFT.holds(reply.text) for reply in drafts) if run.learns == 2 else None,
        kl=report.scores["canaries"]["kl"],
        held_back=report.scores["target" if run.learns == 1 else "retention"]["after"],
        seconds=report.seconds,
    )


def asked(user: User, prompts: Sequence[str], length: int, **how: Any) -> list[Reply]:
    """Greedy replies, written at once as far as the batch has rows; each is what it would be alone. ``how`` is as for
    ``User.chat``.
    """
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(
            pool.map(
                lambda prompt: user.chat(prompt, temperature=0, max_tokens=length, **how), prompts
            )
        )


def general(user: User, **how: Any) -> list[bool]:
    """Which of the general questions are answered rightly; ``how`` is as for ``User.chat``."""
    said = asked(user, [question for question, _ in GENERAL], _SHORT, **how)
    return [is_right(words, reply.text) for (_, words), reply in zip(GENERAL, said, strict=True)]


def _edit(user: User, lessons: Sequence[tuple[str, str]], style: Style) -> None:
    # Asked at once, but corrected in their order, since the newest are held back.
    replies = asked(user, [prompt for prompt, _ in lessons], _REPLY)
    for reply, (_, answer) in zip(replies, lessons, strict=True):
        user.feedback(reply, edit=style.apply(answer))


def _check(names: Sequence[str], known: Iterable[str], what: str) -> None:
    for name in names:
        if name not in known:
            raise InvalidInput(
                f"There is no {what} called {name!r} here.",
                hint=suggest_nearest(name, known, what=what),
            )
