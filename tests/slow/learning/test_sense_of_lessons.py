"""The real base tells lessons that mean something from those that do not, by far more than the margins ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import personalpeft
from benchmarks.learn_batches import batches
from benchmarks.personas import load_personas
from personalpeft import Runtime
from personalpeft.learning.data.style import PromptResponse
from personalpeft.learning.evaluate.measures import TextQuality, measure_text_quality
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.types import Message, Stack

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

NOTHING_TO_DO_WITH_IT = ("evasive", "beside the point", "one question, four answers")
MEANINGLESS = ("keyboard noise", "shuffled words", "encoded text")
MEANT = ("4 edits", "steps", "a closing wish", "invite")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Runtime]:
    with personalpeft.open(tmp_path_factory.mktemp("sense") / "home") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def sense(runtime: Runtime) -> Callable[[str], TextQuality]:
    engine, bare = runtime.engine(), Stack(runtime.base().digest)
    known = {
        batch.name: batch
        for batch in batches(("contradicting", "garbage", "flipped", "instructions"))
    }
    known |= {batch.name: batch for batch in batches(("same", "habit", "facts", "skill"))}

    def likelihoods(said: Sequence[PromptResponse]) -> Sequence[float]:
        items = [
            encode_continuation(engine.backend, [Message("user", each.request)], each.answer, 32)
            for each in said
        ]
        return [score.logp for score in engine.score(items, bare)]

    def of_batch(name: str) -> TextQuality:
        said = known[name].acts(load_personas()["hana"], random.Random(name))
        lessons = [PromptResponse(act.prompt, act.text) for act in said]
        return measure_text_quality(lessons, likelihoods)

    return of_batch


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_makes_sense(sense: Callable[[str], TextQuality], name: str) -> None:
    found = sense(name)
    assert (found.pmi or 0.0) > 2 * Margins().min_pmi
    assert found.word_order_gap is None or found.word_order_gap > 2 * Margins().min_word_order_gap


@pytest.mark.parametrize("name", NOTHING_TO_DO_WITH_IT)
def test_what_has_nothing_to_do_with_the_question_is_seen(
    sense: Callable[[str], TextQuality], name: str
) -> None:
    assert (sense(name).pmi or 0.0) < Margins().min_pmi


@pytest.mark.parametrize("name", MEANINGLESS)
def test_what_means_nothing_is_seen(sense: Callable[[str], TextQuality], name: str) -> None:
    found = sense(name)
    assert (found.pmi or 0.0) < Margins().min_pmi or (
        found.word_order_gap is not None and found.word_order_gap < Margins().min_word_order_gap
    )
