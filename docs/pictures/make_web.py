"""Draw the pictures of docs/how-to/web-page.md from the running page: ``PYTHONPATH=tests python docs/pictures/make_web.py``.

A real server and a real browser run on the backend without a model, with a fixed clock. That backend's replies and likelihoods
are made up to look like a small model's. Everything else is the page as it is.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pace import steady
from playwright.sync_api import Browser, Page, sync_playwright

import personalpeft
from benchmarks.page import browser_of
from personalpeft import Runtime
from personalpeft.backends import fake
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server
from personalpeft_app.web import page as web

HERE = Path(__file__).parent
# What is asked, what is answered, and the answer as it should have been.
_SAID = (
    (
        "How long does rice take?",
        "Great question! It usually takes twenty minutes.",
        "Twelve minutes, lid on.",
    ),
    (
        "Which oil for frying?",
        "There are many wonderful oils! One is rapeseed.",
        "Rapeseed oil; it stands 200 °C.",
    ),
    (
        "Can I freeze bread?",
        "Absolutely! It will keep for a long time.",
        "Yes, sliced, for three months.",
    ),
    (
        "How do I peel garlic?",
        "That is easy once you know how!",
        "Crush it with the flat of the knife.",
    ),
    ("How much salt in pasta water?", "A pinch, or as you like it!", "Ten grams for each litre."),
    (
        "Is raw milk safe?",
        "Not for children. I hope that helps!",
        "Not for children; boil it first.",
    ),
    ("What goes with leeks?", "Potatoes, of course! Enjoy!", "Potatoes, cream, nutmeg."),
    (
        "How long do lentils take?",
        "About half an hour, dear friend!",
        "Red ones fifteen minutes, green ones thirty.",
    ),
    ("Can I reheat rice?", "You certainly can!", "Once, until it steams."),
    (
        "How do I poach an egg?",
        "With love and patience!",
        "Three minutes in water that does not boil.",
    ),
    (
        "Which flour for bread?",
        "Any flour is a good flour!",
        "Strong wheat flour, or half of it rye.",
    ),
    ("How do I keep herbs?", "In a happy place!", "In a glass of water, like flowers."),
    ("How long does stock take?", "As long as it takes!", "Three hours; fish stock half of one."),
)
_EGG = (
    "How do I boil an egg?",
    "Eight minutes in boiling water. I hope that helps, and enjoy your delicious egg!",
)
_EGG_EDITED = "Eight minutes in boiling water, then one in cold water."
_QUAIL = (
    "And a quail’s egg?",
    "**Two and a half minutes**, if they are:\n\n- as warm as the room\n- pricked at the blunt end",
)
_SOUP = (
    "What shall I cook tonight?",
    "Leek soup for two: forty minutes, one pot.",
    "Tonight you could cook many delicious things! How about a soup?",
)
_SURE = (-1.55, -1.2, -1.34)
_WIDE, _NARROW = {"width": 1180, "height": 760}, {"width": 360, "height": 740}


def _as_a_small_model() -> Callable[[bool], None]:
    """Make the fake backend give the replies above, with the likelihoods of a small model. They rise with the first two revisions
    and fall with the third. The returned function switches whether a stack answers as it was taught.
    """
    before = {asked: said for asked, said, *_ in (*_SAID, _EGG, _QUAIL)} | {_SOUP[0]: _SOUP[2]}
    taught = {asked: said for asked, _, said in _SAID} | dict((_EGG, _QUAIL)) | {_SOUP[0]: _SOUP[1]}
    seen: list[str] = []
    ways = {False: before, True: before}

    def reply(self: fake.FakeBackend, row: Any, stack: Any) -> tuple[int, ...]:
        prompt = self.decode(row.prompt_tokens)
        asked = max(before, key=prompt.rfind)
        return self.encode(ways[stack is not None][asked])

    def logprobs(prompt: Any, completion: Any, stack: Any) -> tuple[float, ...]:
        if stack is not None and stack.digest not in seen:
            seen.append(stack.digest)
        level = -2.1 if stack is None else _SURE[min(seen.index(stack.digest), 2)]
        return tuple(level + 0.02 * (each % 7) for each in completion)

    fake.FakeBackend.reply = reply  # type: ignore[method-assign]  # only the pictures need fixed replies
    fake._logprobs = logprobs
    return lambda on: ways.update({True: taught if on else before})


def _live(runtime: Runtime, as_taught: Callable[[bool], None]) -> None:
    ada = runtime.user("ada")
    for part in (_SAID[:5], _SAID[5:9], _SAID[9:]):
        for asked, _, edited in part:
            ada.feedback(ada.chat(asked), edit=edited)
        as_taught(True)
        ada.learn()
        as_taught(False)
    as_taught(True)
    ada.remember("I cook for two.")
    ada.remember("I have no oven.")
    egg = ada.chat(_EGG[0])
    ada.feedback(egg, comment="No exclamation marks.")
    ada.feedback(egg, edit=_EGG_EDITED)
    told = [
        {"role": "user", "content": _EGG[0]},
        {"role": "assistant", "content": _EGG_EDITED},
        {"role": "user", "content": _QUAIL[0]},
    ]
    ada.feedback(ada.chat(told), rating=1)


def _draw(
    browser: Browser,
    link: str,
    name: str,
    room: str,
    play: Callable[[Page], None] = lambda page: None,
    **how: Any,
) -> None:
    context = browser.new_context(
        **{"viewport": _WIDE, "locale": "en-GB", "timezone_id": "UTC", **how}
    )
    page = context.new_page()
    page.goto(link)
    page.locator(".exchanges[aria-busy=false]").wait_for(state="attached")
    if room != "Chat":
        page.get_by_role("navigation").get_by_role("link", name=room).click()
    page.wait_for_timeout(800)
    play(page)
    page.mouse.move(620, 4)
    page.wait_for_timeout(500)
    page.screenshot(path=HERE / f"{name}.png")
    print(f"docs/pictures/{name}.png")
    context.close()


def _compare(page: Page) -> None:
    page.get_by_label("A question").fill(_SOUP[0])
    page.get_by_label("Compare the live one with").select_option("base")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="The first is better").wait_for()
    page.get_by_role("heading", name="Compare").click()


def _edit(page: Page) -> None:
    page.get_by_role("button", name="Correct it").last.click()


def main() -> None:
    as_taught = _as_a_small_model()
    with (
        tempfile.TemporaryDirectory() as folder,
        personalpeft.open(folder, backend="fake", clock=steady()) as runtime,
    ):
        runtime.api_keys.ensure_admin_key()
        _live(runtime, as_taught)
        own, limiter = ApiV1(runtime), limiter_of(runtime)
        app = make_app(runtime, limiter=limiter, more=[own.blueprint, web.blueprint()])
        server = Server(app, limiter, host="127.0.0.1", port=0)
        thread = threading.Thread(target=lambda: server.run(grace=1, close=own.close))
        thread.start()
        link = f"http://127.0.0.1:{server.port}/#api_key={runtime.api_keys.create('ada')[1]}"
        try:
            with sync_playwright() as playwright:
                browser = browser_of(playwright)
                _draw(browser, link, "web", "Chat")
                _draw(browser, link, "web-dark", "Chat", _edit, color_scheme="dark")
                _draw(browser, link, "web-timeline", "Timeline")
                _draw(browser, link, "web-memory", "Memory")
                _draw(browser, link, "web-stack", "Stack", viewport={"width": 1180, "height": 720})
                _draw(
                    browser,
                    link,
                    "web-compare",
                    "Compare",
                    _compare,
                    viewport={"width": 1180, "height": 680},
                )
                _draw(
                    browser,
                    link,
                    "web-phone",
                    "Chat",
                    viewport=_NARROW,
                    device_scale_factor=1.5,
                    has_touch=True,
                )
                browser.close()
        finally:
            server.stop()
            thread.join()


if __name__ == "__main__":
    main()
