"""Find the GGUF file that a base comes from. A file in parts is joined once, in the cache."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from personalpeft.base_models.cache import cached_entry
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import gguf_parts
from personalpeft.base_models.types import ModelCard
from personalpeft.types import canonical_digest

CACHED_FILE = "base.gguf"
"""The name of a GGUF file in an entry of the cache."""
_VERSION = "1.0"  # Of how parts are joined.
_BLOCK = 1 << 20


def gguf_file(card: ModelCard, cache: Path) -> Path | None:
    """Return the GGUF file of a card, its parts joined; None for another source.

    Raises:
        WeightsError: The file is missing, or its parts cannot be joined.
    """
    parts = gguf_parts(card)
    if len(parts) < 2:
        return parts[0] if parts else None
    key = canonical_digest([sealed_digest(parts, cache), "joined"])
    entry = cached_entry(card, key, _VERSION, cache, partial(_join, parts))
    return entry.folder / CACHED_FILE


def source_gguf_file(card: ModelCard) -> Path | None:
    """Return the source if it is one GGUF file."""
    parts = gguf_parts(card)
    return parts[0] if len(parts) == 1 else None


def _join(parts: Sequence[Path], into: Path) -> None:
    with (into / CACHED_FILE).open("wb") as whole:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, whole, _BLOCK)
