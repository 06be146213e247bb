"""After ``kill -9`` nothing promised is lost, heads are valid, and interrupted work ends with the
same bytes.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_makers import ask, correct, open_runtime, python_environment, quick_card

from personalpeft import Runtime

pytestmark = pytest.mark.exhaustive

KILLED_PROCESS = Path(__file__).with_name("killed_process.py")
KILLS = 20
# On the fake backend a build has 26 to 30 steps. "Reading" and "Judging" are reported at their
# beginning.
POINTS = [
    ("Reading", 1),
    *(("Learning", n) for n in (1, 4, 5, 6, 11, 20)),
    ("Judging", 1),
    ("Judging", 2),
]
TORCH_POINTS = [("Learning", 3), ("Learning", 9), ("Judging", 1)]


def start(cache: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(KILLED_PROCESS), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=python_environment(cache),
    )


def lines_before_kill(
    lines: int, seconds: float, cache: Path, *arguments: object
) -> Iterator[tuple[str, str]]:
    """Yield what the process printed before it was killed, some seconds after that many lines.

    Lines and not time alone, since a process on a busy machine may have done nothing yet.
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
        # A line without an end was cut off by the kill.
        for line in said:
            if line.endswith("\n"):
                kind, _, what = line.strip().partition(" ")
                yield kind, what


def problems(runtime: Runtime) -> list[str]:
    """Return what ``verify`` finds, except harmless leftovers of an interrupted write."""
    return [
        f"{each.where}: {each.fault}"
        for each in runtime.verify()
        if not each.remedy.startswith("Harmless")
    ]


def test_nothing_promised_is_lost_whenever_the_process_is_killed(
    tmp_path: Path, shared_cache: Path
) -> None:
    home, chance = tmp_path / "home", random.Random(20260501)
    promised: dict[str, set[str]] = {"turn": set(), "signal": set(), "revision": set()}
    heads: list[str] = ["None"]
    for _ in range(KILLS):
        for kind, what in lines_before_kill(
            chance.randrange(40), chance.uniform(0.0, 0.05), shared_cache, "live", home
        ):
            if kind == "head":
                heads.append(what)
            else:
                promised[kind].add(what)
        with open_runtime(home) as runtime:
            ada = runtime.user("ada")
            assert promised["turn"] <= {turn.id for turn in ada.turns()}
            assert promised["signal"] <= {each.id for each in ada.signals(current=False)}
            revisions = {revision.id: revision for revision in ada.revisions()}
            assert promised["revision"] <= set(revisions)
            # The last reported move is in the history, and at most one more came after it.
            moves = ["None", *(str(move.after) for move in ada.history())]
            assert heads == moves[: len(heads)]
            assert len(moves) <= len(heads) + 1
            heads = moves
            for entry in ada.stack().entries:
                assert revisions[entry.revision].digest == entry.digest
                assert runtime.engine().read_adapter(entry.digest).manifest.layer == "style"
            assert problems(runtime) == []
            assert ask(ada).text
            promised["turn"].add(ada.turn("last").id)
    assert len(promised["signal"]) > 3 * KILLS
    assert len(heads) > 4


def record_edits(home: Path, base: str | Path) -> None:
    with open_runtime(home, base) as runtime:
        ada = runtime.user("ada")
        correct(ada, 6)


def learn_uninterrupted(home: Path, base: str | Path) -> str | None:
    record_edits(home, base)
    with open_runtime(home, base) as runtime:
        return runtime.user("ada").learn().revision


def test_killed_learn_is_finished_with_the_same_bytes(tmp_path: Path, shared_cache: Path) -> None:
    expected = learn_uninterrupted(tmp_path / "whole", "fake")
    for stage, reports in POINTS:
        home = tmp_path / f"{stage}-{reports}"
        record_edits(home, "fake")
        finish_after_kills(home, "fake", [(stage, reports)], shared_cache, expected)


def test_repeatedly_killed_learn_is_finished_with_the_same_bytes(
    tmp_path: Path, shared_cache: Path
) -> None:
    expected = learn_uninterrupted(tmp_path / "whole", "fake")
    record_edits(tmp_path / "home", "fake")
    finish_after_kills(
        tmp_path / "home", "fake", [("Learning", 7)] * 3 + [("Judging", 1)], shared_cache, expected
    )


def test_killed_learn_on_torch_is_finished_with_the_same_bytes(
    tmp_path: Path, shared_cache: Path
) -> None:
    card = quick_card(tmp_path)
    expected = learn_uninterrupted(tmp_path / "whole", card)
    record_edits(tmp_path / "home", card)
    finish_after_kills(tmp_path / "home", card, TORCH_POINTS, shared_cache, expected)


def finish_after_kills(
    home: Path, base: str | Path, points: list[tuple[str, int]], cache: Path, expected: str | None
) -> None:
    """Kill a learn at each of the points, check the home each time, then let a learn finish."""
    killed = 0
    for stage, reports in points:
        with start(cache, "learn", home, base, stage, reports) as process:
            said, wrong = process.communicate()
        with open_runtime(home, base) as runtime:
            ada = runtime.user("ada")
            if process.returncode == -signal.SIGKILL:
                killed += 1
                assert ada.history() == ()
                assert ada.revisions() == ()
                assert ada.reports() == ()
            else:
                assert said == f"revision {expected}\n", wrong
            assert problems(runtime) == []
    assert killed
    with open_runtime(home, base) as runtime:
        ada = runtime.user("ada")
        if not ada.revisions():
            ada.learn()
        assert [revision.id for revision in ada.revisions()] == [expected]
        assert [move.after for move in ada.history()] == [expected]
        assert runtime.verify() == ()
