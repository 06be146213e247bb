"""The only part that touches the home folder."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from personalpeft.store.base import Store

__all__ = ["open_store"]


def open_store(
    home: Path,
    *,
    now: Callable[[], datetime],
    entropy: Callable[[int], bytes],
    patience: float = 10.0,
    read_only: bool = False,
) -> Store:
    """Opens a home, and makes it first where there is none.

    ``now`` gives aware datetimes, ``entropy(n)`` gives n random bytes; ``patience`` is how many seconds a second writer waits before
    ``Busy`` names the first. A home that cannot be written to opens for reading, and each write then raises ``HomeError``;
    ``read_only`` asks for that and makes no home. Raises ``HomeError`` for a folder that is not ours, a database that is damaged or
    from a newer version, and a disk that is full; all of them leave everything as it was.
    """
    # SQLite and its helpers are loaded by the first home that is opened, not by the first import.
    from personalpeft.store.home import open_home

    return open_home(home, now=now, entropy=entropy, patience=patience, read_only=read_only)
