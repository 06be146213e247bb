"""Learns on a Ray cluster equal learns alone; killed workers neither lose nor repeat a learn."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import psutil
import pytest
from ray_makers import USERS, World, killing_worker

from personalpeft import HomeError, InvalidId, InvalidInput, LearnReport, NotFound, ServingFailed
from personalpeft_ray_updates import RunStatus

Alone: TypeAlias = dict[str, tuple[str, ...]]

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("ray_here")]


def test_learns_are_spread_over_processes_and_equal_learns_alone(
    world: World, alone: Alone
) -> None:
    world.correct()
    # Both workers have started before the first finishes its users.
    world.set_pace(0.03)
    order = USERS[::-1]
    reports = world.learn(order, at_once=2)
    assert [report.user for report in reports] == list(order)
    assert all(report.live for report in reports)
    assert world.live_revisions() == alone
    world.published_once()
    assert len(world.users_by_process) == 2
    assert os.getpid() not in world.users_by_process
    assert [len(world.statuses[-1].reports), world.statuses[-1].lost] == [len(USERS), 0]


def test_workers_run_on_the_homes_node_up_to_its_cpus(world: World) -> None:
    import ray

    world.correct(USERS[:3])
    world.set_pace(0.03)
    parents: set[int] = set()

    def look(status: RunStatus) -> None:
        parents.update(psutil.Process(pid).ppid() for pid in status.workers)

    # Four CPUs are on the other node, but workers may only use the two on this one.
    assert len(ray.nodes()) == 2
    world.learn(USERS[:3], look, workers=6, at_once=1)
    assert len(parents) == 1
    assert max(len(status.workers) for status in world.statuses) == 2
    with pytest.raises(InvalidInput, match="2 CPUs"):
        world.learn(USERS[:3], cpus=3)


def test_each_node_learns_for_its_own_home(world: World, alone: Alone) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def learn_there(users: Sequence[str], **how: Any) -> tuple[Sequence[LearnReport], set[int]]:
        from personalpeft_ray_updates import learn_on_cluster

        machines: set[int] = set()

        def look(status: RunStatus) -> None:
            machines.update(psutil.Process(pid).ppid() for pid in status.workers)

        return learn_on_cluster(users, progress=look, workers=1, **how), machines

    here, *there = USERS[:3]
    world.correct(USERS[:3])
    with world.open_runtime() as runtime:
        for user in there:
            runtime.user(user).export(world.folder / user)
    with world.open_runtime("there") as runtime:
        for user in there:
            runtime.import_user(world.folder / user)
    (machine,) = {node["NodeID"] for node in ray.nodes()} - {
        ray.get_runtime_context().get_node_id()
    }
    pinned: Any = ray.remote(
        num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False)
    )
    far = pinned(learn_there).remote(there, home=world.folder / "there", **world.how)
    near, machines = learn_there([here], home=world.home, **world.how)
    far_reports, far_machines = ray.get(far)
    assert all(report.live for report in (*near, *far_reports))
    assert [len(machines), len(far_machines), len(machines | far_machines)] == [1, 1, 2]
    assert world.live_revisions(there, name="there") == {user: alone[user] for user in there}


def test_a_worker_killed_midway_loses_nothing_and_each_learn_is_published_once(
    world: World, alone: Alone
) -> None:
    world.correct()
    world.set_pace(0.05)

    def midway() -> int | None:
        pid = world.holder("user-0")
        return pid if pid is not None and max(world.steps("user-0", pid), default=0) >= 5 else None

    with killing_worker(midway) as killed:
        reports = world.learn(at_once=2)
    assert all(report.live for report in reports)
    assert world.live_revisions() == alone
    world.published_once()
    assert world.statuses[-1].lost == len(killed) == 1
    # The next worker resumed from the killed one's saved step.
    done = max(world.steps("user-0", killed[0]))
    later = [
        step
        for pid in world.users_by_process
        if pid != killed[0]
        for step in world.steps("user-0", pid)
    ]
    assert later
    assert min(later) >= done - 1


def test_a_revision_published_before_a_worker_was_killed_is_reported_and_not_learned_again(
    world: World,
) -> None:
    first, second = USERS[:2]
    world.correct([first])
    world.correct([second], shown=4)
    world.set_pace(0.05)
    # Both style layers were published together, and one user then learns a skill.
    with killing_worker(
        lambda: world.holder(second) if world.has_saved_step(second, "skill.email") else None
    ) as killed:
        reports = world.learn([first, second], workers=1)
    assert len(killed) == 1
    assert [(report.layer, report.live, report.error) for report in reports] == [
        ("style", True, "")
    ] * 2
    assert [[(each.layer, each.live) for each in report.above] for report in reports] == [
        [],
        [("skill.email", True)],
    ]
    world.published_once([first])
    world.published_once([second], layers=2)


def test_two_runs_and_another_process_publish_once(world: World, alone: Alone) -> None:
    world.correct()
    world.set_pace(0.02)
    reports_by_run: dict[str, tuple[LearnReport, ...]] = {}

    def run(name: str) -> None:
        reports_by_run[name] = world.learn(workers=1, at_once=2)

    runs = [threading.Thread(target=run, args=(name,)) for name in ("one", "other")]
    for each in runs:
        each.start()
    with world.open_runtime() as runtime:
        while any(each.is_alive() for each in runs):
            runtime.learn_many(USERS[::-1])
    for each in runs:
        each.join()
    for reports in reports_by_run.values():
        assert all(report.live or report.error in {"Busy", "NothingToLearn"} for report in reports)
    assert world.live_revisions() == alone
    world.published_once()


def test_one_users_error_is_in_the_report_and_stops_no_other(world: World) -> None:
    world.correct(USERS[:2])
    with world.open_runtime() as runtime:
        runtime.user("silent")
        with runtime._services.store.leases.acquire("learn-user-1"):
            reports = world.learn(["silent", "user-0", "nobody", "user-1"], at_once=1)
        assert [report.error for report in reports] == ["NothingToLearn", "", "NotFound", "Busy"]
        assert [summary.id for summary in runtime.users()] == ["silent", "user-0", "user-1"]
    world.published_once(["user-0"])


@pytest.mark.parametrize(
    ("users", "more", "error"),
    [
        (["user-0", "user-0"], {}, InvalidInput),
        ("user-0", {}, InvalidInput),
        (["User 0"], {}, InvalidId),
        (["user-0"], {"workers": 0}, InvalidInput),
        (["user-0"], {"at_once": 0}, InvalidInput),
        (["user-0"], {"cpus": 0}, InvalidInput),
        (["user-0"], {"gpus": float("nan")}, InvalidInput),
        (["user-0"], {"gpus": 1.0}, InvalidInput),
    ],
)
def test_an_invalid_run_is_refused_and_nothing_is_learned(
    world: World, users: Any, more: dict[str, Any], error: type[Exception]
) -> None:
    world.correct(["user-0"])
    with pytest.raises(error):
        world.learn(users, **more)
    assert world.live_revisions(["user-0"]) == {"user-0": ()}


def test_a_missing_home_or_base_is_an_error_before_a_worker_starts(world: World) -> None:
    with pytest.raises(HomeError):
        world.learn()
    assert not world.home.exists()
    world.correct(["user-0"])
    world.base = "nowhere"
    with pytest.raises(NotFound):
        world.learn()
    assert world.statuses == []


def test_no_named_user_means_no_learn(world: World) -> None:
    world.correct(["user-0"])
    assert world.learn([]) == ()


def test_a_stopped_learn_resumes_in_the_next_run(world: World, alone: Alone) -> None:
    world.correct()
    world.set_pace(0.05)
    reports = world.learn(at_once=2, cancelled=lambda: world.has_saved_step("user-0"))
    assert {report.error for report in reports} == {"Cancelled"}
    assert all(report.reason for report in reports)
    assert world.has_saved_step("user-0")
    with world.open_runtime() as runtime:
        assert all(report.live for report in runtime.learn_many(USERS))
    assert world.live_revisions() == alone
    world.published_once()


def test_a_user_whose_learn_kills_workers_is_given_up_and_the_others_learn(world: World) -> None:
    world.correct(USERS[:3])
    world.set_pace(0.02)
    killed: set[int] = set()

    def kill(status: RunStatus) -> None:
        for pid, users in status.workers.items():
            if "user-1" in users and pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)

    reports = world.learn(USERS[:3], kill, workers=1)
    assert [report.error for report in reports] == ["", "ServingFailed", ""]
    assert "3 workers" in reports[1].reason
    assert len(killed) == world.statuses[-1].lost == 3
    world.published_once(["user-0", "user-2"])
    with world.open_runtime() as runtime:
        assert runtime.user("user-1").learn().live
    world.published_once(USERS[:3])


def test_failing_worker_starts_are_an_error_with_their_reason(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from personalpeft_ray_updates import cluster

    class BrokenWorker:
        def __init__(self, opening: object) -> None:
            raise ModuleNotFoundError("No module named 'personalpeft'")

        def ready(self) -> int:
            raise AssertionError

    world.correct(["user-0"])
    monkeypatch.setattr(cluster, "Worker", BrokenWorker)
    with pytest.raises(ServingFailed) as raised:
        world.learn(["user-0"], workers=1)
    assert "logs" in raised.value.hint
    assert world.live_revisions(["user-0"]) == {"user-0": ()}


def test_cluster_learns_on_a_model_give_the_bytes_of_learns_alone(world: World) -> None:
    import torch

    torch.set_num_threads(1)
    world.base = _quick_card(world)
    alone = []
    for name in ("alone", "home"):
        with world.open_runtime(name) as runtime:
            for user in USERS[:2]:
                # Demonstrations, not chats, so that no model is loaded to record them.
                for number in range(4):
                    runtime.user(user).teach(
                        f"question {number} of {user}", f"Ahoy! {number} of {user}"
                    )
                if name == "alone":
                    alone.append(runtime.user(user).learn().revision)
    reports = world.learn(USERS[:2], workers=1, at_once=1)
    assert [report.revision for report in reports] == alone
    assert None not in alone


def _quick_card(world: World) -> Any:
    from importlib import resources

    tiny = (resources.files("personalpeft_models") / "tiny-random.toml").read_text("utf-8")
    card = world.folder / "tiny-quick.toml"
    learning = "\n[learning]\nrank = 2\nalpha = 8.0\nmin_steps = 12\nbatch_size = 2\nlearning_rate = 0.01\n"
    card.write_text(tiny.replace('name = "tiny-random"', 'name = "tiny-quick"') + learning)
    return card
