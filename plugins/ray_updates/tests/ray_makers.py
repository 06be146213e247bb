"""Homes with users who have something to learn, cluster runs on them, and a worker killer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import personalpeft
from personalpeft import LearnReport, Runtime
from personalpeft_ray_updates import RunStatus, learn_on_cluster

USERS = tuple(f"user-{number}" for number in range(4))
# A first learn needs this many edits.
EDITS = 4


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

        return learn_on_cluster(users, home=self.home, **self.how, progress=record, **more)

    @property
    def users_by_process(self) -> dict[int, set[str]]:
        """The users that each process was seen with."""
        seen: dict[int, set[str]] = {}
        for status in self.statuses:
            for pid, users in status.workers.items():
                seen.setdefault(pid, set()).update(users)
        return {pid: users for pid, users in seen.items() if users}

    def holder(self, user: str) -> int | None:
        """Return the process that last reported the user, or None."""
        workers = self.statuses[-1].workers if self.statuses else {}
        return next((pid for pid, users in workers.items() if user in users), None)

    def steps(self, user: str, pid: int) -> list[int]:
        """Return the steps of the user's style layer that a process reported."""
        seen = [status.workers.get(pid, {}).get(user) for status in self.statuses]
        return [
            each.step
            for each in seen
            if each and each.stage == "Learning" and each.layer == "style"
        ]

    def has_saved_step(self, user: str, layer: str = "style") -> bool:
        """Return whether a step of the user's learn has been saved."""
        return (self.home / "sessions" / user / f"{layer}.session").exists()

    def published_once(self, users: Sequence[str] = USERS, layers: int = 1) -> None:
        """Check that each user has one revision a layer, nothing pending and no sessions left."""
        with self.open_runtime() as runtime:
            assert runtime.verify() == ()
            for user in users:
                handle = runtime.user(user)
                assert [move.layer for move in handle.history()] == [
                    layer.name for layer in handle.layers()
                ]
                assert len(handle.revisions()) == len(handle.layers()) == layers
                assert not handle.pending().news
        assert not list(self.home.glob("sessions/*/*.session"))


@contextmanager
def killing_worker(happened: Callable[[], int | None]) -> Iterator[list[int]]:
    """Poll for a process to kill, kill the first one, and yield the list of killed ones."""
    killed: list[int] = []
    over = threading.Event()

    def poll() -> None:
        while not killed and not over.wait(0.005):
            if (pid := happened()) is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
