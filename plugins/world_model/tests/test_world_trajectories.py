"""Trajectories are chats in JSONL, and demonstrations grouped by game."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world_makers import RAW, RECORDINGS, TASK, Kitchen, kitchen

from personalpeft import InvalidInput, MissingPackage
from personalpeft_world_model import (
    Outcome,
    Rate,
    State,
    Step,
    Trajectory,
    measure_baselines,
    read_jsonl,
    record,
    write_jsonl,
)
from personalpeft_world_model.trajectories import RESET, demonstrations

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="[]"), min_size=1).filter(
    lambda text: text == text.strip()
)


@given(text=TEXTS, outcome=st.sampled_from(sorted({*Outcome} - {Outcome.UNKNOWN})))
def test_a_state_is_read_as_it_was_written(text: str, outcome: Outcome) -> None:
    assert State.read(State(text, outcome).written) == State(text, outcome)


def test_recordings_of_real_games_are_read_as_they_were_written(tmp_path: Path) -> None:
    recorded = read_jsonl(RECORDINGS)
    assert len({each.environment for each in recorded}) == 6
    assert all(each.steps and each.task and each.initial.text for each in recorded)
    copy = tmp_path / "copy.jsonl"
    assert write_jsonl(copy, recorded) == len(recorded)
    assert copy.read_bytes() == RECORDINGS.read_bytes()


def test_any_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    state = State("five stars\u2028very\u2029good\u0085and\x0b\x0c\x1c\r\nmore")
    run = Trajectory("shop", "Buy it.", RAW, (Step("next", state),))
    write_jsonl(tmp_path / "shop.jsonl", [run])
    ((step,),) = (each.steps for each in read_jsonl(tmp_path / "shop.jsonl"))
    assert step.state == state


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_file_of_another_editor_is_read(tmp_path: Path, line_end: str) -> None:
    file = tmp_path / "windows.jsonl"
    lines = RECORDINGS.read_text("utf-8").splitlines()
    file.write_bytes(line_end.join(["\ufeff" + lines[0], *lines[1:]]).encode())
    assert read_jsonl(file) == read_jsonl(RECORDINGS)


def test_a_recording_teaches_the_same_before_and_after_it_was_written(tmp_path: Path) -> None:
    grid = State("  S x\n\n", actions=("go",)), State("\n  x S\n", Outcome.WON)
    run = Trajectory("grid", "Go.", grid[0], (Step("go", grid[1]),))
    write_jsonl(tmp_path / "grid.jsonl", [run])
    assert list(demonstrations([run])) == list(demonstrations(read_jsonl(tmp_path / "grid.jsonl")))


def test_a_chat_without_a_first_state_is_read_too(tmp_path: Path) -> None:
    file = tmp_path / "paper.jsonl"
    messages = [("system", "Win."), ("user", "jump"), ("assistant", "You won. [SUCCESS]")]
    chat = {"messages": [{"role": role, "content": text} for role, text in messages]}
    file.write_text(json.dumps(chat) + "\n", "utf-8")
    (found,) = read_jsonl(file)
    assert found.initial == State("")
    assert found.final == State("You won.", Outcome.WON)
    assert [step.action for step in found.steps] == ["jump"]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        '{"messages": []}',
        '{"messages": [{"role": "user", "content": "go"}]}',
        '{"messages": [{"role": "system", "content": "t"}, {"role": "user", "content": "go"}]}',
        '{"messages": [{"role": "system", "content": 5}]}',
        '{"messages": ' + "[" * 100_000,
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(f"\n{line}\n", "utf-8")
    with pytest.raises(InvalidInput, match="Line 2"):
        read_jsonl(file)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "games.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InvalidInput):
        read_jsonl(file)


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    file = tmp_path / "once.jsonl"
    write_jsonl(file, kitchen())
    with pytest.raises(InvalidInput, match="once"):
        write_jsonl(file, [])
    assert len(read_jsonl(file)) == 3


@pytest.mark.parametrize("stop", [KeyboardInterrupt, MissingPackage("No games.", hint="Install.")])
def test_a_recording_that_is_stopped_leaves_no_file(
    tmp_path: Path, stop: BaseException | type[BaseException]
) -> None:
    def recorded() -> Iterator[Trajectory]:
        yield kitchen()[0]
        raise stop

    file = tmp_path / "games.jsonl"
    with pytest.raises((KeyboardInterrupt, MissingPackage)):
        write_jsonl(file, recorded())
    assert list(tmp_path.iterdir()) == []
    assert write_jsonl(file, kitchen()) == 3


def test_each_transition_is_demonstrated_once_in_the_group_of_its_game() -> None:
    found = list(demonstrations(kitchen()))
    assert [(each.prompt[-1].content, each.answer) for each in found] == [  # type: ignore[union-attr]
        ("raw\n> cook", "fried"),
        ("fried\n> eat", "full [SUCCESS]"),
        ("fried\n> cook", "ash [FAILURE]"),
        ("raw\n> eat", "sick [FAILURE]"),
    ]
    assert {each.group for each in found} == {"kitchen"}


def test_of_several_outcomes_of_an_action_the_most_frequent_is_demonstrated() -> None:
    slipped, moved = (
        Trajectory("lake", "Cross it.", RAW, (Step("right", State(text)),))
        for text in ("slipped", "moved")
    )
    (found,) = demonstrations([slipped, moved, moved])
    assert found.answer == "moved"


def test_baselines_are_what_copying_could_reach() -> None:
    first, second, third = kitchen()
    assert measure_baselines([first, second, third]) == (Rate(0, 5), Rate(0, 5))
    waits = record([Kitchen()], seed=0, shares={"random": 1}, steps=1)
    assert all(run.initial == RAW and run.task == TASK for run in waits)
    copied, seen = measure_baselines(read_jsonl(RECORDINGS))
    assert copied.right == 0
    assert 0 < seen.value < 1


def test_a_recording_depends_on_its_seed_and_its_game_alone() -> None:
    def texts(seed: int) -> list[object]:
        return [run.to_chat() for run in record([Kitchen()], seed=seed, steps=40)]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    chats = texts(1)
    assert all(chat["messages"][1]["content"] == RESET for chat in chats)  # type: ignore[index]


@pytest.mark.parametrize(
    "shares", [{}, {"walk": 1.0}, {"random": 0.0}, {"random": -1.0, "noise": 2}]
)
def test_wrong_shares_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match="shares"):
        list(record([Kitchen()], seed=0, shares=shares))
