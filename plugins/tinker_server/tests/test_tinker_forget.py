"""A forgotten user leaves no run, weights or call, also for the next user of the same id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tinker_makers import TEXT, CallFailed, Run, TinkerServer, datum

from personalpeft_tinker_server.database import count_user_data

TRACE = list(b"a sentence that only ada has")


def _train(server: TinkerServer, user: str, text: list[int]) -> tuple[Run, str]:
    """Train a run of a user, and return it with the path of its weights."""
    run = server.session(user).run()
    run.train(1, [datum(text)])
    return run, run.save("mine")


def _bytes_of(server: TinkerServer) -> bytes:
    folder: Path = server.runtime.settings.home / "tinker"
    return b"".join(file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file())


def test_the_next_user_of_an_id_finds_nothing_of_the_forgotten_one(
    start: Callable[[], TinkerServer],
) -> None:
    server = start()
    run, path = _train(server, "ada", TRACE)
    others, kept = _train(server, "bo", TEXT)
    request = run.submit(
        "forward", forward_input={"data": [datum(TRACE)], "loss_fn": "cross_entropy"}
    )
    server.runtime.forget_user("ada")
    session = server.session("ada")
    client = session.client
    assert client.get("sessions") == {"sessions": [session.id]}
    for place in ("training_runs", "checkpoints"):
        assert client.get(place)[place] == []
    client.post("weights_info", {"tinker_path": path}, status=404)
    client.post("get_info", {"model_id": run.id}, status=404)
    client.post("retrieve_future", {"request_id": request}, status=410)
    with pytest.raises(CallFailed, match="no weights"):
        session.run().call("load_weights", path=path)
    session.run(seed=2).train(1)
    # What another user has stays.
    others.train(1)
    assert others.session.client.post("weights_info", {"tinker_path": kept})["lora_rank"] == 4


@pytest.mark.parametrize("restarted", [True, False])
def test_the_server_erases_the_files_and_calls_of_a_forgotten_user(
    start: Callable[[], TinkerServer], restarted: bool
) -> None:
    server = start()
    _train(server, "ada", TRACE)
    trace = f"[{TRACE[0]}, {TRACE[1]}, {TRACE[2]}".encode()
    assert trace in _bytes_of(server)
    server.runtime.forget_user("ada")
    if restarted:
        server = start()
    else:
        server.extension.service.do_chores()
    assert trace not in _bytes_of(server)
    assert list((server.runtime.settings.home / "tinker" / "files").iterdir()) == []


def test_what_the_server_keeps_of_a_user_is_counted(start: Callable[[], TinkerServer]) -> None:
    server = start()
    data = server.runtime.plugin_data
    assert set(count_user_data(data, "ada").values()) == {0}
    _train(server, "ada", TRACE)
    kept = count_user_data(data, "ada")
    assert kept["runs"] == 1
    assert kept["checkpoints"] == 1
    assert kept["calls"] >= 1
    assert set(count_user_data(data, "ad").values()) == {0}
