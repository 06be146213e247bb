"""The page shows learns of other processes and old conversations, and exports layers."""

from __future__ import annotations

import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect
from web_makers import Site, Visit, correct

import personalpeft
from personalpeft.types import SignalKind

pytestmark = pytest.mark.exhaustive


@contextmanager
def learn_in_another_process(site: Site, stage: str = "Learning") -> Iterator[Callable[[], None]]:
    """Hold a learn of another runtime in the middle until the result is called."""
    there, on = threading.Event(), threading.Event()

    def hold(now: str, done: float) -> None:
        if now == stage and (stage != "Learning" or done > 0.3):
            there.set()
            assert on.wait(60)

    def learn() -> None:
        with personalpeft.open(site.runtime.settings.home, backend="fake") as other:
            other.user("ada").learn(progress=hold)

    thread = threading.Thread(target=learn)
    thread.start()
    try:
        assert there.wait(60)
        yield on.set
    finally:
        on.set()
        thread.join(60)


def strip(page: Page) -> Locator:
    return page.get_by_role("region", name="Learning", exact=True)


def test_training_consent_is_withdrawn_on_the_page(site: Site, visit: Visit) -> None:
    page = visit.open("Memory")
    switch = page.get_by_label("Train my layers on new feedback")
    expect(switch).to_be_checked()
    switch.uncheck()
    expect(page.get_by_text("New feedback is not trained on.").first).to_be_visible()
    ada = site.runtime.user("ada")
    assert not ada.summary().training
    page.reload()
    expect(switch).not_to_be_checked()


def test_a_learn_of_another_process_is_shown_while_it_runs_and_when_it_ends(
    site: Site, visit: Visit
) -> None:
    correct(site.runtime)
    page = visit.open("Timeline")
    expect(strip(page)).to_contain_text("5 lessons to learn from")
    ada = site.runtime.user("ada")
    with learn_in_another_process(site) as go_on:
        learning = ada.training_status()
        assert learning is not None
        expect(strip(page)).to_contain_text(f"Style: step {learning.step} of {learning.steps}")
        expect(strip(page)).to_contain_text("in another program")
        bar = page.get_by_role("progressbar")
        expect(bar).to_be_visible()
        assert bar.evaluate("(each) => each.value") == pytest.approx(learning.done)
        # Only its own process can cancel it, and no second learn starts beside it.
        expect(page.locator("#learn")).to_be_hidden()
        page.keyboard.press("l")
        go_on()
        expect(page.locator(".note").last).to_contain_text("Style: learned")
    expect(bar).to_be_hidden()
    expect(page.locator("li.entry.is-live")).to_be_visible()
    expect(page.get_by_role("button", name="Learn", exact=True)).to_be_enabled()
    expect(page.locator(".note")).to_have_count(1)


def test_a_page_opened_during_a_learn_of_another_process_shows_it(site: Site, visit: Visit) -> None:
    correct(site.runtime)
    with learn_in_another_process(site, "Judging") as go_on:
        page = visit.open()
        expect(strip(page)).to_contain_text("Style: judging")
        go_on()
    expect(page.locator(".note").last).to_contain_text("Style: learned")


def test_a_learn_started_in_another_window_can_be_cancelled(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    from http_makers import SlowSteps

    correct(site.runtime)
    page = visit.open()
    second = page.context.new_page()
    second.goto(site.link())
    second.locator(".exchanges[aria-busy=false]").wait_for(state="attached")
    SlowSteps(monkeypatch, 0.3)
    second.get_by_role("button", name="Learn", exact=True).click()
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    for each in (page, second):
        expect(each.get_by_role("progressbar")).to_be_hidden()
        expect(each.locator(".note").last).to_contain_text("Stopped.")


def test_an_old_conversation_is_found_by_paging_back(site: Site, visit: Visit) -> None:
    ada = site.runtime.user("ada")
    first = ada.chat("The oldest question", max_tokens=1)
    for number in range(120):
        ada.chat(f"question {number}", max_tokens=1)
    page = visit.open()
    page.get_by_role("button", name="Conversations").click()
    dialog = page.get_by_role("dialog", name="Conversations")
    expect(dialog.get_by_role("listitem")).to_have_count(100)
    expect(dialog.get_by_role("button", name="The oldest question")).to_have_count(0)
    dialog.get_by_role("button", name="Show older").click()
    expect(dialog.get_by_role("button", name="Show older")).to_be_hidden()
    expect(dialog.get_by_role("listitem")).to_have_count(121)
    dialog.get_by_role("button", name="The oldest question").click()
    expect(page.locator("article.exchange")).to_have_count(1)
    visit.ask("And its end")
    assert ada.turns(1)[0].conversation_id == first.conversation_id
    page.reload()
    visit.wait_until_loaded()
    expect(page.locator("article.exchange")).to_have_count(2)


def test_a_conversation_longer_than_the_context_continues_and_reports_the_cut(
    site: Site, visit: Visit
) -> None:
    page = visit.open()
    long = "word " * (site.runtime.base().card.context // 8)
    for _ in range(7):
        visit.ask(long)
    expect(page.locator(".note").last).to_contain_text("oldest message")
    expect(page.locator("article.exchange")).to_have_count(7)


def test_an_answer_is_demonstrated_with_its_source(site: Site, visit: Visit) -> None:
    page = visit.open("Memory")
    page.get_by_text("Show an answer that you want").click()
    page.get_by_label("Prompt").fill("Write to Bo.")
    page.reload()
    visit.open_view("Memory")
    # The draft is kept, and the form that holds it is open.
    expect(page.get_by_label("Prompt")).to_have_value("Write to Bo.")
    page.get_by_role("button", name="Save the answer").click()
    expect(page.get_by_label("Wanted answer")).to_be_focused()
    page.keyboard.type("Dear Bo, hello.")
    page.get_by_label("Skill").fill("email")
    page.get_by_role("button", name="Save the answer").click()
    expect(page.locator(".note")).to_contain_text("Recorded.")
    kept = page.get_by_role("listitem").filter(has_text="Dear Bo, hello.")
    expect(kept).to_contain_text("demonstration Skill: email")
    expect(kept).to_contain_text("about Write to Bo.")
    (signal,) = site.runtime.user("ada").signals()
    assert signal.kind is SignalKind.DEMONSTRATION
    assert signal.payload == {
        "prompt": "Write to Bo.",
        "answer": "Dear Bo, hello.",
        "skill": "email",
    }
    expect(page.get_by_label("Prompt")).to_have_value("")


def test_a_user_archive_and_peft_layers_are_downloaded(
    site: Site, visit: Visit, tmp_path: Path
) -> None:
    page = visit.open("Stack")
    # Without a live layer nothing can be exported for PEFT; the user's archive is still complete.
    expect(page.get_by_role("button", name="Download the layers for PEFT")).to_be_hidden()
    correct(site.runtime)
    site.runtime.user("ada").learn()
    visit.open_view("Chat")
    visit.open_view("Stack")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download everything").click()
    assert download.value.suggested_filename == "ada.personal"
    file = tmp_path / "ada.personal"
    download.value.save_as(file)
    imported = site.runtime.import_user(file, as_user="bob")
    assert (
        site.runtime.user(imported.user).stack().digest == site.runtime.user("ada").stack().digest
    )
    for name, suggested in (
        ("Download Style for PEFT", "ada-style.zip"),
        ("Download the layers for PEFT", "ada.zip"),
    ):
        with page.expect_download() as download:
            page.get_by_role("button", name=name).click()
        assert download.value.suggested_filename == suggested
        download.value.save_as(tmp_path / suggested)
        with zipfile.ZipFile(tmp_path / suggested) as archive:
            assert "adapter_config.json" in archive.namelist()
    expect(page.locator(".note").last).to_contain_text("ada.zip is in your downloads.")


def test_layers_are_built_anew_shown_beside_the_live_ones_kept_switched_and_taken_back(
    site: Site, visit: Visit
) -> None:
    ada = site.runtime.user("ada")
    for first in (0, 5):
        correct(site.runtime, first=first)
        ada.learn()
    (before,) = ada.layers()
    page = visit.open("Stack")
    part = page.get_by_role("region", name="Another base")
    build = part.get_by_role("button", name="Build and compare")
    build.click()
    expect(part).to_contain_text("The gate:")
    expect(part.get_by_role("region", name="Live now").first).to_be_visible()
    part.get_by_role("button", name="Keep what is live").click()
    assert ada.layers() == (before,)
    build.click()
    part.get_by_role("button", name="Switch to").click()
    expect(part).to_contain_text("are live.")
    assert ada.layers()[0].head != before.head
    part.get_by_role("button", name="Go back").click()
    expect(part).to_contain_text("live again")
    assert ada.layers() == (before,)


def test_layers_on_a_base_that_the_server_does_not_have_open_are_taken_back_on_the_page(
    site: Site, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct(site.runtime)
    site.runtime.user("ada").learn()
    page = visit.open()
    refuse = {"error": {"kind": "BaseMismatch", "message": "Built on another base.", "hint": ""}}
    page.route("**/users/ada/stack", lambda route: route.fulfill(status=409, json=refuse))
    visit.open_view("Stack")
    part = page.get_by_role("region", name="Another base")
    expect(part).to_contain_text("Your layers are on another base than this server.")
    expect(part.get_by_role("button", name="Build and compare")).to_be_hidden()
