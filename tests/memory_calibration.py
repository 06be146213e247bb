"""Write the vectors and weights that calibrate memory, beside ``neutral_prompts.toml``.

``python tests/memory_calibration.py``, after those prompts, the general prompts or the forms of
questions changed. It takes a minute. ``scikit-learn`` comes with ``sentence-transformers``.

For each language the file has three arrays: the vectors of the neutral prompts, those of the
general questions, and the weights of a logistic regression, with the intercept last. It tells
questions about the user's own life (the forms by relation) from everyday requests and general
questions.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import safetensors.numpy
from sklearn.linear_model import LogisticRegression

from personalpeft.learning.data.general_prompts import GeneralPrompts, load_general_prompts
from personalpeft.learning.data.question_bank import load_relations
from personalpeft.memory import calibration
from personalpeft.memory.calibration import LanguageCalibration
from personalpeft.memory.embedder import MiniLM
from personalpeft.memory.types import Vectors

FOLDER = Path(calibration.__file__).parent
# Weaker regularization than usual: vectors of length 1 have small coordinates.
_INVERSE_REGULARIZATION = 10


def neutral_prompts() -> Mapping[str, Sequence[str]]:
    """Return the neutral prompts by language."""
    text = (resources.files("personalpeft.memory") / "neutral_prompts.toml").read_text("utf-8")
    return tomllib.loads(text)


def _texts_in(language: str, texts_of: Callable[[GeneralPrompts], Sequence[str]]) -> Sequence[str]:
    """Return general prompts in one language alone: they follow the English ones."""
    if language == "en":
        return texts_of(load_general_prompts())
    english = len(texts_of(load_general_prompts()))
    return texts_of(load_general_prompts((language,)))[english:]


def general_questions(language: str) -> Sequence[str]:
    """Return the general questions of the regularizer in one language."""
    return _texts_in(language, lambda general: general.regularizer_prompts)


def personal_questions(language: str) -> list[str]:
    """Return the forms of the question bank in one language. Examples fill their slots."""
    relations = load_relations()
    if language != "en":
        relations = load_relations((language,))[len(relations) :]
    questions = []
    for relation in relations:
        for number, form in enumerate((*relation.forms, *relation.questions)):
            subject = relation.others[number % len(relation.others)] if relation.others else ""
            questions.append(form.replace("{x}", subject))
    return questions


def other_requests(language: str) -> list[str]:
    """Return requests that no fact about the user answers."""
    return [
        *_texts_in(language, lambda general: general.everyday_prompts),
        *_texts_in(language, lambda general: general.regularizer_prompts),
        *_texts_in(language, lambda general: [each.question for each in general.probes]),
    ]


def main() -> None:
    """Write the file."""
    embedder = MiniLM()
    prompts = {name: embedder.embed(texts) for name, texts in neutral_prompts().items()}
    questions = {name: embedder.embed(general_questions(name)) for name in prompts}
    scale = LanguageCalibration(prompts, questions, {})
    arrays: dict[str, Vectors] = dict(prompts)
    for language in prompts:
        arrays[language + calibration.QUESTIONS] = questions[language]
        personal, other = personal_questions(language), other_requests(language)
        model = LogisticRegression(
            C=_INVERSE_REGULARIZATION, class_weight="balanced", max_iter=5000
        )
        vectors = scale.move(embedder.embed([*personal, *other]))
        model.fit(vectors, [1] * len(personal) + [0] * len(other))
        weights = np.concatenate([model.coef_[0], model.intercept_])
        arrays[language + calibration.PERSONAL] = weights
    data = {name: array.astype(np.float16) for name, array in arrays.items()}
    path = FOLDER / f"neutral_prompts.{embedder.name}.safetensors"
    path.write_bytes(safetensors.numpy.save(data))


if __name__ == "__main__":
    main()
