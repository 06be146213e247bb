"""The page's files hold no user data and comply with its content security policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flask import Flask
from http_makers import Caller, admin_caller
from web_makers import with_page
from werkzeug.middleware.dispatcher import DispatcherMiddleware
from werkzeug.test import Client

import personalpeft_app.web
from personalpeft import Runtime
from personalpeft_app.http.server import make_app
from personalpeft_app.web.page import POLICY

SITE = Path(personalpeft_app.web.__file__).parent / "site"
FILES = sorted(SITE.iterdir())
PARTS = [path for path in FILES if path.name != "index.html"]
SCRIPTS = [path for path in FILES if path.suffix == ".js"]


@pytest.fixture
def app(runtime: Runtime) -> Flask:
    return make_app(runtime, owner="ada", more=with_page(runtime)[1])


@pytest.fixture
def folder(anonymous: Caller) -> str:
    """Return the folder of the page's files, as the page links it."""
    found = re.search(r'src="(web/[0-9a-f]+)/main\.js"', anonymous.get("/").text)
    assert found
    return f"/{found[1]}"


@pytest.fixture
def anonymous(app: Flask) -> Caller:
    return Caller(app, None)


def test_the_page_needs_no_api_key_and_every_user_route_does(
    app: Flask, anonymous: Caller, folder: str
) -> None:
    assert anonymous.get("/").status_code == 200
    for path in PARTS:
        assert anonymous.get(f"{folder}/{path.name}").status_code == 200, path.name
    for rule in app.url_map.iter_rules():
        if rule.rule not in ("/", "/web/<of>/<name>", "/healthz"):
            (method,) = sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})[:1]
            path = re.sub("<[^>]+>", "ada", rule.rule)
            assert anonymous.ask(method, path).status_code == 401, rule.rule


def test_a_file_carries_the_policy_and_is_cached_until_it_changes(
    anonymous: Caller, folder: str
) -> None:
    for path in ("/", *(f"{folder}/{path.name}" for path in PARTS)):
        got = anonymous.get(path)
        assert got.headers["Content-Security-Policy"] == POLICY
        assert got.headers["X-Content-Type-Options"] == "nosniff"
        assert got.headers["Cache-Control"] == (
            "no-cache" if path == "/" else "max-age=31536000, immutable"
        )
        again = anonymous.get(path, headers={"If-None-Match": got.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")
        assert again.headers["Content-Security-Policy"] == POLICY
        assert "Set-Cookie" not in got.headers


@pytest.mark.parametrize(
    "name", ["nothing.js", "../page.py", "..%2Fpage.py", "%2e%2e/page.py", "__init__.py", "a/b", ""]
)
def test_no_name_reaches_outside_the_folder(anonymous: Caller, folder: str, name: str) -> None:
    # Names of another form than the page's files are 401 whether or not they exist.
    assert anonymous.get(f"{folder}/{name}").status_code in (401, 404)
    assert anonymous.get("/web/0123456789ab/main.js").status_code == 404


def test_the_page_is_served_to_its_own_host_and_origin_only(anonymous: Caller) -> None:
    assert anonymous.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert anonymous.get("/", headers={"Origin": "https://evil.example"}).status_code == 403
    assert anonymous.ask("POST", "/").status_code in (401, 405)


def test_the_page_works_below_a_path_of_another_app(app: Flask) -> None:
    mounted = Client(DispatcherMiddleware(Flask("shop"), {"/model": app}))
    # Without the trailing slash its relative links would be resolved against the parent path.
    assert mounted.get("/model").headers["Location"].endswith("/model/")
    found = re.search(r'src="(web/[0-9a-f]+/main\.js)"', mounted.get("/model/").text)
    assert found
    assert mounted.get(f"/model/{found[1]}").status_code == 200


def test_the_page_is_served_while_other_requests_are_refused_under_load(
    runtime: Runtime,
) -> None:
    from personalpeft_app.http.concurrency import ConcurrencyLimiter

    limiter = ConcurrencyLimiter(1)
    full = admin_caller(runtime, make_app(runtime, limiter=limiter, more=with_page(runtime)[1]))
    with limiter.hold("token"):
        assert full.get("/api/v1/whoami").status_code == 429
        assert full.get("/").status_code == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_code_is_inline_and_nothing_is_loaded_from_other_origins(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(
        r"<script(?![^>]*\bsrc=\"web/)|<style|\sstyle=|\son[a-z]+=\"|javascript:", text
    )
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|//[a-z]+\.[a-z]{2,}", text
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_turns_text_into_markup_or_code(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|\beval\b"
        r"|new Function|srcdoc|document\.cookie",
        text,
    )
    assert text.count("\n") < 300


def test_every_name_that_a_file_refers_to_exists() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        text = path.read_text("utf-8")
        found = re.findall(
            r'from "\./([^"]+)"|import\("\./([^"]+)"\)|(?:href|src)="web/([^"]+)"', text
        )
        for name in (next(filter(None, each)) for each in found):
            assert name in names, (path.name, name)
