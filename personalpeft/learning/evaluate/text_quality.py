"""Whether answers mean something, and have to do with what was asked. The bare base is asked, which nobody has taught either.

Garbage is what might as well be another way: an answer that is as likely after any other question, words that are as likely
in any other order. So each answer is compared with itself in another place. Of text that means something both differences
are far above nothing, in every language that the base has some notion of; of what does not they are nothing, whatever it
looks like.

- ``fit``: how much likelier answers are after their own request than after others' (their pointwise mutual information,
  estimated among the lessons themselves as in van den Oord et al. 2018, "Representation Learning with Contrastive
  Predictive Coding", section 2.3).
- ``order``: how much likelier they are than their own words in an order drawn by chance.
- ``own``: the share of them that say anything beside the request itself. An answer that only says it over fits it better than
  any, and in its right order.

The first two in nats a token. Measured on the default base, of four to twelve lessons: what means something 0.34 to 2.6 and 2.1 to
5.5, what does not at most 0.03 or at most 0.6. A base that knows no language cannot tell, and its card says so (``gate.Margins``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from personalpeft.learning.data.response_template import PromptResponse
from personalpeft.memory.conflicts import normalize

_FEWEST, _MOST = 4, 12
_FEWEST_WORDS = 5
_OTHERS = 2
_LOOK = 400


@dataclass(frozen=True, slots=True)
class TextQuality:
    """``fit``, ``order`` and ``own`` of some lessons; None where there are too few to tell."""

    pmi: float | None = None
    word_order_gap: float | None = None
    novelty: float | None = None


NOT_MEASURED = TextQuality()


def measure_text_quality(
    lessons: Sequence[PromptResponse], likelihoods: Callable[[Sequence[PromptResponse]], Sequence[float]]
) -> TextQuality:
    """The sense of the newest of some lessons, which somebody wrote. ``likelihoods`` gives the mean log-prob a token of each answer
    under the bare base. Of a conversation only what was asked last is looked at, and of that the beginning.
    """
    newest = list({each.request: each for each in lessons}.values())[-_MOST:]
    asked = [PromptResponse(each.request[:_LOOK], each.answer) for each in newest]
    if len(asked) < _FEWEST:
        return NOT_MEASURED
    step = max(1, len(asked) // (_OTHERS + 1))
    elsewhere = [
        PromptResponse(asked[(place + step * turn) % len(asked)].request, each.answer)
        for turn in range(1, _OTHERS + 1)
        for place, each in enumerate(asked)
    ]
    long = [each for each in asked if len(each.answer.split()) >= _FEWEST_WORDS]
    mixed = (
        [PromptResponse(each.request, _mixed(each.answer)) for each in long] if len(long) >= _FEWEST else []
    )
    of = dict(
        zip((*asked, *elsewhere, *mixed), likelihoods([*asked, *elsewhere, *mixed]), strict=True)
    )

    def mean(some: Sequence[PromptResponse]) -> float:
        return sum(of[each] for each in some) / len(some)

    fit = round(mean(asked) - mean(elsewhere), 4)
    own = round(sum(map(_says_something, newest)) / len(newest), 4)
    return TextQuality(fit, round(mean(long) - mean(mixed), 4) if mixed else None, own)


def _says_something(each: PromptResponse) -> bool:
    """Whether an answer has a word beside the request said over, once or more."""
    return bool(normalize(each.answer).replace(normalize(each.request), "").strip())


def _mixed(text: str) -> str:
    words = text.split()
    # By the words alone, so the same lesson is always asked in the same way.
    random.Random(text).shuffle(words)
    return " ".join(words)
