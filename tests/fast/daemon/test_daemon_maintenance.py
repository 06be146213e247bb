"""The daemon's maintenance: it ends probations, makes backups, collects garbage and reports each."""

from __future__ import annotations

import os

from daemon_makers import World

import personalpeft
from personalpeft import Runtime
from personalpeft.errors import CardError
from personalpeft_app.daemon.journal import LogEntry, Outcome
from personalpeft_app.daemon.worker import Worker


def messages(world: World, what: str) -> list[str]:
    return [line.message for line in world.log if line.kind == what]


def test_a_probation_decided_during_another_learn_ends_within_the_hour(
    world: World,
) -> None:
    world.correct(9)
    world.run_for(hours=1)
    with world.open_runtime() as runtime:
        ada = runtime.user("ada")
        assert ada.revisions()[0].probation
        # A running learn holds the lease, so feedback alone cannot end the probation.
        with runtime._services.store.leases.acquire("learn-ada"):
            for number in range(6):
                ada.feedback(ada.chat(f"another question {number}", temperature=0), rating=-1)
        assert ada.stack().entries
    world.advance(hours=1)
    world.run_once()
    with world.open_runtime() as runtime:
        assert runtime.user("ada").stack().entries == ()
    (message,) = messages(world, "probation")
    assert message.startswith("ada")


def test_a_damaged_adapter_of_one_user_ends_no_probation_of_the_others(world: World) -> None:
    with world.open_runtime() as runtime:
        for name, learns in (("ada", 2), ("bo", 1)):
            user = runtime.user(name)
            for learn in range(learns):
                for number in range(6):
                    asked = user.chat(f"question {learn} {number}", temperature=0)
                    user.feedback(asked, edit=f"Ahoy! Answer {number}. Arrr!")
                assert user.learn().probation
            with runtime._services.store.leases.acquire(f"learn-{name}"):
                for number in range(8):
                    user.feedback(user.chat(f"later {number}", temperature=0), rating=-1)
        first, _ = runtime.user("ada").revisions()
        blobs = runtime._services.store.blobs
        blobs.expected_path(first.digest).unlink()
    world.advance(hours=1)
    world.run_once()
    with world.open_runtime() as runtime:
        assert runtime.user("bo").stack().entries == ()
        assert runtime.user("ada").stack().entries
    failed = [line for line in world.log if line.kind == "probation"]
    assert [line.outcome for line in failed] == [Outcome.FAILED]


def test_a_backup_is_made_daily_and_only_the_newest_are_kept(world: World) -> None:
    world.set(backup="copies", copies=2)
    world.correct(9)
    world.run_for(hours=24 * 5, every=180)
    assert len(messages(world, "backup")) >= 5
    copies = sorted((world.home / "copies").glob("copy-*"))
    assert len(copies) == 2
    with personalpeft.open(copies[-1], base="fake", backend="fake") as runtime:
        assert len(runtime.user("ada", create=False).revisions()) == 1
        assert runtime.verify() == ()


def test_tasks_run_while_the_base_is_missing(world: World) -> None:
    world.set(backup="copies")
    world.correct(9)
    log: list[LogEntry] = []

    def missing() -> Runtime:
        raise CardError("The card is missing.")

    with world.open_runtime() as runtime:
        worker = Worker(
            runtime, missing, tell=log.append, clock=world.clock, sensors=lambda: world.reading
        )
        for _ in range(26):
            world.advance(hours=1)
            worker.run_once()
    assert list((world.home / "copies").glob("copy-*"))
    (failed,) = [each for each in log if each.kind == "learn"]
    assert failed.outcome == Outcome.FAILED
    assert "The card is missing." in failed.message


def test_garbage_is_collected(world: World) -> None:
    world.correct(9)
    world.run_for(hours=1)
    with world.open_runtime() as runtime:
        stray = runtime._services.store.blobs.put("ada", b"an adapter that no revision names")
        path = runtime._services.store.blobs.path(stray)
    os.utime(path, (0, 0))
    world.run_for(hours=26)
    assert not path.exists()
    assert messages(world, "collect")


def test_a_failed_task_is_reported_and_the_others_run(world: World) -> None:
    world.correct(9)
    (world.home / "taken").write_text("a file, where a folder should be made")
    world.set(backup="taken", report_at="07:00")
    world.run_for(hours=24)
    backups = [entry for entry in world.log if entry.kind == "backup"]
    assert {entry.outcome for entry in backups} == {Outcome.FAILED}
    assert messages(world, "report")
    assert world.learn_count() == 1


def test_a_backup_whose_drive_was_away_is_made_when_the_drive_is_back(world: World) -> None:
    drive = world.home.parent / "drive"
    drive.write_text("nothing is mounted here")
    world.correct(2)
    world.set(backup=str(drive / "copies"))
    world.run_for(hours=20)  # 12:00 to 08:00
    failed = [entry for entry in world.log if entry.kind == "backup"]
    # One entry for the time of day before the start, and one for this night's.
    assert [entry.outcome for entry in failed] == [Outcome.FAILED] * 2
    coming = {each.action: each.reason for each in world.run_once().upcoming}
    assert coming["backup"] == "the last try failed"
    drive.unlink()
    drive.mkdir()
    world.run_for(hours=1.5)
    assert len(list(drive.glob("copies/copy-*"))) == 1
    world.run_for(hours=12)
    assert len(list(drive.glob("copies/copy-*"))) == 1
