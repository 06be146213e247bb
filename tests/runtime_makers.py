"""Homes with users for the tests of the public surface, and comparison of all that a home holds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import personalpeft
from personalpeft import Reply, Runtime, User
from personalpeft.backends.fake import FakeBackend
from personalpeft.clock import Clock

TINY = (resources.files("personalpeft_models") / "tiny-random.toml").read_text("utf-8")


def tiny_card(tables: str, **changes: object) -> str:
    """Return the card of the tiny base with some keys changed and more tables."""
    card = TINY
    for key, value in changes.items():
        card, found = re.subn(
            rf"^{key} = .*$", f"{key} = {json.dumps(value)}", card, flags=re.MULTILINE
        )
        assert found == 1, key
    return card + tables


# A learn takes a second. The promises of learning do not depend on its size.
QUICK_CARD = tiny_card(
    """
[learning]
rank = 2
alpha = 8.0
min_steps = 12
batch_size = 2
learning_rate = 0.01

[learning.memory]
tokens_per_parameter = 10.0
""",
    name="tiny-quick",
    target_modules=["q_proj", "v_proj", "down_proj"],
    context_length=1024,
    max_tokens=8,
)


@dataclass
class FakeTime:
    """A clock that moves a second at each reading, so that no two events have the same time."""

    at: datetime = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    seconds: float = 0.0
    drawn: int = field(default=0)

    def now(self) -> datetime:
        self.at += timedelta(seconds=1)
        return self.at

    def timer(self) -> float:
        self.seconds += 0.001
        return self.seconds

    def entropy(self, count: int) -> bytes:
        self.drawn += 1
        return hashlib.sha256(f"{self.drawn}".encode()).digest()[:count]

    def clock(self) -> Clock:
        return Clock(self.now, self.timer, self.entropy)


@contextmanager
def open_runtime(home: Path, base: str | Path = "fake", **more: Any) -> Iterator[Runtime]:
    """Open a runtime on the fake backend, or on the torch backend where a base is given."""
    backend = "fake" if base == "fake" else "torch"
    with personalpeft.open(home, base=base, backend=backend, **more) as runtime:
        yield runtime


def ask(user: User, prompt: str = "How do I boil an egg?", **more: Any) -> Reply:
    return user.chat(prompt, **{"temperature": 0, **more})


def style(text: str) -> str:
    return f"Ahoy! {text} Arrr!"


def correct(user: User, count: int = 6, *, first: int = 0) -> list[str]:
    """Record so many corrected replies, and return the ids of the edits."""
    return [
        user.feedback(ask(user, f"question {n}"), edit=style(f"Answer {n}."))
        for n in range(first, first + count)
    ]


def fix_reply(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Make the fake backend reply this to every prompt."""
    monkeypatch.setattr(FakeBackend, "reply", lambda backend, row, stack: backend.encode(text))


def greedy(user: User, prompts: Sequence[str] = ("hello", "question 1", "bye")) -> list[str]:
    return [ask(user, prompt, memory=False).text for prompt in prompts]


def trained_on(user: User) -> set[str]:
    return {
        s
        for revision in user.revisions()
        for s, role in revision.signals.items()
        if role == "trained"
    }


def pinned(user: User) -> set[str]:
    return {
        s
        for revision in user.revisions()
        for s, role in revision.signals.items()
        if role == "held_out"
    }


def home_contents(home: Path) -> tuple[list[str], dict[str, str]]:
    """Return all rows of the database as SQL, and digests of all other files except locks."""
    with sqlite3.connect(f"file:{home / 'personalpeft.db'}?mode=ro", uri=True) as connection:
        rows = list(connection.iterdump())
    connection.close()
    files = {
        str(path.relative_to(home)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file()
        and not path.name.startswith(("personalpeft.db", "write."))
        and "locks" not in path.parts
    }
    return rows, files


@contextmanager
def home_unchanged(home: Path) -> Iterator[None]:
    """Check that the home is unchanged after the block, whatever the block raises."""
    before = home_contents(home)
    try:
        yield
    finally:
        assert home_contents(home) == before


def quick_card(folder: Path) -> Path:
    path = folder / "tiny-quick.toml"
    path.write_text(QUICK_CARD)
    return path


def python_environment(cache: Path) -> dict[str, str]:
    """Return the environment of another process beside the test."""
    return {**os.environ, "PERSONALPEFT_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
