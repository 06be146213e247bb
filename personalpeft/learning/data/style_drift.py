"""When the way of answering has changed: from some lesson on, answers have what the older ones lack, or lack what those
had. Pure: texts in, a place in time out.

A way of answering is known by its marks: what is literally the same in most lessons (``manner.manner_of``: an opening,
a closing, the letters). It has changed where lessons in a row say otherwise about a mark than those before them, and all
of this holds:

- Of the older at least three of four agree, of the newer all, or all but one; the newest four do.
- It is no accident: were the lessons in an order drawn by chance, so clean a cut would come in at most one of 250.
- The requests do not explain it. Where those that are answered in the new way are unlike the others ("Write a message to
  …" after questions), they are another kind of request with a manner of its own, which takes nothing back.

Invariants: two ways that alternate, or are mixed without a cut, are no change. What was found in some lessons is found in
them and any that come after, until a change that is later still; so going back to an old way is a change too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt
from typing import Literal

from personalpeft.learning.data.response_template import Shown, manner_of

_FEWEST = 4
_MOST = 0.75
_CHANCE = 1 / 250
# As far as one looks around a cut: what the way was for the last so many lessons, and whether the next few differ.
_OLDER, _NEWER = 32, 12
# Long texts are read in part: an answer where it begins and ends, a request where it begins.
_END, _LOOK = 120, 400


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that an answer has or lacks: an opening, a closing, letters that are all small or all large."""

    what: Literal["opening", "closing", "letters"]
    text: str

    def on(self, answer: str) -> bool:
        """Whether an answer has it, given as ``Shown.pattern``."""
        match self.what:
            case "opening":
                return answer.startswith(self.text)
            case "closing":
                return answer.rstrip().endswith(self.text)
        # Figures alone are neither small nor large, so they speak against neither.
        return not any(map(str.isupper if self.text == "lower" else str.islower, answer))


@dataclass(frozen=True, slots=True)
class Change:
    """From the lesson at ``at`` on, answers have (True) or lack (False) these marks, other than before."""

    at: int
    marks: tuple[tuple[Mark, bool], ...]

    def agrees(self, shown: Shown) -> bool:
        """Whether an answer is in the new way, as far as that differs from the old."""
        return all(mark.on(shown.pattern) is has for mark, has in self.marks)


@lru_cache(maxsize=64)
def latest_change(lessons: tuple[Shown, ...]) -> Change | None:
    """The latest change in lessons that are in the order of time; None where the way of answering never changed."""
    found, since = None, 0
    until: dict[int, tuple[Mark, ...]] = {}
    for end in range(2 * _FEWEST, len(lessons) + 1):
        for at in range(end - _FEWEST, max(since, end - _NEWER), -1):
            seen, newer = lessons[max(since, at - _OLDER) : end], end - at
            answers = [each.pattern for each in seen]
            if at not in until:
                until[at] = _marks(answers[:-newer])
            marks = dict.fromkeys((*until[at], *_marks(answers[-newer:])))
            change = Change(at, tuple(_changed(marks, answers[:-newer], answers[-newer:])))
            settled = change.marks and all(map(change.agrees, seen[-_FEWEST:]))
            if settled and not _another_kind(seen, change):
                found, since = change, at
                until.clear()
                break
    return found


def _changed(
    marks: Iterable[Mark], older: Sequence[str], newer: Sequence[str]
) -> Iterator[tuple[Mark, bool]]:
    """The marks about which the newer say otherwise, and whether they have them."""
    for mark in marks:
        had, have = sum(map(mark.on, older)), sum(map(mark.on, newer))
        if _cut(len(older), had, len(newer), have):
            yield mark, True
        elif _cut(len(older), len(older) - had, len(newer), len(newer) - have):
            yield mark, False


def _marks(answers: Sequence[str]) -> tuple[Mark, ...]:
    manner = manner_of(
        [text if len(text) <= 2 * _END else text[:_END] + text[-_END:] for text in answers]
    )
    letters = "" if manner.letters == "own" else manner.letters
    known = (
        Mark("opening", manner.opening),
        Mark("closing", manner.closing),
        Mark("letters", letters),
    )
    return tuple(mark for mark in known if mark.text)


def _cut(older: int, had: int, newer: int, have: int) -> bool:
    """Whether few of the older and nearly all of the newer have something, and that is no accident."""
    if had > (1 - _MOST) * older or have < max(_FEWEST, newer - 1):
        return False
    # Fisher's exact test: the share of all orders in which so many of those that have it, or more, are among the newer.
    total, everything = had + have, older + newer
    ways = sum(
        comb(total, k) * comb(everything - total, newer - k)
        for k in range(have, min(newer, total) + 1)
    )
    return ways <= _CHANCE * comb(everything, newer)


def _another_kind(seen: Sequence[Shown], change: Change) -> bool:
    """Whether most requests that are answered in the new way are less like any of the others than three of four of those
    are like one another.
    """
    looks = {
        way: [look_of(each.request) for each in seen if change.agrees(each) is way]
        for way in (True, False)
    }
    old, new = looks[False], looks[True]
    among = sorted(nearest(look, [*old[:n], *old[n + 1 :]]) for n, look in enumerate(old))
    usual = among[int((1 - _MOST) * len(among))]
    return sum(nearest(look, old) < usual for look in new) >= _MOST * len(new)


def nearest(look: frozenset[str], others: Sequence[frozenset[str]]) -> float:
    return max((len(look & other) / sqrt(len(look) * len(other)) for other in others), default=0.0)


def look_of(request: str) -> frozenset[str]:
    """Every three letters in a row: no list of words, so it serves any language."""
    text = f"  {request[:_LOOK].casefold()} "
    return frozenset(text[i : i + 3] for i in range(len(text) - 2))
