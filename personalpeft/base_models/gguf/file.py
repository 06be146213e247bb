"""A base as one GGUF file: the source's own where it is one, else written once from its weights.

Invariants: the source's own file was hashed when the base was prepared; what is made in the cache is there whole or not at
all, and its hash lies beside it and is checked on every call.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from personalpeft.base_models.files import hash_files, join, package_files
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.gguf.writer import FORMAT, write_gguf
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import WeightsError


def resolve_gguf_file(base: Base, names: GgufNames, cache: Path) -> Path:
    """Raises ``WeightsError`` where the file cannot be made."""
    own = source_gguf_file(base.card)
    if own is not None:
        return own
    if base.card.source.kind != "package":
        return _write_from_weights(
            base, cache, f"{FORMAT}", lambda into: write_gguf(base, names, into)
        )
    parts = package_files(base.card)
    return _write_from_weights(base, cache, "joined", lambda into: join(parts, into))


def source_gguf_file(card: ModelCard) -> Path | None:
    """The GGUF file that a source is, where it is one. Raises ``WeightsError`` for a package that is not installed."""
    parts = package_files(card) if card.source.kind == "package" else ()
    return parts[0] if len(parts) == 1 else None


def _write_from_weights(base: Base, cache: Path, how: str, make: Callable[[Path], None]) -> Path:
    """The cache's file, made by one process at a time if it is not there or not what it was."""
    folder = cache / "gguf"
    file = folder / f"{base.digest[:16]}-{how}.gguf"
    seal = file.with_suffix(".sha256")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if file.exists() and seal.exists() and seal.read_text("utf-8") == hash_files([file]):
                return file
            # Only the holder of the lock makes this file, so what lies here of it was left by a process that died.
            for leftover in folder.glob(f"{file.name}.tmp-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=folder) as fresh:
                new = Path(fresh, file.name)
                make(new)
                digest = hash_files([new])
                seal.unlink(missing_ok=True)
                new.replace(file)
                seal.write_text(digest, "utf-8")
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(
            f"{base.card.name} cannot be written as a GGUF file in {folder}: {error}.",
            hint="Make room there, or set PERSONALPEFT_CACHE to a folder that can be written.",
        ) from error
    return file
