"""How a skill is practised: the numbers that, with tasks, base and revisions below, decide a practice.

The defaults are for a base of about 135M parameters; a card's ``[practice]`` table overrides them for its base.
docs/learning.md says where each number comes from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields, replace

from personalpeft.errors import CardError, nearest
from personalpeft.types import Json

# What has to be above 0 for a practice to be one; everything else may be 0.
_LEAST = {
    "rounds": 1,
    "per_round": 1,
    "group": 2,
    "pool": 1,
    "held_back": 1,
    "longest": 1,
    "repeats": 1,
    "batch": 1,
}


@dataclass(frozen=True, slots=True)
class Drill:
    """Of ``rounds``, each with ``group`` replies to ``per_round`` tasks, the first ``imitate`` learn what has passed so far,
    in ``repeats`` steps of ``batch`` replies at ``imitation_rate``; the others make one step along the policy gradient at
    ``learning_rate``, held to what lies below with ``kl``. ``pool`` tasks are there to be tried, ``held_back`` others to
    judge by. Replies are sampled at ``temperature`` (1: what is learned from is what the model says) and end at ``longest``
    tokens.
    """

    rounds: int = 36
    imitate: int = 12
    repeats: int = 4
    batch: int = 8
    per_round: int = 8
    group: int = 5
    pool: int = 128
    held_back: int = 48
    temperature: float = 1.0
    longest: int = 48
    kl: float = 0.01
    imitation_rate: float = 5e-4
    learning_rate: float = 2e-4
    seed: int = 0


def drill_for(card: str, overrides: Json) -> Drill:
    """The drill for a base: the defaults and what its card's ``[practice]`` says. Raises ``CardError`` for a key or a
    value that a drill does not have.
    """
    kinds = {field.name: type(field.default) for field in fields(Drill)}
    for key, value in overrides.items():
        if key not in kinds:
            hint = nearest(key, kinds, what="key")
            raise CardError(f"The card {card} has an unknown key in [practice]: {key}.", hint=hint)
        whole, least = kinds[key] is int, _LEAST.get(key, 0)
        number = not isinstance(value, bool) and isinstance(value, int if whole else int | float)
        if not number or not least <= value <= sys.float_info.max:
            raise CardError(
                f"The card {card} has a wrong value in [practice]: {key} = {value!r}.",
                hint=f"It is a {'whole ' if whole else ''}number, {least} or more.",
            )
    return replace(Drill(), **overrides)
