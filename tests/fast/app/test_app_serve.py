"""The serving commands create API keys, never print them unrequested, and listen locally by default."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import parse_qs

import pytest
from app_makers import Shell, read_json, read_to_end


def test_a_server_creates_its_api_key_prints_its_path_and_stops_on_a_signal(shell: Shell) -> None:
    server = shell.spawn("serve", "--port", "0", "--json")
    said = read_json(server)
    token = shell.home / "token"
    engine = {"backend": "fake", "backend_reason": "requested", "max_batch": 16}
    assert said == {
        "url": said["url"],
        "admin_key_file": str(token),
        "admin_key_created": True,
        "token_file": str(token),
        "token_made": True,
        **engine,
    }
    secret = token.read_text().strip()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    asked = urllib.request.Request(
        f"{said['url']}/v1/models", headers={"Authorization": f"Bearer {secret}"}
    )
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200
    server.send_signal(signal.SIGTERM)
    out, errors = read_to_end(server)
    assert server.returncode == 0
    assert "GET /v1/models 200" in errors
    assert secret not in out + errors + json.dumps(said)


def test_with_tinker_its_clients_train_beside_the_other_routes_and_a_signal_stops_all(
    shell: Shell,
) -> None:
    torch = ("--backend", "torch", "--base", "tiny-random")
    server = shell.spawn(*torch, "serve", "--tinker", "--port", "0", "--json")
    url = read_json(server)["url"]
    key = f"tml-{(shell.home / 'token').read_text().strip()}"

    def ask(path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"X-Api-Key": key, "Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}{path}", data, headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.load(answer)

    api = "/tinker/api/v1"
    assert ask(f"{api}/healthz") == {"status": "ok"}
    assert ask("/v1/models")["data"]
    session = ask(f"{api}/create_session", {})["session_id"]
    run = {"session_id": session, "model_seq_id": 0, "base_model": "tiny-random"}
    request = ask(f"{api}/create_model", run)["request_id"]
    while (made := ask(f"{api}/retrieve_future", {"request_id": request}))["type"] == "try_again":
        pass
    assert made == {"type": "create_model", "model_id": f"{session}:train:0"}
    server.send_signal(signal.SIGTERM)
    _, errors = read_to_end(server)
    assert server.returncode == 0, errors


def test_a_taken_port_is_reported_before_the_model_is_loaded(shell: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refused = shell.run("serve", "--port", str(taken.getsockname()[1]))
    assert refused.exit_code == 2
    assert "127.0.0.1" in refused.stderr
    assert "--port" in refused.stderr
    assert "Loading" not in refused.stderr
    # A start that failed left no API key, so other machines are still refused.
    assert shell.run("serve", "--port", "0", "--public").exit_code == 3


@pytest.mark.exhaustive
def test_on_a_terminal_it_prints_a_sign_in_link_to_the_page(shell: Shell) -> None:
    ours, theirs = pytest.importorskip("pty").openpty()
    server = shell.spawn("serve", "--port", "0", "--user", "ada", stderr=theirs, NO_COLOR="1")
    os.close(theirs)
    said = ""
    while "#" not in said or not said.endswith("\n"):
        said += os.read(ours, 4096).decode()
    (link,) = [word for word in said.split() if "#" in word]
    address, _, told = link.partition("#")
    assert (shell.home / "token").read_text().strip() not in said
    (code,) = parse_qs(told)["code"]
    exchange = urllib.request.Request(
        f"{address}web/session", method="POST", headers={"Authorization": f"Bearer {code}"}
    )
    with urllib.request.urlopen(exchange) as answer:
        session = {"Authorization": f"Bearer {json.load(answer)['token']}"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{address}api/v1/token", headers=session)
    ) as answer:
        assert json.load(answer)["user"] == "ada"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(exchange)
    with urllib.request.urlopen(address) as page:
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"main.js" in page.read()
    server.send_signal(signal.SIGTERM)
    server.communicate(timeout=60)
    os.close(ours)
    assert server.returncode == 0


@pytest.mark.parametrize(
    ("args", "code", "hint"),
    [
        (("--public",), 3, "personalpeft api-key first"),
        (("--host", "0.0.0.0"), 2, "--public"),
        (("--host", "192.0.2.1"), 2, "--public"),
    ],
)
def test_other_hosts_are_accepted_only_by_name(
    shell: Shell, args: tuple[str, ...], code: int, hint: str
) -> None:
    result = shell.run("serve", "--port", "0", *args)
    assert result.exit_code == code
    assert hint in result.stderr
    assert not shell.home.exists()


def test_api_keys_are_created_listed_and_revoked(shell: Shell) -> None:
    secret = shell.run("api-key", "make", "--user", "ada").stdout.strip()
    everything = shell.run("api-key", "make", "--admin").stdout.strip()
    listed = shell.run("api-key", "--json")
    keys = json.loads(listed.stdout)["api_keys"]
    assert [key["user"] for key in keys] == ["ada", None]
    assert secret not in listed.output
    assert everything not in listed.output
    assert shell.run("api-key", "make", "--worker", "--admin").exit_code == 2
    assert shell.run("api-key", "make", "--worker").exit_code == 0
    worker = json.loads(shell.run("api-key", "--json").stdout)["api_keys"][-1]
    assert (worker["user"], worker["worker"]) == (None, True)
    assert shell.run("api-key", "revoke", worker["id"]).exit_code == 0
    assert shell.run("api-key", "revoke", keys[0]["id"][:6]).exit_code == 0
    assert len(json.loads(shell.run("api-key", "list", "--json").stdout)["api_keys"]) == 1
    assert shell.run("api-key", "revoke", "zzzz").exit_code == 3
    where = shell.run("api-key", "first").stdout.strip()
    assert where == str(shell.home / "token")


def test_the_first_api_key_is_named_where_no_other_can_be_revoked(shell: Shell) -> None:
    where = shell.run("api-key", "first").stdout.strip()
    refused = shell.run("api-key", "revoke", "zz")
    assert refused.exit_code == 3
    assert where in refused.stderr
