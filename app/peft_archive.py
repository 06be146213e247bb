"""Zip and unzip PEFT folders, to send them as one file.

Invariants: no name in an archive decides where a file is written, and a size bound holds. The
library's own reader checks the contents.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path

from personalpeft.adapters.formats.peft import CONFIG_FILE, PROVENANCE_FILE, TENSOR_FILE
from personalpeft.errors import AdapterError
from personalpeft.sandbox import Limits, run_reader

_FILES = (CONFIG_FILE, TENSOR_FILE, PROVENANCE_FILE)
_LARGEST = 256 * 2**20
_HINT = f"Send a zip of {CONFIG_FILE} and {TENSOR_FILE}, with no folder around them."


def zip_adapter(folder: Path, archive: Path) -> None:
    """Write the existing files into a new archive, uncompressed, since tensors do not shrink.

    Raises ``AdapterError`` for a file that cannot be read.
    """
    with zipfile.ZipFile(archive, "x") as target:
        for name in _FILES:
            try:
                if (folder / name).is_file():
                    target.write(folder / name, name)
            except OSError as error:
                raise AdapterError(
                    f"{folder / name} cannot be read: {error.strerror or error}.",
                    hint="Look at the folder.",
                ) from error


def unzip_adapter(archive: Path, folder: Path) -> None:
    """Unpack an untrusted archive into an existing folder. A child with limits reads it first.

    Raises ``AdapterError``.
    """
    digests = run_reader(
        f"{__name__}:check_archive",
        {"path": str(archive)},
        Limits.for_files(_LARGEST, memory_factor=1, bytes_a_second=1 << 24),
        source=archive.name,
        error=AdapterError,
    )

    with archive.open("rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != digests.get(str(archive)):
            raise AdapterError("The archive changed while it was read.", hint="Send it again.")
        with zipfile.ZipFile(opened) as file:
            file.extractall(folder)


def check_archive(path: str) -> Mapping[str, str]:
    """Check an untrusted archive in a child of ``sandbox``, and return its digest."""
    try:
        with Path(path).open("rb") as opened, zipfile.ZipFile(opened) as file:
            entries = file.infolist()
            names = [entry.filename for entry in entries]
            if len(set(names)) < len(names) or not set(names) <= {*_FILES}:
                raise AdapterError(
                    "The archive must hold the files of a PEFT folder and nothing else.", hint=_HINT
                )
            # No more is read than the size in the archive's index says.
            if sum(entry.file_size for entry in entries) > _LARGEST:
                raise AdapterError(
                    "The archive is too large.", hint=f"At most {_LARGEST} bytes are accepted."
                )
            if file.testzip() is not None:
                raise AdapterError("The archive cannot be read.", hint=_HINT)
            opened.seek(0)
            return {path: hashlib.file_digest(opened, "sha256").hexdigest()}
    except AdapterError:
        raise
    except Exception as error:  # zipfile raises errors of many kinds
        raise AdapterError("The archive cannot be read.", hint=_HINT) from error
