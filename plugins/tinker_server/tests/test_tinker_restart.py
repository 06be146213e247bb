"""A restart of the server loses no call, no run and no saved weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import tinker_makers
from tinker_makers import (
    FB,
    TEXT,
    CallFailed,
    Session,
    TinkerServer,
    checkpoint_route,
    datum,
    loss_of,
    refused,
)

from personalpeft.store.error_mapping import sqlite3
from personalpeft_tinker_server import database, executor, futures, sampling, service, training

Start = Callable[[], TinkerServer]


def refuse_results(
    server: TinkerServer, monkeypatch: pytest.MonkeyPatch, times: int
) -> list[object]:
    """Have a server fail so many times to store a result, and return the list of failures."""
    store, failures = server.extension.service.futures.finish, list[object]()

    def fail(*args: Any) -> None:
        if len(failures) < times:
            failures.append(args)
            raise sqlite3.OperationalError("database or disk is full")
        store(*args)

    monkeypatch.setattr(server.extension.service.futures, "finish", fail)
    return failures


@pytest.mark.parametrize("store_seconds", [0.0, 3600.0])
def test_a_run_continues_as_if_there_had_been_no_restart(
    start: Start, monkeypatch: pytest.MonkeyPatch, store_seconds: float
) -> None:
    """With a stored state after each step, and with all calls executed again."""
    monkeypatch.setattr(executor, "STORE_SECONDS", store_seconds)
    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(6)
    losses = run.train(2)
    losses.append(loss_of(run.forward_backward([datum(TEXT)])))
    # Stopped between a pass and its step: the gradients must come back.
    run = run.on(start())
    run.step()
    losses += run.train(3)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_results_and_queued_calls_survive(start: Start) -> None:
    server = start()
    run = server.session().run()
    done = run.submit("forward_backward", **FB)
    before = run.session.client.result(done)
    # The call after the next one has arrived, so it waits.
    waiting = run.submit("optim_step", run.seq + 2, adam_params={"learning_rate": 1e-2})
    sample = run.session.client.post(
        "asample",
        {
            "prompt": {"chunks": [{"tokens": TEXT[:4]}]},
            "sampling_params": {"max_tokens": 4, "seed": 1},
            "base_model": "tiny-random",
        },
    )["request_id"]
    run = run.on(start())
    client = run.session.client
    assert client.result(done) == before
    assert client.result(sample)["sequences"]
    run.forward_backward([datum(TEXT)])
    assert client.result(waiting)["metrics"]


def test_saved_weights_survive(start: Start) -> None:
    server = start()
    run = server.session().run()
    run.train(2)
    path = run.save("kept")
    sampled = run.save("served", "save_weights_for_sampler")
    run = run.on(start())
    session = Session(run.session.client, run.session.id, runs=1)
    other = session.run(seed=9)
    other.call("load_weights", path=path, optimizer=True)
    assert other.forward([datum(TEXT)]) == run.forward([datum(TEXT)])
    assert session.sample(session.sampler(sampled), TEXT[:4])["sequences"]


def test_a_run_of_a_silent_client_leaves_memory_and_comes_back(start: Start) -> None:
    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(4)
    losses = run.train(2)
    client = run.session.client
    client.ask("POST", f"sessions/{run.session.id}/finish", {})
    server.maintain()
    losses += run.train(2)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_pass_that_fails_in_the_server_leaves_nothing_behind(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(4)
    losses = run.train(2)
    backend = server.runtime.engine().backend
    compute = backend.forward_backward

    def fail(*args: Any, **options: Any) -> Any:
        compute(*args, **options)
        raise MemoryError

    monkeypatch.setattr(backend, "forward_backward", fail)
    with pytest.raises(CallFailed, match="MemoryError") as failed:
        run.forward_backward([datum(TEXT)])
    assert failed.value.args[1] == "server"
    monkeypatch.undo()
    losses += run.train(2)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_pass_whose_result_cannot_be_stored_at_once_counts_once(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "IDLE_SECONDS", 0.05)
    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(4)
    losses = run.train(2)
    failures = refuse_results(server, monkeypatch, 6)
    losses.append(loss_of(run.forward_backward([datum(TEXT)])))
    run.step()
    assert len(failures) == 6
    losses += run.train(1)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_sample_whose_result_cannot_be_stored_at_once_is_stored_later(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "RETRY_SECONDS", 0.05)
    server = start()
    session = server.session()
    failures = refuse_results(server, monkeypatch, 3)
    assert session.sample(session.sampler(), TEXT[:4])["sequences"]
    assert len(failures) == 3


def test_a_run_goes_on_after_a_restart_without_the_weights_that_it_loaded(start: Start) -> None:
    server = start()
    run = server.session().run()
    run.train(2)
    path = run.save("loaded")
    run.call("load_weights", path=path, optimizer=True)
    before = run.forward([datum(TEXT)])
    client = run.session.client
    assert client.ask("DELETE", checkpoint_route(path)).status_code == 204
    run = run.on(start())
    assert run.forward([datum(TEXT)]) == before


def test_a_run_does_not_go_on_on_another_base(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.numpy import load_file, save_file

    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(3)
    losses = run.train(1)
    losses.append(loss_of(run.forward_backward([datum(TEXT)])))
    path = run.save("kept")
    other = tmp_path / "other"
    shutil.copytree(server.runtime.base().folder, other)
    template = server.runtime.base().card.template
    (other / "chat_template.jinja").write_text(template, "utf-8")
    for file in other.glob("*.safetensors"):
        tensors = load_file(file)
        save_file({name: array[::-1].copy() for name, array in tensors.items()}, file)
    with monkeypatch.context() as patch:
        patch.setattr(tinker_makers, "BASE", str(other))
        moved = run.on(start())
        for call in (moved.step, lambda: moved.forward([datum(TEXT)]), lambda: moved.save("x")):
            with refused("on another base"):
                call()
    # On its own base it goes on.
    back = moved.on(start())
    back.step()
    losses += back.train(1)
    assert losses == pytest.approx(expected, rel=1e-6)
    back.call("load_weights", path=path, optimizer=True)


def test_a_run_of_an_earlier_version_goes_on(start: Start) -> None:
    server = start()
    undisturbed, run = (server.session().run() for _ in range(2))
    expected = undisturbed.train(2)
    losses = run.train(1)
    server.extension.close()
    with closing(server.runtime.plugin_data("tinker").connect("server")) as db:
        db.execute("alter table runs drop column base_digest")
        db.execute("drop table sources")
        db.commit()
    losses += run.on(start()).train(1)
    assert losses == pytest.approx(expected, rel=1e-6)


def test_a_second_server_of_the_home_is_refused(start: Start) -> None:
    from tinker_makers import open_server

    from personalpeft import Busy

    server = start()
    with pytest.raises(Busy, match="Another server"), open_server(server.runtime.settings.home):
        pass


def test_runs_of_active_clients_are_limited_and_those_of_others_do_not_count(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_RUNS", 1)
    server = start()
    client = server.client("ada")
    session = client.session()
    session.run()
    body = {"session_id": session.id, "model_seq_id": 1, "base_model": "tiny-random"}
    refused = client.ask("POST", "create_model", body)
    assert refused.status_code == 429
    assert int(refused.headers["Retry-After"]) > 0
    server.client("bob").session().run()
    client.ask("POST", f"sessions/{session.id}/finish", {})
    # Nor does a restart bring the session back.
    again = start().client(token=client.secret)
    again.session().run()


def test_calls_beyond_the_queue_are_refused_and_may_be_repeated(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "MAX_QUEUED", 2)
    run = start().session().run()
    step = {"model_id": run.id, "adam_params": {}}
    client = run.session.client
    # The first call is missing, so the others wait.
    for seq in (2, 3):
        client.post("optim_step", {**step, "seq_id": seq})
    client.post("optim_step", {**step, "seq_id": 4}, status=429)
    client.post("optim_step", {**step, "seq_id": 3})


def test_the_bytes_of_queued_calls_count_and_those_of_other_owners_do_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    run, other = (server.session(user).run() for user in ("ada", "bob"))
    run.train(1)
    call = {"model_id": run.id, **FB}
    client = run.session.client
    monkeypatch.setattr(database, "MAX_BYTES", 3 * len(json.dumps({**call, "seq_id": 10})))
    # The first call is missing, so the others wait.
    for seq in (10, 11, 12):
        client.post("forward_backward", {**call, "seq_id": seq})
    client.post("forward_backward", {**call, "seq_id": 13}, status=429)
    client.post("forward_backward", {**call, "seq_id": 12})
    other.train(1)


def test_saved_weights_beyond_the_quota_are_refused_until_others_are_deleted(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start()
    run, other = (server.session(user).run() for user in ("ada", "bob"))
    path = run.save("one")
    client = run.session.client
    (listed,) = client.get("checkpoints")["checkpoints"]
    monkeypatch.setattr(database, "MAX_BYTES", int(1.5 * listed["size_bytes"]))
    folder = server.runtime.settings.home / "tinker" / "files"
    before = set(folder.iterdir())
    with refused("would exceed"):
        run.save("two")
    assert set(folder.iterdir()) == before
    other.save("two")
    assert client.ask("DELETE", checkpoint_route(path)).status_code == 204
    run.save("two")
