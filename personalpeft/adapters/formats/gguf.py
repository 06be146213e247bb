"""Write and import GGUF LoRA files for llama.cpp.

Invariants: llama.cpp computes from a written file what this package computes from the stack. That
holds where the architecture permutes rows too (``base_models/gguf/tensor_names.py``). An import
reads a whole file or nothing. At the largest rank it takes at most five times the file's size in
memory. Tensors lie behind the header, one after the other, within the file.

An exported file has the SHA-256 of all its other bytes, so an import refuses every damage. Files of
other programs have none.

``base_models/gguf/header.py`` reads the header.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.compose import as_single_lora, in_half
from personalpeft.adapters.formats.safetensors_reader import to_array
from personalpeft.adapters.safe_io import Fault, naming, read_untrusted, safe_repr
from personalpeft.adapters.types import Adapter, AdapterStack, LoRAWeights, Manifest, Matrix
from personalpeft.adapters.validate import check_adapter, check_weights, match_tensors, stack_blocks
from personalpeft.base_models.gguf.header import GgufFault, Value, parse_header
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.ids import check_layer_name
from personalpeft.types import Architecture, canonical_digest

_ALPHA = "adapter.lora.alpha"
_ACTIVATED = "adapter.alora.invocation_tokens"
_DIGEST = "personalpeft.sha256"
_NO_DIGEST = "0" * 64
_LORA = re.compile(r"(.+)\.lora_([ab])")

_FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}


def write_gguf_lora(
    names: GgufNames, stack: AdapterStack, path: Path, *, title: str = "", digest: bool = False
) -> None:
    """Write a stack as one LoRA, in float16 unless the base is float32 or a number is too large.

    Args:
        names: The base's tensor names in GGUF files.
        stack: The stack.
        path: The new file.
        title: The adapter's name for people.
        digest: Whether the file gets a digest, by which an import finds damage.
    """
    from gguf import GGUFWriter

    weights, scaling = as_single_lora(stack)
    ranks = {pair.a.shape[1] for pair in weights.values()}
    halves = weights if names.full else in_half(weights)
    writer = GGUFWriter(path, names.architecture)
    try:
        writer.add_type("adapter")
        writer.add_string("adapter.type", "lora")
        if digest:
            writer.add_string(_DIGEST, _NO_DIGEST)
        if title:
            writer.add_name(title)
        # llama.cpp multiplies by alpha over the rank of each tensor, or by 1 where alpha is 0.
        writer.add_float32(_ALPHA, scaling * ranks.pop() if len(ranks) == 1 else 0.0)
        for projection, pair in halves.items():
            for block in range(pair.a.shape[0]):
                name = names.projection(projection, block)
                writer.add_tensor(f"{name}.lora_a", pair.a[block])
                writer.add_tensor(f"{name}.lora_b", names.to_gguf(projection, pair.b[block]))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()
    if digest:
        data, empty = path.read_bytes(), _NO_DIGEST.encode()
        path.write_bytes(data.replace(empty, hashlib.sha256(data).hexdigest().encode(), 1))


def import_gguf_lora(
    path: Path, architecture: Architecture, names: GgufNames, *, layer: str, base: str
) -> Adapter:
    """Read a GGUF LoRA as an adapter.

    Args:
        path: The file.
        architecture: The shapes of the base.
        names: The base's tensor names in GGUF files.
        layer: The layer that the adapter is for.
        base: Digest of the base.

    Returns:
        The checked adapter.

    Raises:
        AdapterError: The file is damaged, hostile, unsupported or not for this base.
    """
    check_layer_name(layer)
    (metadata, tensors), file_digest = read_untrusted(path, read_gguf)
    digest = canonical_digest(["gguf", file_digest])
    with naming(path):
        alpha = _alpha(metadata, names)
        unpadded = _stack_tensors(tensors, architecture, names)
        for name, pair in unpadded.items():
            # Check before ranks are padded. Padding can make a small file large.
            check_weights({name: pair}, architecture, numbers=False)
            if name in names.heads:
                b = np.stack([names.from_gguf(name, rows) for rows in pair.b])
                unpadded[name] = LoRAWeights(pair.a, b)
        weights, scaling = _pad_ranks(unpadded, alpha)
        rank = next(iter(weights.values())).a.shape[1]
        recipe = {"imported": "gguf", "rank": rank}
        manifest = Manifest(base, layer, rank, scaling, tuple(sorted(weights)), recipe, digest)
        adapter = Adapter(manifest, weights)
        check_adapter(adapter, architecture=architecture)
    return adapter


def _check_digest(data: bytes, metadata: Mapping[str, object]) -> None:
    """Check the digest of an exported file, also where a byte of the digest's name was changed."""
    for key, value in metadata.items():
        if key.startswith(_DIGEST[:8]) or key.endswith(_DIGEST[8:]):
            stored = str(value).encode()
            rest = data.replace(stored, _NO_DIGEST.encode(), 1)
            if key != _DIGEST or hashlib.sha256(rest).hexdigest().encode() != stored:
                raise Fault("was changed since it was exported.")


def _alpha(metadata: Mapping[str, object], names: GgufNames) -> float:
    """Check the file's metadata and return alpha, where 0 means a scaling of 1."""
    kind = (metadata.get("general.type"), metadata.get("adapter.type"))
    # An activated LoRA computes something else where its tokens do not occur.
    if kind != ("adapter", "lora") or _ACTIVATED in metadata:
        raise Fault("is no plain LoRA.", hint="Give a GGUF file that holds a plain LoRA adapter.")
    architecture = metadata.get("general.architecture")
    if architecture != names.architecture:
        raise Fault(
            f"is for the architecture {safe_repr(architecture)}, the base is {names.architecture}.",
            hint="An adapter works only on the base it was built for.",
        )
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        raise Fault(f"has an alpha of {safe_repr(alpha)}.")
    return alpha


def _stack_tensors(
    tensors: Mapping[str, npt.NDArray[Any]],
    architecture: Architecture,
    names: GgufNames,
) -> dict[str, LoRAWeights]:
    """Stack the file's tensors over the blocks. Every tensor must belong to a projection."""
    modules = {
        names.projection(projection, block): (projection, block)
        for projection in architecture.projections
        for block in range(architecture.blocks)
    }
    halves: dict[tuple[str, str], dict[int, Matrix]] = {}
    for name, (module, half) in match_tensors(tensors, _LORA, modules).items():
        projection, block = modules[module]
        halves.setdefault((projection, half), {})[block] = tensors[name]
    return stack_blocks(halves, architecture.blocks)


def _pad_ranks(
    weights: Mapping[str, LoRAWeights], alpha: float
) -> tuple[Mapping[str, LoRAWeights], float]:
    """Pad all ranks to the largest with zeros; return the weights and their scaling."""
    ranks = {pair.a.shape[1] for pair in weights.values()}
    if len(ranks) == 1:
        return weights, alpha / ranks.pop() if alpha else 1.0
    padded = {}
    for name, pair in weights.items():
        scale = np.float32(alpha / pair.a.shape[1] if alpha else 1.0)
        padded[name] = LoRAWeights(pair.a, pair.b.astype(np.float32) * scale).padded(max(ranks))
    return padded, 1.0


def read_gguf(data: bytes) -> tuple[Mapping[str, Value], dict[str, Matrix]]:
    """Return the metadata and the tensors in the bytes of a GGUF file. Raises ``Fault``."""
    try:
        header = parse_header(data)
    except GgufFault as fault:
        raise Fault(str(fault), hint=fault.hint) from fault
    start = header.begin
    arrays: dict[str, Matrix] = {}
    for name, info in header.tensors.items():
        if info.kind not in _FLOATS:
            raise Fault(
                f"tensor {safe_repr(name)} is of the kind {info.kind}, which may be quantised.",
                hint="Adapters are read as F32, F16 or BF16; convert the file to one of them.",
            )
        dtype, width = _FLOATS[info.kind]
        # llama.cpp, too, loads only tensors that lie in the order of the header without gaps.
        if header.begin + info.offset != start:
            raise Fault(f"tensor {safe_repr(name)} does not lie behind the one before it.")
        end = start + math.prod(info.shape) * width
        # A slice copies, since the offset may not be aligned.
        arrays[name] = to_array(data[start:end], dtype, info.shape)
        start = -(-end // header.alignment) * header.alignment
    _check_digest(data, header.metadata)
    return header.metadata, arrays
