"""Say what a GGUF file holds, or why it cannot be a base.

Invariant: a file that passes has each tensor that its architecture needs, in the right shape, and no
other. transformers, which reads the weights, would make up missing ones and skip others silently.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from personalpeft.base_models.gguf.header import GgufHeader, Value, read_header
from personalpeft.base_models.types import usable_sampling
from personalpeft.errors import WeightsError

_BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm")
_LLAMA = (*_BLOCK, "ffn_gate", "ffn_up", "ffn_down")
_NORMED = (*_LLAMA, "attn_q_norm", "attn_k_norm")
_BIASES = ("attn_q", "attn_k", "attn_v")
# The weights of a block, and the biases, of each architecture that is read.
_ARCHITECTURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "llama": (_LLAMA, ()),
    "qwen2": (_LLAMA, _BIASES),
    "qwen3": (_NORMED, ()),
    "gemma3": ((*_NORMED, "post_attention_norm", "post_ffw_norm"), ()),
}
# What llama.cpp reads of these architectures and transformers does not, with the values that change
# nothing. Another value is no error anywhere, but the model that learns is not the one that serves.
_IGNORED: Mapping[str, tuple[Value, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window_pattern": (6,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "rope.scaling.attn_factor": (1.0,),
}
_TOKENIZERS = {"gpt2": ("smollm", "llama-bpe", "qwen2"), "llama": ("default", None)}
_SPECIAL = ("bos", "eos", "eot", "padding", "unknown")
_CONTROL = 3
_FLOAT32 = 0
# What looks like a mark of a template is one, whatever its type: some makers give marks the type of
# words. A text that spells one would become the mark, and a reply would not end at it.
_MARK = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_[a-z]+>|<(?:bos|eos)>")
# Tokens that end a turn or a text in the templates of these architectures.
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<eos>",
    "</s>",
)
_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
}
_T = TypeVar("_T")
_OTHER_FILE = "Give a folder in Hugging Face format instead: its architecture may be supported."


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a file holds."""

    architecture: str
    title: str  # "" if the file has no name
    parameters: int
    tokens: int  # of the vocabulary
    quantisation: str  # the type of most weights
    formats: frozenset[str]  # GGML's names of the types of all tensors
    size: int  # of the file, in bytes
    context: int  # tokens it was trained for
    licence: str  # "unknown" if the file does not say
    template: str | None
    control: tuple[str, ...]  # tokens that no text may spell
    stop_tokens: tuple[str, ...]
    bos: str
    eos: str
    sampling: Mapping[str, float | int]  # settings of the makers, if the file has them
    kv_bytes: int  # of a token's keys and values in bfloat16
    header: str  # SHA-256 of the header


def describe_gguf(path: Path) -> GgufFacts:
    """Return what a file holds. Reads its header only.

    Raises:
        WeightsError: The file is damaged, or cannot be a base. The message says why.
    """
    from gguf import GGMLQuantizationType

    header = read_header(path)
    fields = _Fields(path, header)
    architecture = _check_kind(fields)
    blocks = fields.size("block_count")
    _check_ignored(fields, architecture)
    _check_rope(fields, architecture)
    tokens = _check_tokenizer(fields)
    _check_tensors(fields, architecture, blocks, len(tokens))
    control = control_tokens(header.metadata)
    _, kv_heads, head_dim = fields.heads()
    bos, eos, turn, *_ = (fields.token(name, tokens) for name in _SPECIAL)
    ends = [end for end in _ENDS if end in control]
    template = header.metadata.get("tokenizer.chat_template")
    counts = Counter[int]()
    for info in header.tensors.values():
        counts[info.kind] += math.prod(info.shape)
    return GgufFacts(
        architecture=architecture,
        title=fields.text("general.name"),
        parameters=sum(counts.values()),
        tokens=len(tokens),
        quantisation=_quantisation(header, counts),
        formats=frozenset(GGMLQuantizationType(kind).name for kind in counts),
        size=header.size,
        context=fields.size("context_length"),
        licence=fields.text("general.license.name") or fields.text("general.license") or "unknown",
        template=template if isinstance(template, str) and template.strip() else None,
        control=control,
        stop_tokens=tuple(dict.fromkeys(each for each in (turn, *ends, eos) if each)),
        bos=bos,
        eos=eos,
        sampling=usable_sampling(
            {name: header.metadata.get(key) for name, key in _SAMPLING.items()}
        ),
        kv_bytes=2 * 2 * blocks * kv_heads * head_dim,
        header=header.digest,
    )


class _Fields:
    """A file's metadata, with errors that name the file."""

    def __init__(self, path: Path, header: GgufHeader) -> None:
        self.path, self.header = path, header
        self.architecture = self.text("general.architecture")

    def fail(self, what: str, hint: str = "Get a fresh copy of the file.") -> WeightsError:
        return WeightsError(f"{self.path}: {what}", hint=hint)

    def text(self, key: str) -> str:
        """Return a text on one line; "" if the file has none."""
        value = self.header.metadata.get(key)
        return " ".join(value.split())[:200] if isinstance(value, str) else ""

    def size(self, key: str) -> int:
        """Return a positive number of this architecture."""
        value = self.optional_size(key)
        if value is None:
            raise self.fail(f"has no {self.architecture}.{key}.")
        return value

    def optional_size(self, key: str) -> int | None:
        value = self.header.metadata.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.fail(
                f"{self.architecture}.{key} must be a positive number, got {value!a:.60}."
            )
        return value

    def check_number(self, key: str, below: float, default: float | None = None) -> None:
        """Check that a number of this architecture lies between 0 and a limit."""
        value = self.header.metadata.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, float) or not 0 < value < below:
            raise self.fail(
                f"{self.architecture}.{key} must be a number from 0 to {below}, got {value!a:.30}."
            )

    def heads(self) -> tuple[int, int, int]:
        """Return the attention heads, those of keys and values, and the size of a head."""
        heads = self.size("attention.head_count")
        kv_heads = self.optional_size("attention.head_count_kv") or heads
        dim = self.optional_size("attention.key_length") or self.size("embedding_length") // heads
        return heads, kv_heads, dim

    def token(self, name: str, tokens: tuple[str, ...]) -> str:
        """Return a special token; "" if the file names none."""
        key = f"tokenizer.ggml.{name}_token_id"
        number = self.header.metadata.get(key)
        if number is None:
            return ""
        # llama.cpp ignores a number without a token. transformers takes another token for it.
        if type(number) is not int or not 0 <= number < len(tokens):
            raise self.fail(f"has no token {number!a:.30}, which {key} names.", _OTHER_FILE)
        return tokens[number]


def _check_kind(fields: _Fields) -> str:
    """Return the architecture of a whole model."""
    metadata, architecture = fields.header.metadata, fields.architecture
    kind = fields.text("general.type") or "model"
    if kind != "model":
        # Such as an adapter, the vision part of a model (mmproj) or data for quantising (imatrix).
        hint = (
            "Give the file with the model's weights. Import an adapter: personalpeft import-gguf."
        )
        raise fields.fail(f"is of the type {kind!a:.30} and no model.", hint)
    parts = metadata.get("split.count", 1)
    if type(parts) is not int or parts > 1:
        raise fields.fail(
            f"is one of {parts!a:.20} parts of a model.",
            "Join them first, with llama.cpp: llama-gguf-split --merge FIRST-PART JOINED.gguf",
        )
    if architecture not in _ARCHITECTURES:
        raise fields.fail(
            f"must have one of the architectures {', '.join(_ARCHITECTURES)}, "
            f"got {architecture!a:.60}.",
            _OTHER_FILE,
        )
    if metadata.get(f"{architecture}.expert_count"):
        raise fields.fail("is a mixture of experts, which is not supported.", _OTHER_FILE)
    return architecture


def _check_tensors(fields: _Fields, architecture: str, blocks: int, tokens: int) -> None:
    """Check names and shapes, and that vectors are float32: llama.cpp ends the process at others."""
    tensors = fields.header.tensors
    if blocks > len(tensors):
        raise fields.fail(f"names {blocks} blocks and has {len(tensors)} tensors.")
    hidden, inner = fields.size("embedding_length"), fields.size("feed_forward_length")
    heads, kv_heads, dim = fields.heads()
    if fields.optional_size("attention.value_length") not in (None, dim):
        raise fields.fail("has values of another size than keys.", _OTHER_FILE)
    shapes: dict[str, tuple[int, ...]] = {
        "attn_q": (heads * dim, hidden),
        "attn_k": (kv_heads * dim, hidden),
        "attn_v": (kv_heads * dim, hidden),
        "attn_output": (hidden, heads * dim),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
        "attn_q_norm": (dim,),
        "attn_k_norm": (dim,),
    }
    weights, biases = _ARCHITECTURES[architecture]
    block = {f"{name}.weight": shapes.get(name, (hidden,)) for name in weights}
    block |= {f"{name}.bias": shapes[name][:1] for name in biases}
    expected = {f"blk.{n}.{name}": shape for n in range(blocks) for name, shape in block.items()}
    expected |= {"token_embd.weight": (tokens, hidden), "output_norm.weight": (hidden,)}
    if missing := sorted(expected.keys() - tensors.keys()):
        raise fields.fail(f"lacks {len(missing)} tensors, such as {missing[0]}.")
    if "output.weight" in tensors:
        expected["output.weight"] = (tokens, hidden)
    optional = {"rope_freqs.weight"} if architecture == "llama" else set()
    if others := sorted(tensors.keys() - expected.keys() - optional):
        raise fields.fail(
            f"has the tensor {others[0]!a:.60}, which no {architecture} model that is read has.",
            _OTHER_FILE,
        )
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise fields.fail(f"{name} must be {shape}, got {tensors[name].shape}.")
        if len(shape) == 1 and tensors[name].kind != _FLOAT32:
            raise fields.fail(f"{name} must be stored as float32.", _OTHER_FILE)


def rope_factor(metadata: Mapping[str, Value], architecture: str) -> float:
    """Return what positions are divided by. llama.cpp divides them unless the file names a type."""
    if metadata.get(f"{architecture}.rope.scaling.type", "linear") != "linear":
        return 1.0
    names = ("rope.scaling.factor", "rope.scale_linear")
    given = (metadata.get(f"{architecture}.{name}") for name in names)
    factor = next((each for each in given if each is not None), 1.0)
    return float(factor) or 1.0 if isinstance(factor, int | float) else 1.0


def _check_ignored(fields: _Fields, architecture: str) -> None:
    """Refuse what llama.cpp computes and transformers, which trains, leaves out."""
    for key, neutral in _IGNORED.items():
        value = fields.header.metadata.get(f"{architecture}.{key}", neutral[0])
        if value not in neutral:
            raise fields.fail(
                f"has {architecture}.{key} = {value!a:.60}, which is not supported in GGUF files.",
                _OTHER_FILE,
            )
    fields.check_number("attention.layer_norm_rms_epsilon", below=1)
    if architecture == "gemma3":
        fields.size("attention.sliding_window")


def _check_rope(fields: _Fields, architecture: str) -> None:
    fields.check_number("rope.freq_base", below=math.inf, default=10000.0)
    scaling = fields.text(f"{architecture}.rope.scaling.type")
    factor = rope_factor(fields.header.metadata, architecture)
    if scaling not in ("", "none", "linear") or (factor != 1.0 and architecture != "gemma3"):
        raise fields.fail(
            f"scales its positions by {scaling or factor!a:.30}, which is not supported in GGUF files.",
            _OTHER_FILE,
        )
    _, _, dim = fields.heads()
    if fields.optional_size("rope.dimension_count") not in (None, dim):
        raise fields.fail(
            "rotates a part of each head, which is not supported in GGUF files.", _OTHER_FILE
        )


def _check_tokenizer(fields: _Fields) -> tuple[str, ...]:
    """Return the tokens."""
    metadata = fields.header.metadata
    kind, splitting = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in _TOKENIZERS or splitting not in _TOKENIZERS[str(kind)]:
        known = ", ".join(str(name) for names in _TOKENIZERS.values() for name in names if name)
        raise fields.fail(
            f"must split texts as one of {known}, got {kind!a:.30}, {splitting!a:.30}.", _OTHER_FILE
        )
    tokens = _values(metadata.get("tokenizer.ggml.tokens"), str)
    types = _values(metadata.get("tokenizer.ggml.token_type"), int)
    if not tokens or len(tokens) != len(types):
        raise fields.fail("has no whole list of tokens and their types.")
    # llama.cpp ends the process at a doubled token.
    if double := next((each for each, count in Counter(tokens).items() if count > 1), None):
        raise fields.fail(f"has the token {double!a:.40} twice.")
    merges = _values(metadata.get("tokenizer.ggml.merges"), str)
    scores = _values(metadata.get("tokenizer.ggml.scores"), float)
    if not (merges if kind == "gpt2" else scores):
        raise fields.fail("has no merges or scores of its tokens.")
    if kind == "gpt2" and not all(each.count(" ") == 1 for each in merges):
        raise fields.fail("has a merge that is not two tokens.")
    return tokens


def control_tokens(metadata: Mapping[str, Value]) -> tuple[str, ...]:
    """Return the tokens of a file that no text may spell."""
    tokens = _values(metadata.get("tokenizer.ggml.tokens"), str)
    types = _values(metadata.get("tokenizer.ggml.token_type"), int)
    return tuple(
        token
        for token, kind in zip(tokens, types, strict=True)
        if token and (kind == _CONTROL or _MARK.fullmatch(token))
    )


def _values(values: Any, kind: type[_T]) -> tuple[_T, ...]:
    """Return an array of one type, or an empty one for anything else."""
    if isinstance(values, tuple) and all(type(each) is kind for each in values):
        return values
    return ()


def _quantisation(header: GgufHeader, counts: Mapping[int, int]) -> str:
    from gguf import GGMLQuantizationType, LlamaFileType

    named = header.metadata.get("general.file_type")
    names = {int(each): each.name for each in LlamaFileType}
    if type(named) is int and named in names:
        return re.sub("^(MOSTLY|ALL)_", "", names[named])
    return GGMLQuantizationType(max(counts, key=lambda kind: counts[kind])).name
