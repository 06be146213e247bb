"""The main workflow in a browser: ask, correct, learn, inspect and revert."""

from __future__ import annotations

import pytest
from http_makers import SlowSteps
from playwright.sync_api import Browser, Locator, expect
from web_makers import Site, Visit, correct, new_window

from personalpeft.types import SignalKind


def test_a_correction_is_learned_shown_and_rolled_back(site: Site, visit: Visit) -> None:
    correct(site.runtime, 4)
    page = visit.open()
    page.get_by_role("button", name="New conversation").click()
    reply = visit.ask("How do I boil an egg?")
    before = reply.locator(".reply").inner_text()
    reply.get_by_role("button", name="Correct it").click()
    field = reply.get_by_label("The reply as it should have been")
    expect(field).to_have_value(before)
    field.fill("Ahoy! Eight minutes. Arrr!")
    reply.get_by_role("button", name="Save correction").click()
    expect(reply.get_by_text("Corrected by you")).to_be_visible()
    expect(reply.locator("ins").first).to_be_visible()
    ada = site.runtime.user("ada")
    assert ada.signals()[-1].payload == {"text": "Ahoy! Eight minutes. Arrr!"}
    expect(page.get_by_label("Learning", exact=True)).to_contain_text("5 lessons to learn from")

    visit.learn()
    (style,) = ada.layers()
    assert style.head is not None
    short = style.head.split("@")[1][:8]
    visit.open_view("Timeline")
    live = page.locator("li.entry.is-live")
    expect(live).to_contain_text(short)
    expect(live.get_by_role("heading")).to_contain_text("learned")
    expect(page.get_by_role("img", name=f"Live is {short}")).to_be_visible()

    visit.open_view("Chat")
    after = visit.ask("How do I boil an egg?").locator(".reply").inner_text()
    assert after != before

    visit.open_view("Timeline")
    live.get_by_role("button", name="Roll back").click()
    expect(page.locator("li.entry").first).to_contain_text("rolled back by you")
    expect(page.locator("li.entry.is-live")).to_have_count(0)
    assert ada.layers()[0].head is None
    visit.open_view("Chat")
    page.get_by_role("button", name="New conversation").click()
    assert visit.ask("How do I boil an egg?").locator(".reply").inner_text() == before


@pytest.mark.exhaustive
def test_a_reply_streams_and_can_be_cancelled(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.open()
    SlowSteps(monkeypatch, 0.3)
    page.get_by_label("Your question").fill("Tell me about ducks and geese and swans.")
    page.get_by_label("Your question").press("Enter")
    reply = page.locator("article.exchange")
    expect(reply.locator(".reply")).not_to_be_empty()
    expect(reply).to_have_attribute("aria-busy", "true")
    page.get_by_role("button", name="Stop").click()
    expect(reply.get_by_text("stopped")).to_be_visible()
    (turn,) = site.runtime.user("ada").turns()
    assert turn.finish_reason == "cancelled"
    assert reply.locator(".reply").inner_text().strip() == turn.reply.strip()
    # A partial reply takes feedback.
    expect(reply.get_by_role("button", name="Good", exact=True)).to_be_visible()


@pytest.mark.exhaustive
def test_ratings_rules_and_copying_reach_the_ledger(site: Site, visit: Visit) -> None:
    page = visit.open()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    reply = visit.ask("Hello")
    reply.get_by_role("button", name="Not good").click()
    expect(reply.get_by_role("button", name="Not good")).to_have_attribute("aria-pressed", "true")
    reply.get_by_role("button", name="Add a rule").click()
    reply.get_by_label("A rule for all replies").fill("Answer in one sentence.")
    reply.get_by_role("button", name="Save rule").click()
    expect(reply.get_by_text("Answer in one sentence.")).to_be_visible()
    signals = site.runtime.user("ada").signals()
    assert [signal.kind for signal in signals] == [SignalKind.RATING, SignalKind.COMMENT]
    assert signals[0].payload["value"] == -1
    reply.get_by_role("button", name="Copy").click()
    expect(page.locator(".note").last).to_contain_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == reply.locator(".reply").inner_text()


@pytest.mark.exhaustive
def test_a_regenerated_reply_replaces_the_old_one(site: Site, visit: Visit) -> None:
    visit.open()
    reply = visit.ask("Hello")
    reply.get_by_role("button", name="Regenerate").click()
    expect(visit.page.locator("article.exchange")).to_have_count(1)
    expect(
        visit.page.locator("article.exchange").get_by_role("button", name="Good", exact=True)
    ).to_be_visible()
    turns = site.runtime.user("ada").turns()
    assert len(turns) == 2
    assert turns[0].messages == turns[1].messages


@pytest.mark.exhaustive
def test_a_reopened_conversation_shows_its_feedback(site: Site, visit: Visit) -> None:
    visit.open()
    reply = visit.ask("Hello")
    reply.get_by_role("button", name="Good", exact=True).click()
    visit.ask("And then?")
    last = site.runtime.user("ada").turns()[0]
    assert [message.role for message in last.messages] == ["user", "assistant", "user"]
    visit.page.get_by_role("button", name="New conversation").click()
    visit.ask("Something else")
    visit.page.reload()
    visit.wait_until_loaded()
    expect(visit.page.locator("article.exchange")).to_have_count(1)
    visit.page.get_by_role("button", name="Conversations").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Hello").click()
    replies = visit.page.locator("article.exchange")
    expect(replies).to_have_count(2)
    expect(replies.first.get_by_text("Rated good")).to_be_visible()


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", ["kept"], indirect=True)
def test_implicit_feedback_is_no_thumb_of_the_user(site: Site, visit: Visit) -> None:
    page = visit.open()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit.ask("Hello").get_by_role("button", name="Copy").click()
    expect(page.locator(".note").last).to_contain_text("Copied.")
    page.reload()
    visit.wait_until_loaded()
    ada = site.runtime.user("ada")
    assert [each.payload.get("how") for each in ada.signals()] == ["copied"]
    reply = page.locator("article.exchange")
    good = reply.get_by_role("button", name="Good", exact=True)
    expect(good).to_have_attribute("aria-pressed", "false")
    good.click()
    expect(reply.get_by_text("Rated good")).to_be_visible()
    assert [each.payload.get("how") for each in ada.signals()] == ["copied", None]


@pytest.mark.exhaustive
def test_why_names_the_revisions_and_their_signals(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    site.runtime.user("ada").learn()
    visit.open()
    visit.ask("Hello").get_by_role("button", name="Why this answer?").click()
    why = visit.page.get_by_role("dialog", name="Why this answer?")
    expect(why).to_contain_text("Style")
    expect(why).to_contain_text("Arrr!")


@pytest.mark.exhaustive
def test_weights_and_scopes_are_set_in_the_stack_view(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    ada = site.runtime.user("ada")
    ada.learn()
    page = visit.open("Stack")
    slider = page.get_by_role("slider", name="Weight")
    slider.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    expect(page.locator(".note").last).to_contain_text("0.80")
    expect(page.locator("output")).to_have_text("0.80")
    expect(slider).to_be_focused()
    assert ada.layers()[0].weight == pytest.approx(0.8)
    page.get_by_label("Attached").select_option("never")
    expect(page.locator(".note").last).to_contain_text("never")
    assert ada.layers()[0].scope == "never"
    page.get_by_label("Live", exact=True).select_option(label="none: the bare base")
    expect(page.locator(".note").last).to_contain_text("the bare base is live")
    expect(page.locator(".layer .id")).to_have_text("the bare base")
    assert ada.layers()[0].head is None


@pytest.mark.exhaustive
def test_a_blind_comparison_reveals_the_answers_after_the_choice(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    ada = site.runtime.user("ada")
    head = ada.learn().revision
    assert head is not None
    page = visit.open("Timeline")
    page.get_by_role("button", name="Compare Style").click()
    page.get_by_label("A question").fill("How do I boil an egg?")
    page.get_by_label("Compare the live one with").select_option("base")
    page.get_by_role("button", name="Ask both").click()
    answers = page.locator("section.answer")
    expect(answers).to_have_count(2)
    short = head.split("@")[1][:8]
    expect(page.locator(".answers")).not_to_contain_text(short)
    page.get_by_role("button", name="The second is better").click()
    expect(page.locator(".answers")).to_contain_text(short)
    expect(page.locator(".answers")).to_contain_text("The bare base")
    assert ada.signals()[-1].kind is SignalKind.PREFERENCE


@pytest.mark.exhaustive
def test_facts_and_rules_show_their_source_and_can_be_erased(site: Site, visit: Visit) -> None:
    ada = site.runtime.user("ada")
    ada.feedback(ada.chat("How do I boil an egg?"), comment="Answer in one sentence.")
    page = visit.open("Memory")
    page.get_by_label("A fact about you").fill("My dog is called Biscuit.")
    page.get_by_role("button", name="Remember").click()
    fact = page.get_by_role("listitem").filter(has_text="My dog is called Biscuit.")
    expect(fact).to_contain_text("From you on")
    rule = page.get_by_role("listitem").filter(has_text="Answer in one sentence.")
    expect(rule).to_contain_text("about How do I boil an egg?")
    expect(rule).not_to_contain_text("never trained on")
    ada.retract(ada.items()[0].id, training_only=True)
    visit.open_view("Chat")
    visit.open_view("Memory")
    expect(rule).to_contain_text("never trained on")

    fact.get_by_role("button", name="Change").click()
    page.get_by_label("The fact, new text").fill("My dog is called Rex.")
    page.get_by_role("button", name="Save", exact=True).click()
    renamed = page.get_by_role("listitem").filter(has_text="My dog is called Rex.")
    expect(renamed).to_be_visible()

    renamed.get_by_role("button", name="Forget").click()
    dialog = page.get_by_role("dialog", name="Forget this?")
    expect(dialog).to_contain_text("This erases")
    dialog.get_by_role("button", name="Keep it").click()
    assert len(ada.items()) == 2
    renamed.get_by_role("button", name="Forget").click()
    dialog.get_by_role("button", name="Forget it permanently").click()
    expect(renamed).to_have_count(0)
    assert [item.text for item in ada.items()] == ["Answer in one sentence."]
    rule.get_by_role("button", name="Switch off").click()
    expect(rule.get_by_role("button", name="Switch off")).to_have_count(0)
    assert ada.items() == ()


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", ["tab", "program"])
def test_what_is_forgotten_elsewhere_leaves_the_chat_and_the_next_question_is_answered(
    browser: Browser, site: Site, where: str
) -> None:
    ada = site.runtime.user("ada")
    with new_window(browser, site) as open_tab:
        here = open_tab()
        page = here.open()
        here.ask("My secret is a quagga.")
        ada.remember("My dog is called Rex.")
        if where == "tab":
            ada.forget("last")
            other = open_tab().open("Memory")
            fact = other.get_by_role("listitem").filter(has_text="Rex")
            fact.get_by_role("button", name="Forget").click()
            other.get_by_role("button", name="Forget it permanently").click()
            expect(page.locator("article.exchange")).to_have_count(0)
        else:
            ada.forget("last")
        page.get_by_label("Your question").fill("What is a zebra?")
        page.get_by_role("button", name="Ask", exact=True).click()
        # First, since the forgotten exchange has the button, too.
        expect(page.get_by_text("quagga")).to_have_count(0)
        exchange = page.locator("article.exchange")
        expect(exchange.get_by_role("button", name="Good", exact=True)).to_have_count(1)
        expect(exchange).to_contain_text("What is a zebra?")
        assert [turn.messages[-1].content for turn in ada.turns()] == ["What is a zebra?"]


@pytest.mark.exhaustive
def test_a_learn_shows_progress_survives_a_reload_and_can_be_cancelled(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(site.runtime)
    page = visit.open()
    SlowSteps(monkeypatch, 0.3)
    page.get_by_role("button", name="Learn", exact=True).click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.reload()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("progressbar")).to_be_hidden()


@pytest.mark.exhaustive
def test_a_learn_without_new_signals_says_so(visit: Visit) -> None:
    page = visit.open()
    page.get_by_role("button", name="Learn", exact=True).click()
    expect(page.locator(".note")).to_be_visible()
    expect(page.get_by_role("button", name="Learn", exact=True)).to_be_enabled()


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", ["kept"], indirect=True)
def test_implicit_feedback_is_recorded_only_when_enabled(site: Site, visit: Visit) -> None:
    page = visit.open()
    visit.ask("How do I boil an egg?")
    visit.ask("Thanks!")
    last = visit.ask("No, that's wrong.")
    ada = site.runtime.user("ada")
    third, second, first = (turn.id for turn in ada.turns())
    last.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.exchange").last).to_have_attribute("aria-busy", "false")
    seen = {
        signal.turn: signal.payload["how"] for signal in ada.signals() if signal.source == "app"
    }
    assert seen == {first: "thanked", second: "contradicted", third: "regenerated"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_admin", [True, False])
def test_a_user_is_erased_only_after_the_name_was_typed(
    site: Site, visit: Visit, is_admin: bool
) -> None:
    ada, bob = site.runtime.user("ada"), site.runtime.user("bob")
    for each in (ada, bob):
        each.feedback(each.chat("How do I boil an egg?"), comment="Answer in one sentence.")
    page = visit.open("Memory", secret=None if is_admin else site.api_key_of("ada"))
    page.get_by_label("A fact about you").fill("a draft")

    def begin() -> Locator:
        page.get_by_role("button", name="Forget everything …").click()
        return page.get_by_role("dialog", name="Forget everything?")

    dialog = begin()
    expect(dialog).to_contain_text("1 turn")
    dialog.get_by_role("button", name="Keep everything").click()
    expect(dialog).to_have_count(0)
    dialog = begin()
    erase = dialog.get_by_role("button", name="Forget everything permanently")
    for typed in ("", "bob"):
        dialog.get_by_label("Type ada to confirm").fill(typed)
        expect(erase).to_be_disabled()
    assert len(ada.turns()) == 1
    dialog.get_by_label("Type ada to confirm").fill("ada")
    erase.click()
    title = "Choose a user" if is_admin else "Sign in"
    expect(page.get_by_role("heading", level=1, name=title)).to_be_visible()
    expect(page.locator(".note")).to_contain_text("Erased 1 turn")
    assert [each.id for each in site.runtime.users()] == ["bob"]
    assert "a draft" not in page.evaluate("JSON.stringify(sessionStorage)")
