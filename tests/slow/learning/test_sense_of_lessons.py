"""The real base tells lessons that mean something from those that do not, by far more than the margins ask for."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

import personalpeft
from personalpeft import Runtime
from personalpeft.learning.data.response_template import Shown
from personalpeft.learning.evaluate.text_quality import Sense, sense_of
from personalpeft.learning.gate.gate import Margins
from personalpeft.learning.train.losses import continuation
from personalpeft.types import Message, Stack
from personalpeft_app.bench.learn_batches import batches
from personalpeft_app.bench.persons import people

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]

NOTHING_TO_DO_WITH_IT = ("evasive", "beside the point", "one question, four answers")
MEANINGLESS = ("keyboard noise", "shuffled words", "encoded text")
MEANT = ("4 edits", "steps", "a closing wish", "invite")


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory, shared_cache: Path) -> Iterator[Runtime]:
    with personalpeft.open(tmp_path_factory.mktemp("sense") / "home") as runtime:
        yield runtime


@pytest.fixture(scope="module")
def sense(runtime: Runtime) -> Callable[[str], Sense]:
    engine, bare = runtime.engine(), Stack(runtime.base().digest)
    known = {
        batch.name: batch
        for batch in batches(("contradicting", "garbage", "flipped", "instructions"))
    }
    known |= {batch.name: batch for batch in batches(("same", "habit", "facts", "skill"))}

    def likelihoods(said: Sequence[Shown]) -> Sequence[float]:
        items = [
            continuation(engine.backend, [Message("user", each.request)], each.answer, 32)
            for each in said
        ]
        return [score.logp for score in engine.score(items, bare)]

    def of_batch(name: str) -> Sense:
        said = known[name].acts(people()["hana"], random.Random(name))
        lessons = [Shown(act.prompt, act.text) for act in said]
        return sense_of(lessons, likelihoods)

    return of_batch


@pytest.mark.parametrize("name", MEANT)
def test_what_is_meant_makes_sense(sense: Callable[[str], Sense], name: str) -> None:
    found = sense(name)
    assert (found.fit or 0.0) > 2 * Margins().fit
    assert found.order is None or found.order > 2 * Margins().order


@pytest.mark.parametrize("name", NOTHING_TO_DO_WITH_IT)
def test_what_has_nothing_to_do_with_the_question_is_seen(
    sense: Callable[[str], Sense], name: str
) -> None:
    assert (sense(name).fit or 0.0) < Margins().fit


@pytest.mark.parametrize("name", MEANINGLESS)
def test_what_means_nothing_is_seen(sense: Callable[[str], Sense], name: str) -> None:
    found = sense(name)
    assert (found.fit or 0.0) < Margins().fit or (
        found.order is not None and found.order < Margins().order
    )
