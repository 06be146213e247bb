"""kill -9 at any moment: nothing that was promised is lost, heads stay valid, and what was half done is finished the same."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, correct, opened, python_environment, quick_card

from personalpeft import Runtime

pytestmark = pytest.mark.exhaustive

DOOMED = Path(__file__).with_name("doomed.py")
KILLS = 20
# On the fake backend a build has 26 to 30 steps; both "Reading" and "Judging" are reported when they begin.
POINTS = [
    ("Reading", 1),
    *(("Learning", n) for n in (1, 4, 5, 6, 11, 20)),
    ("Judging", 1),
    ("Judging", 2),
]
TORCH_POINTS = [("Learning", 3), ("Learning", 9), ("Judging", 1)]


def start(cache: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(DOOMED), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(cache),
    )


def killed_after(
    lines: int, seconds: float, cache: Path, *arguments: object
) -> Iterator[tuple[str, str]]:
    """Yield what the process printed before it was killed, some seconds after that many lines.

    Lines and not time alone: on a busy machine a process does nothing worth killing for a while.
    """
    with start(cache, *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        if first != "open\n":
            pytest.fail(f"{first}{process.stderr.read()}")
        said = [process.stdout.readline() for _ in range(lines)]
        threading.Timer(seconds, process.kill).start()
        said += process.stdout.read().splitlines(keepends=True)
        process.wait()
        assert process.returncode == -signal.SIGKILL, process.stderr.read()
        # A line without an end was cut in the middle of saying it.
        for line in said:
            if line.endswith("\n"):
                kind, _, what = line.strip().partition(" ")
                yield kind, what


def faults(runtime: Runtime) -> list[str]:
    """What verify finds, but for what a write that was cut short may leave behind."""
    return [
        f"{each.where}: {each.fault}"
        for each in runtime.verify()
        if not each.remedy.startswith("Harmless")
    ]


def test_nothing_that_was_promised_is_lost_whenever_the_process_is_killed(
    tmp_path: Path, shared_cache: Path
) -> None:
    home, chance = tmp_path / "home", random.Random(20260501)
    promised: dict[str, set[str]] = {"turn": set(), "signal": set(), "revision": set()}
    heads: list[str] = ["None"]
    for _ in range(KILLS):
        for kind, what in killed_after(
            chance.randrange(40), chance.uniform(0.0, 0.05), shared_cache, "live", home
        ):
            if kind == "head":
                heads.append(what)
            else:
                promised[kind].add(what)
        with opened(home) as runtime:
            ada = runtime.user("ada")
            assert promised["turn"] <= {turn.id for turn in ada.turns()}
            assert promised["signal"] <= {each.id for each in ada.signals(current=False)}
            revisions = {revision.id: revision for revision in ada.revisions()}
            assert promised["revision"] <= set(revisions)
            # The last move that was told is in the history, and at most one more came after it.
            moves = ["None", *(str(move.after) for move in ada.history())]
            assert heads == moves[: len(heads)]
            assert len(moves) <= len(heads) + 1
            heads = moves
            for entry in ada.stack().entries:
                assert revisions[entry.revision].digest == entry.digest
                assert runtime.engine().read_adapter(entry.digest).manifest.layer == "style"
            assert faults(runtime) == []
            assert ask(ada).text
            promised["turn"].add(ada.turn("last").id)
    assert len(promised["signal"]) > 3 * KILLS
    assert len(heads) > 4


def lived(home: Path, base: str | Path) -> None:
    with opened(home, base) as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)


def uninterrupted(home: Path, base: str | Path) -> str | None:
    lived(home, base)
    with opened(home, base) as runtime:
        return runtime.user("ada").learn().revision


def test_a_learn_that_was_killed_is_finished_with_the_same_bytes(
    tmp_path: Path, shared_cache: Path
) -> None:
    expected = uninterrupted(tmp_path / "whole", "fake")
    for stage, reports in POINTS:
        home = tmp_path / f"{stage}-{reports}"
        lived(home, "fake")
        finish(home, "fake", [(stage, reports)], shared_cache, expected)


def test_a_learn_that_is_killed_again_and_again_is_finished_with_the_same_bytes(
    tmp_path: Path, shared_cache: Path
) -> None:
    expected = uninterrupted(tmp_path / "whole", "fake")
    lived(tmp_path / "home", "fake")
    finish(
        tmp_path / "home", "fake", [("Learning", 7)] * 3 + [("Judging", 1)], shared_cache, expected
    )


def test_on_the_torch_backend_too(tmp_path: Path, shared_cache: Path) -> None:
    card = quick_card(tmp_path)
    expected = uninterrupted(tmp_path / "whole", card)
    lived(tmp_path / "home", card)
    finish(tmp_path / "home", card, TORCH_POINTS, shared_cache, expected)


def finish(
    home: Path, base: str | Path, points: list[tuple[str, int]], cache: Path, expected: str | None
) -> None:
    """Kills a learn at each of the points in turn, looks at the home each time, and then lets one come to its end."""
    killed = 0
    for stage, reports in points:
        with start(cache, "learn", home, base, stage, reports) as process:
            said, wrong = process.communicate()
        with opened(home, base) as runtime:
            ada = runtime.user("ada")
            if process.returncode == -signal.SIGKILL:
                killed += 1
                assert ada.history() == ()
                assert ada.revisions() == ()
                assert ada.reports() == ()
            else:
                assert said == f"revision {expected}\n", wrong
            assert faults(runtime) == []
    assert killed
    with opened(home, base) as runtime:
        ada = runtime.user("ada")
        if not ada.revisions():
            ada.learn()
        assert [revision.id for revision in ada.revisions()] == [expected]
        assert [move.after for move in ada.history()] == [expected]
        assert runtime.verify() == ()
