"""Resolve a card to a base that can be loaded.

Finds the files and hashes them. Of a GGUF file it makes a cached folder with config and tokenizer,
and another one with the weights in safetensors when something needs them so.

Invariants:

- Weights without an unbroken seal are hashed. Weights that differ from the card's digest are never
  opened.
- An entry of the cache is complete or missing: it is made in a temporary folder and renamed. Only
  the holder of its lock makes or removes it. An entry that was changed is made again.
- An entry that was opened lately stays: programs of several versions share a cache. A process may
  still read the files of a removed entry that it has mapped. Windows does not remove them.
- A base's digest comes from its source, so it is the same on every machine. A random base has no
  source; its digest comes from the weights that its seed gives.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from personalpeft.base_models.chat_template import end_of_turn, find_tool_format
from personalpeft.base_models.convert import (
    RECIPE,
    make_random_model,
    unpack_gguf,
    write_gguf_config,
)
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import (
    MANIFEST,
    SINGLE,
    check_digest,
    folder_digest,
    folder_files,
    gguf_parts,
    hash_files,
    hub_folder,
    max_positions,
    read_json,
)
from personalpeft.base_models.gguf.describe import describe_gguf
from personalpeft.base_models.gguf.file import find_gguf_file
from personalpeft.base_models.gguf.header import read_header
from personalpeft.base_models.inspect import FACTS, ModelFacts, inspect_model, restrict_to_targets
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import (
    CardError,
    InvalidInput,
    PersonalPeftError,
    WeightsError,
)
from personalpeft.formatting import to_json
from personalpeft.types import Progress, canonical_digest, canonical_json

_log = logging.getLogger(__name__)

# In a base's digest. The tokenizer's own file depends on transformers' release.
_GGUF_TOKENIZER = f"gguf {RECIPE}"

_ENTRY_NAME = re.compile(r"[0-9a-f]{16}-\d+\.\d+")
_LEFTOVER = ".tmp-"
_MONTH = 30 * 24 * 3600


def resolve_base(card: ModelCard, *, cache: Path, progress: Progress | None = None) -> Base:
    """Return the base of a card, with every file found and hashed.

    Args:
        card: The card.
        cache: The folder for prepared bases.
        progress: Called with the stage and its progress, 0 to 1.

    Raises:
        WeightsError: Files are missing, changed or unusable, or the cache cannot be written.
        CardError: The card does not fit its model.
    """
    report = progress or (lambda stage, done: None)
    source = card.source
    if parts := gguf_parts(card):
        if source.kind == "gguf":
            describe_gguf(parts[0])  # Refuses what would be read in another way.
        weights = sealed_digest(
            parts, cache, lambda done: report(f"Checking {parts[0].name}", done)
        )
        check_digest(card, weights, str(parts[0]))
        entry = _entry(
            card,
            canonical_digest([weights, "config"]),
            cache,
            report,
            lambda into: write_gguf_config(parts, into, report),
        )
        return _base(card, entry.folder, cache, entry.facts, weights, _GGUF_TOKENIZER)

    if source.kind == "random" and (shape := source.shape) is not None:
        key = canonical_digest([source.seed, asdict(shape), card.context])
        entry = _entry(
            card,
            key,
            cache,
            report,
            lambda into: make_random_model(source.seed, shape, card.context, into),
        )
        weights = canonical_digest([entry.files[SINGLE], asdict(shape)])
        tokenizer = entry.files["tokenizer.json"]
        return _base(card, entry.folder, cache, entry.facts, weights, tokenizer)

    folder = hub_folder(card, report) if source.kind == "hub" else source.path or Path()
    digests = {}
    for name, path in folder_files(card, folder).items():
        report(f"Checking {name}", 0.0)
        digests[name] = sealed_digest([path], cache)
    weights = folder_digest(digests)
    check_digest(card, weights, str(folder))
    # The facts depend on the template and other settings, which are not part of the digest.
    settings = {
        path.name: hash_files([path])
        for path in folder.iterdir()
        if path.suffix in (".json", ".jinja") and path.name not in digests and path.is_file()
    }
    entry = _entry(card, canonical_digest([weights, settings]), cache, report, lambda into: folder)
    return _base(card, folder, cache, entry.facts, weights, digests["tokenizer.json"])


def unpacked_folder(
    base: Base, *, full: bool = False, progress: Progress = lambda stage, done: None
) -> Path:
    """Return the folder with a base's config, tokenizer and weights in safetensors.

    A GGUF file is unpacked into the cache the first time.

    Args:
        base: The base.
        full: Whether to unpack to float32 instead of bfloat16.
        progress: Called with the stage and its progress, 0 to 1.

    Raises:
        WeightsError: The file was changed, or cannot be unpacked.
    """
    file = find_gguf_file(base)
    if file is None:
        return base.folder
    card, name = base.card, file.name
    weights = sealed_digest([file], base.cache, lambda done: progress(f"Checking {name}", done))
    if base.digest != _digest(weights, _GGUF_TOKENIZER, base.template):
        raise WeightsError(
            f"The weights of {card.name} were changed while it was open: {file}.",
            hint="Open it again.",
        )
    return _entry(
        card,
        canonical_digest([weights, "float32"]) if full else weights,
        base.cache,
        progress,
        lambda into: unpack_gguf(file, base.folder, into, progress, full=full),
    ).folder


def unpacked_bytes(base: Base) -> int:
    """Return how many bytes of weights ``unpacked_folder`` has. It unpacks nothing."""
    file = find_gguf_file(base)
    if file is None:
        return sum(each.stat().st_size for each in base.folder.glob("model*.safetensors"))
    return 2 * sum(math.prod(each.shape) for each in read_header(file).tensors.values())


def _digest(weights: str, tokenizer: str, template: str) -> str:
    return canonical_digest({"weights": weights, "tokenizer": tokenizer, "template": template})


def _base(
    card: ModelCard, folder: Path, cache: Path, facts: ModelFacts, weights: str, tokenizer: str
) -> Base:
    template = card.template or facts.template
    if template is None:
        raise CardError(f"{card.name} has no chat template.", hint="Set chat_template in its card.")
    longest = max_positions(read_json(folder / "config.json"))
    if longest is not None and card.context > longest:
        raise CardError(
            f"context_length of {card.name} must be at most {longest}, "
            f"the model's positions, got {card.context}.",
            hint=f"Set context_length to {longest} or less.",
        )
    base = Base(
        card=card,
        digest=_digest(weights, tokenizer, template),
        folder=folder,
        cache=cache,
        template=template,
        architecture=restrict_to_targets(facts.architecture, card),
        control=tuple(dict.fromkeys((*facts.control, *card.stop_tokens))),
        bos=facts.bos,
        eos=facts.eos,
    )
    try:
        last = end_of_turn(base)
    except CardError:
        raise
    except InvalidInput as error:
        raise CardError(
            f"The chat template of {card.name} refuses a plain chat: {error}", hint=error.hint
        ) from error
    stops = (*((last,) if last else ()), *card.stop_tokens, *facts.stops)
    return replace(
        base, stop_tokens=tuple(dict.fromkeys(stops)), tool_format=find_tool_format(base)
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A folder of the cache: the facts about a source and its converted files, if any."""

    folder: Path
    facts: ModelFacts
    files: Mapping[str, str]


def _entry(
    card: ModelCard,
    key: str,
    cache: Path,
    report: Progress,
    make: Callable[[Path], Path],
) -> _Entry:
    """Return a source's entry; make it if it is missing or changed.

    ``make`` may write files into a new entry, and returns the model's folder.
    """
    folder = cache / "bases" / f"{key[:16]}-{RECIPE}.{FACTS}"
    with _cache_errors(card, cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A read-only cache can be used.
        with suppress(OSError), _locked(folder, report):
            os.utime(folder / MANIFEST)
        entry = _read_entry(folder, key, cache)
        if entry is None:
            with _locked(folder, report):
                entry = _read_entry(folder, key, cache) or _make_entry(
                    card, key, folder, report, make
                )
        return entry


def _make_entry(
    card: ModelCard,
    key: str,
    folder: Path,
    report: Progress,
    make: Callable[[Path], Path],
) -> _Entry:
    _remove_leftovers(folder)
    if folder.exists():
        _log.warning(
            "The cached copy of %s in %s was changed; it is made again.", card.name, folder
        )
    fresh = _temporary_folder(folder)
    report(f"Preparing {card.name}", 0.0)
    facts = inspect_model(make(fresh))
    files = {path.name: hash_files([path]) for path in sorted(fresh.iterdir())}
    content = {"source": key, "files": files, "facts": to_json(facts)}
    sealed = {**content, "seal": canonical_digest(content)}
    (fresh / MANIFEST).write_text(canonical_json(sealed), "utf-8")
    if folder.exists():
        folder.rename(_temporary_folder(folder) / "changed")
    fresh.rename(folder)
    _remove_leftovers(folder)
    report(f"Preparing {card.name}", 1.0)
    return _Entry(folder, facts, files)


def find_changed_files(cache: Path) -> list[Path]:
    """Return the prepared files that differ from their manifests. Reads all bytes."""
    changed = []
    for entry in sorted((cache / "bases").glob("*")):
        with suppress(FileNotFoundError):
            if _ENTRY_NAME.fullmatch(entry.name) and entry.is_dir():
                content = _read_manifest(entry)
                if content is None:
                    changed.append(entry / MANIFEST)
                    continue
                changed += [
                    entry / name
                    for name, digest in content["files"].items()
                    if not (entry / name).is_file() or hash_files([entry / name]) != digest
                ]
    return changed


def collect_bases(cache: Path, *, dry_run: bool = False) -> list[int]:
    """Remove bases that were not opened for 30 days, and what killed processes left of any.

    What another process makes or cannot give up stays until the next call. With ``dry_run`` nothing
    is removed. Return the bytes of each folder.
    """
    bases = cache / "bases"
    try:
        # The file system's time, since it is compared with a file's.
        with tempfile.TemporaryFile(dir=bases) as file:
            before = os.fstat(file.fileno()).st_mtime - _MONTH
    except OSError:
        return []
    sizes = []
    for name in sorted({path.name.partition(_LEFTOVER)[0] for path in bases.iterdir()}):
        entry = bases / name
        if _ENTRY_NAME.fullmatch(name):
            with suppress(OSError), FileLock(f"{entry}.lock").acquire(timeout=0):
                manifest = entry / MANIFEST
                is_unused = manifest.exists() and manifest.stat().st_mtime < before
                removed = [*_leftovers(entry), *([entry] if is_unused else [])]
                sizes += [_size(folder) for folder in removed]
                if not dry_run:
                    if is_unused:
                        # One step, so that no process reads half an entry.
                        entry.rename(_temporary_folder(entry) / name)
                    _remove_leftovers(entry)
    return sizes


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return an entry's manifest unless it is missing or changed."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        seal = content.pop("seal")
        return content if seal == canonical_digest(content) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_entry(folder: Path, key: str, cache: Path) -> _Entry | None:
    """Return an entry unless it is missing, incomplete or changed."""
    content = _read_manifest(folder)
    if content is None or content["source"] != key:
        return None
    files = content["files"]
    try:
        if {path.name for path in folder.iterdir()} != {MANIFEST, *files}:
            return None
    except FileNotFoundError:
        return None  # Another process has removed it.
    if any(sealed_digest([folder / name], cache) != digest for name, digest in files.items()):
        return None
    return _Entry(folder, ModelFacts.from_json(content["facts"]), files)


@contextmanager
def _locked(folder: Path, report: Progress) -> Iterator[None]:
    """Lock an entry; the system releases the lock of a process that dies."""
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("Waiting for another process that prepares the same base", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _cache_errors(card: ModelCard, cache: Path) -> Iterator[None]:
    try:
        yield
    except PersonalPeftError:
        raise
    except (OSError, SafetensorError) as error:
        raise WeightsError(
            f"{card.name} cannot be prepared in {cache}: {error}.",
            hint="Make room there, or set PERSONALPEFT_CACHE to a folder that can be written.",
        ) from error
    except (ValueError, LookupError, NotImplementedError) as error:
        raise WeightsError(
            f"{card.name} cannot be unpacked: {error}.",
            hint="This version of transformers may not know this kind of GGUF file.",
        ) from error


def _temporary_folder(entry: Path) -> Path:
    """Make a folder beside an entry. Later calls remove it if this process dies."""
    return Path(tempfile.mkdtemp(prefix=f"{entry.name}{_LEFTOVER}", dir=entry.parent))


def _leftovers(entry: Path) -> Iterator[Path]:
    return entry.parent.glob(f"{entry.name}{_LEFTOVER}*")


def _remove_leftovers(entry: Path) -> None:
    """Remove temporary folders of dead processes. The caller holds the entry's lock."""
    for leftover in _leftovers(entry):
        shutil.rmtree(leftover)
