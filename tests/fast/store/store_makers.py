"""Test data for the store, and processes that run a script on a home."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from personalpeft.store.erasure import delete_pending_files, erase, erase_user  # noqa: F401 - for the scripts of ``beside``
from personalpeft.store.gc import collect_garbage  # noqa: F401
from personalpeft.store.home import open_store
from personalpeft.store.integrity import verify  # noqa: F401
from personalpeft.store.store import Store
from personalpeft.store.types import ErasureMark
from personalpeft.types import (
    Message,
    Revision,
    Sampling,
    Signal,
    SignalKind,
    Stack,
    Turn,
    Usage,
    Verdict,
)

BASE = "base-one"
HIDE_PYSQLITE = 'sys.modules["sqlcipher3"] = sys.modules["pysqlite3"] = None; '


class Clock:
    """A clock that moves a millisecond at each reading."""

    def __init__(self) -> None:
        self.at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.at += timedelta(milliseconds=1)
        return self.at


def opened(home: Path, *, timeout: float = 10.0, read_only: bool = False) -> Store:
    return open_store(home, now=Clock(), entropy=os.urandom, timeout=timeout, read_only=read_only)


def add_turn(
    store: Store,
    user: str = "ada",
    reply: str = "Boil it.",
    stack: Stack | None = None,
    used: Sequence[str] = (),
    erasure_mark: ErasureMark | None = None,
) -> Turn:
    return store.ledger.add_turn(
        user,
        messages=[Message("system", "Be brief."), Message("user", "How do I boil an egg?")],
        reply=reply,
        stack=stack or Stack(BASE),
        sampling=Sampling(temperature=0.5, stop=("\n\n",)),
        usage=Usage(12, 3),
        finish_reason="stop",
        used=used,
        erasure_mark=erasure_mark,
    )


def add_fact(store: Store, user: str = "ada", text: str = "My dog is called Biscuit.") -> Signal:
    return store.ledger.add_signal(user, SignalKind.FACT, {"text": text})


def packed(
    user: str = "ada", layer: str = "style", content: bytes = b"one", **changes: object
) -> tuple[Revision, bytes]:
    blob = b"packed " + content
    digest = hashlib.sha256(blob).hexdigest()
    values: dict[str, object] = {
        "id": f"{layer}@{digest[:12]}",
        "user": user,
        "layer": layer,
        "digest": digest,
        "base": BASE,
        "parent": None,
        "below": (),
        "recipe": {"rank": 8},
        "inputs": "0" * 64,
        "signals": {},
        "scores": {"pinned": 0.75},
        "verdict": Verdict.PROMOTED,
        "reason": "Better on 3 of 4 pinned questions.",
        "probation": False,
        "at": datetime(2026, 1, 2, tzinfo=UTC),
        "seconds": 61.5,
        **changes,
    }
    return Revision(**values), blob  # type: ignore[arg-type]


def add_revision(
    store: Store, content: bytes = b"one", *, promote: bool = True, **changes: object
) -> Revision:
    revision, blob = packed(content=content, **changes)  # type: ignore[arg-type]
    store.catalog.add_revision(
        revision, blob, {"verdict": str(revision.verdict)}, promote=promote, cause="learn"
    )
    return revision


def beside(script: str, home: Path, *arguments: object) -> subprocess.Popen[str]:
    """Start another process that runs a script. ``sys.argv[1]`` is the home."""
    here = str(Path(__file__).parent)
    # The store chooses its SQLite when it is imported.
    first = HIDE_PYSQLITE if script.startswith(HIDE_PYSQLITE) else ""
    prelude = f"import sys; {first}sys.path.insert(0, {here!r}); from store_makers import *; home = Path(sys.argv[1])\n"
    return subprocess.Popen(
        [sys.executable, "-c", prelude + script, str(home), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen[str]) -> str:
    """Return what a process printed, after a check that it succeeded."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out
