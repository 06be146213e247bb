"""A server finds the plugin by its entry point, and its error messages show the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from tinker_makers import BASE, Client, TinkerServer, declare_entry_points, kl_datum, open_server

import personalpeft
from personalpeft import plugins
from personalpeft_app.http import security
from personalpeft_app.http.server import make_app
from personalpeft_tinker_server.service import Options


def test_the_entry_point_opens_the_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declare_entry_points(monkeypatch, plugins.HTTP)
    with personalpeft.open(tmp_path / "home", base=BASE, backend="torch") as runtime:
        extension = runtime.http_extension("tinker", security.plugin_host())
        app = make_app(runtime, more=[extension.blueprint])
        client = Client(app, runtime.api_keys.create(None)[1])
        assert client.get("healthz") == {"status": "ok"}
        (model,) = client.get("get_server_capabilities")["supported_models"]
        assert model["model_name"] == BASE
        extension.close()
        extension.close()


def test_aliases_are_further_names_of_the_base(tmp_path: Path) -> None:
    options = Options.from_environment({Options.ALIASES: "org/One, org/Two", Options.TOKENIZER: ""})
    assert options == Options(("org/One", "org/Two"), None)
    with open_server(tmp_path / "home", options) as server:
        session = server.session()
        made = session.client.post(
            "create_model", {"session_id": session.id, "model_seq_id": 0, "base_model": "org/Two"}
        )
        session.client.result(made["request_id"])
        info = session.client.post("get_info", {"model_id": made["model_id"]})
        assert info["model_data"]["model_name"] == "org/Two"
        data = [kl_datum([1, 2], [1, 2], [3])]
        body = {"model_id": made["model_id"], "seq_id": 1, "data": data}
        call = session.client.post(
            "mint/forward_backward_reverse_kl", {**body, "reference_model_path": "org/Two"}
        )
        metrics = session.client.result(call["request_id"])["metrics"]
        assert metrics["loss:mean"] == pytest.approx(0, abs=1e-6)


def test_a_malformed_body_is_refused_by_the_name_of_its_field(server: TinkerServer) -> None:
    client = server.client()
    for place, body, problem in (
        ("create_model", {"session_id": "x"}, "model_seq_id"),
        ("asample", {"prompt": {"chunks": []}}, "sampling_params"),
        ("save_weights", {"model_id": "x", "path": "../up"}, "path"),
        ("forward_backward", {"model_id": "x"}, "forward_backward_input"),
        ("optim_step", {"model_id": "x", "seq_id": 2**70}, "seq_id"),
        ("optim_step", {"model_id": "x", "seq_id": -5}, "seq_id"),
        (
            "create_model",
            {"session_id": "x", "model_seq_id": -1, "base_model": "x"},
            "model_seq_id",
        ),
    ):
        answer = client.ask("POST", place, body)
        assert answer.status_code == 400, place
        assert problem in answer.get_data(as_text=True)
