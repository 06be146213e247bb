"""Homes with people in them who have something to learn, runs on them, and somebody who kills workers."""

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

PEOPLE = tuple(f"user-{number}" for number in range(4))
# A first learn takes so many.
EDITS = 4


@dataclass
class World:
    """The home that is learned in, and what was told of it."""

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
    def opened(self, name: str = "home") -> Iterator[Runtime]:
        with personalpeft.open(self.folder / name, **self.how) as runtime:
            yield runtime

    def say(self, users: Sequence[str] = PEOPLE, *, shown: int = 0, name: str = "home") -> None:
        """Corrections of each, and so many answers shown for a skill; no two people say the same."""
        with self.opened(name) as runtime:
            for number, user in enumerate(users):
                person = runtime.user(user)
                for each in range(EDITS):
                    asked = f"question {10 * number + each}"
                    person.feedback(
                        person.chat(asked, temperature=0, max_tokens=8),
                        edit=f"Ahoy! Answer to {asked}. Arrr!",
                    )
                for each in range(shown):
                    person.teach(f"Write to {number}.{each}.", f"Dear {each}", skill="email")

    def learn_alone(self, users: Sequence[str] = PEOPLE) -> dict[str, tuple[str, ...]]:
        """The revisions that each comes to by learning alone, in a home beside."""
        self.say(users, name="alone")
        with self.opened("alone") as runtime:
            for user in users:
                runtime.user(user).learn()
        return self.live(users, name="alone")

    def live(
        self, users: Sequence[str] = PEOPLE, *, name: str = "home"
    ) -> dict[str, tuple[str, ...]]:
        with self.opened(name) as runtime:
            return {
                user: tuple(e.revision for e in runtime.user(user).stack().entries)
                for user in users
            }

    def slowly(self, seconds: float) -> None:
        self.pace.write_text(str(seconds))

    def learn(
        self,
        users: Sequence[str] = PEOPLE,
        progress: Callable[[RunStatus], None] = lambda status: None,
        **more: Any,
    ) -> tuple[LearnReport, ...]:
        def heard(status: RunStatus) -> None:
            self.statuses.append(status)
            progress(status)

        return learn_on_cluster(users, home=self.home, **self.how, progress=heard, **more)

    @property
    def taught(self) -> dict[int, set[str]]:
        """Which process was seen to have which users."""
        seen: dict[int, set[str]] = {}
        for status in self.statuses:
            for pid, users in status.workers.items():
                seen.setdefault(pid, set()).update(users)
        return {pid: users for pid, users in seen.items() if users}

    def holder(self, user: str) -> int | None:
        """The process that has the user now, as far as was told."""
        workers = self.statuses[-1].workers if self.statuses else {}
        return next((pid for pid, users in workers.items() if user in users), None)

    def steps(self, user: str, pid: int) -> list[int]:
        """The steps of the user's style at which a process was seen."""
        seen = [status.workers.get(pid, {}).get(user) for status in self.statuses]
        return [
            each.step
            for each in seen
            if each and each.stage == "Learning" and each.layer == "style"
        ]

    def begun(self, user: str, layer: str = "style") -> bool:
        """Whether a step of the user's learn has been saved."""
        return (self.home / "sessions" / user / f"{layer}.session").exists()

    def published_once(self, users: Sequence[str] = PEOPLE, layers: int = 1) -> None:
        """Each has one revision a layer, nothing is left over, and nothing is left to learn."""
        with self.opened() as runtime:
            assert runtime.verify() == ()
            for user in users:
                person = runtime.user(user)
                assert [move.layer for move in person.history()] == [
                    layer.name for layer in person.layers()
                ]
                assert len(person.revisions()) == len(person.layers()) == layers
                assert not person.pending().news
        assert not list(self.home.glob("sessions/*/*.session"))


@contextmanager
def killing(happened: Callable[[], int | None]) -> Iterator[list[int]]:
    """Looks again and again for a process to kill, and kills the first that is named; gives whom it killed."""
    killed: list[int] = []
    over = threading.Event()

    def look() -> None:
        while not killed and not over.wait(0.005):
            if (pid := happened()) is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()
