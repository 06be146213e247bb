"""Fixtures: a browser, a running site on the fake backend, and visits to it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "http"))

from http_makers import serve_locally
from web_makers import PATIENCE, Site, Visit, chromium, new_visit, with_page

import personalpeft
from personalpeft import Runtime
from personalpeft_app.web.sign_in import SignInCodes

expect.set_options(timeout=PATIENCE)


# Module scope: while the browser is open, no other test can run an event loop of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        found = chromium(playwright)
        yield found
        found.close()


@pytest.fixture
def runtime(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Runtime]:
    """The parameter of the ``runtime`` fixture is its implicit feedback setting."""
    implicit = getattr(request, "param", "off")
    with personalpeft.open(tmp_path / "home", backend="fake", implicit_feedback=implicit) as opened:
        yield opened


@pytest.fixture
def site(runtime: Runtime) -> Iterator[Site]:
    codes = SignInCodes(runtime.api_keys)
    own, blueprints = with_page(runtime, codes)
    with serve_locally(runtime, more=blueprints) as made:
        yield Site(runtime, made.url, made.secret, codes)
        own.close()


@pytest.fixture
def visit(browser: Browser, site: Site) -> Iterator[Visit]:
    with new_visit(browser, site) as made:
        yield made
