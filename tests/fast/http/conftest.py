"""Fixtures: the HTTP app on the fake backend, its callers, and a running server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask
from http_makers import Caller, LocalServer, admin_caller, serve_locally, user_caller

import personalpeft
from personalpeft import Runtime
from personalpeft_app.http.server import make_app


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with personalpeft.open(tmp_path / "home", backend="fake") as opened:
        yield opened


@pytest.fixture
def app(runtime: Runtime) -> Flask:
    return make_app(runtime, owner="ada")


@pytest.fixture
def admin(runtime: Runtime, app: Flask) -> Caller:
    return admin_caller(runtime, app)


@pytest.fixture
def ada(runtime: Runtime, app: Flask) -> Caller:
    return user_caller(runtime, app)


@pytest.fixture(scope="module")
def shared_runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """A runtime with the user ada that tests share which change nothing."""
    with personalpeft.open(tmp_path_factory.mktemp("shared") / "home", backend="fake") as opened:
        opened.user("ada")
        yield opened


@pytest.fixture(scope="module")
def shared_admin(shared_runtime: Runtime) -> Caller:
    return admin_caller(shared_runtime, make_app(shared_runtime, owner="ada"))


@pytest.fixture
def site(runtime: Runtime) -> Iterator[LocalServer]:
    with serve_locally(runtime) as made:
        yield made
