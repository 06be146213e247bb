"""A PEFT folder as one file, so that it can be sent: a zip of the files that such a folder has, and nothing else.

Invariants: no name in an archive decides where anything is written; what does not fit the bound is not unpacked. What is in the files is
for the library's own reader to judge.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

from personalpeft.adapters.formats.peft import CONFIG_FILE, PROVENANCE_FILE, TENSOR_FILE
from personalpeft.errors import AdapterError

_FILES = (CONFIG_FILE, TENSOR_FILE, PROVENANCE_FILE)
_LARGEST = 256 * 2**20
_PART = 2**20
_HINT = f"Send a zip of {CONFIG_FILE} and {TENSOR_FILE}, with no folder around them."


def zip_adapter(folder: Path, archive: Path) -> None:
    """Writes those of the files that are there into a new archive. Tensors do not shrink, so nothing is compressed. Raises
    ``AdapterError`` for a file that cannot be read.
    """
    with zipfile.ZipFile(archive, "x") as made:
        for name in _FILES:
            try:
                if (folder / name).is_file():
                    made.write(folder / name, name)
            except OSError as error:
                raise AdapterError(
                    f"{folder / name} cannot be read: {error.strerror or error}.",
                    hint="Look at the folder.",
                ) from error


def unzip_adapter(archive: Path, folder: Path) -> None:
    """Writes the files of an archive that a stranger made into a folder that is there. Raises ``AdapterError``."""
    try:
        with zipfile.ZipFile(archive) as given:
            entries = given.infolist()
            names = [entry.filename for entry in entries]
            if len(set(names)) < len(names) or not set(names) <= {*_FILES}:
                raise AdapterError(
                    "The archive holds something else than a PEFT folder.", hint=_HINT
                )
            room = _LARGEST
            for entry in entries:
                with given.open(entry) as source, (folder / entry.filename).open("xb") as target:
                    # What an archive says of a file's size is only what it says.
                    while part := source.read(_PART):
                        room -= len(part)
                        if room < 0:
                            raise AdapterError(
                                "The archive holds more than is taken.",
                                hint=f"At most {_LARGEST} bytes are.",
                            )
                        target.write(part)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        NotImplementedError,
        RuntimeError,
        ValueError,
    ) as error:
        if isinstance(error, AdapterError):
            raise
        raise AdapterError("This is no archive that can be read.", hint=_HINT) from error
