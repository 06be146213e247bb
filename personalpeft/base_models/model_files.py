"""Find the GGUF files that other programs have downloaded.

Invariant: finding them reads no model, follows no folder link and leaves the programs' folders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OLLAMA = "Ollama"
_MANIFEST_LIMIT = 1 << 20
_MODEL_LAYER = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-]([0-9a-f]{64})")
# Parts of models that are no base: vision parts, and all parts of a split file but the first.
_NO_MODEL = re.compile(r"mmproj|imatrix|ggml-vocab|-(?!00001)\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file that may be a base."""

    program: str  # whose folder it is in
    name: str  # as that program calls it
    path: Path
    size: int  # in bytes


def find_models(folders: Mapping[str, Sequence[Path]]) -> tuple[ModelFile, ...]:
    """Return the models in the folders of programs, each file once.

    Args:
        folders: Folders by program. Those of "Ollama" have manifests and blobs.
    """
    found: dict[Path, ModelFile] = {}
    for program, places in folders.items():
        for place in places:
            models = _ollama(place) if program == _OLLAMA else _files(program, place)
            for model in models:
                with suppress(OSError):
                    found.setdefault(model.path.resolve(), model)
    return tuple(sorted(found.values(), key=lambda each: (each.program, each.name)))


def _files(program: str, folder: Path) -> Iterator[ModelFile]:
    for path in sorted(_below(folder)):
        if path.suffix.lower() != ".gguf" or _NO_MODEL.search(path.name):
            continue
        with suppress(OSError):
            yield ModelFile(program, path.stem, path, path.stat().st_size)


def _below(folder: Path) -> Iterator[Path]:
    """Yield the files below a folder, without those behind links to folders."""
    with suppress(OSError):
        yield from (path for path in folder.rglob("*") if path.is_file())


def _ollama(folder: Path) -> Iterator[ModelFile]:
    """Yield the models of Ollama's manifests, ``manifests/HOST/OWNER/MODEL/TAG``."""
    for manifest in sorted(_below(folder / "manifests")):
        parts = manifest.relative_to(folder / "manifests").parts
        if len(parts) != 4:
            continue
        _, owner, model, tag = parts
        name = f"{model}:{tag}" if owner == "library" else f"{owner}/{model}:{tag}"
        for layer in _layers(manifest):
            digest = _DIGEST.fullmatch(str(layer.get("digest")))
            if layer.get("mediaType") != _MODEL_LAYER or digest is None:
                continue
            blob = folder / "blobs" / f"sha256-{digest[1]}"
            with suppress(OSError):
                yield ModelFile(_OLLAMA, name, blob, blob.stat().st_size)


def _layers(manifest: Path) -> list[dict[str, Any]]:
    """Return the layers of a manifest; none of a damaged one."""
    try:
        if manifest.stat().st_size > _MANIFEST_LIMIT:
            return []
        content = json.loads(manifest.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return []
    layers = content.get("layers") if isinstance(content, dict) else None
    return [each for each in layers if isinstance(each, dict)] if isinstance(layers, list) else []
