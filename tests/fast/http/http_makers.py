"""Servers on the fake backend, and callers that hold a token."""

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
    """Asks an app in this process, with a token and without."""

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


def administration(runtime: Runtime, app: Flask) -> Caller:
    runtime.api_keys.ensure_admin_key()
    return Caller(app, runtime.api_keys.admin_key_file.read_text().strip())


def of_user(runtime: Runtime, app: Flask, user: str = "ada") -> Caller:
    return Caller(app, runtime.api_keys.create(user)[1])


@dataclass(frozen=True)
class Served:
    """A server on a socket of this machine, and the secrets that it takes."""

    runtime: Runtime
    url: str
    secret: str
    places: ConcurrencyLimiter
    server: Server

    def of(self, user: str) -> str:
        return self.runtime.api_keys.create(user)[1]

    @property
    def running(self) -> float:
        return self.runtime.engine().metrics()["num_requests_running"]


@contextmanager
def served(runtime: Runtime, *, grace: float = 5, **more: Any) -> Iterator[Served]:
    """The app on a free port, in a thread of this process."""
    runtime.api_keys.ensure_admin_key()
    places = limiter_of(runtime)
    server = Server(
        make_app(runtime, owner="ada", places=places, **more), places, host="127.0.0.1", port=0
    )
    thread = threading.Thread(target=lambda: server.run(grace=grace, close=runtime.close))
    thread.start()
    secret = runtime.api_keys.admin_key_file.read_text().strip()
    try:
        yield Served(runtime, f"http://127.0.0.1:{server.port}", secret, places, server)
    finally:
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


def wait_for(happened: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.002)


class Slow:
    """Has the fake model take so long for a step, or wait for a word."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        step = FakeBackend.step

        def slowly(backend: FakeBackend) -> object:
            time.sleep(seconds)
            return step(backend)

        monkeypatch.setattr(FakeBackend, "step", slowly)
