"""The page is for everybody: without a mouse, on a small screen, in the dark, with a screen reader, with little motion."""

from __future__ import annotations

from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect
from web_makers import Site, Visit, correct, visiting

from personalpeft.backends.fake import FakeBackend

pytestmark = pytest.mark.exhaustive

ROOMS = ("Chat", "Timeline", "Memory", "Stack", "Compare")
SMALL = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture
def lived_in(site: Site) -> Site:
    """A home in which somebody has done a little of everything."""
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
    said = [
        (each["id"], [node["html"] for node in each["nodes"]][:3])
        for each in found.response["violations"]
    ]
    assert said == [], where


@pytest.mark.parametrize(
    "how",
    [{}, {"color_scheme": "dark"}, SMALL, {**SMALL, "color_scheme": "dark"}],
    ids=["wide", "dark", "small", "both"],
)
def test_axe_finds_nothing_in_any_room_and_nothing_is_wider_than_the_screen(
    lived_in: Site, browser: Browser, how: dict[str, Any]
) -> None:
    with visiting(browser, lived_in, **how) as visit:
        page = visit.page
        page.goto(lived_in.url)
        expect(page.get_by_label("Token")).to_be_visible()
        _check(page, "the door")
        visit.come()
        for room in ROOMS:
            visit.go(room)
            expect(page.locator("#learning")).to_contain_text("learn")
            _check(page, room)
            assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, room
        visit.go("Chat")
        page.get_by_role("button", name="Why this answer?").last.click()
        _check(page, "why")
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Correct it").last.click()
        _check(page, "correcting")
        page.keyboard.press("Escape")
        page.keyboard.press("?")
        expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
        _check(page, "keys")


def test_axe_finds_nothing_where_a_person_is_chosen_and_where_nothing_was_said_yet(
    site: Site, visit: Visit
) -> None:
    site.runtime.user("bob")
    page = visit.page
    page.goto(f"{site.url}/#token={site.secret}")
    page.get_by_role("button", name="bob").wait_for()
    _check(page, "whose")
    page.get_by_role("button", name="bob").click()
    visit.ready()
    for room in ROOMS:
        visit.go(room)
        _check(page, room)


def test_axe_finds_nothing_in_two_answers_a_message_and_a_question_before_forgetting(
    lived_in: Site, visit: Visit
) -> None:
    page = visit.come("Compare")
    page.get_by_label("A question").fill("How do I boil an egg?")
    page.get_by_label("What is live, against").select_option("base")
    page.get_by_role("button", name="Ask both").click()
    page.get_by_role("button", name="The first is better").wait_for()
    _check(page, "answers")
    visit.go("Memory")
    page.get_by_role("button", name="Forget").first.click()
    page.get_by_role("dialog", name="Forget this?").wait_for()
    _check(page, "forget")


@pytest.mark.parametrize("how", [{}, {**SMALL, "color_scheme": "dark"}], ids=["wide", "both"])
def test_axe_finds_nothing_in_what_opens_what_others_learn_and_a_reply_with_everything(
    lived_in: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    text = (
        "# Two\n1. *one*\n   - `a`\n2. **two**\n\n> said\n\n---\n```\ncode "
        + "x" * 90
        + "\n```\nend"
    )
    monkeypatch.setattr(FakeBackend, "_reply", lambda self, row, stack: self.encode(text))
    with (
        visiting(browser, lived_in, **how) as visit,
        lived_in.runtime._services.store.leases.acquire("learn-ada"),
    ):
        page = visit.come()
        expect(page.get_by_role("progressbar")).to_be_visible()
        visit.ask("Show me")
        _check(page, "a reply")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        page.get_by_role("button", name="Conversations").click()
        expect(page.get_by_role("dialog").get_by_role("button", name="Close")).to_be_in_viewport()
        _check(page, "earlier")
        page.keyboard.press("Escape")
        visit.go("Memory")
        page.get_by_text("Show an answer that you want").click()
        _check(page, "showing an answer")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_everything_that_can_be_pressed_on_a_small_screen_is_large_enough(
    lived_in: Site, browser: Browser
) -> None:
    with visiting(browser, lived_in, **SMALL) as visit:
        page = visit.come()
        for room in ROOMS:
            visit.go(room)
            small = page.evaluate(
                """() => [...document.querySelectorAll("a[href], button, select, input, summary, textarea")]
                .filter((each) => each.checkVisibility() && !each.classList.contains("skip"))
                .map((each) => [each.getAttribute("aria-label") ?? each.textContent, each.getBoundingClientRect()])
                .filter(([, box]) => box.height < 24 || box.width < 24).map(([name]) => name)"""
            )
            assert small == [], room


def test_a_person_without_a_mouse_asks_corrects_learns_and_goes_back(
    site: Site, visit: Visit
) -> None:
    correct(site.runtime, 4)
    page = visit.come()
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


def test_a_question_mark_lists_the_keys_and_they_can_be_switched_off(visit: Visit) -> None:
    page = visit.come("Stack")
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keys")
    expect(dialog).to_contain_text("learn, or cancel a learn")
    dialog.get_by_label("Use single-key shortcuts").uncheck()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    page.keyboard.press("1")
    expect(page.get_by_role("heading", level=1, name="Stack")).to_be_visible()


def test_a_screen_reader_finds_landmarks_and_hears_replies_by_sentences(visit: Visit) -> None:
    page = visit.come()
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


def test_nothing_moves_where_little_motion_is_wanted(browser: Browser, site: Site) -> None:
    with visiting(browser, site, reduced_motion="reduce") as visit:
        visit.come()
        assert visit.page.evaluate("document.getAnimations().length") == 0
        moving = visit.page.evaluate(
            """() => [...document.querySelectorAll("*")].filter((each) =>
            getComputedStyle(each).transitionDuration !== "0s" || getComputedStyle(each).animationName !== "none").length"""
        )
        assert moving == 0
