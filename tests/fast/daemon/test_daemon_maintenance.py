"""What a daemon does beside learning: it ends probations, makes copies, takes away what nothing needs, and says so."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_makers import World

import personalpeft
from personalpeft_app.daemon.journal import Outcome


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "cache"
    (place / "logs").mkdir(parents=True)
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place))
    return place


def lines(world: World, what: str) -> list[str]:
    return [line.message for line in world.told if line.kind == what]


def test_a_probation_that_feedback_decided_while_another_learned_is_ended_within_the_hour(
    world: World,
) -> None:
    world.say(9)
    world.goes_on(hours=1)
    with world.opened() as runtime:
        ada = runtime.user("ada")
        assert ada.revisions()[0].probation
        # Whoever learns holds the lease, so that feedback alone cannot end it.
        with runtime._services.store.leases.acquire("learn-ada"):
            for number in range(6):
                ada.feedback(ada.chat(f"another question {number}", temperature=0), rating=-1)
        assert ada.stack().entries
    world.pass_(hours=1)
    world.round()
    with world.opened() as runtime:
        assert runtime.user("ada").stack().entries == ()
    (said,) = lines(world, "probation")
    assert said.startswith("ada")


def test_a_day_leaves_a_copy_that_is_a_home_and_only_so_many(world: World) -> None:
    world.set(backup="copies", copies=2)
    world.say(9)
    world.goes_on(hours=24 * 5, every=180)
    assert len(lines(world, "backup")) >= 5
    copies = sorted((world.home / "copies").iterdir())
    assert len(copies) == 2
    with personalpeft.open(copies[-1], base="fake", backend="fake") as runtime:
        assert len(runtime.user("ada", create=False).revisions()) == 1
        assert runtime.verify() == ()


def test_old_logs_of_bugs_go_and_nothing_else_does(world: World, cache: Path) -> None:
    world.say(1)
    old, new, other = (cache / "logs" / name for name in ("bug-1.log", "bug-2.log", "mine.log"))
    for path in (old, new, other):
        path.write_text("x")
    for path, days in ((old, 31), (new, 29), (other, 99)):
        os.utime(path, (world.wall.timestamp() - days * 86400,) * 2)
    world.pass_(minutes=1)
    world.round()
    assert [path.exists() for path in (old, new, other)] == [False, True, True]
    assert len(lines(world, "clean")) == 1


def test_what_nothing_needs_is_taken_away(world: World) -> None:
    world.say(9)
    world.goes_on(hours=1)
    with world.opened() as runtime:
        stray = runtime._services.store.blobs.put(b"an adapter that no revision names")
        path = runtime._services.store.blobs.path(stray)
    os.utime(path, (0, 0))
    world.goes_on(hours=26)
    assert not path.exists()
    assert lines(world, "collect")


def test_a_chore_that_fails_is_said_and_the_others_are_done(world: World) -> None:
    world.say(9)
    (world.home / "taken").write_text("a file, where a folder should be made")
    world.set(backup="taken", morning="07:00")
    world.goes_on(hours=24)
    backups = [entry for entry in world.told if entry.kind == "backup"]
    assert {entry.outcome for entry in backups} == {Outcome.FAILED}
    assert lines(world, "report")
    assert world.learns() == 1
