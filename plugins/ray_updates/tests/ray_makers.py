"""Nodes with folders of their own, homes with users who have something to learn, and node killers."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import personalpeft
from personalpeft import LearnReport, Runtime
from personalpeft_ray_updates import RunStatus, learn_on_cluster

USERS = tuple(f"user-{number}" for number in range(4))
# A first learn needs this many edits.
EDITS = 4
_MAX_STARTS = 4


class Nodes:
    """The nodes of a cluster that learn. Each has one CPU and shares no folder with another.

    ``kernels`` are compiled kernels that each new node gets a copy of, so that it compiles none.
    """

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._cluster = cluster
        self._folder = folder
        self._nodes: dict[str, Any] = {}
        self._num_made = 0
        # The folder of each node that was ever started, by id.
        self.folders: dict[str, Path] = {}
        self.kernels: Path | None = None

    @property
    def ids(self) -> list[str]:
        return list(self._nodes)

    def add(self, **environment: str) -> str:
        """Start a node and return its id."""
        self._num_made += 1
        folder = self._folder / f"node-{self._num_made}"
        folder.mkdir()
        if self.kernels is not None:
            shutil.copytree(self.kernels, folder / "cache" / "kernels")
        node = self._start(
            {
                "PERSONALPEFT_HOME": str(folder / "home"),
                "PERSONALPEFT_CACHE": str(folder / "cache"),
                "PERSONALPEFT_RAY_FOLDER": str(folder / "work"),
                **environment,
            }
        )
        self._nodes[node.node_id] = node
        self.folders[node.node_id] = folder
        return str(node.node_id)

    def _start(self, environment: dict[str, str]) -> Any:
        """Start a node. On a busy machine Ray gives up after 30 seconds, so it is tried again."""
        for _ in range(_MAX_STARTS - 1):
            with suppress(Exception):
                return self._add_node(environment)
        return self._add_node(environment)

    def _add_node(self, environment: dict[str, str]) -> Any:
        return self._cluster.add_node(
            num_cpus=1, object_store_memory=100 << 20, env_vars=environment
        )

    def kill(self, node_id: str) -> None:
        """End the processes of a node at once."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def restore(self, count: int) -> None:
        """Have so many plain nodes, living ones and new ones."""
        while len(self._nodes) < count:
            self.add()

    @contextmanager
    def replaced(self, count: int, **environment: str) -> Iterator[list[str]]:
        """Have other nodes than before inside the block, with more in their environment."""
        for node_id in self.ids:
            self.kill(node_id)
        yield [self.add(**environment) for _ in range(count)]
        for node_id in self.ids:
            self.kill(node_id)


@dataclass
class World:
    """A home for cluster runs, and the statuses that the runs reported."""

    folder: Path
    pace: Path
    base: str | Path = "fake"
    statuses: list[RunStatus] = field(default_factory=list)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def how(self) -> dict[str, Any]:
        return {"base": self.base, "backend": "fake" if self.base == "fake" else "torch"}

    @contextmanager
    def open_runtime(self, name: str = "home") -> Iterator[Runtime]:
        with personalpeft.open(self.folder / name, **self.how) as runtime:
            yield runtime

    def correct(self, users: Sequence[str] = USERS, *, shown: int = 0, name: str = "home") -> None:
        """Record edits of each user and ``shown`` demonstrations of a skill; all texts differ."""
        with self.open_runtime(name) as runtime:
            for number, user in enumerate(users):
                handle = runtime.user(user)
                for each in range(EDITS):
                    prompt = f"question {10 * number + each}"
                    handle.feedback(
                        handle.chat(prompt, temperature=0, max_tokens=8),
                        edit=f"Ahoy! Answer to {prompt}. Arrr!",
                    )
                for each in range(shown):
                    handle.teach(f"Write to {number}.{each}.", f"Dear {each}", skill="email")

    def learn_alone(self, users: Sequence[str] = USERS) -> dict[str, tuple[str, ...]]:
        """Learn without a cluster in another home and return each user's live revisions."""
        self.correct(users, name="alone")
        with self.open_runtime("alone") as runtime:
            for user in users:
                runtime.user(user).learn()
        return self.live_revisions(users, name="alone")

    def live_revisions(
        self, users: Sequence[str] = USERS, *, name: str = "home"
    ) -> dict[str, tuple[str, ...]]:
        with self.open_runtime(name) as runtime:
            return {
                user: tuple(e.revision for e in runtime.user(user).stack().entries)
                for user in users
            }

    def set_pace(self, seconds: float) -> None:
        self.pace.write_text(str(seconds))

    def learn(
        self,
        users: Sequence[str] = USERS,
        progress: Callable[[RunStatus], None] = lambda status: None,
        **more: Any,
    ) -> tuple[LearnReport, ...]:
        def record(status: RunStatus) -> None:
            self.statuses.append(status)
            progress(status)

        how = {"workers": 3, **self.how, **more}
        return learn_on_cluster(users, home=self.home, progress=record, **how)

    @property
    def users_by_node(self) -> dict[str, set[str]]:
        """The users that each node was seen with."""
        seen: dict[str, set[str]] = {}
        for status in self.statuses:
            for worker in status.workers:
                seen.setdefault(worker.node, set()).update(worker.users)
        return seen

    def node_of(self, user: str) -> str | None:
        """Return the node that last reported the user as training, or None."""
        workers = self.statuses[-1].workers if self.statuses else ()
        return next(
            (each.node for each in workers if user in each.users and each.stage != "Opening"), None
        )

    def recorded_once(self, users: Sequence[str] = USERS, layers: int = 1) -> None:
        """Check that each user has one revision a layer, and nothing pending."""
        with self.open_runtime() as runtime:
            assert runtime.verify() == ()
            for user in users:
                handle = runtime.user(user)
                assert [move.layer for move in handle.history()] == [
                    layer.name for layer in handle.layers()
                ]
                assert len(handle.revisions()) == len(handle.layers()) == layers
                assert len(handle.reports()) == layers
                assert not handle.pending().triggers
        assert not list(self.home.glob("sessions/*/*.session"))


class NodeKiller:
    """A progress callback that kills a node now and then, and starts another in its place.

    Ray starts nodes in the main thread only, and callbacks run in the caller's.
    """

    def __init__(
        self,
        nodes: Nodes,
        choose: Callable[[RunStatus], str | None],
        *,
        at_most: int = 1,
        every: float = 0.0,
    ) -> None:
        self._nodes, self._choose = nodes, choose
        self._at_most, self._every = at_most, every
        self._last = time.monotonic()
        self.killed: list[str] = []

    def __call__(self, status: RunStatus) -> None:
        if len(self.killed) == self._at_most or time.monotonic() - self._last < self._every:
            return
        node_id = self._choose(status)
        if node_id in self._nodes.ids:
            self._last = time.monotonic()
            self._nodes.kill(node_id)
            self.killed.append(node_id)
            self._nodes.add()
