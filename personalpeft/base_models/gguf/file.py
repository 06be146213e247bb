"""Get a base as one GGUF file: its source, or a file that is made once from its parts or weights.

Invariant: a file in the cache is complete or missing, and its hash is checked on every call.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from personalpeft import host
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import gguf_parts, hash_files, join
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.gguf.writer import FORMAT, write_gguf
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import WeightsError


def resolve_gguf_file(base: Base, names: GgufNames) -> Path:
    """Return the base as one GGUF file.

    Args:
        base: The base.
        names: Its tensor names in GGUF files.

    Raises:
        WeightsError: llama.cpp cannot compute the base, or the file cannot be written.
    """
    return find_gguf_file(base) or _cached_file(
        base, f"{FORMAT}", lambda into: write_gguf(base, names, into)
    )


def find_gguf_file(base: Base) -> Path | None:
    """Return the GGUF file that a base comes from, its parts joined; None for another source.

    Raises:
        WeightsError: The file is missing, or its parts cannot be joined.
    """
    parts = gguf_parts(base.card)
    if len(parts) > 1:
        return _cached_file(base, "joined", lambda into: join(parts, into))
    return parts[0] if parts else None


def source_gguf_file(card: ModelCard) -> Path | None:
    """Return the source if it is one GGUF file."""
    parts = gguf_parts(card)
    return parts[0] if len(parts) == 1 else None


def _cached_file(base: Base, kind: str, make: Callable[[Path], None]) -> Path:
    """Return a file of the cache; make it if it is missing or changed."""
    folder = base.cache / "gguf"
    file = folder / f"{base.digest[:16]}-{kind}.gguf"
    seal = file.with_suffix(".sha256")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            if (
                file.exists()
                and seal.exists()
                and seal.read_text("utf-8") == sealed_digest([file], base.cache)
            ):
                return file
            # Of processes that died: only the holder of the lock makes this file.
            for leftover in folder.glob(f"{file.name}.tmp-*"):
                shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=f"{file.name}.tmp-", dir=folder) as fresh:
                new = Path(fresh, file.name)
                make(new)
                digest = hash_files([new])
                seal.unlink(missing_ok=True)
                host.replace(new, file)
                seal.write_text(digest, "utf-8")
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(
            f"{base.card.name} cannot be written as a GGUF file in {folder}: {error}.",
            hint="Make room there, or set PERSONALPEFT_CACHE to a folder that can be written.",
        ) from error
    return file
