"""The files of the page hold nothing of anybody, are handed out as they are, and are written so that the policy holds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from flask import Flask
from http_makers import Caller, administration
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
def folder(nobody: Caller) -> str:
    """Where the page says that its files are."""
    found = re.search(r'src="(web/[0-9a-f]+)/main\.js"', nobody.get("/").text)
    assert found
    return f"/{found[1]}"


@pytest.fixture
def nobody(app: Flask) -> Caller:
    return Caller(app, None)


def test_the_page_needs_no_token_and_whatever_is_somebodys_does(
    app: Flask, nobody: Caller, folder: str
) -> None:
    assert nobody.get("/").status_code == 200
    for path in PARTS:
        assert nobody.get(f"{folder}/{path.name}").status_code == 200, path.name
    for rule in app.url_map.iter_rules():
        if rule.rule not in ("/", "/web/<of>/<name>", "/healthz"):
            (method,) = sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})[:1]
            path = re.sub("<[^>]+>", "ada", rule.rule)
            assert nobody.ask(method, path).status_code == 401, rule.rule


def test_a_file_of_the_page_carries_the_policy_and_is_kept_until_it_changes(
    nobody: Caller, folder: str
) -> None:
    for path in ("/", *(f"{folder}/{path.name}" for path in PARTS)):
        got = nobody.get(path)
        assert got.headers["Content-Security-Policy"] == POLICY
        assert got.headers["X-Content-Type-Options"] == "nosniff"
        assert got.headers["Cache-Control"] == (
            "no-cache" if path == "/" else "max-age=31536000, immutable"
        )
        again = nobody.get(path, headers={"If-None-Match": got.headers["ETag"]})
        assert (again.status_code, again.data) == (304, b"")
        assert again.headers["Content-Security-Policy"] == POLICY
        assert "Set-Cookie" not in got.headers


@pytest.mark.parametrize(
    "name", ["nothing.js", "../page.py", "..%2Fpage.py", "%2e%2e/page.py", "__init__.py", "a/b", ""]
)
def test_no_name_leads_out_of_the_folder(nobody: Caller, folder: str, name: str) -> None:
    # Of what has a form that the page's files do not have nobody hears whether it is there.
    assert nobody.get(f"{folder}/{name}").status_code in (401, 404)
    assert nobody.get("/web/0123456789ab/main.js").status_code == 404


def test_the_page_is_of_this_host_and_origin_alone(nobody: Caller) -> None:
    assert nobody.get("/", headers={"Host": "evil.example"}).status_code == 400
    assert nobody.get("/", headers={"Origin": "https://evil.example"}).status_code == 403
    assert nobody.ask("POST", "/").status_code in (401, 405)


def test_the_page_works_under_a_path_of_another_app(app: Flask) -> None:
    mounted = Client(DispatcherMiddleware(Flask("shop"), {"/model": app}))
    # Without the slash its files would be looked for beside it.
    assert mounted.get("/model").headers["Location"].endswith("/model/")
    found = re.search(r'src="(web/[0-9a-f]+/main\.js)"', mounted.get("/model/").text)
    assert found
    assert mounted.get(f"/model/{found[1]}").status_code == 200


def test_the_page_is_there_while_everything_else_is_refused_for_too_much_work(
    runtime: Runtime,
) -> None:
    from personalpeft_app.http.concurrency import ConcurrencyLimiter

    places = ConcurrencyLimiter(1)
    full = administration(runtime, make_app(runtime, places=places, more=with_page(runtime)[1]))
    assert places.acquire()
    assert full.get("/api/v1/token").status_code == 429
    assert full.get("/").status_code == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_inline_and_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(
        r"<script(?![^>]*\bsrc=\"web/)|<style|\sstyle=|\son[a-z]+=\"|javascript:", text
    )
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|//[a-z]+\.[a-z]{2,}", text
    )


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_of_a_text(path: Path) -> None:
    text = path.read_text("utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser|setHTML|\beval\b"
        r"|new Function|srcdoc|document\.cookie",
        text,
    )
    assert text.count("\n") < 300


def test_what_a_file_names_is_there() -> None:
    names = {path.name for path in FILES}
    for path in FILES:
        text = path.read_text("utf-8")
        found = re.findall(
            r'from "\./([^"]+)"|import\("\./([^"]+)"\)|(?:href|src)="web/([^"]+)"', text
        )
        for name in (next(filter(None, each)) for each in found):
            assert name in names, (path.name, name)
