"""Write a base's tokenizer into a GGUF file in llama.cpp's terms.

Only byte-level BPE is written, and only with a pre-tokenizer that llama.cpp has exactly. llama.cpp
would load a similar one as well, and tokenize texts wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from personalpeft.base_models.files import find_source_gguf, read_json
from personalpeft.base_models.types import Base
from personalpeft.errors import WeightsError

if TYPE_CHECKING:
    from gguf import GGUFWriter

_NORMAL, _CONTROL, _USER, _UNUSED = 1, 3, 4, 5

# Patterns of pre-tokenizers with llama.cpp's names for them.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2"}


def tokenizer_writer(base: Base) -> Callable[[GGUFWriter], None] | None:
    """Return what writes the base's tokenizer, or None if llama.cpp has not its kind."""
    if base.card.source.kind == "package":
        return partial(_copy_tokenizer, base)
    content = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    pre_tokenizer = _pre_tokenizer(content)
    # llama.cpp needs merges.
    if (
        content["model"].get("type") != "BPE"
        or pre_tokenizer is None
        or not content["model"].get("merges")
    ):
        return None
    return partial(_write_tokenizer_fields, base, content, pre_tokenizer)


def _copy_tokenizer(base: Base, writer: GGUFWriter) -> None:
    """Copy the fields of the GGUF file that the base comes from."""
    from gguf import GGUFReader, GGUFValueType

    with find_source_gguf(base.card) as file:
        for key, field in GGUFReader(file).fields.items():
            if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
                inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_chat_template(base.template)


def _write_tokenizer_fields(
    base: Base, content: Mapping[str, Any], pre_tokenizer: str, writer: GGUFWriter
) -> None:
    added = {each["id"]: each for each in content.get("added_tokens", ())}
    vocabulary = {number: token for token, number in content["model"]["vocab"].items()}
    tokens = vocabulary | {number: each["content"] for number, each in added.items()}
    # One for each embedding; a model often has more than tokens.
    size = int(read_json(base.folder / "config.json")["vocab_size"])
    if max(tokens) >= size:
        raise WeightsError(
            f"The tokenizer of {base.card.name} has tokens without embeddings.",
            hint="Get a fresh copy of the model.",
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in range(size)])

    def kind(number: int) -> int:
        if number in added:
            return _CONTROL if added[number]["special"] else _USER
        return _NORMAL if number in tokens else _UNUSED

    writer.add_token_types([kind(number) for number in range(size)])
    merges = content["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    ids = {token: number for number, token in tokens.items()}
    if base.bos in ids:
        writer.add_bos_token_id(ids[base.bos])
    end = next((token for token in base.stop_tokens if token in ids), None)
    if end is not None:
        writer.add_eos_token_id(ids[end])
    writer.add_add_bos_token(False)
    writer.add_chat_template(base.template)


def _pre_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of exactly this pre-tokenizer, if it has one."""
    # llama.cpp does not normalise. NFC leaves most texts unchanged, other normalizers do not.
    normalizer = content.get("normalizer")
    if normalizer and normalizer.get("type") != "NFC":
        return None
    first = content.get("pre_tokenizer") or {}
    steps = first.get("pretokenizers", [first])
    if any(step.get("add_prefix_space") for step in steps):
        return None
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return _PATTERNS.get(steps[0].get("pattern", {}).get("Regex"))
    return None
