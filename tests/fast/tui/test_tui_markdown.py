"""Replies are shown as Markdown, and whatever a model wrote is text."""

from __future__ import annotations

import timeit
from collections.abc import Callable

import pytest
from example_counts import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tui_makers import Seat, sit_down

from personalpeft import Runtime
from personalpeft.backends.fake import FakeBackend
from personalpeft_app.tui.dialogs import LinkPicker
from personalpeft_app.tui.exchange import ExchangeView
from personalpeft_app.tui.markdown import links, rendered
from personalpeft_app.tui.width_aware_static import WidthAwareStatic

_PIECES = st.sampled_from(
    [
        "word ",
        "**",
        "*",
        "`",
        "```\n",
        "\n",
        "\n\n",
        "- ",
        "1. ",
        "> ",
        "# ",
        "| a | b |\n|---|---|\n",
        "[x](https://a.example/b)",
        "<b>",
        "&#27;",
        "\x1b[31m",
        "\\",
        "~~",
        "---\n",
        "!",
        "長い",
        "👩‍👩‍👧",
        "\t",
    ]
)
_TEXTS = st.one_of(st.text(max_size=80), st.lists(_PIECES, max_size=30).map("".join))


@examples(150)
@example("0. 10000000.", 12, False)
@example("- " * 12 + "deep", 12, False)
@example("> " * 12 + "deep", 12, False)
@example("0000\t0|0\n-|-", 12, False)
@given(_TEXTS, st.integers(12, 90), st.booleans())
def test_every_text_fits_and_sends_no_control_character(
    text: str, width: int, writing: bool
) -> None:
    shown = rendered(text, width, writing=writing)
    assert all(line.cell_length <= width for line in shown.split("\n", allow_blank=True))
    assert not any(ord(each) < 32 and each != "\n" for each in shown.plain)


def test_marks_become_looks_and_lists_hang_where_they_wrap() -> None:
    text = "# Eggs\nBoil **them** well.\n\n1. First, take a pan that is large enough\n2. Then\n   - salt\n\n> so\n\n```\nx  = 1\n```"
    assert rendered(text, 24).plain.split("\n") == [
        "Eggs",
        "",
        "Boil them well.",
        "",
        "1. First, take a pan",
        "   that is large enough",
        "2. Then",
        "   • salt",
        "",
        "▎ so",
        "",
        "│ x  = 1",
    ]


def test_a_table_that_does_not_fit_is_shown_as_it_was_written() -> None:
    text = "| one | two |\n|---|---|\n| a long cell | b |"
    assert rendered(text, 40).plain.split("\n")[0].split() == ["one", "│", "two"]
    assert rendered(text, 13).plain.split("\n")[0] == "| one | two "


def test_a_reply_that_is_being_written_shows_no_mark_that_comes_and_goes() -> None:
    text = "It is **very** hot.\n\n- one `x`\n- two"
    for end in range(1, len(text) + 1):
        shown = rendered(text[:end], 60, writing=True).plain
        assert "*" not in shown
        assert "`" not in shown
        assert shown.endswith("▌")
    # What stands does not change while more comes.
    assert rendered("One.\n-", 60, writing=True).plain.startswith("One.")


def test_html_and_pictures_are_text_and_only_the_web_can_be_followed() -> None:
    text = "<img src=x onerror=y> ![cat](https://a.example/c.png) [k](javascript:x()) [l](file:///etc/passwd) <https://b.example>"
    assert links(text) == ("https://a.example/c.png", "https://b.example")
    assert "<img src=x onerror=y>" in rendered(text, 90).plain


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
        reply = seat.app.query_one(ExchangeView).query_one(WidthAwareStatic)
        await seat.pilot.click(reply, offset=(4, 0))
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
@pytest.mark.parametrize("writing", [False, True])
def test_no_text_keeps_the_screen_busy(make: Callable[[int], str], writing: bool) -> None:
    text = make(20_000)
    # Once of three times: what other programs take of the processor is none of ours.
    assert any(
        timeit.timeit(lambda: rendered(text, 80, writing=writing), number=1) < 2 for _ in range(3)
    )


def test_a_table_is_shown_with_its_columns_where_a_row_lacks_some() -> None:
    text = "| a | b | c |\n|---|---|---|\n| 1 |\n| 1 | 2 | 3 |\n- x\n- y"
    assert rendered(text, 40).plain.split("\n")[:4] == [
        "a │ b │ c",
        "──┼───┼──",
        "1 │   │  ",
        "1 │ 2 │ 3",
    ]
