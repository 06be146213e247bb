"""Unauthorized requests are refused, and a refusal does not reveal which users exist."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from flask import Blueprint, Flask, Response, jsonify, send_file
from http_makers import Caller, serve_locally

import personalpeft
from personalpeft import HomeError, NotFound, Runtime
from personalpeft_app.http import security, validation
from personalpeft_app.http.concurrency import ConcurrencyLimiter
from personalpeft_app.http.server import make_app


def _probe() -> Blueprint:
    blueprint = Blueprint("probe", __name__)

    @blueprint.get("/probe/<user>")
    def of_one(user: str) -> object:
        return jsonify(user=security.require_user(user), caller=security.caller().user)

    @blueprint.get("/probe")
    def all_users() -> object:
        security.require_admin()
        return jsonify(ok=True)

    @blueprint.post("/probe")
    def body() -> object:
        return jsonify(validation.read_object())

    @blueprint.get("/bug")
    def bug() -> object:
        raise RuntimeError("a secret of the inside")

    return blueprint


@pytest.fixture
def app(runtime: Runtime) -> Flask:
    return make_app(runtime, more=[_probe()])


def test_every_route_but_healthz_needs_an_api_key(app: Flask, admin: Caller) -> None:
    anonymous = replace(admin, secret=None)
    for rule in app.url_map.iter_rules():
        path = rule.rule.replace("<user>", "ada")
        for method in rule.methods or ():
            got = anonymous.ask(method, path).status_code
            assert got == (200 if rule.rule == "/healthz" else 401) or (
                method == "OPTIONS" and got == 200
            ), path
    assert anonymous.get("/there/is/no/such/route").status_code == 401
    assert replace(admin, secret="pp_wrong").get("/probe").status_code == 401


def test_an_api_key_is_accepted_in_either_header(admin: Caller) -> None:
    assert admin.get("/probe").status_code == 200
    assert (
        replace(admin, secret=None).get("/probe", headers={"X-Api-Key": admin.secret}).status_code
        == 200
    )


def test_a_users_api_key_is_valid_for_that_user_only(ada: Caller, admin: Caller) -> None:
    assert ada.get("/probe/ada").json == {"user": "ada", "caller": "ada"}
    # Whether user bob exists or not.
    assert ada.get("/probe/bob").status_code == 403
    assert ada.get("/probe").status_code == 403
    assert admin.get("/probe/bob").status_code == 200
    assert admin.get("/probe/BOB").status_code == 400


def test_a_revoked_api_key_is_refused_from_the_next_request(runtime: Runtime, ada: Caller) -> None:
    assert ada.get("/probe/ada").status_code == 200
    (key,) = runtime.api_keys.list_keys()
    runtime.api_keys.revoke(key.id[:4])
    assert ada.get("/probe/ada").status_code == 401
    with pytest.raises(NotFound):
        runtime.api_keys.revoke(key.id)


def test_a_foreign_host_header_is_refused(runtime: Runtime, admin: Caller) -> None:
    for host in (
        "evil.example",
        "localhost.evil.example",
        "",
        "127.0.0.1.evil.example:80",
        "[::1].evil.example",
    ):
        assert admin.get("/probe", headers={"Host": host}).status_code == 400, host
        assert admin.get("/healthz", headers={"Host": host}).status_code == 400, host
    for host in ("localhost", "LOCALHOST:80", "[::1]:80", "192.168.1.2:80", "127.0.0.1"):
        assert admin.get("/probe", headers={"Host": host}).status_code == 200, host
    named = replace(admin, app=make_app(runtime, names=["models.home"], more=[_probe()]))
    assert named.get("/probe", headers={"Host": "models.home:80"}).status_code == 200


def test_a_cross_origin_page_is_refused(admin: Caller) -> None:
    for origin in (
        "https://evil.example",
        "null",
        "http://127.0.0.1:9999",
        "http://localhost:8080",
        "http://[::1",
    ):
        assert admin.get("/probe", headers={"Origin": origin}).status_code == 403, origin
    assert admin.get("/probe", headers={"Origin": "http://127.0.0.1:8080"}).status_code == 200


def test_a_page_at_a_name_of_the_server_is_its_own_behind_a_proxy(
    runtime: Runtime, admin: Caller
) -> None:
    named = replace(admin, app=make_app(runtime, names=["models.home"], more=[_probe()]))
    for origin in ("https://models.home", "https://models.home:8443"):
        sent = {"Host": "127.0.0.1:8080", "Origin": origin}
        assert named.get("/probe", headers=sent).status_code == 200, origin
    sent = {"Host": "127.0.0.1:8080", "Origin": "https://models.home.evil.example"}
    assert named.get("/probe", headers=sent).status_code == 403


def test_an_origin_that_the_operator_named_may_use_the_server(
    runtime: Runtime, admin: Caller
) -> None:
    origin, header = "http://localhost:3000", "Access-Control-Allow-Origin"
    allowing = replace(admin, app=make_app(runtime, origins=[origin], more=[_probe()]))
    preflight = allowing.app.test_client().options(
        "/probe", headers={"Origin": origin, "Access-Control-Request-Headers": "x-stainless-os"}
    )
    assert (preflight.status_code, preflight.headers[header]) == (204, origin)
    assert preflight.headers["Access-Control-Allow-Headers"] == "x-stainless-os"
    answer = allowing.get("/probe", headers={"Origin": origin})
    assert (answer.status_code, answer.headers[header]) == (200, origin)
    # It still needs an API key, and no other origin is let in.
    stranger = allowing.app.test_client().get("/probe", headers={"Origin": origin})
    assert (stranger.status_code, stranger.headers[header]) == (401, origin)
    other = allowing.get("/probe", headers={"Origin": "http://localhost:3001"})
    assert other.status_code == 403
    assert header not in other.headers
    assert header not in admin.get("/probe").headers


@pytest.mark.parametrize(
    "sent",
    [
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1e999}',
        b"[1]",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
    ids=range(8),
)
def test_malformed_json_is_refused_without_being_repeated(admin: Caller, sent: bytes) -> None:
    got = admin.ask("POST", "/probe", data=sent, content_type="application/json")
    assert got.status_code == 400
    assert len(got.data) < 300


def test_another_content_type_is_refused(admin: Caller) -> None:
    assert admin.ask("POST", "/probe", data=b"{}", content_type="text/plain").status_code == 415


def test_a_body_that_is_too_large_is_refused(admin: Caller) -> None:
    assert admin.post("/probe", {"a": "x" * validation.LARGEST}).status_code == 413


def test_a_bug_reveals_no_details(admin: Caller, caplog: pytest.LogCaptureFixture) -> None:
    got = admin.get("/bug")
    assert got.status_code == 500
    assert b"secret" not in got.data
    assert "a secret of the inside" not in caplog.text
    assert "RuntimeError" in caplog.text
    # The response names the log entry.
    (entry,) = re.findall(r"\[([0-9a-f]{8})\]", caplog.text)
    assert entry in got.json["error"]["message"]


def test_errors_of_plugins_and_files_and_broken_responses_are_in_no_log(
    runtime: Runtime, admin: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    words = "my dog is called Biscuit"
    blueprint = Blueprint("saying", __name__)

    @blueprint.get("/plugin")
    def plugin() -> object:
        raise personalpeft.PluginError(f"The verifier said {words!r}.")

    @blueprint.get("/file")
    def file() -> object:
        raise personalpeft.AdapterError(f"The tensor {words!r} is not known.")

    @blueprint.get("/stream")
    def stream() -> object:
        def written() -> Iterator[str]:
            yield "a"
            raise RuntimeError(words)

        return Response(written())

    @blueprint.get("/after")
    def after() -> object:
        response = Response("a")
        response.call_on_close(lambda: int(words))
        return response

    with serve_locally(runtime, more=[blueprint]) as site:
        for path in ("/plugin", "/file", "/stream", "/after"):
            request = Request(site.url + path, headers={"Authorization": f"Bearer {admin.secret}"})
            with suppress(OSError, HTTPException), urlopen(request, timeout=20) as got:
                got.read()
    assert words not in caplog.text
    for kind in ("PluginError", "AdapterError", "RuntimeError", "ValueError"):
        assert kind in caplog.text


def test_a_file_and_a_response_that_fails_at_its_end_free_their_place(
    runtime: Runtime, admin: Caller
) -> None:
    blueprint = Blueprint("failing", __name__)

    @blueprint.get("/after")
    def after() -> object:
        response = Response("a")
        response.call_on_close(lambda: int("no number"))
        return response

    @blueprint.get("/file")
    def file() -> Response:
        return send_file(__file__)

    limiter = ConcurrencyLimiter(1)
    caller = replace(admin, app=make_app(runtime, limiter=limiter, more=[blueprint]))
    assert caller.get("/file").data == Path(__file__).read_bytes()
    assert limiter.in_use == 0
    with pytest.raises(ValueError, match="no number"):
        caller.get("/after")
    assert limiter.in_use == 0


def test_requests_beyond_the_limit_are_refused_except_healthz(
    runtime: Runtime, admin: Caller
) -> None:
    limiter = ConcurrencyLimiter(1)
    full = replace(admin, app=make_app(runtime, limiter=limiter, more=[_probe()]))
    with limiter.hold("token"):
        got = full.get("/probe")
        assert got.status_code == 429
        assert int(got.headers["Retry-After"]) >= 1
        assert full.get("/healthz").status_code == 200
    assert [full.get("/probe").status_code for _ in range(3)] == [200] * 3
    assert limiter.in_use == 0


def test_the_access_log_holds_no_user_and_no_content(
    admin: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "personalpeft.access"):
        admin.get("/probe/ada?q=private").close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("GET /probe/<user> 200 ")
    assert "ada" not in line
    assert "private" not in line


def test_secret_files_are_readable_by_their_owner_only(runtime: Runtime) -> None:
    keys = runtime.api_keys
    assert keys.ensure_admin_key()
    assert not keys.ensure_admin_key()
    keys.create("ada")
    for path in (keys.admin_key_file, keys.admin_key_file.with_name("tokens.json")):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    secret = keys.create(None)[1]
    assert secret not in keys.admin_key_file.with_name("tokens.json").read_text()
    assert keys.authenticate(secret) is not None
    keys.admin_key_file.chmod(0o644)
    with pytest.raises(HomeError):
        keys.authenticate(secret)


def test_two_processes_agree_on_the_first_secret(runtime: Runtime) -> None:
    with personalpeft.open(runtime.settings.home, backend="fake") as other:
        assert [other.api_keys.ensure_admin_key(), runtime.api_keys.ensure_admin_key()] == [
            True,
            False,
        ]
        secret = runtime.api_keys.admin_key_file.read_text().strip()
        assert runtime.api_keys.authenticate(secret) == other.api_keys.authenticate(secret)
        made = other.api_keys.create("bob")[1]
        holder = runtime.api_keys.authenticate(made)
        assert holder is not None
        assert holder.user == "bob"


def test_created_and_revoked_api_keys_are_durable_on_return(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, home = runtime.api_keys, runtime.settings.home
    on_disk: list[str] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        fsync(handle)
        if os.path.samestat(os.fstat(handle), home.stat()):
            # A power cut after this point keeps the directory entries of now.
            on_disk.append(
                "".join(
                    path.read_text()
                    for path in (keys.admin_key_file, home / "tokens.json")
                    if path.exists()
                )
            )

    monkeypatch.setattr(os, "fsync", record)
    keys.ensure_admin_key()
    assert keys.admin_key_file.read_text() in on_disk[-1]
    made, _ = keys.create("ada")
    assert made.id in on_disk[-1]
    keys.revoke(made.id)
    assert made.id not in on_disk[-1]


def test_no_error_reveals_a_path_of_this_machine(
    runtime: Runtime, admin: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(runtime, more=[_broken(str(runtime.settings.home))])
    got = replace(admin, app=app)
    for path in ("/home", "/busy"):
        answer = got.get(path)
        assert answer.status_code in (507, 423)
        assert str(tmp_path) not in json.dumps(answer.json)


def _broken(home: str) -> Blueprint:
    blueprint = Blueprint("broken", __name__)

    @blueprint.get("/home")
    def full() -> object:
        raise HomeError(f"The disk that holds {home} is full.", hint=f"Free some space at {home}.")

    @blueprint.get("/busy")
    def busy() -> object:
        raise personalpeft.Busy(
            f"The home {home} is held by another process.", hint=f"Wait for {home}."
        )

    return blueprint


def test_the_prefix_that_a_foreign_client_demands_is_ignored(runtime: Runtime, app: Flask) -> None:
    secret = runtime.api_keys.create("ada")[1]
    for given, status in (
        (f"sk-{secret}", 200),
        (f"tml-{secret}", 200),
        (f"toolongforit-{secret}", 401),
        (f"sk-sk-{secret}", 401),
        ("sk-", 401),
        # A JWT that ends with the key, for clients that exchange it.
        (f"eyJhIjoxfQ.eyJiIjoyfQ.sk-{secret}", 200),
        (f"eyJhIjoxfQ.eyJiIjoyfQ.{'0' * len(secret)}", 401),
        ("eyJhIjoxfQ.eyJiIjoyfQ.", 401),
    ):
        assert Caller(app, given).get("/v1/models").status_code == status, given


@pytest.mark.parametrize("path", ["/chat/completions", "/messages"])
def test_a_base_url_without_v1_is_pointed_out(admin: Caller, path: str) -> None:
    response = admin.post(path, {})
    assert response.status_code == 404
    error = response.json["error"]
    # OpenAI's and Anthropic's libraries show the message alone.
    assert f"/v1{path}" in (error["message"] if isinstance(error, dict) else error)
    assert "/v1" not in admin.post("/nowhere", {}).json["error"]["message"]
