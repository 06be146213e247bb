"""Models of real shapes with random weights, as GGUF files and as folders of plain weights.

No hub is reachable where this is built, so speed and memory on large bases are measured on these.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as BlockFormat

from personalpeft.base_models.mapped_weights import map_weights
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.types import canonical_digest

if TYPE_CHECKING:
    import torch

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PACKAGE, FILE = "personalpeft_random_model", "model.gguf"
END = "<|im_end|>"
_TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
# Where a block's scales are, and the standard deviation of its numbers for a scale of one.
_SCALES: Mapping[BlockFormat, tuple[tuple[int, ...], float]] = {
    BlockFormat.Q4_0: ((0,), 4.6),
    BlockFormat.Q4_1: ((0,), 4.6),
    BlockFormat.Q5_0: ((0,), 9.2),
    BlockFormat.Q5_1: ((0,), 9.2),
    BlockFormat.Q8_0: ((0,), 74.0),
    BlockFormat.Q4_K: ((0,), 160.0),
    BlockFormat.Q5_K: ((0,), 320.0),
    BlockFormat.Q6_K: ((208,), 1370.0),
}
# The other half number of a block, its minimum, is set to zero.
_MINIMUMS = {BlockFormat.Q4_1: 2, BlockFormat.Q5_1: 2, BlockFormat.Q4_K: 2, BlockFormat.Q5_K: 2}
# Distinct random rows of a matrix.
_ROWS = 256


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes, and what else its ``config.json`` says."""

    kind: str
    hidden: int
    intermediate: int
    blocks: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The ``config.json``."""
        return {
            "model_type": self.kind,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.blocks,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": None,
            "dtype": "bfloat16",
            **self.more,
        }


_LLAMA3: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_GEMMA3: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
}
SHAPES: Mapping[str, ModelShape] = {
    "smollm2-135m": ModelShape("llama", 576, 1536, 30, 9, 3, 64, 49152),
    "qwen3-0.6b": ModelShape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936),
    "qwen3-1.7b": ModelShape("qwen3", 2048, 6144, 28, 16, 8, 128, 151936),
    "qwen3-4b": ModelShape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936),
    "llama3.2-1b": ModelShape("llama", 2048, 8192, 16, 32, 8, 64, 128256, _LLAMA3),
    "llama3.2-3b": ModelShape("llama", 3072, 8192, 28, 24, 8, 128, 128256, _LLAMA3),
    "gemma3-1b": ModelShape("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, _GEMMA3),
    "gemma3-4b": ModelShape("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, _GEMMA3),
}


def make_gguf_base(
    shape: ModelShape,
    folder: Path,
    matrices: BlockFormat = BlockFormat.Q4_0,
    embeddings: BlockFormat | None = None,
    *,
    seed: int = 0,
) -> Base:
    """Write a model as a GGUF file in a package of its own, and return it as a base.

    The caller puts ``folder`` on ``sys.path``.

    Args:
        shape: The sizes.
        folder: Becomes the parent of the package.
        matrices: The format of the matrices.
        embeddings: The format of the tied embeddings; None for what llama.cpp's Q4_0 files have.
        seed: Of the weights.
    """
    from gguf import GGUFWriter

    package = folder / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "config.json").write_text(json.dumps(shape.config))
    (package / "tokenizer.json").write_text(_tokenizer(shape.vocabulary))
    architecture = "gemma3" if shape.kind == "gemma3_text" else shape.kind
    if embeddings is None:
        embeddings = BlockFormat.Q8_0 if shape.hidden % 256 else BlockFormat.Q6_K
    base = _base(shape, package, Source("package", files=(f"{PACKAGE}:{FILE}",)))
    writer = GGUFWriter(package / FILE, architecture)
    random = np.random.default_rng(seed)
    tensors = list(_tensors(base, shape, matrices, embeddings))
    for name, size, block in tensors:
        rows, columns = (1, *size)[-2:]
        writer.add_tensor_info(
            name,
            _stored_shape(size, block),
            np.dtype(np.float32 if block is BlockFormat.F32 else np.uint8),
            rows * _row_bytes(block, columns),
            raw_dtype=_raw(block),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size, block in tensors:
        if len(size) == 1:
            writer.write_tensor_data(np.ones(size, np.float32))
        else:
            deviation = 0.02 if "embd" in name else size[1] ** -0.5
            writer.write_tensor_data(_random_rows(random, size, block, deviation))
    writer.close()
    return base


def unpack_base(base: Base, shape: ModelShape, folder: Path, *, full: bool = False) -> Base:
    """Write the numbers of a GGUF base to a folder of safetensors, and return that base.

    Args:
        base: The GGUF base.
        shape: Its sizes.
        folder: The new folder.
        full: Whether to write float32 instead of bfloat16.
    """
    import torch

    dtype = torch.float32 if full else torch.bfloat16
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_bytes((base.folder / name).read_bytes())
    weights = map_weights(base)
    sizes = dict(_parameters(base, shape))
    header, offset = {}, 0
    for name, size in sizes.items():
        length = dtype.itemsize * int(np.prod(size))
        header[name] = {
            "dtype": "F32" if full else "BF16",
            "shape": list(size),
            "data_offsets": [offset, offset + length],
        }
        offset += length
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in sizes:
            for part in weights.parts(name, 1 << 22):
                file.write(_bytes(torch.tensor(part, dtype=dtype)))
    return _base(shape, folder, Source("folder", path=folder))


def _bytes(numbers: torch.Tensor) -> memoryview:
    import torch

    return numbers.view(torch.uint8).numpy().data


def open_base(shape: ModelShape, folder: Path) -> Base:
    """Return the base of a folder that ``make_gguf_base`` or ``unpack_base`` has made."""
    inside = folder / PACKAGE
    if inside.exists():
        return _base(shape, inside, Source("package", files=(f"{PACKAGE}:{FILE}",)))
    return _base(shape, folder, Source("folder", path=folder))


def _base(shape: ModelShape, folder: Path, source: Source) -> Base:
    from personalpeft.base_models.inspect import architecture_of

    card = ModelCard(
        name=f"random-{shape.kind}".replace("_", "-"),
        title="A model with random weights",
        licence="Apache-2.0",
        source=source,
        targets=TARGETS,
        context=2048,
        template=_TEMPLATE,
        stop_tokens=(END,),
    )
    architecture = architecture_of(_empty_model(folder), shape.kind)
    digest = canonical_digest([str(shape), str(source.kind)])
    return Base(card, digest, folder, folder / "cache", _TEMPLATE, architecture, (END,), (END,))


def _empty_model(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def _parameters(base: Base, shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, parameter in _empty_model(base.folder).named_parameters():
        if name != "lm_head.weight":
            yield name, tuple(parameter.shape)


def _tensors(
    base: Base, shape: ModelShape, matrices: BlockFormat, embeddings: BlockFormat
) -> Iterator[tuple[str, tuple[int, ...], BlockFormat]]:
    from personalpeft.base_models.gguf.tensor_names import gguf_names

    names = gguf_names(base)
    for name, size in _parameters(base, shape):
        block = BlockFormat.F32 if len(size) == 1 else matrices
        yield names.tensor(name), size, embeddings if "embed_tokens" in name else block


def _stored_shape(size: tuple[int, ...], block: BlockFormat) -> tuple[int, ...]:
    if block is BlockFormat.F32:
        return size
    return (*size[:-1], _row_bytes(block, size[-1]))


def _row_bytes(block: BlockFormat, columns: int) -> int:
    elements, size = GGML_QUANT_SIZES[block]
    return columns // elements * size


def _raw(block: BlockFormat) -> Any:
    return None if block is BlockFormat.F32 else block


def _random_rows(
    random: np.random.Generator, size: tuple[int, ...], block: BlockFormat, deviation: float
) -> npt.NDArray[Any]:
    """Return a matrix of random blocks. Its rows repeat, which takes nothing from a measurement."""
    rows, columns = size
    count = min(rows, _ROWS)
    if block not in _SCALES:
        numbers = (random.standard_normal((count, columns)) * deviation).astype(np.float32)
        if block is BlockFormat.F16:
            data = numbers.astype(np.float16).view(np.uint8)
        elif block is BlockFormat.BF16:
            data = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            data = numbers.view(np.uint8)
    else:
        width = _row_bytes(block, columns)
        data = random.integers(0, 256, (count, width), dtype=np.uint8)
        blocks = data.reshape(count, -1, GGML_QUANT_SIZES[block][1])
        offsets, unit = _SCALES[block]
        scale = np.frombuffer(np.float16(deviation / unit).tobytes(), np.uint8)
        for offset in offsets:
            blocks[:, :, offset : offset + 2] = scale
        if block in _MINIMUMS:
            blocks[:, :, _MINIMUMS[block] : _MINIMUMS[block] + 2] = 0
    repeated = np.tile(data, (-(-rows // count), 1))[:rows]
    if block is BlockFormat.F32:
        return np.ascontiguousarray(repeated).view(np.float32)
    return np.ascontiguousarray(repeated)


def _tokenizer(vocabulary: int) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer.to_str()
