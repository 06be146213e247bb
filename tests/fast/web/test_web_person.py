"""A person and their model in a browser: they correct, learn, see it, and take it back."""

from __future__ import annotations

import pytest
from http_makers import Slow
from playwright.sync_api import expect
from web_makers import Site, Visit, correct

from personalpeft.types import SignalKind


def test_a_person_corrects_an_answer_learns_sees_the_change_and_rolls_back(
    site: Site, visit: Visit
) -> None:
    correct(site.runtime, 4)
    page = visit.come()
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
    visit.go("Timeline")
    live = page.locator("li.entry.is-live")
    expect(live).to_contain_text(short)
    expect(live.get_by_role("heading")).to_contain_text("learned")
    expect(page.get_by_role("img", name=f"Live is {short}")).to_be_visible()

    visit.go("Chat")
    after = visit.ask("How do I boil an egg?").locator(".reply").inner_text()
    assert after != before

    visit.go("Timeline")
    live.get_by_role("button", name="Roll back").click()
    expect(page.locator("li.entry").first).to_contain_text("rolled back by you")
    expect(page.locator("li.entry.is-live")).to_have_count(0)
    assert ada.layers()[0].head is None
    visit.go("Chat")
    page.get_by_role("button", name="New conversation").click()
    assert visit.ask("How do I boil an egg?").locator(".reply").inner_text() == before


@pytest.mark.exhaustive
def test_a_reply_is_shown_while_it_is_written_and_can_be_stopped(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = visit.come()
    Slow(monkeypatch, 0.3)
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
    # Something can be said about what came.
    expect(reply.get_by_role("button", name="Good", exact=True)).to_be_visible()


@pytest.mark.exhaustive
def test_thumbs_rules_and_copying_reach_the_ledger(site: Site, visit: Visit) -> None:
    page = visit.come()
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
def test_a_reply_is_asked_for_again_in_its_place(site: Site, visit: Visit) -> None:
    visit.come()
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
def test_a_conversation_is_found_again_with_what_was_said_about_it(
    site: Site, visit: Visit
) -> None:
    visit.come()
    reply = visit.ask("Hello")
    reply.get_by_role("button", name="Good", exact=True).click()
    visit.ask("And then?")
    last = site.runtime.user("ada").turns()[0]
    assert [message.role for message in last.messages] == ["user", "assistant", "user"]
    visit.page.get_by_role("button", name="New conversation").click()
    visit.ask("Something else")
    visit.page.reload()
    visit.ready()
    expect(visit.page.locator("article.exchange")).to_have_count(1)
    visit.page.get_by_role("button", name="Conversations").click()
    visit.page.get_by_role("dialog").get_by_role("button", name="Hello").click()
    replies = visit.page.locator("article.exchange")
    expect(replies).to_have_count(2)
    expect(replies.first.get_by_text("Rated good")).to_be_visible()


@pytest.mark.exhaustive
def test_why_names_what_answered_and_what_it_was_built_from(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    site.runtime.user("ada").learn()
    visit.come()
    visit.ask("Hello").get_by_role("button", name="Why this answer?").click()
    why = visit.page.get_by_role("dialog", name="Why this answer?")
    expect(why).to_contain_text("Style")
    expect(why).to_contain_text("Arrr!")


@pytest.mark.exhaustive
def test_weights_are_turned_and_scopes_are_set_in_the_stack(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    ada = site.runtime.user("ada")
    ada.learn()
    page = visit.come("Stack")
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
def test_a_blind_comparison_says_whose_the_answers_are_after_the_choice(
    site: Site, visit: Visit
) -> None:
    correct(site.runtime)
    ada = site.runtime.user("ada")
    head = ada.learn().revision
    assert head is not None
    page = visit.come("Timeline")
    page.get_by_role("button", name="Compare Style").click()
    page.get_by_label("A question").fill("How do I boil an egg?")
    page.get_by_label("What is live, against").select_option("base")
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
def test_memories_and_rules_name_where_they_are_from_and_can_be_forgotten(
    site: Site, visit: Visit
) -> None:
    ada = site.runtime.user("ada")
    ada.feedback(ada.chat("How do I boil an egg?"), comment="Answer in one sentence.")
    page = visit.come("Memory")
    page.get_by_label("A fact about you").fill("My dog is called Biscuit.")
    page.get_by_role("button", name="Remember").click()
    fact = page.get_by_role("listitem").filter(has_text="My dog is called Biscuit.")
    expect(fact).to_contain_text("From you on")
    rule = page.get_by_role("listitem").filter(has_text="Answer in one sentence.")
    expect(rule).to_contain_text("about How do I boil an egg?")

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
def test_a_learn_shows_how_far_it_is_is_found_again_after_a_reload_and_can_be_cancelled(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(site.runtime)
    page = visit.come()
    Slow(monkeypatch, 0.3)
    page.get_by_role("button", name="Learn", exact=True).click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.reload()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("progressbar")).to_be_hidden()


@pytest.mark.exhaustive
def test_a_learn_that_has_nothing_to_learn_says_so(visit: Visit) -> None:
    page = visit.come()
    page.get_by_role("button", name="Learn", exact=True).click()
    expect(page.locator(".note")).to_be_visible()
    expect(page.get_by_role("button", name="Learn", exact=True)).to_be_enabled()


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", ["kept"], indirect=True)
def test_what_the_page_sees_without_asking_is_kept_where_that_was_switched_on(
    site: Site, visit: Visit
) -> None:
    page = visit.come()
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
