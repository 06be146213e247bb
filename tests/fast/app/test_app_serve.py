"""The commands that serve: a token is made and never shown unasked, and nobody outside gets in by default."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import stat
import urllib.error
import urllib.request
from urllib.parse import parse_qs

import pytest
from app_makers import Place, ended


def test_a_server_makes_its_token_says_where_it_lies_and_stops_on_a_signal(place: Place) -> None:
    server = place.spawn("serve", "--port", "0", "--json")
    assert server.stdout is not None
    said = json.loads(_first_json(server.stdout))
    token = place.home / "token"
    assert said == {"url": said["url"], "token_file": str(token), "token_made": True}
    secret = token.read_text().strip()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    asked = urllib.request.Request(
        f"{said['url']}/v1/models", headers={"Authorization": f"Bearer {secret}"}
    )
    with urllib.request.urlopen(asked) as answer:
        assert answer.status == 200
    server.send_signal(signal.SIGTERM)
    out, errors = ended(server)
    assert server.returncode == 0
    assert "GET /v1/models 200" in errors
    assert secret not in out + errors + json.dumps(said)


def test_a_port_that_another_has_is_said_before_the_model_is_loaded(place: Place) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = place.spawn("serve", "--port", str(taken.getsockname()[1]))
        _, errors = ended(server)
    assert server.returncode == 2
    assert "127.0.0.1" in errors
    assert "--port" in errors
    assert "Loading" not in errors


def test_on_a_terminal_it_prints_a_link_that_leads_into_the_page_signed_in(place: Place) -> None:
    ours, theirs = pty.openpty()
    server = place.spawn("serve", "--port", "0", "--user", "ada", stderr=theirs, NO_COLOR="1")
    os.close(theirs)
    said = ""
    while "#" not in said or not said.endswith("\n"):
        said += os.read(ours, 4096).decode()
    (link,) = [word for word in said.split() if "#" in word]
    address, _, told = link.partition("#")
    assert (place.home / "token").read_text().strip() not in said
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


def _first_json(stream: object) -> str:
    text = ""
    while True:
        text += stream.readline().decode()  # type: ignore[attr-defined]
        if text.rstrip().endswith("}"):
            return text


@pytest.mark.parametrize(
    ("args", "code", "hint"),
    [
        (("--public",), 3, "personalpeft token first"),
        (("--host", "0.0.0.0"), 2, "--public"),
        (("--host", "192.0.2.1"), 2, "--public"),
    ],
)
def test_other_machines_are_let_in_by_name_alone(
    place: Place, args: tuple[str, ...], code: int, hint: str
) -> None:
    result = place.run("serve", "--port", "0", *args)
    assert result.exit_code == code
    assert hint in result.stderr
    assert not place.home.exists()


def test_tokens_are_made_listed_and_revoked(place: Place) -> None:
    secret = place.run("token", "make", "--user", "ada").stdout.strip()
    everything = place.run("token", "make", "--admin").stdout.strip()
    listed = place.run("token", "--json")
    tokens = json.loads(listed.stdout)["tokens"]
    assert [token["user"] for token in tokens] == ["ada", None]
    assert secret not in listed.output
    assert everything not in listed.output
    assert place.run("token", "make", "--worker", "--admin").exit_code == 2
    assert place.run("token", "make", "--worker").exit_code == 0
    worker = json.loads(place.run("token", "--json").stdout)["tokens"][-1]
    assert (worker["user"], worker["worker"]) == (None, True)
    assert "a worker" in place.run("token").stdout
    assert place.run("token", "revoke", worker["id"]).exit_code == 0
    assert place.run("token", "revoke", tokens[0]["id"][:6]).exit_code == 0
    assert len(json.loads(place.run("token", "list", "--json").stdout)["tokens"]) == 1
    assert place.run("token", "revoke", "zzzz").exit_code == 3
    where = place.run("token", "first").stdout.strip()
    assert where == str(place.home / "token")
