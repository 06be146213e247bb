"""Similarity of texts on one scale for all languages. Pure.

A sentence model that learned mostly English puts all texts of another language close together, so
one cosine cannot tell what is relevant in each. Two corrections use prompts by language that belong
to no user. A vector is moved by the difference between the mean of English prompts and that of the
same prompts in its language, the one with the nearest mean. Then half of what each of both texts
has in common with its nearest prompts is subtracted from their cosine (CSLS; Conneau et al. 2018,
"Word Translation Without Parallel Data"). For this there are general questions as well: otherwise
"What is the capital of France?" is more similar to a fact about a home than to any such prompt.

A request on the topic of a fact ("How do I walk a dog?") is often more similar to it than another
wording of a question about it ("What place would I call my home town?"). So a logistic regression by
language tells questions about the user's own life from other requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft.memory.types import Vectors

_REFERENCE = "en"
QUESTIONS = ".questions"
"""Follows the language in the name of its general questions."""
PERSONAL = ".personal"
"""Follows the language in the name of the weights that find personal questions."""
# What is taken from the similarity of a request that surely asks nothing about the user's own life.
_IMPERSONAL_DISCOUNT = np.float32(0.2)
_NEIGHBOURS = 3
# A text is in another language if its mean is nearer than that of English by this much. Of 358
# English texts six were ("What language is spoken in Spain?"). Nearly all others are by 0.26.
_MIN_LEAD = 0.15


class LanguageCalibration:
    """Prompts by language, which set the scale of similarity. Read-only.

    Args:
        prompts: By language, ``[n, size]``, each row of length 1: the same prompts in each
            language. English must be among them.
        questions: By language, ``[m, size]``: general questions, which may differ.
        personal: By language, ``[size + 1]``: the weights of a logistic regression on moved vectors
            and its intercept. Without them each request may be a personal one.
    """

    def __init__(
        self,
        prompts: Mapping[str, Vectors],
        questions: Mapping[str, Vectors],
        personal: Mapping[str, Vectors],
    ) -> None:
        self._means = np.stack([vectors.mean(axis=0) for vectors in prompts.values()])
        self._directions = _normalized(self._means)
        self._reference = list(prompts).index(_REFERENCE)
        self._prompts = self.move(np.concatenate([*prompts.values(), *questions.values()]))
        # Without weights each request may be personal.
        unknown = np.zeros(self._means.shape[1] + 1, dtype=np.float32)
        self._personal = np.stack([personal.get(name, unknown) for name in prompts])

    def similarity(self, queries: Vectors, texts: Vectors) -> Vectors:
        """Return ``[len(queries), len(texts)]``: 0 for texts as similar as these prompts are."""
        moved_queries, moved_texts = self.move(queries), self.move(texts)
        common = self._reach(moved_queries)[:, None] + self._reach(moved_texts)
        similarity: Vectors = moved_queries @ moved_texts.T - np.float32(0.5) * common
        return similarity

    def impersonal_discount(self, queries: Vectors) -> Vectors:
        """Return ``[len(queries)]``: 0 where a request may ask about the user's own life.

        It rises to ``_IMPERSONAL_DISCOUNT`` where the request surely does not.
        """
        weights = self._personal[self._languages(queries)]
        logits = (self.move(queries) * weights[:, :-1]).sum(axis=1) + weights[:, -1]
        # 1 - 2p, where p is the probability of a personal question.
        discount: Vectors = _IMPERSONAL_DISCOUNT * np.maximum(0, -np.tanh(logits / 2))
        return discount

    def is_english(self, vector: Vectors) -> bool:
        """Return whether a text is English, by its vector ``[size]``."""
        return bool(self._languages(vector[None])[0] == self._reference)

    def move(self, vectors: Vectors) -> Vectors:
        """Return vectors moved from the mean of their language to that of English, of length 1."""
        means = self._means[self._languages(vectors)]
        return _normalized(vectors - means + self._means[self._reference])

    def _languages(self, vectors: Vectors) -> npt.NDArray[np.intp]:
        cosines = vectors @ self._directions.T
        cosines[:, self._reference] += _MIN_LEAD
        nearest: npt.NDArray[np.intp] = cosines.argmax(axis=1)
        return nearest

    def _reach(self, vectors: Vectors) -> Vectors:
        """Return the mean cosine of each vector with its nearest prompts."""
        cosines = np.sort(vectors @ self._prompts.T, axis=1)
        reach: Vectors = cosines[:, -_NEIGHBOURS:].mean(axis=1)
        return reach


@cache
def load_calibration(embedder: str) -> LanguageCalibration:
    """Return the calibration of the package for an embedder, by its name."""
    data = (resources.files(__package__) / f"neutral_prompts.{embedder}.safetensors").read_bytes()
    arrays = {name: rows.astype(np.float32) for name, rows in safetensors.numpy.load(data).items()}
    personal = {
        name.removesuffix(PERSONAL): arrays.pop(name)
        for name in list(arrays)
        if name.endswith(PERSONAL)
    }
    vectors = {name: _normalized(rows) for name, rows in arrays.items()}
    questions = {name: rows for name, rows in vectors.items() if name.endswith(QUESTIONS)}
    prompts = {name: rows for name, rows in vectors.items() if name not in questions}
    return LanguageCalibration(prompts, questions, personal)


def _normalized(vectors: Vectors) -> Vectors:
    normalized: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return normalized
