"""A BERT sentence model in plain torch, for models with mean pooling.

It gives the vectors of sentence-transformers, up to rounding. Importing that package takes longer
than the rest of a start.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from personalpeft.memory.types import Vectors

_MODULES = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
_CONFIG = {"model_type": "bert", "hidden_act": "gelu"}


def supports(folder: Path) -> bool:
    """Return whether a sentence-transformers folder holds a model that this module computes."""
    modules = _read(folder / "modules.json")
    config = _read(folder / "config.json")
    if [module["type"].rpartition(".")[2] for module in modules] not in _MODULES:
        return False
    pooling = {
        name
        for name, is_on in _read(folder / modules[1]["path"] / "config.json").items()
        if name.startswith("pooling_mode") and is_on
    }
    return (
        pooling == {"pooling_mode_mean_tokens"}
        and modules[0]["path"] == ""
        and not _read(folder / "sentence_bert_config.json").get("do_lower_case")
        and config.get("position_embedding_type", "absolute") == "absolute"
        and all(config.get(name) == value for name, value in _CONFIG.items())
        and (folder / "model.safetensors").is_file()
        and (folder / "tokenizer.json").is_file()
    )


class SentenceModel:
    """A loaded model. Read-only after loading, so threads may share it."""

    def __init__(self, folder: Path) -> None:
        config = _read(folder / "config.json")
        self._heads = int(config["num_attention_heads"])
        self._layers = int(config["num_hidden_layers"])
        self._epsilon = float(config["layer_norm_eps"])
        self._weights = load_file(folder / "model.safetensors")
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        longest = int(_read(folder / "sentence_bert_config.json")["max_seq_length"])
        self._tokenizer.enable_truncation(longest)

    def tokens(self, text: str) -> int:
        """Return how many tokens the model reads, with the two that frame the text."""
        return len(self._tokenizer.encode(text).ids)

    def encode(self, text: str) -> Vectors:
        """Return the text's vector, of length 1."""
        tokens = torch.tensor(self._tokenizer.encode(text).ids)
        with torch.inference_mode():
            states = self._embed(tokens)
            for layer in range(self._layers):
                states = self._block(f"encoder.layer.{layer}", states)
            vector: Vectors = functional.normalize(states.mean(dim=0), dim=0).numpy()
        return vector

    def _embed(self, tokens: Tensor) -> Tensor:
        words, kinds, positions = (
            self._weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "token_type", "position")
        )
        return self._norm("embeddings", words[tokens] + kinds[0] + positions[: len(tokens)])

    def _block(self, name: str, states: Tensor) -> Tensor:
        query, key, value = (
            self._linear(f"{name}.attention.self.{part}", states)
            .unflatten(-1, (self._heads, -1))
            .transpose(0, 1)
            for part in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query[None], key[None], value[None])[0]
        mixed = self._linear(f"{name}.attention.output.dense", mixed.transpose(0, 1).flatten(1))
        states = self._norm(f"{name}.attention.output", mixed + states)
        inner = functional.gelu(self._linear(f"{name}.intermediate.dense", states))
        return self._norm(f"{name}.output", self._linear(f"{name}.output.dense", inner) + states)

    def _linear(self, name: str, states: Tensor) -> Tensor:
        weights = self._weights
        return functional.linear(states, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def _norm(self, name: str, states: Tensor) -> Tensor:
        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        return functional.layer_norm(states, weight.shape, weight, bias, self._epsilon)


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
