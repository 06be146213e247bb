"""How a layer is built: the numbers that, with signals, base and revisions below, decide every byte of a revision.

The defaults are for a base of about 135M parameters; a card's ``[learning]`` table overrides them for its base.
docs/learning.md says where each number comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from personalpeft.errors import CardError, nearest
from personalpeft.types import Json

Start: TypeAlias = Literal["auto", "nothing"]
"""Where a build starts: "auto" is the layer's head where one can build on it; "nothing" is the reference."""


# What a recipe cannot do without, and shares of a whole; everything else may be 0 or more.
_LEAST = {"rank": 1, "steps": 1, "most_steps": 1, "batch": 1, "longest": 2}
_MOST = {"replay": 1, "held_out": 1, "warmup": 1}


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps`` is for a first build of up to ``batch * 3`` lessons; more lessons take more steps, up to
    ``most_steps``.

    ``pairs`` of a batch's lessons that have a rejected text also get the preference term, with ``beta``. What all lessons
    share counts ``shared``, what is particular to one of them ``content``. ``anchors`` is how many generic answers a batch holds
    to, with ``anchor_weight``; ``thumbs`` is how many replies that were liked a step judges, and as many that were not
    (where there are enough). Each question about a fact is put in ``phrasings`` other ways too, and a step answers
    ``unknown`` questions that nobody has answered. In a build on a parent, ``replay`` of a batch is older lessons.
    ``held_out`` is the share of lessons that is pinned. Texts are cut at ``longest`` tokens. ``capacity`` is how many
    tokens a trained parameter may have to recall (capacity.py).
    """

    rank: int = 8
    alpha: float = 32.0
    targets: tuple[str, ...] = ()
    learning_rate: float = 5e-4
    steps: int = 26
    most_steps: int = 120
    batch: int = 4
    pairs: int = 1
    beta: float = 0.1
    content: float = 0.3
    shared: float = 1.0
    thumbs: int = 2
    phrasings: int = 5
    unknown: int = 0
    anchors: int = 4
    anchor_weight: float = 2.0
    replay: float = 0.5
    warmup: float = 0.05
    clip: float = 1.0
    weight_decay: float = 0.0
    held_out: float = 0.25
    longest: int = 96
    capacity: float = 1e-2
    seed: int = 0

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets)}

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step: linear warm-up, then REX decay (Chen et al. 2022, "REX: Revisiting Budgeted
        Training").
        """
        done = step / steps
        rising = min(1.0, (step + 1) / max(1.0, self.warmup * steps))
        return self.learning_rate * rising * (1 - done) / (0.5 + 0.5 * (1 - done))


@dataclass(frozen=True, slots=True)
class Recipes:
    """The recipe of each kind of layer."""

    style: Recipe
    skill: Recipe
    memory: Recipe

    def of(self, layer: str) -> Recipe:
        """That of a layer: "style", "memory" or "skill.<name>"."""
        recipe: Recipe = getattr(self, layer.partition(".")[0])
        return recipe


# What sets a kind apart from the defaults of ``Recipe``. A memory is many small things that have nothing in common: the
# MLP holds the most of them for each parameter, and every word counts, but for those of the manner below, which that knows.
# A skill is what its answers make of what is asked, so what is particular to one answer is the point; it is more a way of
# looking than a thing known, and attention alone learned it better from thirty demonstrations than all projections did.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "style": {},
    "skill": {
        "rank": 16,
        "targets": ("self_attn",),
        "learning_rate": 1e-3,
        "steps": 20,
        "content": 1.0,
        "anchors": 1,
        "anchor_weight": 1.0,
    },
    "memory": {
        "rank": 16,
        "targets": ("mlp",),
        "learning_rate": 1e-3,
        "steps": 42,
        # Each fact has to have its turn: of 160 told at once, 120 steps taught a fifth.
        "most_steps": 480,
        "batch": 8,
        "content": 1.0,
        "shared": 0.1,
        "unknown": 1,
        "anchors": 2,
        "anchor_weight": 2.0,
    },
}


def recipes_for(card: str, overrides: Json, projections: Mapping[str, tuple[int, int]]) -> Recipes:
    """The recipes for a base. What a card's ``[learning]`` table says holds for every layer; ``[learning.memory]`` and the
    like say more of one kind, and win. ``targets`` names projections by path, by last name, or by a part of the path
    ("mlp"); by default every projection that the card targets.

    Raises ``CardError`` for a key or a value that a recipe does not have.
    """
    common = {key: value for key, value in overrides.items() if key not in _KINDS}
    _check(card, "learning", common, projections)
    recipes = {}
    for kind, own in _KINDS.items():
        special = overrides.get(kind, {})
        if not isinstance(special, Mapping):
            raise CardError(
                f"The card {card} has a wrong value in [learning]: {kind} = {special!r}.",
                hint=f"What only a {kind} layer is to have goes into a table [learning.{kind}].",
            )
        _check(card, f"learning.{kind}", special, projections)
        numbers = {**own, **common, **special}
        targets = _named(numbers.get("targets", ()), projections) or tuple(projections)
        recipes[kind] = replace(Recipe(), **{**numbers, "targets": targets})
    return Recipes(**recipes)


def _check(
    card: str,
    table: str,
    overrides: Mapping[str, object],
    projections: Mapping[str, tuple[int, int]],
) -> None:
    kinds = {field.name: type(field.default) for field in fields(Recipe)}
    for key, value in overrides.items():
        if key not in kinds:
            hint = nearest(key, kinds, what="key")
            raise CardError(f"The card {card} has an unknown key in [{table}]: {key}.", hint=hint)
        wanted = kinds[key]
        if not _fits(key, wanted, value):
            raise CardError(
                f"The card {card} has a wrong value in [{table}]: {key} = {value!r}.",
                hint=f"It should be {_allowed(key, wanted)}, such as {Recipe.__dataclass_fields__[key].default!r}.",
            )
    asked: Any = overrides.get("targets", ())
    for name in asked:
        if not _named((name,), projections):
            known = {part for path in projections for part in (path, *path.split("."))}
            raise CardError(
                f"The card {card} has a wrong value in [{table}]: targets names {name}, which the base does not have.",
                hint=nearest(name, known, what="projection"),
            )


def _named(names: Sequence[str], projections: Mapping[str, tuple[int, int]]) -> tuple[str, ...]:
    """The projections that some names mean, in the base's order."""
    return tuple(p for p in projections if any(name == p or name in p.split(".") for name in names))


def _fits(key: str, wanted: type, value: object) -> bool:
    if wanted is tuple:
        return isinstance(value, list | tuple)
    if isinstance(value, bool) or not isinstance(value, int if wanted is int else int | float):
        return False
    return _LEAST.get(key, 0) <= value <= _MOST.get(key, sys.float_info.max)


def _allowed(key: str, wanted: type) -> str:
    if wanted is tuple:
        return "a list of projections"
    most = f" to {_MOST[key]}" if key in _MOST else " or more"
    return f"{'a whole number' if wanted is int else 'a number'}, {_LEAST.get(key, 0)}{most}"
