"""What a learn would have to go by, from the ledger alone: no model is loaded to ask.

Invariant: what a report has considered, whatever its verdict, is not pending again; so who learns when something is pending
learns once for each lesson, however often it asks and whatever its clock says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from personalpeft.learning.lessons import Lesson, Routing, dislikes_for, lessons_for, routings_of
from personalpeft.learning.plan import FEWEST, layers_below, taken_back
from personalpeft.learning.standing import layers_of, on_something_old
from personalpeft.store.base import Store
from personalpeft.types import Layer, Stack, StackEntry, Verdict, canonical_digest

_LAST_LEARNS = 3


@dataclass(frozen=True, slots=True)
class News:
    """One reason to learn. ``key`` names it for good: the same reason has the same key, and no other has it. ``at`` is since
    when it is there, by the clock of that time (None: not known). "lesson": no learn has considered it; "begun": a learn was
    ended by its budget; "below": the layer was built on a stack that has changed since; "taken back": some of what it learned was.
    """

    key: str
    kind: Literal["lesson", "begun", "below", "taken back"]
    layer: str
    at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """``news`` are the reasons to learn now. ``too_few`` says of layers that were never built how many of the lessons that
    a first learn takes they have. ``learned`` is when a learn last said something, ``seconds`` how long the last ones that
    built something took on average (None: there was none).
    """

    user: str
    news: tuple[News, ...]
    too_few: Mapping[str, int]
    learned: datetime | None
    seconds: float | None


def pending(store: Store, user: str) -> Pending:
    """Reads the ledger and the catalog. Raises ``NotFound``."""
    catalog = store.catalog
    routings = routings_of(store, user)
    layers = catalog.layers(user)
    heads = {layer.name: layer.head for layer in layers}
    reports = [report for report in catalog.reports(user) if report.get("event", "learn") == "learn"]
    news: list[News] = []
    too_few: dict[str, int] = {}
    for layer in layers_of(store, user, routings):
        open_ones = _open(store, user, routings, layer)
        lessons = lessons_for(routings, layer)
        if heads.get(layer) is None and not _enough(lessons):
            if lessons:
                too_few[layer] = len(lessons)
            continue
        asked = _asked(reports, layer)
        news += [News(key, "lesson", layer, at) for key, at in open_ones.items() if key not in asked]
        news += _begun(reports, layer, open_ones)
    news += _below(store, user, layers)
    news += _taken_back(store, user, layers, routings)
    learned = [datetime.fromisoformat(report["at"]) for report in reports[-1:]]
    return Pending(user, tuple(news), too_few, learned[0] if learned else None, _seconds(reports))


def _open(store: Store, user: str, routings: Sequence[Routing], layer: str) -> dict[str, datetime]:
    """The signals with a lesson for the layer that no build has used, oldest first, and when each came."""
    used = store.catalog.considered(user, layer)
    lessons = [*lessons_for(routings, layer), *dislikes_for(routings, layer)]
    wanted = {lesson.signal for lesson in lessons} - used
    return {each.signal.id: each.signal.at for each in routings if each.signal.id in wanted}


def _enough(lessons: Sequence[Lesson]) -> bool:
    """As ``Plan.enough`` for a build from nothing, as far as that can be told without a model."""
    return len(lessons) >= FEWEST or any(lesson.probe for lesson in lessons)


def _asked(reports: Sequence[Mapping[str, Any]], layer: str) -> set[str]:
    """What the reports of a layer have gone through. One that said that there were too few says nothing of them: the learn that
    has enough is to learn them all.
    """
    considered = [report for report in reports if report["layer"] == layer and (report["revision"] or report["steps"])]
    return {source["signal"] for report in considered for source in report.get("sources", ())}


def _begun(reports: Sequence[Mapping[str, Any]], layer: str, open_ones: Mapping[str, datetime]) -> Iterator[News]:
    last = next((report for report in reversed(reports) if report["layer"] == layer), None)
    if last is not None and last["revision"] is None and last["steps"] and open_ones:
        yield News(
            f"{layer} after step {last['steps']} at {last['at']}", "begun", layer, datetime.fromisoformat(last["at"])
        )


def _below(store: Store, user: str, layers: Sequence[Layer]) -> Iterator[News]:
    live = [(layer, store.catalog.revision(user, layer.head)) for layer in layers if layer.head is not None]
    if not live:
        return
    # Of which base they are does not matter here: layers of two bases are no stack, and a learn then says so.
    entries = tuple(StackEntry(layer.name, head.id, head.digest, layer.weight) for layer, head in live)
    stack = Stack(live[0][1].base, entries)
    for layer, head in live:
        below = Stack(stack.base, layers_below(stack, layer.name)).digest
        if on_something_old(store, user, stack, layer.name) is not None and not _was_tried(store, user, layer, below):
            yield News(f"{head.id} on {below[:12]}", "below", layer.name)


def _taken_back(store: Store, user: str, layers: Sequence[Layer], routings: Sequence[Routing]) -> Iterator[News]:
    for layer in layers:
        if layer.head is None:
            continue
        head = store.catalog.revision(user, layer.head)
        gone = taken_back(store, user, head, routings)
        built = [each for each in store.catalog.revisions(user, layer=layer.name) if each.at > head.at]
        if gone and not any(each.parent is None and not gone & each.signals.keys() for each in built):
            yield News(f"{head.id} without {canonical_digest(sorted(gone))[:12]}", "taken back", layer.name)


def _was_tried(store: Store, user: str, layer: Layer, below: str) -> bool:
    """Whether it was built anew above the same and did not go live. Where a lesson has come since, that is news by itself."""
    built = store.catalog.revisions(user, layer=layer.name)
    return any(
        Stack(each.base, each.below).digest == below and each.parent is None and each.verdict is not Verdict.PROMOTED
        for each in built
    )


def _seconds(reports: Sequence[Mapping[str, Any]]) -> float | None:
    built = [report["seconds"] for report in reports if report["revision"] and report["steps"]][-_LAST_LEARNS:]
    return sum(built) / len(built) if built else None
