"""A crowd of made-up users in a home that is thrown away: each has one revision, live, of rank 8 on all projections, with
weights of its own. The weights are random and small: replies stay text, and run on to the length that was asked for.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

import personalpeft
from personalpeft import Runtime
from personalpeft.adapters.compose import compose, in_half
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.base import StagedStack
from personalpeft.base_models.types import Base
from personalpeft.engine.engine import Engine
from personalpeft.learning.publish import imported_revision
from personalpeft.settings import Serving, VllmServer
from personalpeft.store.home import open_store
from personalpeft.store.store import Store
from personalpeft.store.types import NewRevision
from personalpeft.types import Message, Stack, canonical_digest

RANK = 8
_LAYER = "style"
# How large B's numbers are: each projection's output changes by some hundredths of itself.
_SIZE = 0.01
# Adapters in memory at once while the home is built.
_BATCH = 32
_HEROES = (
    *(
        "a lighthouse keeper",
        "two brothers",
        "an old clockmaker",
        "a travelling cook",
        "the last dragon",
    ),
    *("a village doctor", "a lost letter", "a night train", "a stubborn goat", "a young painter"),
    *(
        "an island without birds",
        "a retired sailor",
        "a broken bridge",
        "a winter market",
        "the red bicycle",
    ),
    "a quiet robot",
)


@dataclass(frozen=True, slots=True)
class Crowd:
    """The open home with so many users in it. ``store`` is a second writer beside the runtime, as another process would be."""

    runtime: Runtime
    store: Store
    users: int

    @property
    def base(self) -> Base:
        return self.runtime.base()

    @property
    def engine(self) -> Engine:
        return self.runtime.engine()

    def stack(self, number: int) -> Stack:
        """The live stack of a user."""
        return self.runtime.user(name(number), create=False).stack()

    def stage(self, stack: Stack) -> StagedStack:
        """A stack as its files have it, in host memory in the form of the slots: what the engine's loader does."""
        parts = [(self.engine.read_adapter(entry.digest), entry.weight) for entry in stack.entries]
        return self.engine.backend.stage(compose(parts))

    def peft_folder(self, number: int, parent: Path) -> Path:
        """A user's adapter, written as a PEFT folder into ``parent``."""
        return self.runtime.user(name(number), create=False).export_peft(
            parent / name(number), layer=_LAYER
        )

    def publish(self, new: NewRevision) -> None:
        """Makes a revision durable and its user's head."""
        self.store.catalog.add_revision(
            new.revision, new.blob, new.report, promote=True, cause="learn"
        )


@contextmanager
def crowd(
    base_name: str,
    users: int,
    *,
    backend: str = "torch",
    serving: Serving = Serving(),
    server: VllmServer | None = None,
    say: Callable[[str], None],
) -> Iterator[Crowd]:
    """Builds the home in the temporary folder, and deletes it at the end. A user is about 5 MB with the default base. ``server``
    is for the vLLM backend.
    """
    with tempfile.TemporaryDirectory(prefix="personalpeft-bench-") as folder:
        home = Path(folder) / "home"
        with (
            personalpeft.open(home, base_name, backend, serving=serving, vllm=server) as runtime,
            open_store(home, now=lambda: datetime.now(UTC), entropy=os.urandom) as store,
        ):
            base = runtime.base()
            say(f"making {users} users")
            builds = (build(base, name(number), number) for number in range(users))
            store.catalog.add_revisions(builds, batch_size=_BATCH)
            say("loading the model")
            runtime.engine()
            yield Crowd(runtime, store, users)


def name(number: int) -> str:
    """The id of a made-up user."""
    return f"user-{number:06d}"


def build(base: Base, user: str, seed: int) -> NewRevision:
    """A revision of a user's own, with the numbers that ``seed`` draws."""
    adapter = _adapter(base, seed)
    blob = pack(adapter)
    digest = hashlib.sha256(blob).hexdigest()
    recipe, reason = adapter.manifest.recipe, "made up for a benchmark"
    revision = imported_revision(
        user, _LAYER, digest, base.digest, recipe, reason=reason, at=datetime.now(UTC)
    )
    return NewRevision(revision, blob, {"imported": revision.id})


def question(number: int, repetition: int) -> tuple[Message, ...]:
    """Something that is answered at length; other words for each user and repetition, and about as many."""
    text = f"Write a long story about {_HEROES[number % len(_HEROES)]} in the year {1000 + number}, part {repetition}."
    return (Message("user", text),)


def _adapter(base: Base, seed: int) -> Adapter:
    draw = np.random.default_rng([RANK, seed])
    blocks = base.architecture.blocks
    pairs = {
        path: LoRAWeights(
            draw.standard_normal((blocks, RANK, inputs), np.float32) / np.float32(inputs**0.5),
            draw.standard_normal((blocks, outputs, RANK), np.float32) * np.float32(_SIZE),
        )
        for path, (inputs, outputs) in sorted(base.architecture.projections.items())
    }
    recipe = {"rank": RANK, "alpha": float(RANK), "targets": sorted(pairs), "seed": seed}
    manifest = Manifest(
        base.digest, _LAYER, RANK, 1.0, tuple(sorted(pairs)), recipe, canonical_digest([seed])
    )
    return Adapter(manifest, in_half(pairs))
