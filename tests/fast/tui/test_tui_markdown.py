"""Replies are shown as Markdown, and whatever a model wrote is text."""

from __future__ import annotations

import asyncio
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from tui_makers import Seat, sit_down

from personalpeft import Runtime
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.tui import app as app_module
from personalpeft_app.tui.dialogs import LinkPicker
from personalpeft_app.tui.markdown import ReplyMarkdown, links


def show(text: str, size: tuple[int, int] = (60, 40), pieces: int = 0) -> str:
    """What a reply looks like on a screen of that size. ``pieces``: it streams in, so many at once."""
    shown = ""

    class Page(App[None]):
        CSS_PATH = Path(app_module.__file__).with_name("look.tcss")

        def compose(self) -> ComposeResult:
            yield ReplyMarkdown()

    async def run() -> None:
        nonlocal shown
        page = Page()
        async with page.run_test(size=size) as pilot:
            reply = page.query_one(ReplyMarkdown)
            for end in range(pieces, len(text), pieces) if pieces else ():
                await reply.show(text[:end], streaming=True)
            await reply.show(text)
            await pilot.pause()
            strips = page.screen._compositor.render_strips()
            shown = "\n".join(strip.text.rstrip() for strip in strips).rstrip()

    asyncio.run(run())
    return shown


LONG = """# Eggs
Boil **them** well.

1. First, take a pan that is large enough
2. Then
   - salt

> so

```
x  = 1
```
| a | b |
| --- | --- |
| 1 | 2 |
"""


def test_marks_become_looks_and_lists_hang_where_they_wrap() -> None:
    lines = show(LONG, (26, 40)).split("\n")
    assert [line.strip() for line in lines if line.strip()][:8] == [
        "Eggs",
        "Boil them well.",
        "1. First, take a pan",
        "that is large enough",
        "2. Then",
        "• salt",
        "▌ so",
        "x  = 1",
    ]


@pytest.mark.parametrize("pieces", [1, 3, 50])
def test_a_reply_looks_the_same_when_it_streamed_in(pieces: int) -> None:
    assert show(LONG, pieces=pieces) == show(LONG)


def test_a_line_break_stays_where_it_was_written() -> None:
    assert [line.strip() for line in show("one\ntwo").split("\n")] == ["one", "two"]


def test_html_and_pictures_are_text_and_only_the_web_can_be_followed() -> None:
    text = (
        "<img src=x onerror=y> ![cat](https://a.example/c.png) [k](javascript:x()) "
        "[l](file:///etc/passwd) <https://b.example>"
    )
    assert links(text) == ("https://a.example/c.png", "https://b.example")
    assert "<img src=x onerror=y>" in show(text, (90, 10))


def test_no_control_character_reaches_the_terminal() -> None:
    text = "a\x1b[31mb &#27;[0m \x07\x9b `\x1b` \n\n```\n\x1b\n```\n\n|\x1b|\n|-|\n|\x07|\n\n[\x1b](https://a.example/\x1b)"
    shown = show(text)
    assert "\\x1b[31m" in shown
    assert not any((ord(each) < 32 and each != "\n") or 126 < ord(each) < 160 for each in shown)


def _says(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(FakeBackend, "decode", lambda self, tokens: text)


def test_a_link_is_opened_only_after_its_address_was_shown_whole(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "https://evil.example/a?next=https://good.example"
    _says(monkeypatch, f"[good.example]({address})\n")

    async def play(seat: Seat) -> None:
        opened: list[str] = []
        monkeypatch.setattr(seat.app, "open_url", opened.append)
        await seat.ask("where")
        await seat.press("up", "o")
        await seat.sees(address)
        await seat.press("escape")
        assert not opened
        await seat.pilot.click("ReplyMarkdown MarkdownParagraph", offset=(2, 0))
        await seat.until(lambda: isinstance(seat.app.screen, LinkPicker), "the question")
        assert not opened
        await seat.press("enter")
        assert opened == [address]

    sit_down(runtime, play)


def test_markdown_follows_the_width_of_the_screen(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    _says(
        monkeypatch,
        "- a point that is rather long and goes on and on until it must be wrapped somewhere\n",
    )

    async def play(seat: Seat) -> None:
        await seat.ask("points")
        first = [line for line in seat.screen.splitlines() if "•" in line]
        await seat.pilot.resize_terminal(50, 24)
        await seat.until(
            lambda: [line for line in seat.screen.splitlines() if "•" in line] != first,
            "shorter lines",
        )
        assert max(map(len, seat.screen.splitlines())) <= 50

    sit_down(runtime, play)


def _wide_and_long(length: int) -> str:
    columns = length // 12
    return f"{'|a' * columns}\n{'|-' * columns}\n" + "|x\n" * (2 * columns)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda length: "`" * length, id="backticks"),
        pytest.param(lambda length: "`a" * (length // 2), id="backticks and letters"),
        pytest.param(
            lambda length: " ".join("`" * n for n in range(1, int((2 * length) ** 0.5))),
            id="longer runs",
        ),
        pytest.param(lambda length: "**a" * (length // 3), id="stars"),
        pytest.param(lambda length: "*a_ " * (length // 4), id="crossed marks"),
        pytest.param(lambda length: "![" * (length // 2), id="brackets"),
        pytest.param(lambda length: ">" * length, id="quotes"),
        pytest.param(lambda length: "- " * (length // 2), id="lists in lists"),
        pytest.param(lambda length: "|" * length, id="pipes"),
        pytest.param(lambda length: "|a|b|\n|-|-|\n# x\n" * (length // 18), id="tables"),
        pytest.param(_wide_and_long, id="a table of a few characters and many cells"),
        pytest.param(
            lambda length: "\n\n".join(map(_wide_and_long, [2_000] * (length // 2_000))),
            id="many such tables",
        ),
    ],
)
def test_no_text_keeps_the_screen_busy(make: Callable[[int], str]) -> None:
    text = make(20_000)
    # Once of three times: other programs may take the processor.
    assert any(timeit.timeit(lambda: show(text, (80, 24)), number=1) < 4 for _ in range(3))
