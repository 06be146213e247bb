"""The real base separates meaningful lessons from meaningless ones by far more than the margins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import personalpeft
from benchmarks.learn_batches import batches
from benchmarks.personas import load_personas, pools
from personalpeft import Runtime
from personalpeft.learning.evaluate.text_quality import measure_text_quality
from personalpeft.learning.gate.evidence import TextQuality
from personalpeft.learning.gate.gate import MAX_LEARNED_END_SURPRISAL, Margins
from personalpeft.learning.outcomes import ReasonCode
from personalpeft.learning.train.losses import encode_continuation
from personalpeft.types import Message, PromptResponse, Stack

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

OFF_TOPIC = ("evasive", "beside the point", "one question, four answers")
MEANINGLESS = ("keyboard noise", "shuffled words", "encoded text")
MEANINGFUL = ("4 edits", "steps", "a closing wish", "invite")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Runtime]:
    with personalpeft.open(tmp_path_factory.mktemp("quality") / "home") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def measure(runtime: Runtime) -> Callable[[str], TextQuality]:
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


@pytest.mark.parametrize("name", MEANINGFUL)
def test_meaningful_lessons_exceed_the_margins(
    measure: Callable[[str], TextQuality], name: str
) -> None:
    found = measure(name)
    assert (found.pmi or 0.0) > 2 * Margins().min_pmi
    assert found.word_order_gap is None or found.word_order_gap > 2 * Margins().min_word_order_gap


@pytest.mark.parametrize("name", OFF_TOPIC)
def test_off_topic_lessons_are_below_the_margin(
    measure: Callable[[str], TextQuality], name: str
) -> None:
    assert (measure(name).pmi or 0.0) < Margins().min_pmi


@pytest.mark.parametrize("name", MEANINGLESS)
def test_meaningless_lessons_are_below_a_margin(
    measure: Callable[[str], TextQuality], name: str
) -> None:
    found = measure(name)
    assert (found.pmi or 0.0) < Margins().min_pmi or (
        found.word_order_gap is not None and found.word_order_gap < Margins().min_word_order_gap
    )


def test_two_styles_by_turns_are_refused_and_two_sign_offs_of_one_style_are_not(
    runtime: Runtime,
) -> None:
    ada = runtime.user("ada")
    pairs = pools().everyday[:12]
    for number, (prompt, answer) in enumerate(pairs):
        own = answer.upper() if number % 2 else f"Dear friend, {answer} Sincerely yours."
        ada.teach(prompt, own)
    report = ada.learn()
    assert [each.code for each in report.reasons] == [ReasonCode.STYLES_ALTERNATE]
    assert not report.live
    hana = runtime.user("hana")
    for number, (prompt, answer) in enumerate(pairs):
        ending = "Sincerely yours." if number % 2 else "Yours truly."
        hana.teach(prompt, f"Dear friend, {answer} {ending}")
    report = hana.learn()
    assert report.live
    assert report.scores["text_quality"]["style_overlap"] >= Margins().min_style_overlap


def test_texts_that_were_cut_are_refused_and_labels_of_one_letter_are_not(
    runtime: Runtime,
) -> None:
    imre, lena = runtime.user("imre"), runtime.user("lena")
    for number, (prompt, answer) in enumerate(pools().everyday[:12]):
        imre.teach(prompt, " ".join(answer.split()[: 3 + number % 3]))
    names = ("Anna", "Boris", "Chloe", "Daniel", "Eva", "Felix", "Greta", "Henry", "Iris")
    for name in names:
        lena.teach(f"Give the initial of {name}.", f"{name[0]}.", skill="initial")
    report = imre.learn()
    assert not report.live
    ends = report.scores["text_quality"]
    assert ends["end_surprisal"] > Margins().max_end_surprisal
    assert ends["learned_end_surprisal"] > MAX_LEARNED_END_SURPRISAL
    report = lena.learn()
    assert report.live
    assert report.scores["text_quality"]["end_surprisal"] > Margins().max_end_surprisal
