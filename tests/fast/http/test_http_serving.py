"""A loaded server refuses at once, notices disconnects, and drains before it stops."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_makers import LocalServer, SlowSteps, serve_locally, wait_for
from prometheus_client.parser import text_string_to_metric_families

import personalpeft
from personalpeft import Cancelled, NothingToLearn, Runtime, Serving
from personalpeft_app.client import connect
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.concurrency import ConcurrencyLimiter, Quota
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


def ask(site: LocalServer, path: str, body: Any = None, **headers: str) -> http.client.HTTPResponse:
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
def streams(site: LocalServer, count: int, **more: Any) -> Iterator[list[http.client.HTTPResponse]]:
    """Open ``count`` streams that are being generated or queued."""
    opened: list[http.client.HTTPResponse] = []

    def one() -> None:
        opened.append(ask(site, "/v1/chat/completions", chat(stream=True, **more)))

    threads = [threading.Thread(target=one) for _ in range(count)]
    for number, thread in enumerate(threads, 1):
        thread.start()
        # Each request has its row before the next one, so that no more are queued than allowed.
        wait_for(lambda: site.limiter.in_use == number and site.running == min(number, 2))  # noqa: B023
    try:
        yield opened
    finally:
        for thread in threads:
            thread.join(20)


def test_under_full_load_healthz_answers_and_more_requests_get_a_retry_time(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.2)
    with serve_locally(runtime) as site, streams(site, 4) as replies:
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


def test_more_replies_than_can_ever_wait_are_refused_without_a_retry_time(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No reply ends before all of them are submitted.
    SlowSteps(monkeypatch, 0.1)
    with serve_locally(runtime) as site:
        refused = ask(site, "/v1/chat/completions", chat(n=16))
        assert refused.status == 429
        assert refused.headers["Retry-After"] is None
        # The libraries of OpenAI and Anthropic try again after 429 otherwise.
        assert refused.headers["X-Should-Retry"] == "false"
        assert "16" in json.loads(refused.read())["error"]["message"]
        # The places of the refused replies are free once the engine has dropped them.
        answers = (ask(site, "/v1/chat/completions", chat(n=2)).status for _ in range(100))
        assert next(status for status in answers if status != 429) == 200


@pytest.mark.exhaustive
def test_a_user_who_takes_all_allowed_places_leaves_one_to_others(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.2)
    with serve_locally(runtime) as site:
        runtime.user("bo")
        another, ada = (f"Bearer {site.api_key_of(user)}" for user in ("bo", "ada"))
        with streams(replace(site, secret=site.api_key_of("bo")), 3, model="bo"):
            refused = ask(site, "/v1/chat/completions", chat(model="bo"), Authorization=another)
            answered = ask(site, "/v1/chat/completions", chat(), Authorization=ada)
            assert (refused.status, answered.status) == (429, 200)


def test_a_disconnect_frees_the_row_and_records_the_partial_reply(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.1)
    with serve_locally(runtime) as site:
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
            wait_for(lambda: site.running == 0 and site.limiter.in_use == 0)
        turns = runtime.user("ada").turns()
        assert {turn.finish_reason for turn in turns} == {"cancelled"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_records_all_replies_of_its_request_alike(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    SlowSteps(monkeypatch, 0.1)
    with serve_locally(runtime) as site:
        connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
        headers = {"Authorization": f"Bearer {site.secret}", "Content-Type": "application/json"}
        body = json.dumps(chat(n=2, stream=stream))
        connection.request("POST", "/v1/chat/completions", body, headers)
        wait_for(lambda: runtime.engine().metrics()["generation_tokens_total"] >= 4)
        connection.sock.close()
        connection.close()
        wait_for(lambda: site.running == 0 and site.limiter.in_use == 0)
        turns = runtime.user("ada").turns()
        assert [turn.finish_reason for turn in turns] == ["cancelled"] * 2
        assert all(turn.reply for turn in turns)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"prompt": "Hello"}),
        ("chat/stream", {"prompt": "Hello"}),
        ("comparisons", {"prompt": "Hello", "a": "live", "b": "base"}),
    ],
)
def test_a_disconnect_from_the_v1_api_frees_its_rows(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    ada = runtime.user("ada")
    for number in range(5):
        ada.feedback(
            ada.chat(f"question {number}", temperature=0), edit=f"Ahoy! Answer {number}. Arrr!"
        )
    ada.learn()
    SlowSteps(monkeypatch, 0.1)
    api = ApiV1(runtime)
    with serve_locally(runtime, more=[api.blueprint]) as site:
        connection = http.client.HTTPConnection(site.url.removeprefix("http://"), timeout=20)
        headers = {"Authorization": f"Bearer {site.secret}", "Content-Type": "application/json"}
        connection.request("POST", f"/api/v1/users/ada/{path}", json.dumps(body), headers)
        wait_for(lambda: site.running > 0)
        connection.sock.close()
        connection.close()
        wait_for(lambda: site.running == 0 and site.limiter.in_use == 0)
        assert runtime.engine().metrics()["cancellations_total"] > 0
        api.close()


def test_a_stopping_server_finishes_replies_and_accepts_nothing_new(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.1)
    with serve_locally(runtime) as site:
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
        body = reply.read()
        assert b'"finish_reason":"stop"' in body
        assert body.rstrip().endswith(b"data: [DONE]")
        wait_for(lambda: _is_closed(site))


def _is_closed(site: LocalServer) -> bool:
    try:
        ask(site, "/healthz")
    except OSError:
        return True
    return False


def test_a_reply_cut_by_the_grace_period_is_marked_incomplete(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.3)
    with serve_locally(runtime, grace=0) as site:
        reply = ask(site, "/v1/chat/completions", chat(stream=True))
        site.server.stop()
        body = reply.read()
    assert b"[DONE]" not in body
    assert b'"error"' in body


def test_a_reply_of_the_own_api_cut_by_the_grace_period_is_an_error(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    SlowSteps(monkeypatch, 0.3)
    with (
        closing(ApiV1(runtime)) as api,
        serve_locally(runtime, grace=0, more=[api.blueprint]) as site,
    ):
        reply = ask(site, "/api/v1/users/bob/chat/stream", {"prompt": "Hello there"})
        site.server.stop()
        body = reply.read()
    assert b"event: error" in body
    assert b"event: ended" not in body


def test_a_request_that_never_ends_does_not_keep_the_server_from_stopping(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, over = threading.Event(), threading.Event()

    def endless(runtime: Runtime) -> tuple[()]:
        begun.set()
        over.wait(60)
        return ()

    monkeypatch.setattr(Runtime, "verify", endless)
    with closing(ApiV1(runtime)) as api:
        with serve_locally(runtime, grace=0, more=[api.blueprint]) as site:

            def ask_and_disconnect() -> None:
                with suppress(OSError, http.client.HTTPException):
                    ask(site, "/api/v1/verify", {})

            asking = threading.Thread(target=ask_and_disconnect)
            asking.start()
            assert begun.wait(20)
            stopped = time.monotonic()
        assert time.monotonic() - stopped < 15
        over.set()
        asking.join(20)


def test_a_stop_ends_jobs_first_so_that_their_readers_delay_nothing(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def until_stopped(runtime: Runtime, *asked: object, cancelled: Any, **more: object) -> None:
        wait_for(cancelled, 60)
        raise Cancelled("It was stopped.")

    monkeypatch.setattr(Runtime, "learn_many", until_stopped)
    with closing(ApiV1(runtime)) as api:
        more = {"grace": 15, "stop_jobs": api.jobs.stop, "more": [api.blueprint]}
        with serve_locally(runtime, **more) as site:
            job = ask(site, "/api/v1/learns", {"users": ["bob"]}).headers["Location"]
            events = ask(site, f"{job}/events")
            stopped = time.monotonic()
            site.server.stop()
            assert b'"state": "cancelled"' in events.read()
        assert time.monotonic() - stopped < 5


def test_event_streams_leave_capacity_and_are_limited_per_api_key(
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
        serve_locally(runtime, more=[api.blueprint]) as site,
        ExitStack() as opened,
    ):

        def follow(secret: str) -> http.client.HTTPResponse:
            response = ask(site, f"{job}/events", Authorization=f"Bearer {secret}")
            opened.callback(response.connection.close)  # type: ignore[attr-defined]
            if response.status != 200:
                response.connection.close()  # type: ignore[attr-defined]
            return response

        job = ask(site, "/api/v1/learns", {"users": ["bob"]}).headers["Location"]
        secrets = [runtime.api_keys.create(None)[1] for _ in range(site.limiter.count)]
        first = follow(secrets[0])
        assert first.status == 200
        refused = follow(secrets[0])
        assert refused.status == 429
        assert int(refused.headers["Retry-After"]) >= 1
        # All API keys together use fewer than the limit.
        assert [follow(secret).status for secret in secrets[1:]] == [200, 429, 429]
        # Its capacity is free once the last byte of the response was sent.
        wait_for(
            lambda: ask(site, "/api/v1/whoami", Authorization=f"Bearer {secrets[0]}").status == 200
        )
        wait_for(lambda: site.limiter.in_use == 2)  # The two streams that are open.
        # A learn continues for a client that finds no free event stream.
        with pytest.raises(NothingToLearn):
            connect(site.url, secrets[0]).user("ada").learn("style")
        # A disconnect frees an event stream.
        first.connection.close()  # type: ignore[attr-defined]
        wait_for(lambda: follow(secrets[0]).status == 200)


def test_metrics_have_vllms_names_and_no_user(runtime: Runtime) -> None:
    with serve_locally(runtime) as site:
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
        assert ask(site, "/metrics", Authorization=f"Bearer {site.api_key_of('ada')}").status == 403


def test_a_taken_port_is_an_error(runtime: Runtime) -> None:
    with serve_locally(runtime) as site, pytest.raises(personalpeft.InvalidInput, match="listen"):
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


def test_abandoned_context_that_is_collected_while_another_is_counted_frees_its_place() -> None:
    quota = Quota(2, 2, "full")

    class Collecting(str):
        """An API key at whose look-up the garbage is collected."""

        __slots__ = ()

        def __hash__(self) -> int:
            gc.collect(0)  # The abandoned context is young.
            return str.__hash__(self)

    def work() -> None:
        abandoned: list[Any] = [quota.hold("ada")]
        abandoned[0].__enter__()
        abandoned.append(abandoned)
        del abandoned
        with quota.hold(Collecting("bo")):
            counted.append(quota.in_use)

    counted: list[int] = []
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    assert (counted, quota.in_use) == ([1], 0)
