"""Servers on the fake backend, and callers that hold a token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flask import Flask
from werkzeug.test import TestResponse

from personalpeft import Runtime


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
        return self.app.test_client().open(path, method=method, headers=headers, buffered=True, **more)


def administration(runtime: Runtime, app: Flask) -> Caller:
    runtime.tokens.ensure_first()
    return Caller(app, runtime.tokens.first.read_text().strip())


def of_user(runtime: Runtime, app: Flask, user: str = "ada") -> Caller:
    return Caller(app, runtime.tokens.make(user)[1])
