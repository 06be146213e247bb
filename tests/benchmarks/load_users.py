"""A temporary home of made-up users, each with one live revision of rank 8 on all projections.

Their random weights are small: replies stay text and run to the requested length.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.bulk import NewRevision, add_revisions
from benchmarks.homes import temporary_home
from personalpeft import Runtime
from personalpeft.adapters.compose import compose, in_half
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.backends.base import StagedStack
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.engine.engine import Engine
from personalpeft.learning.candidate import imported_revision
from personalpeft.settings import Serving, VllmServer
from personalpeft.store.home import open_store
from personalpeft.store.store import Store
from personalpeft.types import Message, Sampling, Stack, canonical_digest

RANK = 8
_LAYER = "style"
# The scale of B: each projection's output changes by some hundredths of itself.
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
class LoadedUsers:
    """The open home and its users.

    ``store`` is a second writer beside the runtime, like another process.
    """

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
        """Return a user's live stack."""
        return self.runtime.user(name(number), create=False).stack()

    def stage(self, stack: Stack) -> StagedStack:
        """Read a stack from its files and stage it in host memory, as the engine's loader does."""
        parts = [(self.engine.read_adapter(entry.digest), entry.weight) for entry in stack.entries]
        return self.engine.backend.stage(compose(parts))

    def peft_folder(self, number: int, parent: Path) -> Path:
        """Write a user's adapter as a PEFT folder into ``parent``."""
        return self.runtime.user(name(number), create=False).export_peft(
            parent / name(number), layer=_LAYER
        )

    def promote(self, new: NewRevision) -> None:
        """Store a revision durably and make it its user's head."""
        self.store.catalog.add_revision(
            new.revision, new.blob, new.report, promote=True, cause="learn"
        )


@contextmanager
def load_users(
    base_name: str,
    users: int,
    *,
    backend: str = "torch",
    serving: Serving = Serving(),
    server: VllmServer | None = None,
    echo: Callable[[str], None],
) -> Iterator[LoadedUsers]:
    """Build the home in the temporary folder, and delete it at the end.

    A user takes about 5 MB with the default base. ``server`` is for the vLLM backend.
    """
    with (
        temporary_home(base_name, backend, serving=serving, vllm=server) as runtime,
        open_store(
            runtime.settings.home, now=lambda: datetime.now(UTC), entropy=os.urandom
        ) as store,
    ):
        base = runtime.base()
        echo(f"making {users} users")
        builds = (build(base, name(number), number) for number in range(users))
        add_revisions(store, builds, batch_size=_BATCH)
        echo("loading the model")
        runtime.engine()
        yield LoadedUsers(runtime, store, users)


def name(number: int) -> str:
    """Return the id of a made-up user."""
    return f"user-{number:06d}"


def build(base: Base, user: str, seed: int) -> NewRevision:
    """Return a user's revision with weights drawn from ``seed``."""
    adapter = _adapter(base, seed)
    blob = pack(adapter)
    digest = hashlib.sha256(blob).hexdigest()
    recipe, reason = adapter.manifest.recipe, "made up for a benchmark"
    revision = imported_revision(
        user, _LAYER, digest, base.digest, recipe, reason=reason, at=datetime.now(UTC)
    )
    return NewRevision(revision, blob, {"imported": revision.id})


def question(number: int, repetition: int) -> tuple[Message, ...]:
    """Return a question with a long answer, in other words for each user and repetition."""
    text = f"Write a long story about {_HEROES[number % len(_HEROES)]} in the year {1000 + number}, part {repetition}."
    return (Message("user", text),)


def both_samplings(card: ModelCard, tokens: int) -> dict[str, Sampling]:
    """Return greedy sampling and the card's, by name, for replies of some tokens."""
    return {
        "greedy": Sampling(max_tokens=tokens),
        "sampled": replace(card.sampling, max_tokens=tokens),
    }


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
