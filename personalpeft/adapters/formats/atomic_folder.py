"""Write a folder completely or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from personalpeft.errors import InvalidInput, PersonalPeftError


@contextmanager
def write_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to ``folder`` on success and removed on an error.

    Raises:
        InvalidInput: ``folder`` is not empty or cannot be written.
    """
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(
                f"{folder} is there already.",
                hint="Name a folder that does not exist yet or is empty.",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        sibling = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield sibling
            if folder.exists():
                folder.rmdir()
            sibling.rename(folder)
        finally:
            shutil.rmtree(sibling, ignore_errors=True)
    except PersonalPeftError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{folder} cannot be written: {error.strerror or error}.",
            hint="Choose a folder that can be written to.",
        ) from error
