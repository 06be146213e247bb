"""``bench publish``: do others notice when somebody's revision is published, and how long is the way from an adapter to its
first token, against merging it and loading full weights?

Stall: fifteen users are being answered; a sixteenth's new revision is made durable, becomes the head and is brought into a
slot, some times a second. The times between two tokens of one reply, as their reader sees them, are compared with those
of a quiet run; only those count during which a publication or load was under way.

Hand-over: ours is the packed file made durable and live, loaded into a running engine, and a first token; the peer's is
PEFT's merge, the merged weights saved, loaded again by transformers, and a first token. What both begin with, the adapter in
memory and the base loaded, is not counted.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks import baselines
from benchmarks.figures import Spread, percentile, ratio, spread, taking_turns
from benchmarks.load_users import Crowd, build, crowd, name, question
from personalpeft.engine.engine import Request
from personalpeft.types import Sampling

_OTHERS = 15
_PUBLICATIONS, _PAUSE = 20, 0.25


@dataclass(frozen=True, slots=True)
class PublishBench:
    """The object that ``--json`` prints: medians over the repetitions; ``spread`` has the least and the most.

    ``milliseconds`` has the times between two tokens of one reply, quiet and while a revision was published or loaded, how
    long a publication took, and both hand-overs. ``published`` is how many publications there were in all.
    """

    bench: str
    base: str
    repetitions: int
    ratios: dict[str, float]
    merged_vs_adapter_handoff: float
    milliseconds: dict[str, float]
    spread: dict[str, tuple[float, float]]
    published: int


def bench_publish(
    base_name: str, *, repetitions: int, tokens: int, say: Callable[[str], None]
) -> PublishBench:
    """Runs quiet and publishing in turns, with replies of so many tokens, and then both hand-overs in turns. Raises
    ``MissingPackage`` without PEFT.
    """
    with (
        crowd(base_name, _OTHERS + 1, say=say) as people,
        tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as work,
    ):
        seeds, rounds = count(people.users), count()
        figures: dict[str, list[float]] = {"quiet_p50": [], "publishing_p50": []}
        taken: list[float] = []

        def quiet(repetition: int) -> float:
            gaps = [end - begin for begin, end in _gaps(people, next(rounds), tokens)]
            figures["quiet_p50"].append(percentile(gaps, 50) * 1000)
            return percentile(gaps, 99) * 1000

        def publishing(repetition: int) -> float:
            gaps: list[tuple[float, float]] = []
            publisher = _Publisher(people, seeds)
            while not publisher.done:
                gaps += _gaps(people, next(rounds), tokens)
            taken.extend(end - begin for begin, end in publisher.spans)
            met = [end - begin for begin, end in gaps if publisher.met(begin, end)]
            figures["publishing_p50"].append(percentile(met, 50) * 1000)
            return percentile(met, 99) * 1000

        say("warming up")
        quiet(0)
        figures["quiet_p50"].clear()
        figures |= taking_turns(
            {"quiet_p99": quiet, "publishing_p99": publishing}, repetitions, say
        )

        say("handing over")
        adapter = people.peft_folder(0, Path(work))
        turns: dict[str, Callable[[int], float]] = {
            "adapter_handoff": lambda repetition: _adapter_handoff(people, next(seeds), repetition),
            "merged_handoff": lambda repetition: _merged_handoff(
                people, adapter, Path(work), repetition
            ),
        }
        for run in turns.values():
            run(0)
        figures |= taking_turns(turns, repetitions, say)
    return _summary(base_name, repetitions, figures, taken)


def _summary(
    base_name: str, repetitions: int, figures: dict[str, list[float]], taken: list[float]
) -> PublishBench:
    times = {key: spread(values) for key, values in figures.items()}
    times["publication"] = spread([each * 1000 for each in taken])
    stall = ratio(figures["publishing_p99"], figures["quiet_p99"])
    handoff = ratio(figures["merged_handoff"], figures["adapter_handoff"])
    ratios: dict[str, Spread] = {"stall_p99": stall, "merged_vs_adapter_handoff": handoff}
    return PublishBench(
        bench="publish",
        base=base_name,
        repetitions=repetitions,
        ratios={"stall_p99": stall.median},
        merged_vs_adapter_handoff=handoff.median,
        milliseconds={key: each.median for key, each in times.items()},
        spread={key: (each.least, each.most) for key, each in {**times, **ratios}.items()},
        published=len(taken),
    )


def _gaps(people: Crowd, repetition: int, tokens: int) -> Iterator[tuple[float, float]]:
    """From one token of a reply to its next, for all others' replies, from when all of them have begun."""
    sampling = Sampling(max_tokens=tokens)
    requests = [
        Request(name(number), question(number, repetition), people.stack(number), sampling)
        for number in range(_OTHERS)
    ]
    for request in requests:
        people.engine.preload(request.stack)
    last: dict[int, float] = {}
    for piece in people.engine.stream(requests):
        now = time.perf_counter()
        if piece.tokens and len(last) == _OTHERS:
            yield last[piece.index], now
        if piece.tokens:
            last[piece.index] = now


class _Publisher:
    """Publishes and loads so many revisions of one user, one after the other, in a thread of its own that begins at once."""

    def __init__(self, people: Crowd, seeds: Iterator[int]) -> None:
        # Made beforehand: that is the learn's part, not the publication's.
        self._builds = [
            build(people.base, name(_OTHERS), next(seeds)) for _ in range(_PUBLICATIONS)
        ]
        self._people = people
        self._failure: Exception | None = None
        self.spans: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._run, name="publisher", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the last has been published. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        return not self._thread.is_alive()

    def met(self, begin: float, end: float) -> bool:
        """Whether something was being published at any moment between the two."""
        return any(b < end and begin < e for b, e in self.spans)

    def _run(self) -> None:
        try:
            for new in self._builds:
                time.sleep(_PAUSE)
                began = time.perf_counter()
                self._people.publish(new)
                self._people.engine.preload(self._people.stack(_OTHERS))
                self.spans.append((began, time.perf_counter()))
        except Exception as error:  # noqa: BLE001 - raised again by the thread that asks
            self._failure = error


def _adapter_handoff(people: Crowd, seed: int, repetition: int) -> float:
    new = build(people.base, name(_OTHERS), seed)
    began = time.perf_counter()
    people.publish(new)
    stack = people.stack(_OTHERS)
    request = Request(name(_OTHERS), question(_OTHERS, repetition), stack, Sampling(max_tokens=1))
    for _ in people.engine.stream([request]):
        pass
    return (time.perf_counter() - began) * 1000


def _merged_handoff(people: Crowd, adapter: Path, work: Path, repetition: int) -> float:
    model = baselines.load_with_adapters(people.base.folder, [adapter])
    prompt = people.engine.backend.render(question(_OTHERS, repetition))
    folder = work / "merged"
    began = time.perf_counter()
    model.merge_and_unload().save_pretrained(folder)
    baselines.generate(baselines.load_plain(folder), [prompt], 1)
    taken = (time.perf_counter() - began) * 1000
    shutil.rmtree(folder)
    return taken
