"""From a card to a base that can be loaded: finds the files, hashes them, and makes in the cache what has to be made.

Invariants:

- Weights are hashed on every call; what is not what the card says is never opened.
- The cache holds whole entries or none: an entry is made in a folder of its own and renamed; one process at a time makes it. Its files are
  hashed on every call too, and one that was changed is made again.
- An entry that no process uses any more goes a week later, once a newer one of its base is used: see ``versions``.
- A base's digest comes from the source, not from what the cache made of it, so it is the same on every machine. (A random base has no
  source but its seed, and takes its digest from the numbers that were drawn.)
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout
from safetensors import SafetensorError

from personalpeft.base_models import cache_versions
from personalpeft.base_models.cache_versions import MANIFEST
from personalpeft.base_models.chat_template import end_of_turn
from personalpeft.base_models.convert import RECIPE, convert_gguf, make_random_model
from personalpeft.base_models.files import (
    SINGLE,
    check_digest,
    folder_digest,
    folder_files,
    hash_files,
    hub_folder,
    package_files,
)
from personalpeft.base_models.inspect import FACTS, ModelFacts, inspect_model, restrict_to_targets
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import (
    CardError,
    InvalidInput,
    PersonalPeftError,
    WeightsError,
    suggest_nearest,
)
from personalpeft.formatting import to_json
from personalpeft.types import Progress, canonical_digest, canonical_json

_log = logging.getLogger(__name__)


def resolve_base(card: ModelCard, *, cache: Path, progress: Progress | None = None) -> Base:
    """The base of a card, with every file found and hashed.

    The first time this takes seconds to minutes, later well under a second for a small base. ``progress`` hears a stage and how much of
    it is done (0 to 1). Raises ``WeightsError`` for weights that are missing or changed, ``CardError`` for a card that does not fit them.
    """
    report = progress or (lambda stage, done: None)
    source = card.source
    if source.kind == "package":
        parts = package_files(card)
        weights = hash_files(parts, lambda done: report(f"Checking {parts[0].name}", done))
        check_digest(card, weights, str(parts[0]))
        entry = _entry(card, weights, cache, report, lambda into: convert_gguf(parts, into, report))
        return _base(card, entry.folder, entry.facts, weights, f"gguf {RECIPE}")

    if source.kind == "random":
        key = canonical_digest([source.seed, source.shape, card.context])
        entry = _entry(
            card,
            key,
            cache,
            report,
            lambda into: make_random_model(source.seed, source.shape, card.context, into),
        )
        made = canonical_digest([entry.files[SINGLE], source.shape])
        return _base(card, entry.folder, entry.facts, made, entry.files["tokenizer.json"])

    folder = hub_folder(card, report) if source.kind == "hub" else source.path or Path()
    digests = {}
    for name, path in folder_files(card, folder).items():
        report(f"Checking {name}", 0.0)
        digests[name] = hash_files([path])
    weights = folder_digest(digests)
    check_digest(card, weights, str(folder))
    # The template and the other small settings are not among the hashed weights, but the facts depend on them.
    small = (
        path
        for path in folder.iterdir()
        if path.suffix in (".json", ".jinja") and path.name not in digests
    )
    settings = {path.name: hash_files([path]) for path in small if path.is_file()}
    entry = _entry(card, canonical_digest([weights, settings]), cache, report, None, look=folder)
    return _base(card, folder, entry.facts, weights, digests["tokenizer.json"])


def _base(card: ModelCard, folder: Path, facts: ModelFacts, weights: str, tokenizer: str) -> Base:
    template = card.template or facts.template
    if template is None:
        raise CardError(
            f"{card.name} brings no chat template.", hint="Give one as template in its card."
        )
    if facts.longest is not None and card.context > facts.longest:
        raise CardError(
            f"context of {card.name} is {card.context}, and the model has positions for {facts.longest} tokens.",
            hint=f"Set context to {facts.longest} or less.",
        )
    unknown = [token for token in card.stop_tokens if token not in facts.control]
    if unknown:
        raise CardError(
            f"stop_tokens of {card.name} name {unknown[0]!r}, which is not a control token of its tokenizer.",
            hint=suggest_nearest(unknown[0], facts.control, what="control token"),
        )
    try:
        last = end_of_turn(template, control=facts.control, bos=facts.bos, eos=facts.eos)
    except CardError:
        raise
    except InvalidInput as error:
        raise CardError(
            f"The chat template of {card.name} refuses a plain chat: {error}", hint=error.hint
        ) from error
    return Base(
        card=card,
        digest=canonical_digest({"weights": weights, "tokenizer": tokenizer, "template": template}),
        folder=folder,
        template=template,
        architecture=restrict_to_targets(facts.architecture, card),
        stop_tokens=tuple(
            dict.fromkeys((*((last,) if last else ()), *card.stop_tokens, *facts.stops))
        ),
        control=facts.control,
        bos=facts.bos,
        eos=facts.eos,
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One folder of the cache: what was made of a source, if anything had to be, and the facts about it."""

    folder: Path
    facts: ModelFacts
    files: Mapping[str, str]


def _entry(
    card: ModelCard,
    key: str,
    cache: Path,
    report: Progress,
    make: Callable[[Path], None] | None,
    *,
    look: Path | None = None,
) -> _Entry:
    """The cache's entry for a source, made if it is not there or not what it was. ``look`` is where the model lies, if not in the entry."""
    folder = cache / "bases" / f"{key[:16]}-{RECIPE}.{FACTS}"
    with _cache_errors(card, cache):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A cache that cannot be written can be read, and nothing is removed from it.
        with suppress(OSError), _exclusively(folder, report):
            cache_versions.hold_version(folder)
        origin = cache_versions.origin_of(card.source)
        entry = _read(folder, key)
        if entry is None:
            with _exclusively(folder, report):
                entry = _read(folder, key) or _make_entry(
                    card, key, folder, report, make, look, origin
                )
        cache_versions.remove_unused_versions(folder, origin)
        return entry


def _make_entry(
    card: ModelCard,
    key: str,
    folder: Path,
    report: Progress,
    make: Callable[[Path], None] | None,
    look: Path | None,
    origin: str | None,
) -> _Entry:
    # Only the holder of the lock makes this entry, so what else lies here under its name was left by one that died.
    cache_versions.remove_leftovers(folder)
    if folder.exists():
        _log.warning(
            "The cached copy of %s in %s was changed; it is made again.", card.name, folder
        )
    fresh = cache_versions.temporary_folder(folder)
    report(f"Preparing {card.name}", 0.0)
    if make is not None:
        make(fresh)
    facts = inspect_model(look or fresh)
    files = {path.name: hash_files([path]) for path in sorted(fresh.iterdir())}
    content = {"source": key, "origin": origin, "files": files, "facts": to_json(facts)}
    sealed = {**content, "seal": canonical_digest(content)}
    (fresh / MANIFEST).write_text(canonical_json(sealed), "utf-8")
    if folder.exists():
        folder.rename(cache_versions.temporary_folder(folder) / "changed")
    fresh.rename(folder)
    cache_versions.remove_leftovers(folder)
    report(f"Preparing {card.name}", 1.0)
    return _Entry(folder, facts, files)


def _read(folder: Path, key: str) -> _Entry | None:
    """An entry that is whole and is what it was when it was made; None for anything else."""
    try:
        content = json.loads((folder / MANIFEST).read_text("utf-8"))
        seal = content.pop("seal")
        if seal != canonical_digest(content) or content["source"] != key:
            return None
        files = {str(name): str(digest) for name, digest in content["files"].items()}
        if {path.name for path in folder.iterdir()} != {MANIFEST, *files}:
            return None
        if any(hash_files([folder / name]) != digest for name, digest in files.items()):
            return None
        return _Entry(folder, ModelFacts.from_json(content["facts"]), files)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return None


@contextmanager
def _exclusively(folder: Path, report: Progress) -> Iterator[None]:
    """Held by one process at a time for each entry; freed by the system if that process dies."""
    lock = cache_versions.lock_of(folder)
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
