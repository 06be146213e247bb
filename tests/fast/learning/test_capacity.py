"""A memory layer holds the newest lessons that fit; older ones are left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_makers import correct, open_runtime, pinned, trained_on

from personalpeft import NothingToLearn
from personalpeft.learning.data.lesson import Lesson
from personalpeft.learning.data.lesson_selection import (
    RECOMMENDED_TOKENS_PER_PARAMETER,
    fit_lessons,
)
from personalpeft.learning.outcomes import SignalUse
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.types import Architecture, Message, SignalKind

ARCHITECTURE = Architecture(
    "llama", "model.layers", 3, {"mlp.down_proj": (40, 10), "mlp.up_proj": (10, 40)}
)
RECIPE = TrainingConfig(
    rank=4,
    target_modules=("mlp.down_proj", "mlp.up_proj"),
    tokens_per_parameter=0.05,
    max_length=20,
)


def count_words(text: str) -> int:
    return len(text.split())


def lesson(signal: str, question: str, wanted: str) -> Lesson:
    return Lesson(signal, SignalKind.FACT, (Message("user", question),), wanted)


LESSONS = st.lists(
    st.builds(
        lesson,
        st.sampled_from([f"s_{n}" for n in range(12)]),
        st.integers(1, 9).map(lambda n: "why " * n),
        st.integers(1, 40).map(lambda n: "so " * n),
    ),
    max_size=20,
).map(lambda found: sorted(found, key=lambda each: int(each.signal[2:])))


def test_parameter_count_covers_both_matrices_of_each_projection_in_each_block() -> None:
    assert RECIPE.count_parameters(ARCHITECTURE) == 4 * (50 + 50) * 3


@given(lessons=LESSONS)
def test_memory_layer_keeps_the_newest_lessons_that_fit(
    lessons: list[Lesson],
) -> None:
    fit, room = fit_lessons(lessons, "memory", RECIPE, ARCHITECTURE, count_words)
    assert room["max_tokens"] == 60
    assert room["recommended_tokens"] == int(room["parameters"] * RECOMMENDED_TOKENS_PER_PARAMETER)
    assert room["tokens"] <= room["max_tokens"]
    kept = {each.signal for each in fit}
    assert fit == tuple(each for each in lessons if each.signal in kept)
    sizes = {
        signal: max(
            count_words(each.messages[-1].content) + min(20, count_words(each.chosen))
            for each in lessons
            if each.signal == signal
        )
        for signal in {each.signal: None for each in lessons}
    }
    assert room["tokens"] == sum(sizes[signal] for signal in kept)
    newer = 0
    for signal in reversed(sizes):
        assert (signal in kept) == (newer + sizes[signal] <= room["max_tokens"])
        newer += sizes[signal] * (signal in kept)


def test_long_newest_fact_leaves_room_for_older_ones() -> None:
    small, long = (
        Lesson(signal, SignalKind.FACT, (Message("user", "word " * count),), "Yes.")
        for signal, count in (("small", 5), ("long", 500))
    )
    fit, room = fit_lessons([small, long], "memory", RECIPE, ARCHITECTURE, count_words)
    assert fit == (small,)
    assert room["tokens"] == 6


@given(lessons=LESSONS)
def test_style_and_skills_have_no_capacity_limit(lessons: list[Lesson]) -> None:
    for layer in ("style", "skill.email"):
        fit = fit_lessons(lessons, layer, RECIPE, ARCHITECTURE, count_words)
        assert fit == (tuple(lessons), {})


def test_lessons_without_capacity_are_listed_in_report_and_signal_statuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Apply the limit of the memory layer to the style."""

    def counted(lessons: Sequence[Lesson], layer: str, recipe: TrainingConfig, *rest: Any) -> Any:
        return fit_lessons(
            lessons, "memory", recipe.model_copy(update={"tokens_per_parameter": 0.32}), *rest
        )

    monkeypatch.setattr("personalpeft.learning.plan.fit_lessons", counted)
    with open_runtime(tmp_path / "home") as runtime:
        ada = runtime.user("ada")
        edits = correct(ada, 6)
        report = ada.learn()
        out = [
            status.signal.id
            for status in ada.signal_statuses()
            if status.use_code is SignalUse.NO_CAPACITY
        ]
        assert out == edits[: len(out)]
        assert 0 < len(out) < 5
        assert {
            source.signal for source in report.sources if source.use_code is SignalUse.NO_CAPACITY
        } == set(out)
        assert trained_on(ada) | pinned(ada) == set(edits) - set(out)
        assert report.capacity["tokens"] <= report.capacity["max_tokens"]
        assert report.capacity["max_tokens"] < report.capacity["parameters"]
        assert f"{report.capacity['max_tokens']:,} tokens" in str(report)
        # Held-out lessons take no room, so an older lesson may come in.
        ada.learn()
        assert {
            status.signal.id
            for status in ada.signal_statuses()
            if status.use_code is SignalUse.NO_CAPACITY
        } < set(out)
        assert not trained_on(ada) & pinned(ada)
        with pytest.raises(NothingToLearn):
            ada.learn()
