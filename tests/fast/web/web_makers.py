"""A browser, the page on a real server without a model, and what a person does there."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, expect

from benchmarks.page import BROWSERS
from personalpeft import Runtime
from personalpeft_app.http.api_v1.routes import ApiV1
from personalpeft_app.web import page as web
from personalpeft_app.web.sign_in import SignInCodes

PATIENCE = 20_000
# Notes each thing that the policy forbade, from before the first script of the page.
_WATCH = """
window.forbidden = [];
document.addEventListener("securitypolicyviolation", (event) =>
  window.forbidden.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`));
"""


def chromium(playwright: Playwright) -> Browser:
    """The system's, or Playwright's own. Skips where there is none, and says how to get one."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    own = Path(playwright.chromium.executable_path)
    if found is None and not own.exists():
        pytest.skip(
            "there is no Chromium: make browser, apt-get install chromium, or playwright install chromium"
        )
    # Tests may run as root, and no sandbox is needed around a page of our own.
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@dataclass
class Site:
    """The page and both interfaces on a socket of this machine."""

    runtime: Runtime
    url: str
    secret: str
    codes: SignInCodes

    def of(self, user: str) -> str:
        return self.runtime.api_keys.create(user)[1]

    def link(self, secret: str | None = None, user: str = "ada") -> str:
        return f"{self.url}/#token={secret or self.secret}&user={user}"


@dataclass
class Visit:
    """One browser window, which notes whatever goes wrong in it."""

    site: Site
    page: Page
    wrong: list[str] = field(default_factory=list)

    def come(self, room: str = "", user: str = "ada", secret: str | None = None) -> Page:
        """Comes in by the link, and goes to a room."""
        self.page.goto(self.site.link(secret, user))
        self.ready()
        if room:
            self.go(room)
        return self.page

    def ready(self) -> None:
        """Waits until the page has read what it shows first."""
        self.page.locator(".exchanges[aria-busy=false]").wait_for(state="attached")

    def go(self, room: str) -> None:
        self.page.get_by_role("navigation").get_by_role("link", name=room, exact=True).click()
        expect(self.page.get_by_role("heading", level=1, name=room)).to_be_visible()

    def ask(self, text: str) -> Any:
        """Asks, and waits for the reply: its article."""
        before = self.page.locator("article.exchange").count()
        self.page.get_by_label("Your question").fill(text)
        self.page.get_by_role("button", name="Ask", exact=True).click()
        reply = self.page.locator("article.exchange").nth(before)
        expect(reply.get_by_role("button", name="Good", exact=True)).to_be_visible()
        return reply

    def learn(self) -> None:
        """Presses the button, and waits for what it came to."""
        self.page.get_by_role("button", name="Learn", exact=True).click()
        expect(self.page.locator(".note").last).to_contain_text("Style:")

    def leave(self) -> None:
        """Ends it, and fails where something went wrong in it."""
        self.wrong += self.page.evaluate("window.forbidden ?? []")
        assert self.wrong == []


@contextmanager
def visiting(browser: Browser, site: Site, **how: Any) -> Iterator[Visit]:
    """A window of its own, with nothing kept from another one."""
    context: BrowserContext = browser.new_context(
        **{"locale": "en-GB", "timezone_id": "UTC", **how}
    )
    context.set_default_timeout(PATIENCE)
    context.add_init_script(_WATCH)
    visit = Visit(site, context.new_page())

    def heard(message: ConsoleMessage) -> None:
        # A refusal of the server is told to the person, and to the console by the browser.
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            visit.wrong.append(message.text)

    visit.page.on("console", heard)
    visit.page.on("pageerror", lambda error: visit.wrong.append(str(error)))
    visit.page.on("request", lambda asked: _must_be_ours(asked.url, site, visit))
    try:
        yield visit
        visit.leave()
    finally:
        context.close()


def with_page(runtime: Runtime, codes: SignInCodes | None = None) -> tuple[ApiV1, Any]:
    """Our own API and the page, as the command ``serve`` puts them beside each other."""
    own = ApiV1(runtime)
    return own, (own.blueprint, web.blueprint(codes))


def correct(runtime: Runtime, count: int = 5, user: str = "ada", *, first: int = 0) -> None:
    """Asks and corrects so many replies, without a browser."""
    person = runtime.user(user)
    for number in range(first, first + count):
        reply = person.chat(f"question {number}", temperature=0)
        person.feedback(reply, edit=f"Ahoy! Answer {number}. Arrr!")


def _must_be_ours(url: str, site: Site, visit: Visit) -> None:
    if not url.startswith((site.url, "data:")):
        visit.wrong.append(f"asked for {url}")
