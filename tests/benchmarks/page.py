"""``bench page``: load time of the web page on loopback, from a real server.

First paint is the browser's first contentful paint; "ready" is when the last conversation is shown.
Cold has an empty browser cache; warm revalidates the cached files. The backend is the fake one, in
the process that also drives the browser.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import spread
from benchmarks.homes import temporary_home
from benchmarks.server import serving
from personalpeft import DEFAULT_BASE, Runtime
from personalpeft.errors import MissingPackage
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.web import page as web

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What a browser's program may be called."""

_TURNS = 40
_LEAST = "data:text/html,<p>one"
_READY = ".exchanges[aria-busy=false] article"
_PAINT = """() => performance.getEntriesByName("first-contentful-paint")[0]?.startTime ?? null"""
_NOW = "() => performance.now()"
_SENT = """() => performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"))
    .filter((each) => !each.name.includes("/api/")).reduce((sum, each) => sum + each.encodedBodySize, 0)"""


def bench_page(*, repetitions: int, echo: Callable[[str], None]) -> dict[str, Any]:
    """Measure the page.

    ``least_ms`` is the browser's time to paint one local word; ``bytes`` is the size of all files.

    Raises:
        MissingPackage: Playwright or a browser is missing.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise MissingPackage(
            "There is no Playwright to drive a browser with.", hint="pip install playwright"
        ) from error
    figures: dict[str, list[float]] = {
        name: [] for name in ("least", "cold paint", "warm paint", "cold ready", "warm ready")
    }
    size = 0
    with _serving() as link, sync_playwright() as playwright:
        browser = browser_of(playwright)
        for repetition in range(1, repetitions + 1):
            context = browser.new_context()
            for kept in ("cold", "warm"):
                page = context.new_page()
                page.goto(link)
                page.locator(_READY).first.wait_for()
                figures[f"{kept} ready"].append(page.evaluate(_NOW))
                figures[f"{kept} paint"].append(page.evaluate(_PAINT))
                size = max(size, page.evaluate(_SENT))
                page.close()
            page = context.new_page()
            page.goto(_LEAST)
            page.wait_for_function(f"({_PAINT})() !== null")
            figures["least"].append(page.evaluate(_PAINT))
            context.close()
            echo(
                f"{repetition} of {repetitions}: {', '.join(f'{key} {each[-1]:.0f} ms' for key, each in figures.items())}"
            )
        browser.close()
    return {
        "bench": "page",
        "repetitions": repetitions,
        "least_ms": spread(figures["least"]),
        "first_paint_cold_ms": spread(figures["cold paint"]),
        "first_paint_warm_ms": spread(figures["warm paint"]),
        "ready_cold_ms": spread(figures["cold ready"]),
        "ready_warm_ms": spread(figures["warm ready"]),
        "bytes": size,
    }


def browser_of(playwright: Any) -> Any:
    """Launch the system's Chromium or Playwright's own.

    Raises:
        MissingPackage: No browser is installed.
    """
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None and not Path(playwright.chromium.executable_path).exists():
        raise MissingPackage(
            "There is no Chromium here.",
            hint="Install chromium, or run: playwright install chromium",
        )
    # The page is ours; without this option Chromium does not start as root, as in a container.
    return playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])


@contextmanager
def _serving() -> Iterator[str]:
    """Serve a home with some turns, and return the sign-in link."""
    with (
        temporary_home(DEFAULT_BASE, "fake") as runtime,
        closing(ApiV1(runtime)) as api,
        serving(runtime, api.blueprint, web.blueprint(), owner="ada") as (host, port, secret),
    ):
        _live(runtime)
        yield f"http://{host}:{port}/#api_key={secret}&user=ada"


def _live(runtime: Runtime) -> None:
    ada = runtime.user("ada")
    messages: list[dict[str, str]] = []
    for number in range(_TURNS):
        messages = [*messages[-6:], {"role": "user", "content": f"What is question {number}?"}]
        reply = ada.chat(messages)
        messages.append({"role": "assistant", "content": reply.text})
        if number % 4 == 0:
            ada.feedback(reply, edit=f"{reply.text}, and answer {number}.")
