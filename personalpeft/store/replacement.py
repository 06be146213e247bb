"""Puts a folder in place of a home, in two renames: the former home goes aside, and the folder takes
its place.

Invariants: from when it is whole the folder is ``<home>.restored-<n>``. The former home is
``<home>.replaced-<n>`` with the same number. So a kill between the two renames leaves both and no
home, and the next opening finishes it. A folder alone was not decided on: its home is in use.
"""

from __future__ import annotations

import glob
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from personalpeft import file_system

_NEW, _FORMER = "restored", "replaced"


def replace_home(part: Path, home: Path) -> Path:
    """Put a whole folder in place of a home, and return where the former home is.

    Raises ``OSError``. Then the home and the folder are as they were.
    """
    pairs = (_names(home, number) for number in count(1))
    new, former = next(pair for pair in pairs if not any(path.exists() for path in pair))
    file_system.replace(part, new)
    file_system.sync_folder(home.parent)
    try:
        file_system.replace(home, former)
        try:
            finish_replacement(home)
        except OSError:
            file_system.replace(former, home)
            raise
    except OSError:
        file_system.replace(new, part)
        raise
    return former


def is_replaced(home: Path) -> bool:
    """Return whether a program was killed between the two renames. Raises ``OSError``."""
    return _find_decided(home) is not None


def finish_replacement(home: Path) -> None:
    """Do the second of the two renames, if it is missing. Raises ``OSError``."""
    new = _find_decided(home)
    if new is None:
        return
    with suppress(FileNotFoundError):  # Another program has just done it.
        if home.exists():
            home.rmdir()
        file_system.replace(new, home)
    file_system.sync_folder(home.parent)


def new_folders(home: Path) -> dict[int, Path]:
    """Return the folders that were to replace a home, by their number. Raises ``OSError``."""
    name = re.compile(rf"{re.escape(home.name)}\.{_NEW}-(\d+)")
    try:
        found = [(path, name.fullmatch(path.name)) for path in home.parent.iterdir()]
    except FileNotFoundError:
        return {}
    return {int(match[1]): path for path, match in found if match}


def unfinished_folder(home: Path) -> Path:
    """Return the name of the folder that a restore makes. It stays if the restore is killed."""
    return home.with_name(f"{home.name}.restoring")


def other_copies(home: Path) -> list[Path]:
    """Return the copies of a home beside it: former homes, and what killed restores left."""
    # A parent that cannot be listed has none that are known.
    name = glob.escape(home.name)
    found = [path for each in (_NEW, _FORMER) for path in home.parent.glob(f"{name}.{each}-*")]
    part = unfinished_folder(home)
    return sorted([*found, *([part] if part.exists() else [])])


def _find_decided(home: Path) -> Path | None:
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        return None
    found = new_folders(home)
    return next((found[each] for each in found if _names(home, each)[1].exists()), None)


def _names(home: Path, number: int) -> tuple[Path, Path]:
    """Return the names of the new folder and of the former home."""
    new, former = (home.with_name(f"{home.name}.{what}-{number}") for what in (_NEW, _FORMER))
    return new, former
