"""The command's output, exit codes and handling of Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from click.testing import CliRunner, Result
from ray_makers import USERS, World

from personalpeft_ray_updates.__main__ import command

pytestmark = pytest.mark.exhaustive

ON_THE_FAKE = ("--base", "fake", "--backend", "fake")


def run(world: World, *words: str) -> Result:
    return CliRunner().invoke(command, ["--home", str(world.home), *ON_THE_FAKE, *words])


@pytest.mark.usefixtures("nodes")
def test_all_users_with_new_signals_learn_with_a_text_or_json_report(
    world: World,
) -> None:
    world.correct(USERS[:2])
    with world.open_runtime() as runtime:
        runtime.user("silent")
    result = run(world, "--all")
    assert (result.exit_code, result.stdout.count("PROMOTED")) == (0, 2)
    assert "2 of 2" in result.stderr
    assert "silent" not in result.output
    again = run(world, "--all")
    assert (again.exit_code, again.stdout) == (0, "")
    assert again.stderr
    named = run(world, "user-0", "nobody", "--json", "--workers", "1")
    assert (named.exit_code, named.stderr) == (0, "")
    assert [each["error"] for each in json.loads(named.stdout)] == ["NothingToLearn", "NotFound"]


@pytest.mark.usefixtures("nodes")
def test_a_time_limit_stops_the_run(world: World) -> None:
    world.correct(USERS[:1])
    result = run(world, "user-0", "--seconds", "0.001")
    assert result.exit_code == 130


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "--all"),
        (("user-0", "--all"), 2, "--all"),
        (("user-0", "--workers", "none"), 2, "workers"),
        (("user-0", "user-0"), 2, "once"),
        (("User 0",), 2, "a-z"),
        (("user-0", "--backend", "fak"), 3, "fake"),
    ],
)
def test_a_usage_error_prints_a_line_a_hint_and_an_exit_code(
    world: World, words: Sequence[str], code: int, message: str
) -> None:
    world.correct(USERS[:1])
    result = run(world, *words)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_home_is_a_json_error(world: World) -> None:
    result = run(world, "user-0", "--json")
    assert (result.exit_code, result.stdout) == (7, "")
    assert json.loads(result.stderr)["error"]["kind"] == "HomeError"


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nonsense"])
def test_an_address_without_a_ray_is_an_error_at_once(world: World, address: str) -> None:
    world.correct(USERS[:1])
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


def test_help_works_without_starting_ray() -> None:
    result = CliRunner().invoke(command, ["--help"])
    assert result.exit_code == 0
    for word in ("--workers", "--at-once", "--address", "--retries", "Ctrl-C"):
        assert word in result.stdout


def test_ctrl_c_keeps_what_was_recorded_and_the_next_run_learns_the_rest(
    world: World, alone: dict[str, object]
) -> None:
    world.correct()
    words = ("--home", str(world.home), *ON_THE_FAKE, "--workers", "1", "--at-once", "1", *USERS)
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
    message = child.stderr.readline()
    assert "user-0" in message
    # A terminal sends it to the command and to its whole process group.
    os.killpg(child.pid, signal.SIGINT)
    out, message = child.communicate(timeout=60)
    assert child.returncode == 130, message
    assert 1 <= out.count("PROMOTED") == 4 - out.count("NOT LEARNED") < 4
    with world.open_runtime() as runtime:
        runtime.learn_many(
            [user.id for user in runtime.users() if runtime.user(user.id).pending().triggers]
        )
    assert world.live_revisions() == alone
    world.recorded_once()
