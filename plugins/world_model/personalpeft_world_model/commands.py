"""The command ``personalpeft world``: data goes to stdout, progress and errors to stderr."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from personalpeft_app import session
from personalpeft_app.interrupts import long_call
from personalpeft_app.options import GlobalOptions, Group, command, option
from personalpeft_app.output import emit, format_table, info
from personalpeft_app.progress import Display
from personalpeft_world_model.environment import Outcome, State
from personalpeft_world_model.model import (
    DEFAULT_TRAINING,
    MAX_STATE_TOKENS,
    Training,
    WorldModel,
)
from personalpeft_world_model.recording import record as record_games
from personalpeft_world_model.textworld_games import Kind, TextWorldGame, make_game
from personalpeft_world_model.trajectories import Trajectory, read_jsonl, write_jsonl

if TYPE_CHECKING:
    from personalpeft_world_model.fidelity import Fidelity, Rate

_FILES = click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path, dir_okay=False)
)


@click.group(
    "world",
    cls=Group,
    examples=("world record games.jsonl --game coin --games 100", "world learn coin games.jsonl"),
)
def world() -> None:
    """Teach a layer what an environment does next, and check actions with it.

    Give a world model a user of its own: --user world.
    """


@command(
    "record",
    examples=(
        "world record train.jsonl --game coin --games 300",
        "world record unseen.jsonl --game coin --games 30 --first 301",
    ),
)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@option("--game", type=click.Choice(get_args(Kind)), default="coin", help="The kind of games.")
@option("--games", type=click.IntRange(1), default=300, help="How many games.")
@option("--first", type=click.IntRange(0), default=1, help="The seed of the first game.")
@option("--steps", type=click.IntRange(1), default=20, help="How many steps of each game.")
@option("--seed", type=int, default=0, help="Decides policies and actions.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("games"),
    show_default=True,
    help="Where the files of games are kept.",
)
def record(
    common: GlobalOptions,
    file: Path,
    game: str,
    games: int,
    first: int,
    steps: int,
    seed: int,
    folder: Path,
) -> None:
    """Play games of TextWorld, and write what happens to FILE, a trajectory a line.

    A third of the trajectories follows a solution, a third is random, and the others err at times.
    Needs the package textworld. Making a game takes about a second.
    """
    with Display(common) as display:

        def play() -> Iterator[Trajectory]:
            for number in range(games):
                display("Playing", number / games)
                path = make_game(game, first + number, folder)
                yield from record_games([TextWorldGame(path)], seed=seed, steps=steps)

        count = write_jsonl(file, play())
    emit(common, {"file": file, "trajectories": count, "games": games}, str(file))
    info(common, f"{count} trajectories of {games} games. Next: personalpeft world learn")


@command(
    "learn",
    examples=(
        "world learn coin train.jsonl --user world",
        "world learn coin train.jsonl more.jsonl --epochs 2 --seconds 600",
    ),
)
@click.argument("name")
@_FILES
@option("--epochs", type=click.FloatRange(0.01), default=DEFAULT_TRAINING.epochs, help="Passes.")
@option(
    "--batch-size",
    type=click.IntRange(1),
    default=DEFAULT_TRAINING.batch_size,
    help="Transitions a step.",
)
@option("--rank", type=click.IntRange(1), default=DEFAULT_TRAINING.rank, help="Of the layer.")
@click.option("--seconds", type=float, help="Train for at most this time.")
@click.option("--steps", type=int, help="Train for at most this number of steps.")
@click.option("--accept", is_flag=True, help="Make the result live even if the gate refuses it.")
def learn(
    common: GlobalOptions,
    name: str,
    files: tuple[Path, ...],
    epochs: float,
    batch_size: int,
    rank: int,
    **options: Any,
) -> None:
    """Teach the layer skill.world.NAME the trajectories of FILES, and learn them.

    Prints a report. The gate compares predictions of whole held-out games. What a file
    repeats is taught once, so an interrupted learn goes on with the same command.
    """
    trajectories = [each for file in files for each in read_jsonl(file)]
    training = Training(epochs=epochs, batch_size=batch_size, rank=rank)
    with session.open_user(common, "make") as user, long_call(common) as watched:
        model = WorldModel(user, name)
        info(common, f"{model.teach(trajectories)} new transitions for {model.layer}.")
        report = model.learn(training, **watched, **options)
    emit(common, report, str(report))


@command("fidelity", examples=("world fidelity coin unseen.jsonl --user world",))
@click.argument("name")
@_FILES
def fidelity(common: GlobalOptions, name: str, files: tuple[Path, ...]) -> None:
    """Measure how often the model NAME predicts the next state of FILES word for word.

    Beside it: what copying the state before would get right, and how often the next state was seen
    before. Record games that the model was not trained on.
    """
    from personalpeft_world_model.fidelity import measure_fidelity

    trajectories = [each for file in files for each in read_jsonl(file)]
    display = Display(common)
    with session.open_user(common, "change", display) as user, display:
        measured = measure_fidelity(
            WorldModel(user, name),
            trajectories,
            progress=lambda done: display("Predicting", done),
        )
    emit(common, measured, _fidelity_table(measured))


@command(
    "verify",
    examples=('world verify coin "go east" --task "$TASK" --state "$STATE" --user world',),
)
@click.argument("name")
@click.argument("action")
@click.option("--task", required=True, help="The task, as the environment states it.")
@click.option("--state", required=True, help="The state before the action.")
def verify(common: GlobalOptions, name: str, action: str, task: str, state: str) -> None:
    """Print the state that the model NAME expects after ACTION.

    The exit code is 1 if it expects that the task is lost, or cannot tell, else 0.
    """
    display = Display(common)
    with session.open_user(common, "change", display) as user, display:
        expected = WorldModel(user, name).predict(task, State(state), action)
    data = {"action": action, "state": expected.text, "outcome": expected.outcome}
    emit(common, data, expected.written)
    if expected.outcome is Outcome.UNKNOWN:
        info(common, f"The state was cut at {MAX_STATE_TOKENS} tokens, so its outcome is unknown.")
    raise click.exceptions.Exit(int(expected.outcome in (Outcome.LOST, Outcome.UNKNOWN)))


def _fidelity_table(measured: Fidelity) -> str:
    rows: list[tuple[str, Rate]] = [
        ("exact match", measured.matched),
        ("copy of the state before", measured.copied),
        ("state seen before", measured.seen),
        *((f"step {number}", share) for number, share in measured.by_step.items()),
        *measured.by_environment.items(),
    ]
    cells = [(name, f"{s.value:.1%}", str(s.right), str(s.asked)) for name, s in rows]
    return str(format_table(("WHAT", "SHARE", "RIGHT", "OF"), cells))


world.add_section("World models", (record, learn, fidelity, verify))
