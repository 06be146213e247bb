"""Export and import PEFT folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

``personalpeft.json`` beside them holds the provenance, tied to both files by their SHA-256, and its
own digest. Folders of other programs and of earlier versions have no such digests.

Invariants: an exported folder appears complete or not at all. PEFT computes from it what this
package computes from the adapter. An import reads everything that the folder holds or nothing, and
never a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from personalpeft.adapters.compose import compose, concatenate
from personalpeft.adapters.formats.peft_config import AdapterConfig, build_config, read_config
from personalpeft.adapters.formats.safetensors_reader import read_tensors
from personalpeft.adapters.manifest import (
    FORMAT,
    canonical_manifest,
    check_format,
    manifest_from_json,
)
from personalpeft.adapters.safe_io import (
    Fault,
    naming,
    parse_object,
    read_untrusted,
    safe_repr,
    write_folder_atomically,
)
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter, check_base, match_tensors, stack_blocks
from personalpeft.errors import AdapterError, InvalidInput
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest, canonical_json

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"
PROVENANCE_FILE = "personalpeft.json"
PICKLE_FILE = "adapter_model.bin"

_CONFIG_LIMIT = 2**20
_PROVENANCE_LIMIT = 2**24
_PREFIX = "base_model.model"
_LORA = re.compile(rf"{re.escape(_PREFIX)}\.(.+)\.lora_([AB])\.weight")
_UNKNOWN_ORIGIN = f"Delete {PROVENANCE_FILE} to import the folder as one of unknown origin."


def export_peft(
    adapter: Adapter, architecture: Architecture, folder: Path, *, base_name: str
) -> None:
    """Write one adapter as a PEFT folder.

    Args:
        adapter: The adapter.
        architecture: The shapes of the base.
        folder: The new folder.
        base_name: The name or path by which PEFT loads the base.

    Raises:
        AdapterError: The adapter does not fit the base.
        InvalidInput: The folder exists, or cannot be written.
    """
    manifest = adapter.manifest
    with naming(f"layer {manifest.layer}"):
        check_adapter(adapter, architecture=architecture)
        about = {"manifest": canonical_manifest(manifest)}
    config = build_config(manifest.rank, manifest.scaling, adapter.weights, base_name)
    _write_folder(folder, config, peft_tensors(adapter.weights, manifest.rank, architecture), about)


def export_stack_peft(
    parts: Sequence[tuple[Adapter, float]],
    architecture: Architecture,
    folder: Path,
    *,
    base_name: str,
) -> None:
    """Write a stack as one LoRA of scaling 1.

    Args:
        parts: The adapters with their weights.
        architecture: The shapes of the base.
        folder: The new folder.
        base_name: The name or path by which PEFT loads the base.

    Raises:
        AdapterError: An adapter does not fit the base.
        InvalidInput: The stack is empty, or the folder exists or cannot be written.
    """
    about = []
    for adapter, weight in parts:
        with naming(f"layer {adapter.manifest.layer}"):
            check_adapter(adapter, architecture=architecture)
            if weight != 0:
                manifest = canonical_manifest(adapter.manifest)
                about.append({"manifest": manifest, "weight": float(weight)})
    whole = compose(parts)
    if whole.rank == 0:
        raise InvalidInput(
            "There is nothing to export: the stack is the bare base.",
            hint="Teach it something first.",
        )
    weights = concatenate(whole)
    config = build_config(whole.rank, 1.0, weights, base_name)
    _write_folder(folder, config, peft_tensors(weights, whole.rank, architecture), {"stack": about})


def import_peft(folder: Path, architecture: Architecture, *, layer: str, base: str) -> Adapter:
    """Read a PEFT folder as an adapter.

    LoRA and rsLoRA can be imported, also with ``rank_pattern`` and ``alpha_pattern``. A folder that
    this package exported keeps its recipe, signals and parents.

    Args:
        folder: The folder.
        architecture: The shapes of the base.
        layer: The layer that the adapter is for.
        base: Digest of the base.

    Raises:
        AdapterError: The folder is damaged, hostile, unsupported or not for this base.
    """
    check_layer_name(layer)
    path = folder / TENSOR_FILE
    if not path.exists() and (folder / PICKLE_FILE).exists():
        raise AdapterError(
            f"{folder / PICKLE_FILE}: is a pickle, which can run code.",
            hint="Load it with PEFT where you trust it, and save it as safetensors.",
        )
    config, config_digest = read_untrusted(folder / CONFIG_FILE, read_config, limit=_CONFIG_LIMIT)
    (_, arrays), digest = read_untrusted(path, read_tensors)
    with naming(path):
        weights = _join(arrays, config, architecture)
    rank = next(iter(weights.values())).a.shape[1]
    origin = {
        "imported": "peft",
        "tensors": digest,
        "base_name": config.base_model_name_or_path[:200],
    }
    no_signals = canonical_digest([])
    manifest = Manifest(base, layer, rank, config.scaling, tuple(weights), origin, no_signals)
    provenance = folder / PROVENANCE_FILE
    if provenance.exists():
        about, _ = read_untrusted(provenance, parse_provenance, limit=_PROVENANCE_LIMIT)
        with naming(provenance):
            manifest = _provenance(about, {"config": config_digest, "tensors": digest}, manifest)
    adapter = Adapter(manifest, weights)
    with naming(path):
        check_adapter(adapter, architecture=architecture, base=base)
    return adapter


def parse_provenance(data: bytes) -> dict[str, Any]:
    """Return the object in the bytes of a ``personalpeft.json``. Raises ``Fault``."""
    return parse_object(data, what="the provenance")


def peft_tensors(
    weights: Mapping[str, LoRAWeights], rank: int, architecture: Architecture
) -> dict[str, Matrix]:
    """Return PEFT's tensors of each block by name.

    Args:
        weights: The weights of each projection.
        rank: Smaller ranks are padded with zeros to it.
        architecture: The shapes of the base.
    """
    tensors: dict[str, Matrix] = {}
    for name, pair in weights.items():
        padded = pair.padded(rank)
        for block in range(architecture.blocks):
            prefix = f"{_PREFIX}.{architecture.block_path}.{block}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = np.ascontiguousarray(padded.a[block])
            tensors[f"{prefix}.lora_B.weight"] = np.ascontiguousarray(padded.b[block])
    return tensors


def _join(
    arrays: Mapping[str, Matrix], config: AdapterConfig, architecture: Architecture
) -> dict[str, LoRAWeights]:
    """Stack PEFT's tensors over the blocks, all with one rank and the scaling of the config.

    Ranks below the largest are padded with zeros. A scaling of its own is multiplied into B.
    """
    modules = {
        f"{architecture.block_path}.{block}.{projection}": (projection, block)
        for projection in architecture.projections
        for block in range(architecture.blocks)
    }
    matches = match_tensors(arrays, _LORA, modules)
    largest = max(config.rank_of(module) for module, _ in matches.values())
    halves: dict[tuple[str, str], dict[int, Matrix]] = {}
    for name, (module, half) in matches.items():
        (projection, block), array, rank = modules[module], arrays[name], config.rank_of(module)
        inputs, outputs = architecture.projections[projection]
        shape = (rank, inputs) if half == "A" else (outputs, rank)
        if array.shape != shape:
            raise Fault(
                f"{name} has the shape {array.shape}; it would have to be {shape}.",
                hint="It was trained on another base, or its config does not belong to it. "
                "Open the base that it was trained on.",
            )
        scaling = config.scaling_of(module)
        if half == "B" and scaling != config.scaling:
            array = np.multiply(array, np.float32(scaling / config.scaling), dtype=np.float32)
        if rank < largest:
            padding = (0, largest - rank)
            array = np.pad(array, (padding, (0, 0)) if half == "A" else ((0, 0), padding))
        halves.setdefault((projection, half), {})[block] = array
    return stack_blocks(halves, architecture.blocks)


def _provenance(about: dict[str, Any], files: Mapping[str, str], new: Manifest) -> Manifest:
    """Return the manifest that ``personalpeft.json`` describes.

    Args:
        about: The content of the file.
        files: The digests of the other files of the folder.
        new: The manifest of a folder without such a file.
    """
    check_format(about.get("format"), what="the provenance")
    rest = {key: value for key, value in about.items() if key != "digest"}
    found = {**files, "digest": canonical_digest(rest)}
    # Earlier versions wrote the digest of the tensors only.
    if "tensors" not in about or any(about.get(name, found[name]) != found[name] for name in found):
        raise Fault("belongs to other files, or was changed.", hint=_UNKNOWN_ORIGIN)
    keys = about.keys() - {"config", "digest"}
    if keys == {"format", "tensors", "manifest"}:
        manifest = manifest_from_json(about["manifest"])
        if not math.isclose(manifest.scaling, new.scaling, rel_tol=1e-6):
            raise Fault(f"says scaling {manifest.scaling}, {CONFIG_FILE} says {new.scaling}.")
        return replace(manifest, layer=new.layer)
    if keys == {"format", "tensors", "stack"} and isinstance(about["stack"], list):
        layers = [_stack_layer(part, new.base) for part in about["stack"]]
        signals = canonical_digest([part.signals for part in layers])
        return replace(new, recipe={**new.recipe, "stack": about["stack"]}, signals=signals)
    raise Fault(f"the provenance has the keys {safe_repr(sorted(about))}.")


def _stack_layer(part: Any, base: str) -> Manifest:
    if (
        not isinstance(part, dict)
        or part.keys() != {"manifest", "weight"}
        or type(part["weight"]) not in (int, float)
    ):
        raise Fault(f"a layer of the stack is {safe_repr(part)}.")
    manifest = manifest_from_json(part["manifest"])
    check_base(manifest, base)
    return manifest


def _write_folder(
    folder: Path, config: Mapping[str, Any], tensors: dict[str, Matrix], about: Mapping[str, Any]
) -> None:
    data = save(tensors, metadata={"format": "pt"})
    text = (json.dumps(config, indent=2) + "\n").encode()
    provenance = {
        "format": FORMAT,
        "tensors": hashlib.sha256(data).hexdigest(),
        "config": hashlib.sha256(text).hexdigest(),
        **about,
    }
    provenance["digest"] = canonical_digest(provenance)
    with write_folder_atomically(folder) as new:
        (new / TENSOR_FILE).write_bytes(data)
        (new / PROVENANCE_FILE).write_text(canonical_json(provenance) + "\n", encoding="utf-8")
        (new / CONFIG_FILE).write_bytes(text)
