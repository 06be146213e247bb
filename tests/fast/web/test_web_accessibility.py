"""The page is accessible by keyboard, on small screens, in dark mode and by screen reader."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from runtime_makers import fix_reply
from web_makers import Site, Visit, correct, new_visit

pytestmark = pytest.mark.exhaustive

VIEWS = ("Chat", "Timeline", "Memory", "Stack", "Compare")
SMALL = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def used_site(site: Site) -> Site:
    """A home with turns, feedback of several kinds, and a learn."""
    ada = site.runtime.user("ada")
    correct(site.runtime, 6)
    ada.learn()
    ada.remember("My dog is called Biscuit.")
    reply = ada.chat(
        "Averyveryverylongwordwithoutanyspaceinitthatgoesonandonandonandonandonandonandonandon?"
    )
    ada.feedback(reply, comment="Answer in one sentence.")
    ada.feedback(reply, rating=1)
    ada.feedback(reply, edit=reply.text + " and so on")
    return site


def _check(page: Page, where: str) -> None:
    found = Axe().run(page, options={"resultTypes": ["violations"]})
    messages = [
        (each["id"], [node["html"] for node in each["nodes"]][:3])
        for each in found.response["violations"]
    ]
    assert messages == [], where


@pytest.mark.parametrize(
    "how",
    [{}, {"color_scheme": "dark"}, SMALL, {**SMALL, "color_scheme": "dark"}],
    ids=["wide", "dark", "small", "both"],
)
def test_axe_finds_nothing_in_any_view_and_no_view_is_wider_than_the_screen(
    used_site: Site, browser: Browser, how: dict[str, Any]
) -> None:
    with new_visit(browser, used_site, **how) as visit:
        page = visit.page
        page.goto(used_site.url)
        expect(page.get_by_label("API key")).to_be_visible()
        _check(page, "the door")
        visit.open()
        for view in VIEWS:
            visit.open_view(view)
            expect(page.locator("#learning")).to_contain_text("learn")
            _check(page, view)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
        visit.open_view("Chat")
        page.get_by_role("button", name="Why this answer?").last.click()
        _check(page, "why")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Correct it").last.click()
        _check(page, "correcting")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        _check(page, "keys")


def test_axe_finds_nothing_in_the_user_choice_and_an_empty_conversation(
    site: Site, visit: Visit
) -> None:
    site.runtime.user("bob")
    page = visit.page
    page.goto(f"{site.url}/#token={site.secret}")
    page.get_by_role("button", name="bob").wait_for()
    _check(page, "whose")
    page.get_by_role("button", name="bob").click()
    visit.wait_until_loaded()
    for view in VIEWS:
        visit.open_view(view)
        _check(page, view)


def test_axe_finds_nothing_in_a_comparison_a_message_and_a_confirmation(
    used_site: Site, visit: Visit
) -> None:
    page = visit.open("Compare")
    page.get_by_label("A question").fill("How do I boil an egg?")
    page.get_by_label("Compare the live one with").select_option("base")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="The first is better").wait_for()
    _check(page, "answers")
    visit.open_view("Memory")
    page.get_by_role("button", name="Forget this").first.click()
    page.get_by_role("dialog", name="Forget this?").wait_for()
    _check(page, "forget")


@pytest.mark.parametrize("how", [{}, {**SMALL, "color_scheme": "dark"}], ids=["wide", "both"])
def test_axe_finds_nothing_in_open_menus_a_foreign_learn_and_a_full_reply(
    used_site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    text = (
        "# Two\n1. *one*\n   - `a`\n2. **two**\n\n> said\n\n---\n```\ncode "
        + "x" * 90
        + "\n```\nend"
    )
    fix_reply(monkeypatch, text)
    with (
        new_visit(browser, used_site, **how) as visit,
        used_site.runtime._services.store.leases.acquire("learn-ada"),
    ):
        page = visit.open()
        expect(page.get_by_role("progressbar")).to_be_visible()
        visit.ask("Show me")
        _check(page, "a reply")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_role("dialog").get_by_role("button", name="Close")).to_be_in_viewport()
        _check(page, "earlier")
        page.keyboard.press("Escape")
        visit.open_view("Memory")
        page.get_by_text("Show an answer that you want").click()
        _check(page, "showing an answer")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_every_control_on_a_small_screen_is_large_enough(used_site: Site, browser: Browser) -> None:
    with new_visit(browser, used_site, **SMALL) as visit:
        page = visit.open()
        for view in VIEWS:
            visit.open_view(view)
            small = page.evaluate(
                """() => [...document.querySelectorAll("a[href], button, select, input, summary, textarea")]
                .filter((each) => each.checkVisibility() && !each.classList.contains("skip"))
                .map((each) => [each.getAttribute("aria-label") ?? each.textContent, each.getBoundingClientRect()])
                .filter(([, box]) => box.height < 24 || box.width < 24).map(([name]) => name)"""
            )
            assert small == [], view


def test_asking_correcting_learning_and_rollback_work_by_keyboard(site: Site, visit: Visit) -> None:
    correct(site.runtime, 4)
    page = visit.open()
    keys = page.keyboard
    expect(page.get_by_label("Your question")).to_be_focused()
    keys.type("How do I boil an egg?")
    keys.press("Enter")
    last = page.locator("article.exchange").last
    expect(last).to_contain_text("How do I boil an egg?")
    expect(last.get_by_role("button", name="Good", exact=True)).to_be_visible()
    keys.press("ArrowUp")
    expect(last).to_be_focused()
    keys.press("e")
    expect(last.get_by_role("textbox")).to_be_focused()
    keys.press("Control+a")
    keys.type("Ahoy! Eight minutes. Arrr!")
    keys.press("Control+Enter")
    expect(last.get_by_text("Corrected by you")).to_be_visible()
    expect(last).to_be_focused()
    keys.press("+")
    expect(last.get_by_text("Rated good")).to_be_visible()
    keys.press("l")
    expect(page.locator(".note").last).to_contain_text("Style:")
    keys.press("2")
    expect(page.get_by_role("heading", level=1, name="Timeline")).to_be_focused()
    back = page.get_by_role("button", name="Roll back")
    back.wait_for()
    for _ in range(20):
        keys.press("Tab")
        if back.evaluate("(each) => each === document.activeElement"):
            break
    expect(back).to_be_focused()
    outline = back.evaluate("(each) => getComputedStyle(each).outlineStyle")
    assert outline == "solid"
    keys.press("Enter")
    expect(page.locator("li.entry").first).to_contain_text("rolled back by you")
    assert site.runtime.user("ada").layers()[0].head is None


def test_a_question_mark_lists_the_shortcuts_which_can_be_disabled(visit: Visit) -> None:
    page = visit.open("Stack")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_contain_text("learn, or cancel a learn")
    dialog.get_by_label("Use single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("1")
    expect(page.get_by_role("heading", level=1, name="Stack")).to_be_visible()


def test_a_screen_reader_finds_landmarks_and_reads_replies_by_sentence(visit: Visit) -> None:
    page = visit.open()
    for role, name in (("navigation", "Views"), ("region", "Learning"), ("region", "Messages")):
        expect(page.get_by_role(role, name=name)).to_have_count(1)  # type: ignore[arg-type]
    expect(page.get_by_role("main")).to_have_count(1)
    page.evaluate(
        """() => { window.heard = []; new MutationObserver((changes) => changes.forEach((each) =>
        each.addedNodes.forEach((node) => window.heard.push(node.textContent))))
        .observe(document.getElementById("announcements"), { childList: true }); }"""
    )
    reply = visit.ask("Hello").locator(".reply").inner_text()
    assert "".join(page.evaluate("window.heard")).strip() == reply.strip()
    expect(page.locator("[aria-live=polite]").filter(has=page.locator(".reply"))).to_have_count(0)


def test_nothing_moves_when_reduced_motion_is_requested(browser: Browser, site: Site) -> None:
    with new_visit(browser, site, reduced_motion="reduce") as visit:
        visit.open()
        assert visit.page.evaluate("document.getAnimations().length") == 0
        moving = visit.page.evaluate(
            """() => [...document.querySelectorAll("*")].filter((each) =>
            getComputedStyle(each).transitionDuration !== "0s" || getComputedStyle(each).animationName !== "none").length"""
        )
        assert moving == 0
