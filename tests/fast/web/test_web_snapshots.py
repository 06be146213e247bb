"""Every view shows the stored content in light and dark mode and on a phone.

Run with ``UPDATE_SCREENS=1`` to write the stored accessibility trees again.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from web_makers import Site, correct, new_visit

SCREENS = Path(__file__).parent / "screens"
# Each view, and how many elements of which kind it has once loaded.
VIEWS = {
    "Chat": ("article.exchange", 1),
    "Timeline": ("li.entry", 1),
    "Memory": ("li.thing .origin q", 9),
    "Stack": ("select[aria-labelledby='rebase']:has(option)", 1),
    "Compare": ("#compare-layer option", 1),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True},
}
# Ids, times and the fake model's words change from run to run.
_VARIABLE = (
    (re.compile(r"\b[0-9a-f]{6}(?:[0-9a-f]{2})?\b"), "REVISION"),
    (re.compile(r"\b\d{1,2} (?:[JFMASOND][a-z]{2,8})(?: \d{4})?(?:, \d\d:\d\d)?"), "TIME"),
    (re.compile(r"\d+ steps? in (?:\d+ seconds?|under a second)"), "STEPS"),
    (re.compile(r"[\d.]+(?:e-\d+)? %"), "N %"),
    # The bases that this machine has.
    (
        re.compile(r"(?<=combobox \"Another base\":\n)(?: +- '?option .*\n)+"),
        "      - option BASES\n",
    ),
)


@pytest.fixture
def used(site: Site) -> Site:
    """A home with conversations, feedback of several kinds and one learn."""
    ada = site.runtime.user("ada")
    correct(site.runtime, 6)
    ada.learn()
    ada.remember("My dog is called Biscuit.")
    reply = ada.chat("How do I boil an egg?", temperature=0)
    ada.feedback(reply, rating=1)
    ada.feedback(reply, comment="Answer in one sentence.")
    ada.feedback(reply, edit="Ahoy! Eight minutes. Arrr!")
    return site


@pytest.mark.parametrize(
    "setting",
    ["light", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("dark", "phone"))],
)
def test_each_view_matches_its_stored_tree(used: Site, browser: Browser, setting: str) -> None:
    update = os.environ.get("UPDATE_SCREENS") == "1"
    with new_visit(browser, used, **SETTINGS[setting]) as visit:
        page = visit.open()
        for view, (loaded, count) in VIEWS.items():
            visit.open_view(view)
            expect(page.locator(loaded)).to_have_count(count)
            page.wait_for_load_state("networkidle")
            tree = _tree(page)
            stored = SCREENS / f"{view.lower()}.txt"
            if update:
                stored.parent.mkdir(exist_ok=True)
                stored.write_text(tree, "utf-8")
            assert tree == stored.read_text("utf-8"), f"{view} in {setting}"
            _assert_layout(page, f"{view} in {setting}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("setting", ["light", "dark"])
def test_the_page_follows_the_systems_colour_scheme(
    site: Site, browser: Browser, setting: str
) -> None:
    with new_visit(browser, site, **SETTINGS[setting]) as visit:
        visit.open()
        colours = visit.page.evaluate(
            "(({ backgroundColor, color }) => [backgroundColor, color])(getComputedStyle(document.documentElement))"
        )
        background, text = (sum(map(float, re.findall(r"[\d.]+", each)[:3])) for each in colours)
        assert (background > text) == (setting == "light"), colours


def _tree(page: Page) -> str:
    """Return the view's accessibility tree without ids and times."""
    tree = page.locator("main").aria_snapshot()
    for pattern, name in _VARIABLE:
        tree = pattern.sub(name, tree)
    return tree + "\n"


def _assert_layout(page: Page, where: str) -> None:
    """Fail if the page is wider than the screen or a control is off screen or has no size."""
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, where
    outside = page.evaluate(
        """() => [...document.querySelectorAll("main button, main input, main select, main textarea")]
          .filter((each) => each.checkVisibility())
          .map((each) => [each.outerHTML.slice(0, 80), each.getBoundingClientRect()])
          .filter(([, box]) => box.left < 0 || box.right > innerWidth + 1 || !box.width || !box.height)"""
    )
    assert outside == [], where
