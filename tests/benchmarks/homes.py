"""Folders and homes that last as long as a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import personalpeft
from personalpeft import Runtime


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder."""
    with TemporaryDirectory(prefix="personalpeft-bench-") as folder:
        yield Path(folder)


@contextmanager
def temporary_home(base: str | Path, backend: str = "auto", **options: Any) -> Iterator[Runtime]:
    """Open a new home. ``options`` are more of ``personalpeft.open``."""
    with (
        temporary_folder() as folder,
        personalpeft.open(folder / "home", base, backend, **options) as runtime,
    ):
        yield runtime
