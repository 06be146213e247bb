"""Writes a base's tokenizer into a GGUF file, in the words that llama.cpp has for it.

Known is byte-level BPE that splits texts, to the letter, in a way that llama.cpp has a name for. Of every other kind nothing is
written: a file that named what is nearly the same would be loaded, and its texts read wrongly.
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

# The patterns by which texts are split before merging that llama.cpp knows, by its names for them.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = {_WORDS % r"\p{N}{1,3}": "llama-bpe", _WORDS % r"\p{N}": "qwen2"}


def tokenizer_writer(base: Base) -> Callable[[GGUFWriter], None] | None:
    """What writes the base's tokenizer into a file; None where llama.cpp has not its kind. It raises ``WeightsError`` for one
    that does not fit its model.
    """
    if base.card.source.kind == "package":
        return partial(_copy_tokenizer, base)
    told = json.loads((base.folder / "tokenizer.json").read_text("utf-8"))
    splitting = _splitting(told)
    # It takes no vocabulary without merges either.
    if told["model"].get("type") != "BPE" or splitting is None or not told["model"].get("merges"):
        return None
    return partial(_write_tokenizer_fields, base, told, splitting)


def _copy_tokenizer(base: Base, writer: GGUFWriter) -> None:
    """It came out of a GGUF file, which says best how llama.cpp is to read its texts."""
    from gguf import GGUFReader, GGUFValueType

    with find_source_gguf(base.card) as file:
        for key, field in GGUFReader(file).fields.items():
            if key.startswith("tokenizer.") and key != "tokenizer.chat_template":
                inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
                writer.add_key_value(key, field.contents(), field.types[0], inner)
    writer.add_chat_template(base.template)


def _write_tokenizer_fields(
    base: Base, told: Mapping[str, Any], splitting: str, writer: GGUFWriter
) -> None:
    added = {each["id"]: each for each in told.get("added_tokens", ())}
    spelled = {number: token for token, number in told["model"]["vocab"].items()}
    tokens = spelled | {number: each["content"] for number, each in added.items()}
    # As many as there are embeddings, of which a model often has some to spare.
    size = int(read_json(base.folder / "config.json")["vocab_size"])
    if max(tokens) >= size:
        raise WeightsError(
            f"The tokenizer of {base.card.name} has tokens without embeddings.",
            hint="Get a fresh copy of the model.",
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list([tokens.get(number, f"[unused{number}]") for number in range(size)])

    def kind(number: int) -> int:
        if number in added:
            return _CONTROL if added[number]["special"] else _USER
        return _NORMAL if number in tokens else _UNUSED

    writer.add_token_types([kind(number) for number in range(size)])
    merges = told["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    ids = {token: number for number, token in tokens.items()}
    if base.bos in ids:
        writer.add_bos_token_id(ids[base.bos])
    end = next((token for token in base.stop_tokens if token in ids), None)
    if end is not None:
        writer.add_eos_token_id(ids[end])
    writer.add_add_bos_token(False)
    writer.add_chat_template(base.template)


def _splitting(told: Mapping[str, Any]) -> str | None:
    """llama.cpp's name for how a text is split before it is merged; None for what it does not have, to the letter."""
    # It takes a text as it is. To compose its characters first changes nothing in most texts; whatever else is done first does.
    normalizer = told.get("normalizer")
    if normalizer and normalizer.get("type") != "NFC":
        return None
    first = told.get("pre_tokenizer") or {}
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
