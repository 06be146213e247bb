"""A forgotten user leaves no run, weights or call, also for the next user of the same id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tinker_makers import TEXT, CallFailed, Run, TinkerServer, datum, kl_datum, tokens

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


@pytest.mark.parametrize("restarted", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
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
        server.maintain()
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


def _layer_of_carla(server: TinkerServer) -> str:
    """Make a layer of carla and return its path."""
    run = server.session("carla").run()
    run.train(2, [datum(TRACE)])
    path = run.save("mine")
    body = {"tinker_path": path, "user": "carla", "layer": "skill.fox", "accept": True}
    run.session.client.post("personal/adopt", body)
    return "personalpeft://carla/skill.fox"


def _forget_user(server: TinkerServer) -> None:
    server.runtime.forget_user("carla")


def _forget_layer(server: TinkerServer) -> None:
    server.runtime.user("carla").forget("skill.fox")


@pytest.mark.parametrize("forget", [_forget_user, _forget_layer])
@pytest.mark.parametrize("restarted", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_what_another_owner_trained_from_a_forgotten_layer_is_erased(
    start: Callable[[], TinkerServer], forget: Callable[[TinkerServer], None], restarted: bool
) -> None:
    server = start()
    layer = _layer_of_carla(server)
    session = server.session()
    client = session.client
    loaded, distilled, free = session.run(), session.run(), session.run()
    loaded.call("load_weights", path=layer, optimizer=False)
    item = kl_datum(TEXT[:5], TEXT[:5], TEXT[5:9])
    distilled.call("mint/forward_backward_reverse_kl", reference_model_path=layer, data=[item])
    distilled.step()
    free.train(1)
    copies = [run.save("copy") for run in (loaded, distilled)]
    again = session.run()
    again.call("load_weights", path=copies[0], optimizer=True)
    copies.append(again.save("copy"))
    mix = {"source_paths": copies[:1], "coefficients": [0.5]}
    request = client.post("mint/checkpoints/interpolate", mix)["request_id"]
    copies.append(client.result(request)["path"])
    kept = free.save("kept")
    body = {"prompt": tokens(TEXT[:4]), "sampling_params": {"max_tokens": 4}}
    sample = client.post("asample", {**body, "model_path": copies[0]})["request_id"]
    client.result(sample)
    count = count_user_data(server.runtime.plugin_data, "carla")
    forget(server)
    for path in copies:
        client.post("weights_info", {"tinker_path": path}, status=404)
    if restarted:
        server = start()
        client = server.client(token=client.secret)
    else:
        server.maintain()
    assert [each["tinker_path"] for each in client.get("checkpoints")["checkpoints"]] == [kept]
    client.post("retrieve_future", {"request_id": sample}, status=410)
    assert count["checkpoints"] == 1 + len(copies)
    left = count_user_data(server.runtime.plugin_data, "carla")
    assert left["checkpoints"] == (forget is _forget_layer)
    session.client = client
    for run in (loaded, distilled, again):
        with pytest.raises(CallFailed, match="forgotten"):
            run.train(1)
    free.train(1)


def test_weights_from_a_layer_are_not_adopted_for_another_user(
    start: Callable[[], TinkerServer],
) -> None:
    server = start()
    layer = _layer_of_carla(server)
    server.runtime.user("dan")
    run = server.session().run()
    run.call("load_weights", path=layer, optimizer=False)
    body = {"tinker_path": run.save("copy"), "layer": "skill.fox", "accept": True}
    client = run.session.client
    refused = client.ask("POST", "personal/adopt", {**body, "user": "dan"})
    assert refused.status_code == 400
    assert "a layer of carla" in refused.get_data(as_text=True)
    assert server.runtime.user("dan").stack().entries == ()
    client.post("personal/adopt", {**body, "user": "carla"})
