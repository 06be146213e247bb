"""Saved weights are immutable, owned, and can be trained on, served, downloaded and adopted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_makers import TEXT, CallFailed, TinkerServer, checkpoint_route, datum, loss_of, refused

Start = Callable[[], TinkerServer]
DATA = [datum(TEXT)]


def test_a_run_continues_from_saved_weights_with_the_same_losses(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    run.train(3)
    path = run.save("state")
    expected = run.train(3)
    other = session.run(seed=9)
    other.call("load_weights", path=path, optimizer=True)
    assert other.train(3) == pytest.approx(expected, rel=1e-6)


def test_loading_without_the_optimizer_starts_its_moments_anew(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    run.train(3)
    path = run.save("state")
    expected = run.train(2)
    other = session.run(seed=9)
    other.call("load_weights", path=path, optimizer=False)
    losses = other.train(2)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses[1] != pytest.approx(expected[1], rel=1e-6)


def test_a_load_can_create_the_run(server: TinkerServer) -> None:
    """SDK 0.38 loads so, and computes the id of the new run itself."""
    session = server.session()
    run = session.run(rank=3)
    run.train(2)
    path = run.save("state")
    body = {"session_id": session.id, "model_seq_id": 5, "path": path, "optimizer": True}
    made = session.client.post("load_weights", body)
    assert made["model_id"] == f"{session.id}:train:5"
    session.client.result(made["request_id"])
    info = session.client.post("get_info", {"model_id": made["model_id"]})
    assert info["lora_rank"] == 3
    other = {**body, "model_seq_id": 6, "base_model": "no-base-of-this-server"}
    assert session.client.ask("POST", "load_weights", other).status_code == 400


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(
    ("shape", "hint"),
    [
        ({"rank": 2}, "rank 2, train_attn True and train_mlp True"),
        ({"rank": 4, "train_mlp": False}, "rank 4, train_attn True and train_mlp False"),
        ({"rank": 4, "train_attn": False}, "rank 4, train_attn False and train_mlp True"),
    ],
)
def test_weights_of_another_shape_are_refused(
    server: TinkerServer, optimizer: bool, shape: dict[str, Any], hint: str
) -> None:
    session = server.session()
    path = session.run(**shape).save("state")
    run = session.run(rank=4)
    before = run.train(1)
    with refused(hint):
        run.call("load_weights", path=path, optimizer=optimizer)
    assert run.train(1) < before


def test_a_name_is_given_once_unless_the_client_overwrites(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    path = run.save("mine")
    run.train(1)
    with pytest.raises(CallFailed, match="already"):
        run.save("mine")
    assert run.save("mine", overwrite=True) == path
    loaded = session.run(seed=5)
    loaded.call("load_weights", path=path, optimizer=False)
    assert loaded.forward(DATA) == run.forward(DATA)


def test_weights_name_those_that_their_run_loaded_or_saved_last(
    start: Start, tmp_path: Path
) -> None:
    server = start()
    session = server.session()
    first = session.run()
    paths = [first.save("first")]
    first.train(1)
    paths.append(first.save("second"))
    loaded = session.run()
    loaded.call("load_weights", path=paths[0], optimizer=False)
    paths.append(loaded.save("third"))
    restarted = first.on(start())
    paths.append(restarted.save("fourth", "save_weights_for_sampler"))
    client = restarted.session.client
    archives = [client.archive(path, tmp_path / str(n)) for n, path in enumerate(paths)]
    parents = [
        json.loads((archive / "personalpeft.json").read_text())["manifest"]["parent"]
        for archive in archives
    ]
    assert parents[0] is None
    assert parents[1] == parents[2]
    assert len({*parents[1:]}) == 2
    assert all(len(parent) == 64 for parent in parents[1:])


def test_weights_are_listed_until_they_are_deleted(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    first = run.save("first")
    run.save("second", "save_weights_for_sampler")
    client = session.client
    listed = client.get(f"training_runs/{run.id}/checkpoints")["checkpoints"]
    assert {each["checkpoint_id"] for each in listed} == {"weights/first", "sampler_weights/second"}
    assert all(each["size_bytes"] > 0 for each in listed)
    assert client.get(f"training_runs/{run.id}")["last_checkpoint"]["checkpoint_id"] == (
        "weights/first"
    )
    assert client.ask("DELETE", checkpoint_route(first)).status_code == 204
    left = client.get("checkpoints")["checkpoints"]
    assert [each["checkpoint_id"] for each in left] == ["sampler_weights/second"]


def test_the_time_of_weights_can_be_changed(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    path = run.save("soon", ttl_seconds=3600)
    client = session.client
    (listed,) = client.get("checkpoints")["checkpoints"]
    assert listed["expires_at"] is not None
    assert (
        client.ask("PUT", f"{checkpoint_route(path)}/ttl", {"ttl_seconds": None}).status_code == 204
    )
    (kept,) = client.get("checkpoints")["checkpoints"]
    assert kept["expires_at"] is None
    # No calendar has the end of such a time.
    for seconds in (10**12, 10**30, 10**400):
        route = f"{checkpoint_route(path)}/ttl"
        assert client.ask("PUT", route, {"ttl_seconds": seconds}).status_code == 400
    assert client.get("checkpoints")["checkpoints"] == [kept]
    assert client.post("weights_info", {"tinker_path": path})["lora_rank"] == 4


def test_published_weights_can_be_read_and_not_changed_by_others(server: TinkerServer) -> None:
    ada, bob = server.session("ada"), server.session("bob")
    run = ada.run()
    path = run.save("open", "save_weights_for_sampler")
    place = checkpoint_route(path)
    assert ada.client.ask("POST", f"{place}/publish").status_code == 204
    assert bob.sample(bob.sampler(path), TEXT[:4])["sequences"]
    assert bob.client.ask("DELETE", place).status_code == 404
    assert ada.client.ask("DELETE", f"{place}/publish").status_code == 204
    bob.client.post("weights_info", {"tinker_path": path}, status=404)


def test_without_a_valid_api_key_nothing_is_told(server: TinkerServer) -> None:
    client = server.client(token="pp_" + "0" * 64)
    for method, place in (("POST", "create_session"), ("GET", "training_runs")):
        assert client.ask(method, place, {}).status_code == 401
    assert client.ask("GET", "healthz").status_code == 200
    assert client.ask("GET", "downloads/guess").status_code == 404


def test_saved_weights_become_a_layer_of_a_user_by_name(server: TinkerServer) -> None:
    server.runtime.user("carla")
    session = server.session("carla")
    run = session.run()
    run.train(2)
    path = run.save("good", "save_weights_for_sampler")
    body = {"tinker_path": path, "user": "carla", "layer": "skill.fox"}
    judged = session.client.post("personal/adopt", body)
    assert (judged["outcome"], judged["live"]) == ("abstained", False)
    assert server.runtime.user("carla").stack().entries == ()
    adopted = session.client.post("personal/adopt", {**body, "accept": True})
    (entry,) = server.runtime.user("carla").stack().entries
    assert (entry.layer, entry.revision) == ("skill.fox", adopted["revision"])
    assert server.session("bob").client.ask("POST", "personal/adopt", body).status_code == 403


@pytest.mark.exhaustive
def test_a_users_layer_is_opened_for_training(server: TinkerServer) -> None:
    server.runtime.user("dora")
    session = server.session("dora")
    run = session.run()
    run.train(2)
    path = run.save("good", "save_weights_for_sampler")
    body = {"tinker_path": path, "user": "dora", "layer": "skill.fox", "accept": True}
    session.client.post("personal/adopt", body)
    opened = session.run(seed=9)
    opened.call("load_weights", path="personalpeft://dora/skill.fox", optimizer=False)
    assert loss_of(opened.forward(DATA)) == pytest.approx(loss_of(run.forward(DATA)), rel=1e-4)
    with pytest.raises(CallFailed, match="another user's"):
        server.session("bob").run().call(
            "load_weights", path="personalpeft://dora/skill.fox", optimizer=False
        )


def test_an_interpolation_is_the_weighted_sum(server: TinkerServer) -> None:
    session = server.session()
    run = session.run()
    run.train(2)
    path = run.save("good", "save_weights_for_sampler")
    client = session.client
    body = {"source_paths": [path, path], "coefficients": [0.25, 0.75]}
    mixed = client.result(client.post("mint/checkpoints/interpolate", body)["request_id"])
    same = [
        session.sample(session.sampler(place), TEXT[:6], prompt_logprobs=True)
        for place in (path, mixed["path"])
    ]
    assert same[0]["prompt_logprobs"][1:] == pytest.approx(same[1]["prompt_logprobs"][1:], abs=1e-4)
    for paths, coefficients in (([path], [0.0]), ([path, path], [1.0, -1.0])):
        body = {"source_paths": paths, "coefficients": coefficients}
        with pytest.raises(CallFailed, match="zero"):
            client.result(client.post("mint/checkpoints/interpolate", body)["request_id"])


def test_an_interpolation_whose_rank_would_be_too_large_is_refused(server: TinkerServer) -> None:
    session = server.session()
    run = session.run(rank=64)
    paths = [run.save(f"wide{number}", "save_weights_for_sampler") for number in range(9)]
    client = session.client

    def interpolate(count: int) -> str:
        body = {"source_paths": paths[:count], "coefficients": [1 / count] * count}
        call = client.post("mint/checkpoints/interpolate", body)
        saved: str = client.result(call["request_id"])["path"]
        return saved

    # vLLM loads no larger rank.
    assert client.post("weights_info", {"tinker_path": interpolate(8)})["lora_rank"] == 512
    with refused("sum to 576; the most is 512"):
        interpolate(9)
    assert len(client.get("checkpoints")["checkpoints"]) == 10


def test_archives_are_peft_folders(server: TinkerServer, tmp_path: Path) -> None:
    session = server.session()
    path = session.run().save("good")
    folder = session.client.archive(path, tmp_path)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {
        f.name for f in folder.iterdir()
    }
