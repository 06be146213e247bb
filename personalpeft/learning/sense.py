"""Whether answers mean something, and have to do with what was asked. The bare base is asked, which nobody has taught either.

Garbage is what might as well be another way: an answer that is as likely after any other question, words that are as likely
in any other order. So each answer is compared with itself in another place. Of text that means something both differences
are far above nothing, in every language that the base has some notion of; of what does not they are nothing, whatever it
looks like.

- ``fit``: how much likelier answers are after their own request than after others' (their pointwise mutual information,
  estimated among the lessons themselves as in van den Oord et al. 2018, "Representation Learning with Contrastive
  Predictive Coding", section 2.3).
- ``order``: how much likelier they are than their own words in an order drawn by chance.

Both in nats a token. Measured on the default base, of four to twelve lessons: what means something 0.34 to 2.6 and 2.1 to
5.5, what does not at most 0.03 or at most 0.6. A base that knows no language cannot tell, and its card says so (``gate.Margins``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from personalpeft.learning.lessons import Lesson
from personalpeft.types import Message, SignalKind

_FEWEST, _MOST = 4, 12
_FEWEST_WORDS = 5
_OTHERS = 2

Answer: TypeAlias = tuple[Sequence[Message], str]
"""Messages and what is said after them."""


@dataclass(frozen=True, slots=True)
class Sense:
    """``fit`` and ``order`` of some lessons; None where there are too few to tell."""

    fit: float | None = None
    order: float | None = None


NOT_WEIGHED = Sense()


def sense_of(lessons: Sequence[Lesson], likelihoods: Callable[[Sequence[Answer]], Sequence[float]]) -> Sense:
    """The sense of the newest lessons that somebody wrote. ``likelihoods`` gives the mean log-prob a token of each answer
    under the bare base.
    """
    written = {each.shown.request: each for each in lessons if each.kind not in (SignalKind.FACT, SignalKind.RATING)}
    asked = list(written.values())[-_MOST:]
    if len(asked) < _FEWEST:
        return NOT_WEIGHED
    own = [(each.messages, each.wanted) for each in asked]
    step = max(1, len(asked) // (_OTHERS + 1))
    elsewhere = [
        (asked[(place + step * turn) % len(asked)].messages, each.wanted)
        for turn in range(1, _OTHERS + 1)
        for place, each in enumerate(asked)
    ]
    long = [place for place, each in enumerate(asked) if len(each.wanted.split()) >= _FEWEST_WORDS]
    mixed = [(asked[place].messages, _mixed(asked[place].wanted)) for place in long]
    if len(long) < _FEWEST:
        mixed = []
    found = likelihoods([*own, *elsewhere, *mixed])
    said = found[: len(own)]
    after_others, in_disorder = found[len(own) : len(own) + len(elsewhere)], found[len(own) + len(elsewhere) :]
    fit = sum(said) / len(said) - sum(after_others) / len(after_others)
    order = (sum(said[place] for place in long) - sum(in_disorder)) / len(long) if mixed else None
    return Sense(round(fit, 4), None if order is None else round(order, 4))


def _mixed(text: str) -> str:
    words = text.split()
    # By the words alone, so the same lesson is always asked in the same way.
    random.Random(text).shuffle(words)
    return " ".join(words)
