"""User and model text is never markup, API keys stay private, and drafts survive errors."""

from __future__ import annotations

import pytest
from http_makers import SlowSteps
from playwright.sync_api import expect
from runtime_makers import fix_reply
from web_makers import Site, Visit, correct

HOSTILE = (
    "<img src=x onerror=\"document.title='hacked'\">",
    "</script><script>document.title='hacked'</script>",
    "<svg/onload=document.title='hacked'>",
    "\u202etxet desrever\u202c and \u2067isolated",
    "<a href=\"javascript:document.title='hacked'\">x</a> &lt;b&gt; ${document.title='hacked'} {{7*7}}",
    "<base href='https://evil.example/'><meta http-equiv=refresh content='0;url=https://evil.example'>",
    "**<img src=x onerror=\"document.title='hacked'\">** [x](javascript:document.title='hacked') ![x](https://evil.example/x.png)",
    "- <script>document.title='hacked'</script>\n\n```html\n<svg/onload=document.title='hacked'>\n```\n<https://evil.example>",
)


def test_hostile_text_stays_text_in_every_view(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    ada = site.runtime.user("ada")
    fix_reply(monkeypatch, HOSTILE[0] + HOSTILE[1])
    for number, text in enumerate(HOSTILE):
        reply = ada.chat(text)
        ada.feedback(reply, edit=f"{text} {number}")
        ada.feedback(reply, comment=f"rule {text}")
        ada.remember(f"fact {text}")
    ada.learn(accept=True)
    page = visit.open()
    reply = visit.ask(HOSTILE[0])
    assert reply.locator(".question").inner_text() == HOSTILE[0]
    assert reply.locator(".reply").inner_text() == HOSTILE[0] + HOSTILE[1]
    reply.get_by_role("button", name="Why this answer?").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("dialog").get_by_role("button", name="Close").click()
    for view in ("Timeline", "Memory", "Stack", "Compare"):
        visit.open_view(view)
    visit.open_view("Timeline")
    page.locator("summary").first.click()
    visit.open_view("Memory")
    for text in HOSTILE[:3]:
        expect(page.get_by_text(f"fact {text}", exact=True)).to_be_visible()
    page.get_by_role("listitem").filter(has_text=f"fact {HOSTILE[1]}").get_by_role(
        "button", name="Forget"
    ).click()
    expect(page.get_by_role("dialog")).to_contain_text(HOSTILE[1])
    assert (
        page.locator("main img, main script, main a[href^=javascript], dialog img, base").count()
        == 0
    )
    assert "hacked" not in page.title()


def test_hostile_markup_is_harmless_while_streaming_and_afterwards(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open()
    shown = []
    for number, text in enumerate(HOSTILE):
        fix_reply(monkeypatch, text)
        shown.append(visit.ask(f"Hello {number}").locator(".reply").inner_text())
    assert ["hacked" in text for text in shown] == ["hacked" in text for text in HOSTILE]
    assert shown[0] == HOSTILE[0]
    expect(page.locator(".reply strong, .reply li, .reply pre")).to_have_count(3)
    assert page.locator(".reply").locator("img, script, svg, a, base, meta, iframe").count() == 0
    assert "hacked" not in page.title()


@pytest.mark.exhaustive
def test_a_direction_mark_affects_only_its_own_text(site: Site, visit: Visit) -> None:
    site.runtime.user("ada").remember(f"{HOSTILE[3]}")
    page = visit.open("Memory")
    fact = page.get_by_role("listitem").filter(has_text="desrever")
    expect(fact).to_contain_text("From you on")
    assert fact.locator(".written").evaluate("(each) => getComputedStyle(each).unicodeBidi") in (
        "isolate",
        "plaintext",
    )


@pytest.mark.exhaustive
def test_the_link_signs_in_and_its_api_key_leaves_the_address(site: Site, visit: Visit) -> None:
    page = visit.open()
    assert site.secret not in page.url
    assert site.secret not in str(page.evaluate("history.length && location.href"))
    assert page.evaluate("document.cookie") == ""
    assert page.evaluate("Object.values(localStorage).join()") == ""
    assert site.secret not in page.content()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.exhaustive
def test_a_missing_api_key_is_requested_and_a_wrong_one_refused(site: Site, visit: Visit) -> None:
    page = visit.page
    page.goto(site.url)
    page.get_by_label("API key").fill("pp_wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("does not know")
    page.get_by_label("API key").fill(site.api_key_of("bob"))
    page.keyboard.press("Enter")
    expect(page.locator("#who")).to_have_text("bob")
    # A user's API key opens that user's model and offers no other.
    expect(page.get_by_role("button", name="Switch user")).to_have_count(0)


@pytest.mark.exhaustive
def test_the_administrator_chooses_a_user(site: Site, visit: Visit) -> None:
    correct(site.runtime, 1, "bob")
    page = visit.page
    page.goto(f"{site.url}/#token={site.secret}")
    page.get_by_role("button", name="bob").click()
    expect(page.locator("#who")).to_have_text("bob")
    visit.wait_until_loaded()
    expect(page.locator("article.exchange")).to_contain_text("Ahoy! Answer 0.")
    page.get_by_role("button", name="Switch user").click()
    page.get_by_label("New user").fill("carla")
    page.get_by_role("button", name="Go", exact=True).click()
    expect(page.locator("#who")).to_have_text("carla")
    visit.wait_until_loaded()
    expect(page.locator("article.exchange")).to_have_count(0)
    assert [each.id for each in site.runtime.users()] == ["bob", "carla"]


@pytest.mark.exhaustive
def test_a_draft_survives_a_reload_and_a_refusal(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open()
    field = page.get_by_label("Your question")
    field.fill("Half a thou")
    page.reload()
    visit.wait_until_loaded()
    expect(field).to_have_value("Half a thou")

    reply = visit.ask("Hello")
    reply.get_by_role("button", name="Correct it").click()
    reply.get_by_label("The reply as it should").fill("Ahoy!")
    page.reload()
    visit.wait_until_loaded()
    reply.get_by_role("button", name="Correct it").click()
    expect(reply.get_by_label("The reply as it should")).to_have_value("Ahoy!")
    page.keyboard.press("Escape")

    site.runtime.user("ada").remember("My dog is called Biscuit.")
    visit.open_view("Memory")
    page.get_by_role("button", name="Change").click()
    page.get_by_label("The fact, new text").fill("My dog is called Re")
    # A learn that ends meanwhile, or another view, does not overwrite the draft.
    page.get_by_role("button", name="Learn", exact=True).click()
    expect(page.locator(".note").last).to_be_visible()
    expect(page.get_by_label("The fact, new text")).to_have_value("My dog is called Re")
    visit.open_view("Stack")
    visit.open_view("Memory")
    page.get_by_role("button", name="Change").click()
    expect(page.get_by_label("The fact, new text")).to_have_value("My dog is called Re")
    visit.open_view("Chat")

    # A prompt beyond the context is refused with a message, and the draft stays.
    long = "word " * 2000
    field.fill(long)
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".note").filter(has_text="Shorten the prompt")).to_be_visible()
    expect(field).to_have_value(long.strip())
    expect(page.locator("article.exchange")).to_have_count(1)


@pytest.mark.exhaustive
def test_an_expired_api_key_is_requested_again_over_the_unchanged_page(
    site: Site, visit: Visit
) -> None:
    secret = site.api_key_of("bob")
    page = visit.open(user="bob", secret=secret)
    (key,) = site.runtime.api_keys.list_keys()
    page.get_by_label("Your question").fill("Are you there?")
    site.runtime.api_keys.revoke(key.id)
    page.get_by_role("button", name="Ask", exact=True).click()
    dialog = page.get_by_role("dialog", name="Sign in again")
    dialog.get_by_label("API key").fill(site.api_key_of("bob"))
    dialog.get_by_role("button", name="Sign in").click()
    expect(page.get_by_label("Your question")).to_have_value("Are you there?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(
        page.locator("article.exchange").get_by_role("button", name="Good", exact=True)
    ).to_be_visible()


@pytest.mark.exhaustive
def test_a_lost_server_is_a_message_and_the_draft_stays(site: Site, visit: Visit) -> None:
    page = visit.open()
    page.route("**/chat/stream", lambda route: route.abort())
    page.get_by_label("Your question").fill("Are you there?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.locator(".note")).to_contain_text("The server does not answer.")
    expect(page.get_by_label("Your question")).to_have_value("Are you there?")
    page.unroute("**/chat/stream")
    visit.ask("Are you there?")


@pytest.mark.exhaustive
def test_a_connection_lost_in_mid_reply_keeps_the_prompt_and_the_partial_reply(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open()
    SlowSteps(monkeypatch, 0.3)
    page.get_by_label("Your question").fill("Tell me of ducks.")
    page.get_by_role("button", name="Ask", exact=True).click()
    reply = page.locator("article.exchange .reply")
    expect(reply).not_to_be_empty()
    came = reply.inner_text()
    page.context.set_offline(True)
    page.evaluate("window.stop()")
    expect(page.locator(".note")).to_be_visible()
    page.context.set_offline(False)
    assert reply.inner_text().startswith(came)
    expect(page.get_by_label("Your question")).to_have_value("Tell me of ducks.")


def test_a_printed_link_signs_in_once_as_one_user_and_leaves_no_secret_in_the_address(
    site: Site, visit: Visit
) -> None:
    page = visit.page
    code = site.codes.issue("ada")
    page.goto(f"{site.url}/#code={code}")
    visit.wait_until_loaded()
    expect(page.locator("#who")).to_have_text("ada")
    assert code not in page.url
    assert code not in page.content()
    # The session is ada's only: it can choose no other user.
    expect(page.get_by_role("button", name="Switch user")).to_have_count(0)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_label("API key")).to_be_visible()
    page.goto(f"{site.url}/#code={code}")
    expect(page.locator(".note")).to_contain_text("used before or is too old")
    expect(page.get_by_label("API key")).to_be_visible()
    assert code not in page.url


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("running", "with_code"),
    [
        (True, True),
        (False, False),
        (True, False),
        (False, True),
    ],
)
def test_a_link_asks_before_it_replaces_another_session(
    site: Site, visit: Visit, with_code: bool, running: bool
) -> None:
    def open_link() -> str:
        secret = site.codes.issue("mallory") if with_code else site.api_key_of("mallory")
        if not running:
            # After another page in between the tab keeps its session, and this page loads again.
            page.goto("about:blank")
        page.goto(f"{site.url}/#code={secret}" if with_code else site.link(secret, "ada"))
        expect(page.get_by_role("dialog")).to_contain_text("signed in as ada")
        expect(page.get_by_role("dialog")).to_contain_text("signs it in as mallory")
        assert secret not in page.url
        return secret

    page = visit.open(secret=site.api_key_of("ada"))
    page.get_by_label("Your question").fill("Half a thou")
    before = page.evaluate("({ ...sessionStorage })")
    refused = open_link()
    page.get_by_role("button", name="Stay signed in").click()
    visit.wait_until_loaded()
    expect(page.locator("#who")).to_have_text("ada")
    expect(page.get_by_label("Your question")).to_have_value("Half a thou")
    assert page.evaluate("({ ...sessionStorage })") == before
    open_link()
    page.keyboard.press("Escape")
    visit.wait_until_loaded()
    assert page.evaluate("({ ...sessionStorage })") == before
    open_link()
    page.get_by_role("button", name="Sign in by the link").click()
    expect(page.locator("#who")).to_have_text("mallory")
    visit.wait_until_loaded()
    page.go_back()
    assert refused not in page.url


@pytest.mark.exhaustive
def test_an_unusable_link_keeps_the_session(site: Site, visit: Visit) -> None:
    page = visit.open("Memory", secret=site.api_key_of("ada"))
    before = page.evaluate("({ ...sessionStorage })")
    for secret in ("api_key=pp_wrong", "token=pp_wrong", "code=wrong"):
        page.goto(f"{site.url}/#{secret}")
        expect(page.locator(".note").last).to_be_visible()
        page.locator(".note button").last.click()
        assert page.url == f"{site.url}/#/memory"
        expect(page.get_by_role("heading", level=1, name="Memory")).to_be_visible()
        assert page.evaluate("({ ...sessionStorage })") == before


@pytest.mark.exhaustive
def test_a_link_of_the_same_user_asks_nothing_and_an_administrators_says_so(
    site: Site, visit: Visit
) -> None:
    page = visit.open(secret=site.api_key_of("ada"))
    # The page loads again where the link was followed.
    with page.expect_event("load"):
        page.goto(f"{site.url}/#code={site.codes.issue('ada')}")
    visit.wait_until_loaded()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.goto(site.link(user="bob"))
    expect(page.get_by_role("dialog")).to_contain_text("the administrator, with the model of bob")
