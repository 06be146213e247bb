"""A server under load says so at once, notices who has gone, and stops without cutting anybody off."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_makers import Served, Slow, served, wait_for
from prometheus_client.parser import text_string_to_metric_families

import personalpeft
from personalpeft import NothingToLearn, Runtime, Serving
from personalpeft_app.client import connect
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.http.concurrency import ConcurrencyLimiter
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server

HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with personalpeft.open(
        tmp_path / "home", backend="fake", serving=Serving(max_batch=2, max_queue=2)
    ) as opened:
        opened.user("ada")
        yield opened


def ask(site: Served, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
    sent = {"Authorization": f"Bearer {site.secret}", **headers}
    if body is None:
        connection.request("GET", path, headers=sent)
    else:
        connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json", **sent}
        )
    response = connection.getresponse()
    response.connection = connection  # type: ignore[attr-defined] - it must not be closed before it is read
    return response


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "ada", "messages": HELLO, "temperature": 0, **more}


@contextmanager
def streams(site: Served, count: int) -> Iterator[list[http.client.HTTPResponse]]:
    """So many replies that are being written, or wait."""
    opened: list[http.client.HTTPResponse] = []

    def one() -> None:
        opened.append(ask(site, "/v1/chat/completions", chat(stream=True)))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        # Who is there already has a row before the next comes: else more might wait than may.
        wait_for(lambda: site.places.in_use == number and site.running == min(number, 2))  # noqa: B023
    try:
        yield opened
    finally:
        for thread in threads:
            thread.join(20)


def test_under_full_load_healthz_answers_and_more_is_refused_with_a_time_to_try_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, 0.2)
    with served(runtime) as site, streams(site, 4) as replies:
        begun = time.monotonic()
        assert ask(site, "/healthz").status == 200
        took = time.monotonic() - begun
        refused = ask(site, "/v1/chat/completions", chat())
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        assert json.loads(refused.read())["error"]["type"] == "rate_limit_error"
        assert took < 0.1
    assert [reply.status for reply in replies] == [200] * 4
    assert all(b"[DONE]" in reply.read() for reply in replies)


def test_a_client_that_goes_away_frees_its_row_and_what_it_saw_is_kept(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, 0.1)
    with served(runtime) as site:
        for stream in (True, False):
            connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
            headers = {"Authorization": f"Bearer {site.secret}", "Content-Type": "application/json"}
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(chat(stream=stream)), headers
            )
            wait_for(lambda: site.running == 1)
            if stream:
                connection.sock.recv(300)
            connection.sock.close()
            connection.close()
            gone = time.monotonic()
            wait_for(lambda: site.running == 0 and site.places.in_use == 0)
            # One step, and what it takes to hear of it.
            assert time.monotonic() - gone < 0.35
        turns = runtime.user("ada").turns()
        assert {turn.finish_reason for turn in turns} == {"cancelled"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"prompt": "Hello"}),
        ("chat/stream", {"prompt": "Hello"}),
        ("comparisons", {"prompt": "Hello", "a": "live", "b": "base"}),
    ],
)
def test_a_client_of_our_own_api_that_goes_away_frees_its_rows(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    ada = runtime.user("ada")
    for number in range(5):
        ada.feedback(
            ada.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
        )
    ada.learn()
    Slow(monkeypatch, 0.1)
    api = ApiV1(runtime)
    with served(runtime, more=[api.blueprint]) as site:
        connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
        headers = {"Authorization": f"Bearer {site.secret}", "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1/users/ada/{path}", json.dumps(body), headers)
        wait_for(lambda: site.running > 0)
        connection.sock.close()
        connection.close()
        gone = time.monotonic()
        wait_for(lambda: site.running == 0 and site.places.in_use == 0)
        # Far from the end of what was asked for, which takes half a second at least.
        assert time.monotonic() - gone < 0.35
        api.close()


def test_a_stop_lets_replies_end_and_takes_nothing_new(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, 0.1)
    with served(runtime) as site:
        with closing(
            http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
        ) as kept:
            kept.request("GET", "/healthz")
            kept.getresponse().read()
            reply = ask(site, "/v1/chat/completions", chat(stream=True))
            site.server.stop()
            kept.request("GET", "/healthz")
            health = kept.getresponse()
            assert (health.status, json.loads(health.read())["status"]) == (503, "stopping")
        said = reply.read()
        assert b'"finish_reason":"stop"' in said
        assert said.rstrip().endswith(b"data: [DONE]")
        wait_for(lambda: _nobody_listens(site))


def _nobody_listens(site: Served) -> bool:
    try:
        ask(site, "/healthz")
    except OSError:
        return True
    return False


def test_a_reply_that_outlasts_the_grace_says_that_it_is_not_whole(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    Slow(monkeypatch, 0.3)
    with served(runtime, grace=0) as site:
        reply = ask(site, "/v1/chat/completions", chat(stream=True))
        site.server.stop()
        said = reply.read()
    assert b"[DONE]" not in said
    assert b'"error"' in said


def test_streams_of_jobs_leave_places_for_others_and_one_token_has_a_share_of_them(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_stopped(
        runtime: Runtime, *asked: object, cancelled: Any, **more: object
    ) -> tuple[()]:
        wait_for(cancelled, 60)
        return ()

    monkeypatch.setattr(Runtime, "learn_many", until_stopped)
    with (
        closing(ApiV1(runtime)) as api,
        served(runtime, more=[api.blueprint]) as site,
        ExitStack() as opened,
    ):

        def follow(secret: str) -> http.client.HTTPResponse:
            response = ask(site, f"{job}/events", Authorization=f"Bearer {secret}")
            opened.callback(response.close)
            if response.status != 200:
                response.connection.close()  # type: ignore[attr-defined]
            return response

        job = ask(site, "/api/v1/learns", {"users": ["bob"]}).headers["Location"]
        secrets = [runtime.api_keys.create(None)[1] for _ in range(site.places.count)]
        first = follow(secrets[0])
        assert first.status == 200
        refused = follow(secrets[0])
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        # Of all tokens together, fewer than there are places.
        assert [follow(secret).status for secret in secrets[1:]] == [200, 429, 429]
        assert ask(site, "/api/v1/token", Authorization=f"Bearer {secrets[0]}").status == 200
        # A learn goes on for a client that finds no stream free.
        with pytest.raises(NothingToLearn):
            connect(site.url, secrets[0]).user("ada").learn("style")
        # Who goes away leaves a stream for the next.
        first.close()
        wait_for(lambda: follow(secrets[0]).status == 200)


def test_metrics_have_names_of_vllm_and_no_user_in_them(runtime: Runtime) -> None:
    with served(runtime) as site:
        for _ in range(3):
            ask(site, "/v1/chat/completions", chat()).read()
        text = ask(site, "/metrics").read().decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["personalpeft:request_success"].samples[0].value == 3
        assert families["personalpeft:num_requests_running"].samples[0].value == 0
        first_token = {
            (sample.name, sample.labels.get("le")): sample.value
            for sample in families["personalpeft:time_to_first_token_seconds"].samples
        }
        assert first_token["personalpeft:time_to_first_token_seconds_count", None] == 3
        assert first_token["personalpeft:time_to_first_token_seconds_bucket", "+Inf"] == 3
        labels = {
            name
            for family in families.values()
            for sample in family.samples
            for name in sample.labels
        }
        assert labels == {"le", "version"}
        assert "ada" not in text.replace("adapter", "")
        assert ask(site, "/metrics", Authorization=f"Bearer {site.of('ada')}").status == 403


def test_a_port_that_is_taken_is_said_so(runtime: Runtime) -> None:
    with served(runtime) as site, pytest.raises(personalpeft.InvalidInput, match="listen"):
        Server(make_app(runtime), ConcurrencyLimiter(1), host="127.0.0.1", port=site.server.port)


def test_a_name_with_addresses_of_both_families_is_served_at_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", int(port), 0, 0))
        four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", int(port)))
        return [six, four] if host == "localhost" else [four]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    server = Server(make_app(runtime), ConcurrencyLimiter(1), host="localhost", port=0)
    stopped = threading.Thread(target=lambda: server.run(grace=1, close=runtime.close))
    stopped.start()
    try:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as line:
            line.request("GET", "/healthz")
            assert line.getresponse().status == 200
    finally:
        server.stop()
        stopped.join(20)
