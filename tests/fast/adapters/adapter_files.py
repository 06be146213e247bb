"""Small adapters and hand-made safetensors files for the tests of this folder."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.types import Architecture

BASE = "sha256:" + "ab" * 32
OTHER_BASE = "sha256:" + "cd" * 32

ARCHITECTURE = Architecture(
    model_type="llama",
    block_path="model.layers",
    blocks=2,
    projections={"self_attn.q_proj": (8, 8), "self_attn.k_proj": (8, 4), "mlp.down_proj": (16, 8)},
)


def make_manifest(**changes: Any) -> Manifest:
    manifest = Manifest(
        base=BASE,
        layer="style",
        rank=3,
        scaling=2.0,
        targets=tuple(sorted(ARCHITECTURE.projections)),
        recipe={"rank": 3, "steps": 30, "rate": 4e-4},
        signals="12" * 32,
        below=("style@0123456789ab",),
        parent="style@ba9876543210",
    )
    return replace(manifest, **changes)


def make_adapter(
    seed: int = 0,
    *,
    architecture: Architecture = ARCHITECTURE,
    targets: tuple[str, ...] = (),
    **changes: Any,
) -> Adapter:
    """Return an adapter with random matrices. ``changes`` go into its manifest."""
    random = np.random.default_rng(seed)
    names = targets or tuple(sorted(architecture.projections))
    manifest = make_manifest(**{"targets": names, **changes})
    pairs = {}
    for name in names:
        inputs, outputs = architecture.projections[name]
        a = random.standard_normal((architecture.blocks, manifest.rank, inputs), dtype=np.float32)
        b = random.standard_normal((architecture.blocks, outputs, manifest.rank), dtype=np.float32)
        pairs[name] = LoRAWeights(a, b)
    return Adapter(manifest, pairs)


def split_file(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a file's header as JSON and the bytes after it."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), data[start:]


def join_file(header: dict[str, Any] | str | bytes, body: bytes) -> bytes:
    """Return a safetensors file with any header, valid or not."""
    text = json.dumps(header) if isinstance(header, dict) else header
    raw = text.encode() if isinstance(text, str) else text
    return len(raw).to_bytes(8, "little") + raw + body


def assert_equal(left: Adapter, right: Adapter) -> None:
    assert left.manifest == right.manifest
    assert set(left.weights) == set(right.weights)
    for name, pair in left.weights.items():
        np.testing.assert_array_equal(pair.a, right.weights[name].a)
        np.testing.assert_array_equal(pair.b, right.weights[name].b)


def deltas(pairs: Any, scaling: float = 1.0) -> dict[str, Any]:
    """Return what an adapter adds to each projection: ``[blocks, outputs, inputs]``, float64."""
    return {
        name: scaling * (p.b.astype(np.float64) @ p.a.astype(np.float64))
        for name, p in pairs.items()
    }
