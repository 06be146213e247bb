"""What a learn would have to go by, from the ledger alone: no model is loaded to ask.

Invariant: what a report has considered, whatever its verdict, is not pending again; so who learns when something is pending
learns once for each lesson, however often it asks and whatever its clock says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from personalpeft.learning.data.assignment import (
    Lesson,
    Assignment,
    rejected_lessons_for,
    lessons_for,
    load_assignments,
)
from personalpeft.learning.plan import FEWEST, stack_below
from personalpeft.learning.report import is_for_the_layer, learns
from personalpeft.learning.revalidation import layers_of, on_something_old
from personalpeft.learning.staleness import answer_to, taken_back, was_let_go
from personalpeft.store.base import Store
from personalpeft.types import Json, Layer, Stack, StackEntry, canonical_digest

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
    routings = load_assignments(store, user)
    layers = catalog.layers(user)
    heads = {layer.name: layer.head for layer in layers}
    reports = learns(catalog.reports(user))
    news: list[News] = []
    too_few: dict[str, int] = {}
    for layer in layers_of(store, user, routings):
        open_ones = _open(store, user, routings, layer)
        lessons = lessons_for(routings, layer)
        if heads.get(layer) is None and not _enough(lessons):
            if lessons:
                too_few[layer] = len(lessons)
            continue
        begun = _begun(reports, layer)
        asked = _asked(reports, layer) | (_sources(begun) if begun else set())
        news += [
            News(key, "lesson", layer, at) for key, at in open_ones.items() if key not in asked
        ]
        if begun and open_ones:
            key = f"{layer} after step {begun['steps']} at {begun['at']}"
            news.append(News(key, "begun", layer, datetime.fromisoformat(begun["at"])))
    news += _below(store, user, layers)
    news += _taken_back(store, user, layers, routings)
    learned = [datetime.fromisoformat(report["at"]) for report in reports[-1:]]
    return Pending(user, tuple(news), too_few, learned[0] if learned else None, _seconds(reports))


def _open(store: Store, user: str, routings: Sequence[Assignment], layer: str) -> dict[str, datetime]:
    """The signals with a lesson for the layer that no build has used, oldest first, and when each came."""
    used = store.catalog.considered(user, layer)
    lessons = [*lessons_for(routings, layer), *rejected_lessons_for(routings, layer)]
    wanted = {lesson.signal for lesson in lessons} - used
    return {each.signal.id: each.signal.at for each in routings if each.signal.id in wanted}


def _enough(lessons: Sequence[Lesson]) -> bool:
    """As ``Plan.enough`` for a build from nothing, as far as that can be told without a model."""
    return len(lessons) >= FEWEST or any(lesson.is_probe for lesson in lessons)


def _asked(reports: Sequence[Json], layer: str) -> set[str]:
    """What the builds of a layer have gone through. A report that said that there were too few says nothing of them: the learn that
    has enough is to learn them all.
    """
    built = [report for report in reports if report["layer"] == layer and report["revision"]]
    return {signal for report in built for signal in _sources(report)}


def _begun(reports: Sequence[Json], layer: str) -> Json | None:
    """The report of the layer's last training, where its budget ended that. What came in between, and trained nothing, changes
    nothing of it.
    """
    trained = [report for report in reports if report["layer"] == layer and report["steps"]]
    return trained[-1] if trained and trained[-1]["revision"] is None else None


def _sources(report: Json) -> set[str]:
    return {
        source["signal"] for source in report.get("sources", ()) if is_for_the_layer(source["use"])
    }


def _below(store: Store, user: str, layers: Sequence[Layer]) -> Iterator[News]:
    live = [
        (layer, store.catalog.revision(user, layer.head))
        for layer in layers
        if layer.head is not None
    ]
    if not live:
        return
    # Of which base they are does not matter here: layers of two bases are no stack, and a learn then says so.
    entries = tuple(
        StackEntry(layer.name, head.id, head.digest, layer.weight) for layer, head in live
    )
    stack = Stack(live[0][1].base, entries)
    for layer, head in live:
        if on_something_old(store, user, stack, layer.name) is not None:
            below = stack_below(store, user, stack, layer.name)
            yield News(f"{head.id} on {below.digest[:12]}", "below", layer.name)


def _taken_back(
    store: Store, user: str, layers: Sequence[Layer], routings: Sequence[Assignment]
) -> Iterator[News]:
    for layer in layers:
        if layer.head is None:
            continue
        head = store.catalog.revision(user, layer.head)
        gone = taken_back(store, user, head, routings)
        if gone and answer_to(store, head, gone, routings) is None and not was_let_go(store, head):
            yield News(
                f"{head.id} without {canonical_digest(sorted(gone))[:12]}", "taken back", layer.name
            )


def _seconds(reports: Sequence[Json]) -> float | None:
    built = [report["seconds"] for report in reports if report["revision"] and report["steps"]][
        -_LAST_LEARNS:
    ]
    return sum(built) / len(built) if built else None
