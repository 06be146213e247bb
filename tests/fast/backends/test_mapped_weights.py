"""A base whose weights stay in its file computes what the unpacked base computes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from backend_makers import (
    base_logprobs,
    bytes_of,
    continuation,
    device_choice,
    generate,
    row,
    session_spec,
    train,
    training_steps,
)
from example_counts import all_cases
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockFormat
from random_models import SHAPES, ModelShape, make_gguf_base, unpack_base

from personalpeft.backends.torch import model_runner
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.backends.torch.device import DeviceChoice
from personalpeft.backends.torch.lora_layers import group_projections
from personalpeft.backends.torch.ops.base import Ops
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.base_models.mapped_weights import (
    MAPPED_FORMATS,
    MappedTensor,
    map_gguf,
    map_weights,
)
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

TINY = ModelShape("llama", 256, 512, 2, 4, 2, 64, 300)
KINDS = {
    "llama": TINY,
    "llama3 rope": replace(TINY, more=SHAPES["llama3.2-1b"].more),
    "qwen3": replace(TINY, kind="qwen3"),
    "gemma3": replace(
        TINY,
        kind="gemma3_text",
        blocks=6,
        more={
            **SHAPES["gemma3-1b"].more,
            "sliding_window": 16,
            "query_pre_attn_scalar": 64,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        },
    ),
}
PROMPTS = ("hello", "what is this? " * 4)


def torch_backend(base: Base, **more: Any) -> TorchBackend:
    where = DeviceChoice(torch.device("cpu"), torch.float32, "for tests")
    return TorchBackend(base, where=where, **more)


@pytest.fixture
def make_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(tmp_path)

    def made(shape: ModelShape = TINY, *formats: BlockFormat) -> Base:
        return make_gguf_base(shape, tmp_path, *formats)

    return made


def tensors(backend: TorchBackend) -> Iterator[torch.Tensor]:
    """Yield the weights of a backend's projections, as the model reads them."""
    architecture = backend.base.architecture
    groups = group_projections(architecture) * architecture.blocks
    # The last product is that of the head.
    for linear, group in zip(backend._model._products[:-1], groups, strict=True):
        yield linear.multiply(torch.eye(group.inputs))


@pytest.mark.parametrize("name", MAPPED_FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_kernel_unpacks_the_values_of_llama_cpp(
    name: str, dtype: torch.dtype, shared_cache: Path
) -> None:
    block = BlockFormat[name]
    elements, size = GGML_QUANT_SIZES[block]
    random = np.random.default_rng(int(block))
    columns = 512
    if block in (BlockFormat.F32, BlockFormat.F16, BlockFormat.BF16):
        numbers = random.standard_normal((8, columns)).astype(np.float32)
        kinds = {BlockFormat.F16: np.float16, BlockFormat.F32: np.float32}
        data = (
            numbers.astype(kinds[block]).view(np.uint8)
            if block in kinds
            else (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        )
    else:
        data = random.integers(0, 256, (8, columns // elements * size), dtype=np.uint8)
        blocks = data.reshape(8, -1, size)
        # Every half number: finite, some of them subnormal.
        for offset in (208,) if block is BlockFormat.Q6_K else (0, 2):
            blocks[:, :, offset + 1] &= 0xBF
    ops, reference = CpuOps(shared_cache, dtype), Ops(torch.device("cpu"), dtype)
    for head in (0, 4):
        tensor = MappedTensor("x", block, (8, columns), data, head)
        for rows, part in ((slice(0, 8), slice(0, 512)), (slice(3, 7), slice(256, 512))):
            shape = (rows.stop - rows.start, part.stop - part.start)
            found, expected = (torch.full(shape, 7.0, dtype=dtype) for _ in range(2))
            ops.unpack(tensor, rows, part, found)
            reference.unpack(tensor, rows, part, expected)
            assert torch.equal(found, expected)


def test_only_the_metadata_of_a_file_is_read_before_a_tensor_is_used(make_base: Any) -> None:
    base = make_base()
    found = map_gguf(base.folder / "model.gguf")
    assert found["blk.0.attn_q.weight"].format is BlockFormat.Q4_0
    assert found["token_embd.weight"].format is BlockFormat.Q6_K
    assert not any(tensor.data.flags.owndata for tensor in found.values())


@pytest.mark.parametrize(
    ("kind", "kernels"),
    all_cases(
        product(KINDS, ("plain", "native")),
        usual=[("gemma3", "native")],
    ),
)
def test_replies_scores_and_gradients_are_those_of_the_unpacked_base(
    kind: str, kernels: str, make_base: Any, tmp_path: Path, shared_cache: Path
) -> None:
    base = make_base(KINDS[kind])
    cache = {"cache": shared_cache} if kernels == "native" else {}
    mapped = torch_backend(base, weights="mapped", **cache)
    loaded = torch_backend(
        unpack_base(base, KINDS[kind], tmp_path / "plain", full=True), weights="loaded", **cache
    )
    item = continuation(mapped, "what is this?", "It is a thing.")
    for one, other in zip(mapped.score([item], None), loaded.score([item], None), strict=True):
        assert one.token_logprobs == pytest.approx(other.token_logprobs, rel=1e-3, abs=1e-3)
    replies = [
        [reply.tokens for reply in generate(each, [row(each, p, max_tokens=8) for p in PROMPTS])]
        for each in (mapped, loaded)
    ]
    assert replies[0] == replies[1]
    moments = []
    for each in (mapped, loaded):
        session = each.session(session_spec(each))
        train(session, training_steps(each, 2), rate=1e-3)
        moments.append(session.state())
        session.close()
    for name, expected in moments[1].items():
        distance = np.linalg.norm(moments[0][name] - expected)
        assert distance <= 1e-3 * np.linalg.norm(expected), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "formats",
    [
        (BlockFormat.Q4_1, BlockFormat.Q8_0),
        (BlockFormat.Q4_K, BlockFormat.Q6_K),
        (BlockFormat.Q8_0, BlockFormat.F16),
        (BlockFormat.F16, BlockFormat.BF16),
    ],
    ids=lambda formats: f"{formats[0].name} {formats[1].name}",
)
def test_a_base_can_be_stored_in_each_common_format(
    formats: tuple[BlockFormat, BlockFormat], make_base: Any, tmp_path: Path, shared_cache: Path
) -> None:
    base = make_base(TINY, *formats)
    mapped = torch_backend(base, weights="mapped", cache=shared_cache)
    plain = unpack_base(base, TINY, tmp_path / "plain", full=True)
    loaded = torch_backend(plain, weights="loaded", cache=shared_cache)
    assert all(map(torch.equal, tensors(mapped), tensors(loaded)))


def test_a_folder_of_plain_weights_can_stay_in_its_file_too(
    make_base: Any, tmp_path: Path, shared_cache: Path
) -> None:
    base = unpack_base(make_base(), TINY, tmp_path / "plain")
    mapped, loaded = (
        torch_backend(base, weights=mode, cache=shared_cache) for mode in ("mapped", "loaded")
    )
    assert all(map(torch.equal, tensors(mapped), tensors(loaded)))


@pytest.mark.parametrize("kernels", ["compiled kernels", "plain kernels"])
def test_blocks_computed_twice_give_the_same_bytes(
    kernels: str,
    make_base: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shared_cache: Path,
) -> None:
    base = make_base()
    if kernels == "plain kernels":
        base = unpack_base(base, TINY, tmp_path / "plain")
    found = set()
    for most in (0, 1 << 40):
        monkeypatch.setattr(model_runner, "LOADED_ACTIVATIONS", most)
        monkeypatch.setattr(model_runner, "MAPPED_ACTIVATIONS", most)
        if kernels == "compiled kernels":
            backend = torch_backend(base, weights="mapped", cache=shared_cache)
        else:
            backend = TorchBackend(base, where=device_choice("float32"), weights="loaded")
        session = backend.session(session_spec(backend))
        train(session, training_steps(backend, 3))
        found.add(bytes_of(session))
        session.close()
    assert len(found) == 1


def test_training_changes_neither_the_file_nor_the_base(make_base: Any) -> None:
    base = make_base()
    before = (base.folder / "model.gguf").read_bytes()
    backend = torch_backend(base, weights="mapped")
    before_logprobs = base_logprobs(backend)
    session = backend.session(session_spec(backend))
    train(session, training_steps(backend, 2))
    assert base_logprobs(backend) == before_logprobs
    assert (base.folder / "model.gguf").read_bytes() == before


def test_the_backend_says_that_its_weights_are_in_the_file(make_base: Any) -> None:
    backend = torch_backend(make_base(), weights="mapped")
    assert "weights as in the file (Q4_0, Q6_K)" in backend.description


def test_with_much_memory_weights_are_loaded_and_with_little_they_stay_in_the_file(
    make_base: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = unpack_base(make_base(), TINY, tmp_path / "plain")
    found = []
    for free in (64 * 2**30, 2**30):
        monkeypatch.setattr("personalpeft.host.free_memory", lambda free=free: free)
        found.append("in the file" in torch_backend(base, weights="auto").description)
    assert found == [False, True]


def test_a_damaged_file_is_refused_by_name(make_base: Any, tmp_path: Path) -> None:
    data = (make_base().folder / "model.gguf").read_bytes()
    file = tmp_path / "damaged.gguf"
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(WeightsError, match=r"damaged\.gguf: is cut off"):
        map_gguf(file)


def test_an_unknown_format_is_refused_with_a_way_out(make_base: Any) -> None:
    base = make_base()
    file = base.folder / "model.gguf"
    data = bytearray(file.read_bytes())
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    data[at : at + 4] = struct.pack("<I", 10)  # Q2_K, with fewer bytes than Q6_K.
    file.write_bytes(data)
    with pytest.raises(WeightsError, match="unpacked only into memory") as error:
        map_weights(base)
    assert "PERSONALPEFT_WEIGHTS=loaded" in error.value.hint
