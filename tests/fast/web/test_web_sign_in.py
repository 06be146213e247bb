"""A code signs in once, for a short while, as one user; and what it gives ends with the server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from flask import Flask
from http_makers import Caller
from werkzeug.test import TestResponse

import personalpeft
from personalpeft import Runtime
from personalpeft.clock import Clock
from personalpeft.errors import InvalidId
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.http.server import make_app
from personalpeft_app.web import page
from personalpeft_app.web.sign_in import SECONDS, SignInCodes


@dataclass
class Signing:
    """An app that takes codes, and a clock that the test moves."""

    runtime: Runtime
    passed: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self.codes = SignInCodes(self.runtime.api_keys, Clock(timer=lambda: self.passed[0]))
        self.app: Flask = make_app(
            self.runtime, more=[ApiV1(self.runtime).blueprint, page.blueprint(self.codes)]
        )

    def redeem(self, code: str | None, **headers: str) -> TestResponse:
        return Caller(self.app, code).post("/web/session", headers=headers)


@pytest.fixture
def signing(tmp_path: Path) -> Iterator[Signing]:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        yield Signing(runtime)


def test_a_code_gives_one_session_of_its_user_and_is_void_then(signing: Signing) -> None:
    code = signing.codes.issue("ada")
    answer = signing.redeem(code)
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    session = Caller(signing.app, answer.json["token"])
    assert session.get("/api/v1/token").json["user"] == "ada"
    assert session.get("/api/v1/users/bob").status_code == 403
    assert session.get("/api/v1/users").status_code == 403
    again = signing.redeem(code)
    assert again.status_code == 401
    # The code itself opens nothing.
    assert Caller(signing.app, code).get("/api/v1/token").status_code == 401


def test_a_code_is_void_after_minutes(signing: Signing) -> None:
    early, late = signing.codes.issue("ada"), signing.codes.issue("ada")
    signing.passed[0] += SECONDS - 1
    assert signing.redeem(early).status_code == 200
    signing.passed[0] += 1
    assert signing.redeem(late).status_code == 401
    assert SECONDS <= 15 * 60


@pytest.mark.parametrize("code", [None, "", "wrong", "x" * 10_000])
def test_what_is_no_code_gives_no_session(signing: Signing, code: str | None) -> None:
    signing.codes.issue("ada")
    assert signing.redeem(code).status_code == 401


def test_a_page_of_another_origin_may_use_no_code(signing: Signing) -> None:
    code = signing.codes.issue("ada")
    assert signing.redeem(code, Origin="http://evil.example").status_code == 403
    assert signing.redeem(code, Host="evil.example").status_code == 400
    assert signing.redeem(code).status_code == 200


def test_neither_a_code_nor_its_session_is_in_a_file_or_outlives_the_server(
    signing: Signing,
) -> None:
    code = signing.codes.issue("ada")
    secret = signing.redeem(code).json["token"]
    home = signing.runtime.settings.home
    kept = b"".join(each.read_bytes() for each in home.rglob("*") if each.is_file())
    assert code.encode() not in kept
    assert secret.encode() not in kept
    signing.runtime.close()
    with personalpeft.open(home, backend="fake") as runtime:
        assert Caller(make_app(runtime), secret).get("/v1/models").status_code == 401


def test_a_code_is_of_a_user_that_can_be(signing: Signing) -> None:
    with pytest.raises(InvalidId):
        signing.codes.issue("../ada")


def test_a_page_without_codes_exchanges_none(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        app = make_app(runtime, more=[page.blueprint()])
        assert Caller(app, "code").post("/web/session").status_code == 401
