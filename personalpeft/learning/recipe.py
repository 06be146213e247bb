"""How a layer is built: the numbers that, with signals, base and revisions below, decide every byte of a revision.

The defaults are for a base of about 135M parameters; a card's ``[learning]`` table overrides them for its base.
docs/learning.md says where each number comes from.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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

    ``pairs`` of a batch's lessons that have a rejected text also get the preference term, with ``beta`` and
    ``positive``. ``anchors`` is how many generic answers a batch holds to, with ``anchor_weight``; ``thumbs`` is how
    many replies that were liked a step judges, and as many that were not (where there are enough). In a build on a parent,
    ``replay`` of a batch is older lessons. ``held_out`` is the share of lessons that is pinned. Texts are cut
    at ``longest`` tokens. ``capacity`` is how many tokens a trained parameter may have to recall (capacity.py).
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
    thumbs: int = 2
    anchors: int = 4
    anchor_weight: float = 2.0
    replay: float = 0.25
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


def recipe_for(card: str, overrides: Json, projections: Mapping[str, tuple[int, int]]) -> Recipe:
    """The recipe for a base: the defaults, the card's overrides, and by default every projection that the card targets.

    Raises ``CardError`` for a key or a value that a recipe does not have.
    """
    kinds = {field.name: type(field.default) for field in fields(Recipe)}
    for key, value in overrides.items():
        if key not in kinds:
            hint = nearest(key, kinds, what="key")
            raise CardError(f"The card {card} has an unknown key in [learning]: {key}.", hint=hint)
        wanted = kinds[key]
        if not _fits(key, wanted, value):
            raise CardError(
                f"The card {card} has a wrong value in [learning]: {key} = {value!r}.",
                hint=f"It should be {_allowed(key, wanted)}, such as {Recipe.__dataclass_fields__[key].default!r}.",
            )
    asked = tuple(overrides.get("targets") or projections)
    names = {*projections, *(path.rpartition(".")[2] for path in projections)}
    for name in asked:
        if name not in names:
            hint = nearest(name, names, what="projection")
            raise CardError(
                f"The card {card} has a wrong value in [learning]: targets names {name}, which the base does not have.",
                hint=hint,
            )
    targets = tuple(p for p in projections if p in asked or p.rpartition(".")[2] in asked)
    return replace(Recipe(), **{**overrides, "targets": targets})


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
