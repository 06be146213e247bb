"""Resolve a card to a base that can be loaded.

Finds the files and hashes them. Of a GGUF file it makes a cached folder with config and tokenizer,
and another one with the weights in safetensors when something needs them so.

Invariants:

- Weights without an unbroken seal are hashed. Weights that differ from the card's digest are never
  opened.
- A base's digest comes from its source, so it is the same on every machine. A random base has no
  source; its digest comes from the weights that its seed gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter

from personalpeft.base_models.cache import Entry, cached_entry
from personalpeft.base_models.chat_template import end_of_turn, find_tool_format
from personalpeft.base_models.convert import RECIPE, make_random_model, write_gguf_config
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import (
    SINGLE,
    check_digest,
    folder_digest,
    folder_files,
    gguf_parts,
    hash_files,
    hub_folder,
    max_positions,
    read_json,
    weight_files,
)
from personalpeft.base_models.gguf.describe import describe_gguf
from personalpeft.base_models.gguf.file import gguf_file
from personalpeft.base_models.gguf.header import read_header
from personalpeft.base_models.gguf.to_safetensors import unpack_gguf
from personalpeft.base_models.inspect import FACTS, ModelFacts, inspect_model, restrict_to_targets
from personalpeft.base_models.types import Base, ModelCard
from personalpeft.errors import CardError, InvalidInput, WeightsError
from personalpeft.formatting import to_json
from personalpeft.types import Progress, canonical_digest

# In a base's digest. The tokenizer's own file depends on transformers' release.
_GGUF_TOKENIZER = f"gguf {RECIPE}"
# Of the entries of the cache.
_VERSION = f"{RECIPE}.{FACTS}"


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

    def prepare(key: str, make: Callable[[Path], Path]) -> Entry:
        """Return an entry of the cache with the facts about the model in the folder of ``make``."""
        return cached_entry(
            card, key, _VERSION, cache, lambda into: to_json(inspect_model(make(into))), report
        )

    if parts := gguf_parts(card):
        if source.kind == "gguf":
            describe_gguf(parts[0])  # Refuses what would be read in another way.
        weights = sealed_digest(
            parts, cache, lambda done: report(f"Checking {parts[0].name}", done)
        )
        check_digest(card, weights, str(parts[0]))
        entry = prepare(
            canonical_digest([weights, "config"]),
            lambda into: write_gguf_config(gguf_file(card, cache) or parts[0], into, report),
        )
        return _base(card, entry.folder, cache, entry, weights, _GGUF_TOKENIZER)

    if source.kind == "random" and (shape := source.shape) is not None:
        entry = prepare(
            canonical_digest([source.seed, asdict(shape), card.context]),
            lambda into: make_random_model(source.seed, shape, card.context, into),
        )
        weights = canonical_digest([entry.files[SINGLE], asdict(shape)])
        tokenizer = entry.files["tokenizer.json"]
        return _base(card, entry.folder, cache, entry, weights, tokenizer)

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
    entry = prepare(canonical_digest([weights, settings]), lambda into: folder)
    return _base(card, folder, cache, entry, weights, digests["tokenizer.json"])


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
    file = gguf_file(base.card, base.cache)
    if file is None:
        return base.folder
    card, name = base.card, file.name
    weights = sealed_digest([file], base.cache, lambda done: progress(f"Checking {name}", done))
    if base.digest != _digest(weights, _GGUF_TOKENIZER, base.template):
        raise WeightsError(
            f"The weights of {card.name} were changed while it was open: {file}.",
            hint="Open it again.",
        )
    return cached_entry(
        card,
        canonical_digest([weights, "float32"]) if full else weights,
        _VERSION,
        base.cache,
        lambda into: unpack_gguf(file, base.folder, into, progress, full=full),
        progress,
    ).folder


def unpacked_bytes(base: Base) -> int:
    """Return how many bytes of weights ``unpacked_folder`` has. It unpacks nothing."""
    file = gguf_file(base.card, base.cache)
    if file is None:
        return sum(each.stat().st_size for each in weight_files(base.folder))
    return 2 * sum(math.prod(each.shape) for each in read_header(file).tensors.values())


def _digest(weights: str, tokenizer: str, template: str) -> str:
    return canonical_digest({"weights": weights, "tokenizer": tokenizer, "template": template})


def _base(
    card: ModelCard, folder: Path, cache: Path, entry: Entry, weights: str, tokenizer: str
) -> Base:
    facts = TypeAdapter(ModelFacts).validate_python(entry.facts)
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
    except InvalidInput as error:
        raise CardError(f"{card.name}: {error.message}", hint=error.hint) from error
    stops = (*((last,) if last else ()), *card.stop_tokens, *facts.stops)
    return replace(
        base, stop_tokens=tuple(dict.fromkeys(stops)), tool_format=find_tool_format(base)
    )
