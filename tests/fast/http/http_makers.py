"""Servers on the fake backend, and callers with an API key."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from flask import Flask
from werkzeug.test import TestResponse

from personalpeft import Runtime
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.http.concurrency import ConcurrencyLimiter, limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server


@dataclass(frozen=True)
class Caller:
    """Sends requests to an app in this process, with or without an API key."""

    app: Flask
    secret: str | None

    def post(self, path: str, body: Any = None, **more: Any) -> TestResponse:
        return self.ask("POST", path, json=body, **more)

    def get(self, path: str, **more: Any) -> TestResponse:
        return self.ask("GET", path, **more)

    def ask(self, method: str, path: str, **more: Any) -> TestResponse:
        headers = {"Host": "127.0.0.1:8080", **more.pop("headers", {})}
        if self.secret is not None:
            headers.setdefault("Authorization", f"Bearer {self.secret}")
        return self.app.test_client().open(
            path, method=method, headers=headers, buffered=True, **more
        )


def admin_caller(runtime: Runtime, app: Flask) -> Caller:
    runtime.api_keys.ensure_admin_key()
    return Caller(app, runtime.api_keys.admin_key_file.read_text().strip())


def user_caller(runtime: Runtime, app: Flask, user: str = "ada") -> Caller:
    return Caller(app, runtime.api_keys.create(user)[1])


@dataclass(frozen=True)
class LocalServer:
    """A server on a local socket, and its API keys."""

    runtime: Runtime
    url: str
    secret: str
    limiter: ConcurrencyLimiter
    server: Server

    def api_key_of(self, user: str) -> str:
        return self.runtime.api_keys.create(user)[1]

    @property
    def running(self) -> float:
        return self.runtime.engine().metrics()["num_requests_running"]


@contextmanager
def serve_locally(
    runtime: Runtime,
    *,
    grace: float = 5,
    stop_jobs: Callable[[], None] = lambda: None,
    **more: Any,
) -> Iterator[LocalServer]:
    """Run the app on a free port in a thread of this process."""
    runtime.api_keys.ensure_admin_key()
    limiter = limiter_of(runtime)
    server = Server(
        make_app(runtime, owner="ada", limiter=limiter, **more), limiter, host="127.0.0.1", port=0
    )
    thread = threading.Thread(
        target=lambda: server.run(grace=grace, close=runtime.close, stop_jobs=stop_jobs)
    )
    thread.start()
    secret = runtime.api_keys.admin_key_file.read_text().strip()
    try:
        yield LocalServer(runtime, f"http://127.0.0.1:{server.port}", secret, limiter, server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def wait_for(happened: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.002)


class SlowSteps:
    """Delays each step of the fake model."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        step = FakeBackend.step

        def slowly(backend: FakeBackend) -> object:
            time.sleep(seconds)
            return step(backend)

        monkeypatch.setattr(FakeBackend, "step", slowly)
