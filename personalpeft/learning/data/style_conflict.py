"""Whether what was said could all be meant: one way of answering, or two by turns. Pure.

Taught both at once a model comes to neither, and every answer that was held back becomes a little likelier all the same,
since either way is half learned; so no score finds it. It is found in the lessons: marks (``manner.py``) that are never in
the same answer, each in many of them and together in most, one after the other and back. What the requests explain is no
contradiction: letters in one way, questions in another.

Invariants: a clean cut is a change of mind and none of this (``habits.py``); answers that share nothing are not divided.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from personalpeft.learning.data.response_template import Shown
from personalpeft.learning.data.style_drift import look_of, nearest

_FEWEST = 6
_LEAST, _MOST, _TOGETHER = 0.25, 0.75, 2 / 3
_TURNS = 4
_END = 60
_WORD = re.compile(r"[^\W\d]+")


@dataclass(frozen=True, slots=True)
class _Mark:
    """What the answers ``having`` it have in common, in words. Of one word it is not ``telling``: some answers say yes and
    others no, which is no manner.
    """

    words: str
    having: frozenset[int]
    telling: bool = True


def divided(shown: Sequence[Shown]) -> str:
    """How the answers are divided, in words; "" where they are not. In the order of time."""
    count = len(shown)
    if count < _FEWEST:
        return ""
    # Of marks of the same answers the last one names them, which is the longest.
    marks = {
        mark.having: mark
        for mark in _marks(shown)
        if _LEAST * count <= len(mark.having) <= _MOST * count
    }
    for size in (2, 3):
        for some in combinations(marks.values(), size):
            ways = [mark.having for mark in some]
            together = len(frozenset().union(*ways))
            apart = together == sum(map(len, ways)) and any(mark.telling for mark in some)
            if (
                apart
                and together >= _TOGETHER * count
                and _by_turns(ways)
                and not _explained(shown, ways)
            ):
                said = " and ".join(f"{len(mark.having)} {mark.words}" for mark in some)
                return f"{said}, by turns: that could not all be one way of answering"
    return ""


def _marks(shown: Sequence[Shown]) -> Iterator[_Mark]:
    texts = [each.pattern.strip() for each in shown]
    openings = {
        text[: match.end()] for text in texts for match in re.finditer(r"[^\w\s]+\s+", text[:_END])
    }
    for opening in sorted(openings, key=lambda text: (len(text), text)):
        having = _having(text.startswith(opening) for text in texts)
        yield _Mark(
            f'begin with "{opening.strip()}"', having, telling=len(_WORD.findall(opening)) != 1
        )
    ends = {end for text in texts for end in _ends(text[-_END:])}
    for end in sorted(ends, key=lambda text: (len(text), text)):
        yield _Mark(f'end with "{end.strip()}"', _having(text.endswith(end) for text in texts))
    yield _Mark("are in small letters", _having(text.islower() for text in texts))
    yield _Mark("are in capitals", _having(text.isupper() for text in texts))


def _ends(text: str) -> Iterator[str]:
    """What may be a closing: two words or more that follow the end of a sentence."""
    for match in re.finditer(r"(?<=[.!?])\s+(?=\S+\s+\S)", text):
        yield text[match.start() :]


def _having(found: Iterable[bool]) -> frozenset[int]:
    return frozenset(number for number, has in enumerate(found) if has)


def _by_turns(some: Sequence[frozenset[int]]) -> bool:
    order = sorted((number, way) for way, having in enumerate(some) for number in having)
    return len(list(groupby(way for _, way in order))) >= _TURNS


def _explained(shown: Sequence[Shown], some: Sequence[frozenset[int]]) -> bool:
    """Whether most requests are more like those that are answered in the same way than like any other."""
    looks = {number: look_of(shown[number].request) for having in some for number in having}
    alike = 0
    for having in some:
        for number in having:
            own = nearest(looks[number], [looks[n] for n in having if n != number])
            other = nearest(looks[number], [looks[n] for n in looks if n not in having])
            alike += own > other
    return alike >= _MOST * len(looks)
