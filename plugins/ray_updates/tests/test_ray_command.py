"""The command: what it prints where, how it ends, and Ctrl-C on a Ray of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner, Result
from ray_makers import PEOPLE, World

from personalpeft_ray_updates.__main__ import command

pytestmark = pytest.mark.exhaustive

ON_THE_FAKE = ("--base", "fake", "--backend", "fake")


def run(world: World, *words: str) -> Result:
    return CliRunner().invoke(command, ["--home", str(world.home), *ON_THE_FAKE, *words])


@pytest.mark.usefixtures("ray_here")
def test_everybody_who_has_something_to_learn_does_and_is_told_as_text_or_as_data(
    world: World,
) -> None:
    world.say(PEOPLE[:2])
    with world.opened() as runtime:
        runtime.user("silent")
    told = run(world, "--all")
    assert (told.exit_code, told.stdout.count("PROMOTED")) == (0, 2)
    assert "2 of 2" in told.stderr
    assert "silent" not in told.output
    again = run(world, "--all")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr
    named = run(world, "user-0", "nobody", "--json", "--workers", "1")
    assert (named.exit_code, named.stderr) == (0, "")
    assert [each["error"] for each in json.loads(named.stdout)] == ["NothingToLearn", "NotFound"]


@pytest.mark.usefixtures("ray_here")
def test_when_time_is_up_it_stops_and_says_that_it_goes_on(world: World) -> None:
    world.say(PEOPLE[:1])
    told = run(world, "user-0", "--seconds", "0.001")
    assert told.exit_code == 130


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "--all"),
        (("user-0", "--all"), 2, "--all"),
        (("user-0", "--workers", "none"), 2, "workers"),
        (("user-0", "user-0"), 2, "once"),
        (("User 0",), 2, "a-z"),
        (("user-0", "--backend", "fak"), 3, "fake"),
    ],
)
def test_a_mistake_is_a_line_and_a_hint_and_an_exit_code(
    world: World, words: Sequence[str], code: int, said: str
) -> None:
    world.say(PEOPLE[:1])
    told = run(world, *words)
    assert (told.exit_code, told.stdout) == (code, "")
    assert said in told.stderr
    assert "Traceback" not in told.stderr


def test_a_home_that_is_not_there_is_an_error_that_a_program_can_read(world: World) -> None:
    told = run(world, "user-0", "--json")
    assert (told.exit_code, told.stdout) == (7, "")
    assert json.loads(told.stderr)["error"]["kind"] == "HomeError"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_without_a_ray_is_told_at_once(world: World, address: str) -> None:
    world.say(PEOPLE[:1])
    words = ("--home", str(world.home), *ON_THE_FAKE, "user-0", "--address", address)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "personalpeft_ray_updates", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (3, "")
    assert address in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_says_what_it_does_without_starting_anything() -> None:
    told = CliRunner().invoke(command, ["--help"])
    assert told.exit_code == 0
    for word in ("--workers", "--at-once", "--address", "Ctrl-C"):
        assert word in told.stdout


def test_ctrl_c_on_a_ray_of_its_own_leaves_everything_to_go_on_with(
    world: World, alone: dict[str, object]
) -> None:
    world.say()
    words = ("--home", str(world.home), *ON_THE_FAKE, "--workers", "1", "--at-once", "1", *PEOPLE)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "personalpeft_ray_updates", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    assert child.stderr is not None
    said = child.stderr.readline()
    assert "user-0" in said
    # As a terminal does it: to the command and to all that it started.
    os.killpg(child.pid, signal.SIGINT)
    out, said = child.communicate(timeout=60)
    assert child.returncode == 130, said
    assert 1 <= out.count("PROMOTED") == 4 - out.count("NOT LEARNED") < 4
    with world.opened() as runtime:
        runtime.learn_many(
            [user.id for user in runtime.users() if runtime.user(user.id).pending().news]
        )
    assert world.live() == alone
    world.published_once()
