"""Games of TextWorld as environments, and the whole way on the command line."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from personalpeft import InvalidInput
from personalpeft_app.cli import cli
from personalpeft_world_model import Outcome, noisy, record, run_policy, walkthrough_policy
from personalpeft_world_model.textworld_games import TextWorldGame, make_game

pytest.importorskip("textworld", reason="needs the extra [textworld]")

# Making the games takes longer than the tests.
pytestmark = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of games. They are made once."""
    return tmp_path_factory.mktemp("games")


@pytest.fixture(scope="module")
def coin(games: Path) -> TextWorldGame:
    return TextWorldGame(make_game("coin", 1, games))


@pytest.fixture(scope="module")
def cooking(games: Path) -> TextWorldGame:
    return TextWorldGame(make_game("cooking", 1, games))


@pytest.mark.parametrize("kind", ["coin", "cooking"])
def test_the_advice_solves_a_game_also_after_mistakes(
    kind: str, request: pytest.FixtureRequest
) -> None:
    game = request.getfixturevalue(kind)
    run = run_policy(game, walkthrough_policy, random.Random(0))
    assert run.final.outcome is Outcome.WON
    erring = [run_policy(game, noisy(walkthrough_policy), random.Random(n)) for n in range(8)]
    longer = [each for each in erring if len(each.steps) > len(run.steps)]
    assert any(each.final.outcome is Outcome.WON for each in longer)


def test_a_task_has_the_map_and_what_the_first_state_hides(coin: TextWorldGame) -> None:
    first = coin.reset()
    assert first.text.startswith("room: ")
    room = first.text.removeprefix("room: ").partition(";")[0]
    assert f"{room}: " in coin.task
    assert "coin" in coin.task.partition("Hidden:")[2]
    assert "coin" not in first.text


def test_food_that_is_cooked_twice_is_lost(cooking: TextWorldGame) -> None:
    state = cooking.reset()
    while state.advice is not None and not state.advice.startswith("cook"):
        state = cooking.step(state.advice)
    action = str(state.advice)
    cooked = cooking.step(action)
    assert cooked.outcome is Outcome.RUNNING
    lost = cooking.step(action)
    assert lost.outcome is Outcome.LOST
    assert "burned" in lost.text


def test_recordings_repeat(coin: TextWorldGame) -> None:
    first, second = ([run.to_chat() for run in record([coin], seed=7)] for _ in range(2))
    assert first == second
    assert sum(len(chat["messages"]) for chat in first) > 40


def test_what_is_no_game_is_an_error(tmp_path: Path, games: Path) -> None:
    with pytest.raises(InvalidInput, match="chess"):
        make_game("chess", 1, games)
    for text in (None, "{}", "no json"):
        path = tmp_path / "bad.json"
        if text is not None:
            path.write_text(text, "utf-8")
        with pytest.raises(InvalidInput, match="bad"):
            TextWorldGame(path)


def test_the_command_line_records_learns_measures_and_verifies(
    tmp_path: Path, card: Path, games: Path
) -> None:
    def run(*arguments: object) -> Result:
        options = ("--home", tmp_path / "home", "--base", card, "--user", "world")
        line = [str(each) for each in ("world", *arguments, *options)]
        return CliRunner().invoke(cli, line)

    train, unseen = tmp_path / "train.jsonl", tmp_path / "unseen.jsonl"
    for file, first, count in ((train, 1, 4), (unseen, 11, 1)):
        made = run(
            "record", file, "--games", count, "--first", first, "--steps", 6, "--folder", games
        )
        assert (made.exit_code, made.stdout) == (0, f"{file}\n"), made.output
    assert "error:" in run("fidelity", "coin", unseen).stderr
    learned = run("learn", "coin", train, "--epochs", 1, "--accept")
    assert learned.exit_code == 0, learned.output
    assert "skill.world.coin" in learned.stdout
    measured = run("fidelity", "coin", unseen)
    assert measured.exit_code == 0, measured.output
    assert [line.split()[:2] for line in measured.stdout.splitlines()[:2]] == [
        ["WHAT", "SHARE"],
        ["exact", "match"],
    ]
    checked = run("verify", "coin", "go east", "--task", "Win.", "--state", "room: hall", "--json")
    assert checked.exit_code in (0, 1), checked.output
    assert '"outcome"' in checked.stdout
