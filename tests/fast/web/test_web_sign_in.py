"""A sign-in code works once, for minutes, for one user; its session ends with the server."""

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
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.server import make_app
from personalpeft_app.web import page
from personalpeft_app.web.sign_in import SECONDS, SignInCodes


@dataclass
class SignInApp:
    """An app that accepts sign-in codes, and a clock that the test sets."""

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
def sign_in(tmp_path: Path) -> Iterator[SignInApp]:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        yield SignInApp(runtime)


def test_a_code_gives_one_session_of_its_user_and_is_then_void(sign_in: SignInApp) -> None:
    code = sign_in.codes.issue("ada")
    answer = sign_in.redeem(code)
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    session = Caller(sign_in.app, answer.json["token"])
    assert session.get("/api/v1/whoami").json["user"] == "ada"
    assert session.get("/api/v1/users/bob").status_code == 403
    assert session.get("/api/v1/users").status_code == 403
    again = sign_in.redeem(code)
    assert again.status_code == 401
    # The code itself is no API key.
    assert Caller(sign_in.app, code).get("/api/v1/whoami").status_code == 401


def test_a_code_expires_after_minutes(sign_in: SignInApp) -> None:
    early, late = sign_in.codes.issue("ada"), sign_in.codes.issue("ada")
    sign_in.passed[0] += SECONDS - 1
    assert sign_in.redeem(early).status_code == 200
    sign_in.passed[0] += 1
    assert sign_in.redeem(late).status_code == 401
    assert SECONDS <= 15 * 60


@pytest.mark.parametrize("code", [None, "", "wrong", "x" * 10_000])
def test_an_invalid_code_gives_no_session(sign_in: SignInApp, code: str | None) -> None:
    sign_in.codes.issue("ada")
    assert sign_in.redeem(code).status_code == 401


def test_a_page_of_another_origin_cannot_redeem_a_code(sign_in: SignInApp) -> None:
    code = sign_in.codes.issue("ada")
    assert sign_in.redeem(code, Origin="http://evil.example").status_code == 403
    assert sign_in.redeem(code, Host="evil.example").status_code == 400
    assert sign_in.redeem(code).status_code == 200


def test_codes_and_sessions_are_in_no_file_and_end_with_the_server(
    sign_in: SignInApp,
) -> None:
    code = sign_in.codes.issue("ada")
    secret = sign_in.redeem(code).json["token"]
    home = sign_in.runtime.settings.home
    kept = b"".join(each.read_bytes() for each in home.rglob("*") if each.is_file())
    assert code.encode() not in kept
    assert secret.encode() not in kept
    sign_in.runtime.close()
    with personalpeft.open(home, backend="fake") as runtime:
        assert Caller(make_app(runtime), secret).get("/v1/models").status_code == 401


def test_a_code_needs_a_valid_user_id(sign_in: SignInApp) -> None:
    with pytest.raises(InvalidId):
        sign_in.codes.issue("../ada")


def test_a_page_without_codes_redeems_none(tmp_path: Path) -> None:
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        app = make_app(runtime, more=[page.blueprint()])
        assert Caller(app, "code").post("/web/session").status_code == 401


def test_a_session_and_a_code_end_with_the_user_that_another_process_erases(
    sign_in: SignInApp, tmp_path: Path
) -> None:
    sign_in.runtime.user("ada").chat("hello")
    session = Caller(sign_in.app, sign_in.redeem(sign_in.codes.issue("ada")).json["token"])
    code = sign_in.codes.issue("ada")
    assert session.get("/api/v1/users/ada").status_code == 200
    with personalpeft.open(tmp_path / "home", backend="fake") as other:
        other.forget_user("ada")
        other.user("ada").chat("I am another person.")
    assert session.get("/api/v1/users/ada").status_code == 401
    late = Caller(sign_in.app, sign_in.redeem(code).json["token"])
    assert late.get("/api/v1/users/ada").status_code == 401


def test_a_session_of_a_user_who_does_not_exist_yet_stays_when_that_one_is_made(
    sign_in: SignInApp,
) -> None:
    session = Caller(sign_in.app, sign_in.redeem(sign_in.codes.issue("ada")).json["token"])
    for _ in range(2):
        sign_in.runtime.user("ada").chat("hello")
        assert session.get("/api/v1/users/ada").status_code == 200
