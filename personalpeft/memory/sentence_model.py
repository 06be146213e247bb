"""A BERT sentence model in numpy, for models with mean pooling.

It gives the vectors of sentence-transformers, up to rounding. Importing that package, or torch,
takes longer than the rest of a start.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from threadpoolctl import ThreadpoolController
from tokenizers import Tokenizer

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
    """A loaded model. Threads may share it."""

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
        self._blas = ThreadpoolController()
        self._lock = threading.Lock()

    def tokens(self, text: str) -> int:
        """Return how many tokens the model reads, with the two that frame the text."""
        return len(self._tokenizer.encode(text).ids)

    def encode(self, text: str) -> Vectors:
        """Return the text's vector, of length 1."""
        tokens = self._tokenizer.encode(text).ids
        # Two threads take three times as long beside other programs, and gain nothing elsewhere.
        # The lock: whichever of two blocks ends last would set the limit that it began with.
        with self._lock, self._blas.limit(limits=1, user_api="blas"):
            return self._vector(tokens)

    def _vector(self, tokens: list[int]) -> Vectors:
        states = self._embed(tokens)
        for layer in range(self._layers):
            states = self._block(f"encoder.layer.{layer}", states)
        mean = states.mean(axis=0)
        vector: Vectors = mean / np.linalg.norm(mean)
        return vector

    def _embed(self, tokens: list[int]) -> Vectors:
        words, kinds, positions = (
            self._weights[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "token_type", "position")
        )
        return self._norm("embeddings", words[tokens] + kinds[0] + positions[: len(tokens)])

    def _block(self, name: str, states: Vectors) -> Vectors:
        count, size = states.shape
        query, key, value = (
            self._linear(f"{name}.attention.self.{part}", states)
            .reshape(count, self._heads, -1)
            .swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = query @ key.swapaxes(1, 2) / np.float32((size / self._heads) ** 0.5)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        mixed = (weights @ value).swapaxes(0, 1).reshape(count, size)
        mixed = self._linear(f"{name}.attention.output.dense", mixed)
        states = self._norm(f"{name}.attention.output", mixed + states)
        inner = self._linear(f"{name}.intermediate.dense", states)
        inner *= (1 + _erf(inner / np.float32(2**0.5))) / 2
        return self._norm(f"{name}.output", self._linear(f"{name}.output.dense", inner) + states)

    def _linear(self, name: str, states: Vectors) -> Vectors:
        weights = self._weights
        product: Vectors = states @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
        return product

    def _norm(self, name: str, states: Vectors) -> Vectors:
        weight, bias = (self._weights[f"{name}.LayerNorm.{part}"] for part in ("weight", "bias"))
        centered = states - states.mean(axis=-1, keepdims=True)
        variance = np.square(centered).mean(axis=-1, keepdims=True)
        normed: Vectors = centered / np.sqrt(variance + np.float32(self._epsilon)) * weight + bias
        return normed


def _erf(x: Vectors) -> Vectors:
    """Return the error function, to 1.5e-7 (Abramowitz and Stegun 1964, eq. 7.1.26).

    Importing that of scipy would take longer than loading the model.
    """
    t = 1 / (1 + np.float32(0.3275911) * np.abs(x))
    polynomial = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = (polynomial + np.float32(factor)) * t
    result: Vectors = np.copysign(1 - polynomial * np.exp(-x * x), x)
    return result


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
