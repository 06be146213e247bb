"""A browser, the page on a real server with a fake model, and the common actions on the page."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, expect

from benchmarks.page import BROWSERS
from personalpeft import Runtime
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.web import page as web
from personalpeft_app.web.sign_in import SignInCodes

PATIENCE = 20_000
# Records policy violations from before the page's first script.
_WATCH = """
window.forbidden = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.forbidden.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""


def chromium(playwright: Playwright) -> Browser:
    """Launch the system's Chromium or Playwright's own, or skip the test with instructions."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    own = Path(playwright.chromium.executable_path)
    if found is None and not own.exists():
        pytest.skip(
            "there is no Chromium: make browser, apt-get install chromium, or playwright install chromium"
        )
    # Tests may run as root, and the page under test is ours, so no sandbox is needed.
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@dataclass
class Site:
    """A server of the page and both HTTP interfaces on this machine."""

    runtime: Runtime
    url: str
    secret: str
    codes: SignInCodes

    def api_key_of(self, user: str) -> str:
        return self.runtime.api_keys.create(user)[1]

    def link(self, secret: str | None = None, user: str = "ada") -> str:
        return f"{self.url}/#api_key={secret or self.secret}&user={user}"


@dataclass
class Visit:
    """A browser window that records the errors in it."""

    site: Site
    page: Page
    errors: list[str] = field(default_factory=list)

    def open(self, view: str = "", user: str = "ada", secret: str | None = None) -> Page:
        """Sign in by the link and open a view."""
        self.page.goto(self.site.link(secret, user))
        self.wait_until_loaded()
        if view:
            self.open_view(view)
        return self.page

    def wait_until_loaded(self) -> None:
        """Wait until the page has loaded its first view."""
        self.page.locator(".exchanges[aria-busy=false]").wait_for(state="attached")

    def open_view(self, view: str) -> None:
        self.page.get_by_role("navigation").get_by_role("link", name=view, exact=True).click()
        expect(self.page.get_by_role("heading", level=1, name=view)).to_be_visible()

    def ask(self, text: str) -> Any:
        """Send a prompt and return the article of its complete reply."""
        before = self.page.locator("article.exchange").count()
        self.page.get_by_label("Your question").fill(text)
        self.page.get_by_role("button", name="Ask", exact=True).click()
        reply = self.page.locator("article.exchange").nth(before)
        expect(reply.get_by_role("button", name="Good", exact=True)).to_be_visible()
        return reply

    def learn(self) -> None:
        """Start a learn on the page and wait for its result."""
        self.page.get_by_role("button", name="Learn", exact=True).click()
        expect(self.page.locator(".note").last).to_contain_text("Style:")

    def check_and_close(self) -> None:
        """Fail if the window recorded an error or a policy violation."""
        self.errors += self.page.evaluate("window.forbidden ?? []")
        assert self.errors == []


@contextmanager
def new_window(browser: Browser, site: Site, **how: Any) -> Iterator[Callable[[], Visit]]:
    """Open a window with no state of another one, and yield what opens a tab in it."""
    context: BrowserContext = browser.new_context(
        **{"locale": "en-GB", "timezone_id": "UTC", **how}
    )
    context.set_default_timeout(PATIENCE)
    context.add_init_script(_WATCH)
    visits: list[Visit] = []

    def open_tab() -> Visit:
        visit = Visit(site, context.new_page())
        visits.append(visit)

        def on_console(message: ConsoleMessage) -> None:
            # The page shows a refused request, and the browser logs it to the console too.
            if message.type == "error" and not message.text.startswith("Failed to load resource"):
                visit.errors.append(message.text)

        visit.page.on("console", on_console)
        visit.page.on("pageerror", lambda error: visit.errors.append(str(error)))
        visit.page.on("request", lambda asked: _assert_own_origin(asked.url, site, visit))
        return visit

    try:
        yield open_tab
        for visit in visits:
            visit.check_and_close()
    finally:
        context.close()


@contextmanager
def new_visit(browser: Browser, site: Site, **how: Any) -> Iterator[Visit]:
    """Open a window with no state of another one, with one tab."""
    with new_window(browser, site, **how) as open_tab:
        yield open_tab()


def with_page(runtime: Runtime, codes: SignInCodes | None = None) -> tuple[ApiV1, Any]:
    """Return the API and the page's blueprints, combined as the command ``serve`` does."""
    own = ApiV1(runtime)
    return own, (own.blueprint, web.blueprint(codes))


def correct(runtime: Runtime, count: int = 5, user: str = "ada", *, first: int = 0) -> None:
    """Ask and correct replies through the library."""
    user_handle = runtime.user(user)
    for number in range(first, first + count):
        reply = user_handle.chat(f"question {number}", temperature=0)
        user_handle.feedback(reply, edit=f"Ahoy! Answer {number}. Arrr!")


def _assert_own_origin(url: str, site: Site, visit: Visit) -> None:
    if not url.startswith((site.url, "data:")):
        visit.errors.append(f"asked for {url}")
