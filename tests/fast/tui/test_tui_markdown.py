"""Replies are rendered as Markdown, and control sequences in a model's output stay text."""

from __future__ import annotations

import asyncio
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.app import App, ComposeResult
from tui_makers import TuiDriver, run_tui

from personalpeft import Runtime
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.tui import app as app_module
from personalpeft_app.tui.dialogs import Picker
from personalpeft_app.tui.markdown import ReplyMarkdown, links


def show(text: str, size: tuple[int, int] = (60, 40), pieces: int = 0) -> str:
    """Return the rendered rows of a reply at a screen size.

    ``pieces`` streams the text in chunks of that many characters.
    """
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


@pytest.mark.exhaustive
def test_emphasis_is_styled_and_wrapped_list_items_are_indented() -> None:
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


@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.exhaustive), 3, 50])
def test_a_streamed_reply_renders_like_a_whole_one(pieces: int) -> None:
    assert show(LONG, pieces=pieces) == show(LONG)


def test_a_line_break_is_kept() -> None:
    assert [line.strip() for line in show("one\ntwo").split("\n")] == ["one", "two"]


def test_html_and_images_stay_text_and_only_web_links_are_links() -> None:
    text = (
        "<img src=x onerror=y> ![cat](https://a.example/c.png) [k](javascript:x()) "
        "[l](file:///etc/passwd) <https://b.example>"
    )
    assert links(text) == ("https://a.example/c.png", "https://b.example")
    assert "<img src=x onerror=y>" in show(text, (90, 10))


def test_control_characters_never_reach_the_terminal() -> None:
    text = "a\x1b[31mb &#27;[0m \x07\x9b `\x1b` \n\n```\n\x1b\n```\n\n|\x1b|\n|-|\n|\x07|\n\n[\x1b](https://a.example/\x1b)"
    shown = show(text)
    assert "\\x1b[31m" in shown
    assert not any((ord(each) < 32 and each != "\n") or 126 < ord(each) < 160 for each in shown)


def _reply_with(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(FakeBackend, "decode", lambda self, tokens: text if tokens else "")


@pytest.mark.exhaustive
def test_a_link_is_opened_only_after_its_full_address_was_shown(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = "https://evil.example/a?next=https://good.example"
    _reply_with(monkeypatch, f"[good.example]({address})\n")

    async def scenario(ui: TuiDriver) -> None:
        opened: list[str] = []
        monkeypatch.setattr(ui.app, "open_url", opened.append)
        await ui.ask("where")
        await ui.press("up", "o")
        await ui.wait_for_text(address)
        await ui.press("escape")
        assert not opened
        await ui.pilot.click("ReplyMarkdown MarkdownParagraph", offset=(2, 0))
        await ui.wait_until(lambda: isinstance(ui.app.screen, Picker), "the question")
        assert not opened
        await ui.press("enter")
        assert opened == [address]

    run_tui(runtime, scenario)


def test_markdown_reflows_with_the_screen_width(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    _reply_with(
        monkeypatch,
        "- a point that is rather long and goes on and on until it must be wrapped somewhere\n",
    )

    async def scenario(ui: TuiDriver) -> None:
        await ui.ask("points")
        first = [line for line in ui.screen.splitlines() if "•" in line]
        await ui.pilot.resize_terminal(50, 24)
        await ui.wait_until(
            lambda: [line for line in ui.screen.splitlines() if "•" in line] != first,
            "shorter lines",
        )
        assert max(map(len, ui.screen.splitlines())) <= 50

    run_tui(runtime, scenario)


def _wide_and_long(length: int) -> str:
    columns = length // 12
    return f"{'|a' * columns}\n{'|-' * columns}\n" + "|x\n" * (2 * columns)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda length: "`" * length, id="backticks"),
        pytest.param(
            lambda length: "`a" * (length // 2),
            id="backticks and letters",
        ),
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
        pytest.param(
            lambda length: "|a|b|\n|-|-|\n# x\n" * (length // 18),
            id="tables",
        ),
        pytest.param(_wide_and_long, id="a table of a few characters and many cells"),
        pytest.param(
            lambda length: "\n\n".join(map(_wide_and_long, [2_000] * (length // 2_000))),
            id="many such tables",
        ),
    ],
)
def test_rendering_is_fast_for_any_text(make: Callable[[int], str]) -> None:
    text = make(20_000)
    # Only the fastest of three attempts counts, since other programs may use the processor.
    assert any(timeit.timeit(lambda: show(text, (80, 24)), number=1) < 4 for _ in range(3))
