"""``bench catalog``: a home with very many users, compared with a small one.

A temporary home gets its users in bulk, with real rows, indexes and hash chains. Many users share
packed adapters of the fake base. Every tenth user has a stack of two layers, every hundredth of
three. A new process (this file, run as a program) measures at one per cent of the users and at all.
It opens the home, resolves stacks of random users, lists users and reports its memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

import personalpeft
from benchmarks import child_environment
from benchmarks.bulk import NewRevision, add_revisions
from benchmarks.figures import percentile
from benchmarks.homes import temporary_folder
from benchmarks.peak import peak_mb
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.fake import fake_base
from personalpeft.base_models.types import Base
from personalpeft.learning.candidate import imported_revision
from personalpeft.store.gc import collect_garbage
from personalpeft.store.home import open_store
from personalpeft.store.store import Store
from personalpeft.types import StackEntry, canonical_digest

_BATCH = 2000
_FILES_A_LAYER = 64
_LAYERS_A_USER = 1 + 1 / 10 + 1 / 100
_RESOLVED, _RESOLVED_COLD, _PAGES, _PUBLISHED, _LOOSE = 20_000, 2000, 50, 300, 200
_SEED = 7


def bench_catalog(users: int, *, progress: Callable[[str, float], None]) -> dict[str, Any]:
    """Build, measure and delete the home.

    A page has 100 users. The figures ``at_1_percent`` are of the same home with a hundredth of its
    users; ``home_mb`` is its size on disk. A cold figure is measured after its file was dropped from
    the page cache. It is None where that is impossible.
    """
    base, few = fake_base(), max(1, users // 100)
    with temporary_folder() as folder:
        home = folder / "home"

        def build(first: int, end: int) -> tuple[float, float]:
            began = time.perf_counter()
            with _opened(home) as store:
                add_revisions(
                    store,
                    builds(base, first, end),
                    batch_size=_BATCH,
                    progress=lambda done: progress(
                        "Building the home", (first + done / _LAYERS_A_USER) / users
                    ),
                )
                built = time.perf_counter() - began
                return built, _promote(store, base, end)

        early, promoted_early = build(0, few)
        at_few = _probe(home, few)
        late, promoted = build(few, users)
        progress("Measuring", 0.0)
        at_all = _probe(home, users)
        collected, seconds = _collect(home)
        size = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
        return {
            "bench": "catalog",
            "users": users,
            "build_seconds": round(early + late, 1),
            "home_mb": size >> 20,
            "open_seconds": at_all["open_seconds"],
            "resolve_p50_ms": at_all["resolve_p50_ms"],
            "resolve_p99_ms": at_all["resolve_p99_ms"],
            "resolve_cold_p50_ms": at_all["resolve_cold_p50_ms"],
            "resolve_cold_p99_ms": at_all["resolve_cold_p99_ms"],
            "resolve_p99_ms_at_1_percent": at_few["resolve_p99_ms"],
            "list_page_ms": at_all["list_page_ms"],
            "list_page_ms_at_1_percent": at_few["list_page_ms"],
            "publish_per_second": promoted,
            "publish_per_second_at_1_percent": promoted_early,
            "collect_seconds": seconds,
            "collected": collected,
            "rss_mb": at_all["rss_mb"],
            "rss_mb_at_1_percent": at_few["rss_mb"],
        }


def builds(base: Base, first: int, end: int) -> Iterator[NewRevision]:
    """Yield a style layer for each user, a memory for every tenth, and a skill for every hundredth."""
    files = {
        layer: [_packed(base, layer, number) for number in range(_FILES_A_LAYER)]
        for layer in ("style", "skill.email", "memory")
    }
    for number in range(first, end):
        below: tuple[StackEntry, ...] = ()
        for layer, every in (("style", 1), ("skill.email", 100), ("memory", 10)):
            if number % every == 0:
                blob, digest = files[layer][number % _FILES_A_LAYER]
                made = _build(base, name(number), layer, blob, digest, below)
                below = (*below, StackEntry(layer, made.revision.id, digest))
                yield made


def name(number: int) -> str:
    """Return the id of a made-up user; ids sort like their numbers."""
    return f"user-{number:09d}"


def _packed(base: Base, layer: str, number: int) -> tuple[bytes, str]:
    """Return a packed adapter of rank 1 for the fake base, and its digest."""
    draw = np.random.default_rng([_SEED, number, *layer.encode()])
    blocks = base.architecture.blocks
    pairs = {
        path: LoRAWeights(
            draw.standard_normal((blocks, 1, inputs), np.float32),
            draw.standard_normal((blocks, outputs, 1), np.float32),
        )
        for path, (inputs, outputs) in base.architecture.projections.items()
    }
    manifest = Manifest(
        base.digest,
        layer,
        1,
        1.0,
        tuple(sorted(pairs)),
        {"rank": 1},
        canonical_digest([layer, number]),
    )
    blob = pack(Adapter(manifest, pairs))
    return blob, hashlib.sha256(blob).hexdigest()


def _build(
    base: Base, user: str, layer: str, blob: bytes, digest: str, below: tuple[StackEntry, ...]
) -> NewRevision:
    recipe = {"rank": 1, "alpha": 1.0, "targets": list(base.card.targets)}
    at, reason = datetime(2026, 1, 1, tzinfo=UTC), "made up for a benchmark"
    revision = imported_revision(
        user, layer, digest, base.digest, recipe, reason=reason, at=at, below=below
    )
    return NewRevision(revision, blob, {"imported": revision.id})


def _opened(home: Path, *, ahead: timedelta = timedelta(0)) -> Store:
    return open_store(home, now=lambda: datetime.now(UTC) + ahead, entropy=os.urandom)


def _promote(store: Store, base: Base, users: int) -> float:
    """Return the revisions a second that one writer promotes durably, for random users."""
    draw = random.Random(_SEED)
    made = []
    for number in range(min(_PUBLISHED, users)):
        blob, digest = _packed(base, "style", _FILES_A_LAYER + users * _PUBLISHED + number)
        made.append(_build(base, name(draw.randrange(users)), "style", blob, digest, ()))
    began = time.perf_counter()
    for each in made:
        store.catalog.add_revision(
            each.revision, each.blob, each.report, promote=True, cause="learn"
        )
    return round(len(made) / (time.perf_counter() - began), 1)


def _collect(home: Path) -> tuple[int, float]:
    """Return how many leftovers were collected and the seconds, two days in the future."""
    with _opened(home, ahead=timedelta(days=2)) as store:
        for number in range(_LOOSE):
            store.blobs.put("ada", f"nobody names me {number}".encode())
        began = time.perf_counter()
        found = collect_garbage(store)
        return found.blobs, round(time.perf_counter() - began, 3)


def _probe(home: Path, users: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.catalog", str(home), str(users)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=child_environment())
    probe: dict[str, Any] = json.loads(ran.stdout)
    return probe


def measure(home: Path, users: int) -> dict[str, Any]:
    """Measure a home of so many users in this process, which is a new one."""
    draw = random.Random(_SEED)
    began = time.perf_counter()
    with personalpeft.open(home, backend="fake") as runtime:
        opened = time.perf_counter() - began

        def resolve(times: int) -> list[float]:
            taken = []
            for _ in range(times):
                user = name(draw.randrange(users))
                began = time.perf_counter()
                runtime.user(user).stack()
                taken.append((time.perf_counter() - began) * 1000)
            return taken

        resolve(10)
        cold = resolve(_RESOLVED_COLD) if _drop_from_page_cache(home) else None
        _read_through(home)
        warm = resolve(_RESOLVED)
        pages = []
        for _ in range(_PAGES):
            began = time.perf_counter()
            runtime.users(after=name(draw.randrange(users)))
            pages.append((time.perf_counter() - began) * 1000)
        return {
            "open_seconds": round(opened, 3),
            "resolve_p50_ms": round(percentile(warm, 50), 3),
            "resolve_p99_ms": round(percentile(warm, 99), 3),
            "resolve_cold_p50_ms": round(percentile(cold, 50), 3) if cold else None,
            "resolve_cold_p99_ms": round(percentile(cold, 99), 3) if cold else None,
            "list_page_ms": round(statistics.median(pages), 3),
            "rss_mb": peak_mb(),
        }


def _drop_from_page_cache(home: Path) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in home.glob("personalpeft.db*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())  # Only pages that are on the disk can be dropped.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _read_through(home: Path) -> None:
    with (home / "personalpeft.db").open("rb") as file:
        while file.read(1 << 20):
            pass


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
