"""Each page shows the reply that its user gets alone, while all users ask at once."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from backend_makers import hold_steps
from playwright.sync_api import Browser, expect
from runtime_makers import ask
from web_makers import Site, Visit, new_window

USERS = ("ada", "bo", "cy", "di")
PROMPT = "Hello"


def _send(visit: Visit) -> None:
    """Send the prompt in a new conversation, and wait until its reply is awaited."""
    visit.page.get_by_role("button", name="New conversation").click()
    visit.page.get_by_label("Your question").fill(PROMPT)
    visit.page.get_by_role("button", name="Ask", exact=True).click()
    expect(visit.page.locator("article.exchange")).to_have_attribute("aria-busy", "true")


def _read_reply(visit: Visit) -> str:
    """Wait for the complete reply and return its text."""
    reply = visit.page.locator("article.exchange")
    expect(reply.get_by_role("button", name="Good", exact=True)).to_be_visible()
    return str(reply.locator(".reply").inner_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize(("num_users", "num_windows"), [(2, 1), (4, 3)])
def test_pages_at_once_show_the_replies_of_a_user_alone(
    browser: Browser,
    site: Site,
    monkeypatch: pytest.MonkeyPatch,
    num_users: int,
    num_windows: int,
) -> None:
    """Each window has a tab of each user."""
    users = USERS[:num_users]
    rules = {user: f"Call me {user.upper()}." for user in users}
    wanted = {}
    for user in users:
        one = site.runtime.user(user)
        one.feedback(ask(one), comment=rules[user])
        wanted[user] = ask(one, PROMPT).text
    assert len(set(wanted.values())) == num_users

    with ExitStack() as windows:
        tabs = []
        for _ in range(num_windows):
            open_tab = windows.enter_context(new_window(browser, site))
            tabs += [(user, open_tab()) for user in users]
        for user, visit in tabs:
            visit.open(user=user, secret=site.api_key_of(user))
        steps = hold_steps(monkeypatch)
        for _, visit in tabs:
            _send(visit)
        steps.set()
        assert [(user, _read_reply(visit)) for user, visit in tabs] == [
            (user, wanted[user]) for user, _ in tabs
        ]
        for user, visit in tabs:
            visit.open_view("Memory")
            expect(visit.page.get_by_text(rules[user])).to_be_visible()
            for other in users:
                assert other == user or rules[other] not in visit.page.content()
    for user in users:
        newest = site.runtime.user(user).turns()[:num_windows]
        assert [turn.reply for turn in newest] == [wanted[user]] * num_windows
