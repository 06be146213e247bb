"""Learns on the nodes of a cluster equal learns alone; each is recorded once, whatever dies."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest
from ray_makers import USERS, NodeKiller, Nodes, World

from personalpeft import (
    BaseMismatch,
    HomeError,
    InvalidId,
    InvalidInput,
    NotFound,
    ServingFailed,
)
from personalpeft_ray_updates import RunStatus

Alone: TypeAlias = dict[str, tuple[str, ...]]

pytestmark = [pytest.mark.exhaustive]


def test_learns_are_spread_over_nodes_and_equal_learns_alone(
    world: World, alone: Alone, nodes: Nodes
) -> None:
    world.correct()
    world.set_pace(0.1)
    opened: set[str] = set()
    groups: set[tuple[str, ...]] = set()

    def observe(status: RunStatus) -> None:
        for worker in status.workers:
            groups.add(worker.users)
            if psutil.pid_exists(worker.pid):
                opened.update(each.path for each in psutil.Process(worker.pid).open_files())

    order = USERS[::-1]
    reports = world.learn(order, observe)
    assert [report.user for report in reports] == list(order)
    assert all(report.live for report in reports)
    assert world.live_revisions() == alone
    world.recorded_once()
    assert len(world.users_by_node) == 3
    assert groups == {(user,) for user in USERS}
    assert [len(world.statuses[-1].reports), world.statuses[-1].lost] == [len(USERS), 0]
    # No node opened the home, and each had a home of its own without a user left in it.
    assert any("/work/worker-" in path for path in opened)
    assert not any(path.startswith(str(world.folder)) for path in opened)
    for node_id in nodes.ids:
        folder = nodes.folders[node_id]
        assert not (folder / "home").exists()
        left = [path for path in folder.glob("work/*/home/**/*") if path.is_file()]
        assert left
        assert not any(b"Arrr" in path.read_bytes() for path in left)


def test_users_may_learn_in_one_pass(world: World, alone: Alone, nodes: Nodes) -> None:
    world.correct()
    world.set_pace(0.05)
    reports = world.learn(workers=1, at_once=3)
    assert all(report.live for report in reports)
    # The fake's training does not depend on who shares a pass.
    assert world.live_revisions() == alone
    world.recorded_once()
    sizes = {len(each.users) for status in world.statuses for each in status.workers}
    assert sizes == {3, 1}


def test_a_node_killed_midway_costs_a_learn_and_each_is_recorded_once(
    world: World, alone: Alone, nodes: Nodes
) -> None:
    world.correct()
    world.set_pace(0.2)
    killer = NodeKiller(nodes, lambda status: world.node_of("user-0"))
    reports = world.learn(progress=killer)
    assert all(report.live for report in reports)
    assert world.live_revisions() == alone
    world.recorded_once()
    assert len(killer.killed) == 1
    assert world.statuses[-1].lost == 1


def test_a_killed_process_leaves_nothing_once_its_node_learns_again(
    world: World, nodes: Nodes
) -> None:
    world.correct(USERS[:1])
    world.set_pace(0.2)
    killed: list[int] = []

    def kill(status: RunStatus) -> None:
        for worker in status.workers:
            if not killed and worker.stage == "Learning":
                killed.append(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    with nodes.replaced(1) as (only,):
        (report,) = world.learn(USERS[:1], kill)
        assert report.live
        assert killed
        folder = nodes.folders[only] / "work"
        assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
    world.recorded_once(USERS[:1])


def test_a_node_with_another_base_is_left_out(
    world: World, alone: Alone, nodes: Nodes, tmp_path: Path
) -> None:
    world.correct()
    other = nodes.add(PERSONALPEFT_RAY_BASE="tiny-random")
    try:
        reports = world.learn(workers=4)
    finally:
        nodes.kill(other)
    assert all(report.live for report in reports)
    assert world.live_revisions() == alone
    world.recorded_once()
    assert set(world.statuses[-1].refusals) <= {other}


def test_without_a_node_with_the_base_nothing_is_learned(world: World, nodes: Nodes) -> None:
    world.base = "tiny-random"
    with world.open_runtime() as runtime:
        for number in range(4):
            runtime.user("user-0").teach(f"question {number}", f"Ahoy! {number}")
    other = world.folder / "other.toml"
    card = _tiny_card().replace('name = "tiny-random"', 'name = "other"')
    other.write_text(card.replace("seed = 7", "seed = 8"))
    assert other.read_text() != card
    with (
        nodes.replaced(2, PERSONALPEFT_RAY_BASE=str(other)),
        pytest.raises(BaseMismatch, match="2 refused") as raised,
    ):
        world.learn(["user-0"])
    assert "PERSONALPEFT_RAY_BASE" in raised.value.hint
    assert world.live_revisions(["user-0"]) == {"user-0": ()}


def test_what_moved_meanwhile_is_not_overwritten(world: World, nodes: Nodes) -> None:
    world.correct(USERS[:2])
    world.set_pace(0.2)
    moved = threading.Event()

    def learn_at_home(status: RunStatus) -> None:
        if not moved.is_set() and world.node_of("user-0"):
            moved.set()
            with world.open_runtime() as runtime:
                assert runtime.user("user-0").learn().live

    reports = world.learn(USERS[:2], learn_at_home)
    assert moved.is_set()
    assert [report.error for report in reports] == ["LedgerMoved", ""]
    world.recorded_once(USERS[:2])


def test_two_runs_record_once(world: World, alone: Alone, nodes: Nodes) -> None:
    world.correct()
    world.set_pace(0.05)
    second: list[Any] = []
    other = World(world.folder, world.pace)
    thread = threading.Thread(target=lambda: second.extend(other.learn()))
    thread.start()
    first = world.learn()
    thread.join()
    errors = {report.error for report in (*first, *second)}
    assert errors <= {"", "LedgerMoved", "NothingToLearn", "Busy"}
    assert len(second) == len(USERS)
    assert world.live_revisions() == alone
    world.recorded_once()


def test_one_users_error_is_in_the_report_and_stops_no_other(world: World, nodes: Nodes) -> None:
    world.correct(USERS[:2])
    with world.open_runtime() as runtime:
        runtime.user("silent")
        with runtime._services.store.leases.acquire("learn-user-1"):
            reports = world.learn(["silent", "user-0", "nobody", "user-1"])
        assert [report.error for report in reports] == ["NothingToLearn", "", "NotFound", "Busy"]
        assert [summary.id for summary in runtime.users()] == ["silent", "user-0", "user-1"]
        (report,) = world.learn(["user-1"], max_bundle_mb=1)
        assert report.live
    world.recorded_once(["user-0", "user-1"])


def test_a_user_larger_than_allowed_is_not_sent(world: World, nodes: Nodes) -> None:
    world.correct(USERS[:2])
    with world.open_runtime() as runtime:
        for number in range(24):
            text = random.Random(number).randbytes(45_000).hex()
            runtime.user("user-0").teach(text, "Too long.", skill="email")
    reports = world.learn(USERS[:2], max_bundle_mb=1)
    assert [report.error for report in reports] == ["InvalidInput", ""]
    assert "MB" in reports[0].reason


@pytest.mark.parametrize(
    ("users", "more", "error"),
    [
        (["user-0", "user-0"], {}, InvalidInput),
        ("user-0", {}, InvalidInput),
        (["User 0"], {}, InvalidId),
        (["user-0"], {"workers": 0}, InvalidInput),
        (["user-0"], {"at_once": 0}, InvalidInput),
        (["user-0"], {"cpus": 0}, InvalidInput),
        (["user-0"], {"retries": -1}, InvalidInput),
        (["user-0"], {"gpus": float("nan")}, InvalidInput),
        (["user-0"], {"gpus": 1.0}, InvalidInput),
        (["user-0"], {"cpus": 2}, InvalidInput),
    ],
)
def test_an_invalid_run_is_refused_and_nothing_is_learned(
    world: World, nodes: Nodes, users: Any, more: dict[str, Any], error: type[Exception]
) -> None:
    world.correct(["user-0"])
    with pytest.raises(error):
        world.learn(users, **more)
    assert world.live_revisions(["user-0"]) == {"user-0": ()}


def test_a_missing_home_or_base_is_an_error_before_a_task_starts(
    world: World, nodes: Nodes
) -> None:
    with pytest.raises(HomeError):
        world.learn()
    assert not world.home.exists()
    world.correct(["user-0"])
    world.base = "nowhere"
    with pytest.raises(NotFound):
        world.learn()
    assert world.statuses == []


def test_a_base_of_the_home_or_of_a_path_is_named_by_its_full_path(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft_ray_updates.run import _base_for_nodes

    world.correct(["user-0"])
    (world.home / "models").mkdir()
    card = world.home / "models" / "own.toml"
    card.write_text(_tiny_card().replace('name = "tiny-random"', 'name = "of-the-home"'))
    monkeypatch.chdir(world.home)
    with world.open_runtime() as runtime:
        assert _base_for_nodes(runtime, "of-the-home") == str(card)
        assert _base_for_nodes(runtime, Path("models/own.toml")) == str(card)
        assert _base_for_nodes(runtime, "tiny-random") == "tiny-random"
        assert _base_for_nodes(runtime, "nowhere") == "nowhere"


def test_a_wrong_card_of_the_home_keeps_no_other_base_from_learning(
    world: World, nodes: Nodes
) -> None:
    world.correct(USERS[:1])
    (world.home / "models").mkdir()
    (world.home / "models" / "wrong.toml").write_text("name = 1")
    (report,) = world.learn(USERS[:1])
    assert report.live


def test_no_named_user_means_no_learn(world: World) -> None:
    world.correct(["user-0"])
    assert world.learn([]) == ()


def test_a_stopped_run_records_nothing_more_and_the_next_learns(
    world: World, alone: Alone, nodes: Nodes
) -> None:
    world.correct()
    world.set_pace(0.3)
    reports = world.learn(cancelled=lambda: world.node_of("user-0") is not None)
    assert {report.error for report in reports} == {"Cancelled"}
    assert all(report.reason for report in reports)
    assert world.live_revisions() == dict.fromkeys(USERS, ())
    world.pace.unlink()
    assert all(report.live for report in world.learn())
    assert world.live_revisions() == alone
    world.recorded_once()


@pytest.mark.timeout(60, func_only=True)
def test_a_stopped_run_ends_also_if_a_group_of_users_is_lost_then(
    world: World, nodes: Nodes
) -> None:
    world.correct(USERS[:2])
    # Longer than the time that learns get to end after a stop.
    world.set_pace(30)
    stops = threading.Event()
    killed: set[int] = set()

    def kill_stopped(status: RunStatus) -> None:
        for worker in status.workers:
            if stops.is_set() and worker.pid not in killed:
                killed.add(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    def cancelled() -> bool:
        if world.node_of("user-0"):
            stops.set()
        return stops.is_set()

    reports = world.learn(
        USERS[:2], kill_stopped, cancelled=cancelled, workers=1, at_once=2, retries=0
    )
    assert killed
    assert [report.error for report in reports] == ["Cancelled", "Cancelled"]
    assert world.live_revisions(USERS[:2]) == dict.fromkeys(USERS[:2], ())


def test_a_user_whose_learn_kills_processes_is_given_up_and_the_others_learn(
    world: World, nodes: Nodes
) -> None:
    world.correct(USERS[:3])
    world.set_pace(0.1)
    killed: set[int] = set()

    def kill(status: RunStatus) -> None:
        for worker in status.workers:
            if "user-1" in worker.users and worker.pid not in killed:
                killed.add(worker.pid)
                os.kill(worker.pid, signal.SIGKILL)

    reports = world.learn(USERS[:3], kill, retries=2)
    assert [report.error for report in reports] == ["", "ServingFailed", ""]
    assert "every try" in reports[1].reason
    assert len(killed) == 3
    world.recorded_once(["user-0", "user-2"])
    world.pace.unlink()
    (report,) = world.learn(["user-1"])
    assert report.live
    world.recorded_once(USERS[:3])


def test_a_bug_on_the_nodes_is_an_error_of_its_users(
    world: World, nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft_ray_updates import cluster

    def broken(*arguments: object) -> dict[str, Any]:
        raise ModuleNotFoundError("No module named 'personalpeft'")

    world.correct(["user-0"])
    monkeypatch.setattr(cluster, "learn_on_node", broken)
    (report,) = world.learn(["user-0"])
    assert report.error == ServingFailed.__name__
    assert "No module named" in report.reason
    assert world.live_revisions(["user-0"]) == {"user-0": ()}


def test_every_user_is_recorded_once_while_nodes_are_killed(
    world: World,
    nodes: Nodes,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three nodes, 24 users on a model, and a node killed every 20 seconds."""
    import time

    import torch

    torch.set_num_threads(1)
    # Like each node, this process computes the replies of the base itself.
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(world.folder / "cache"))
    users = [f"user-{number:02}" for number in range(24)]
    world.base = _slow_card(world)
    with world.open_runtime() as runtime, world.open_runtime("alone") as other:
        for user in users:
            # Demonstrations, not chats, so that no model is loaded to record them.
            for number in range(4):
                runtime.user(user).teach(
                    f"question {number} of {user}", f"Ahoy! {number} of {user}"
                )
            runtime.user(user).export(world.folder / user)
            other.import_user(world.folder / user)
        began = time.monotonic()
        alone = {user: other.user(user).learn().revision for user in users}
        seconds_alone = time.monotonic() - began
    chosen = random.Random(24)

    def choose(status: RunStatus) -> str:
        busy = {worker.node for worker in status.workers}
        return chosen.choice(sorted(busy & set(nodes.ids)) or nodes.ids)

    nodes.kernels = Path(os.environ["PERSONALPEFT_CACHE"]) / "kernels"
    began = time.monotonic()
    killer = NodeKiller(nodes, choose, at_most=1000, every=20.0)
    reports = world.learn(users, killer, retries=20)
    seconds = time.monotonic() - began
    figures = {
        "users": len(users),
        "live": sum(report.live for report in reports),
        "equal": sum(alone[report.user] == report.revision for report in reports),
        "nodes_killed": len(killer.killed),
        "learns_lost": world.statuses[-1].lost,
        "seconds": round(seconds, 1),
        "seconds_alone": round(seconds_alone, 1),
    }
    print(json.dumps(figures))  # noqa: T201 - what the run is for
    assert {report.user: report.revision for report in reports} == alone
    assert all(report.live for report in reports)
    # A quick machine ends before a second node is killed.
    assert killer.killed
    world.recorded_once(users)


def _tiny_card() -> str:
    from importlib import resources

    return (resources.files("personalpeft_models") / "tiny-random.toml").read_text("utf-8")


def _slow_card(world: World) -> Path:
    """Return a card of the tiny base on which a learn takes seconds."""
    learning = "\n[learning]\nrank = 2\nalpha = 8.0\nmin_steps = 60\nbatch_size = 2\nlearning_rate = 0.01\n"
    card = world.folder / "tiny-slow.toml"
    card.write_text(_tiny_card().replace('name = "tiny-random"', 'name = "tiny-slow"') + learning)
    return card
