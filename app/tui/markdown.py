"""Show replies as Markdown, with Textual's widget and its stream.

This module adds a parser and asks before a link opens. The parser that Textual uses by default
drops HTML, and 20,000 characters of headings occupy the screen for 19 s.

Invariants: a reply is text. HTML is shown as written and no picture is fetched. No link opens
before the user has seen its whole address. A text of very many blocks is shown plain, so no reply
can keep the screen busy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownBlock, MarkdownStream

from personalpeft_app.output import printable

# Each block is a widget, and widgets are slow to mount.
_MAX_TOKENS = 1500
# Each row of a table is filled up to its columns, so few characters can ask for very many cells.
_MAX_CELLS = 20_000
_WEB = re.compile(r"https?://", re.IGNORECASE)


class ReplyParser(MarkdownIt):
    """Read CommonMark, tables and strikethrough, with each line break as it was written."""

    def __init__(self) -> None:
        super().__init__("commonmark", {"html": False})
        # While a reply streams in, a list that begins below a line would make that line a heading.
        self.enable(["table", "strikethrough"]).disable("lheading")

    def parse(self, src: str, env: Any = None) -> list[Token]:
        lines = src.split("\n")
        if max(line.count("|") for line in lines) * len(lines) > _MAX_CELLS:
            return _plain(lines)
        tokens = super().parse(src, env)
        if len(tokens) > _MAX_TOKENS:
            return _plain(lines)
        for token in tokens:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"
        return tokens


_parser = cache(ReplyParser)


def links(text: str) -> tuple[str, ...]:
    """Return the addresses on the web that a text links to, each once, in order."""
    leaves = (leaf for token in _parser().parse(printable(text)) for leaf in token.children or ())
    addresses = (str(leaf.attrs.get("href") or leaf.attrs.get("src") or "") for leaf in leaves)
    return tuple(dict.fromkeys(each for each in addresses if _WEB.match(each)))


def _plain(lines: Sequence[str]) -> list[Token]:
    leaves: list[Token] = []
    for line in lines:
        leaves += [Token("text", "", 0, content=line), Token("hardbreak", "br", 0)]
    return [
        Token("paragraph_open", "p", 1, map=[0, len(lines)]),
        Token("inline", "", 0, children=leaves[:-1]),
        Token("paragraph_close", "p", -1),
    ]


class _Table(Markdown.BLOCKS["table_open"]):  # type: ignore[misc,name-defined,valid-type]  # out of a mapping
    def on_mount(self) -> None:
        # Textual reads a cell's tooltip as markup, but a model's text is not markup.
        for cell in self.query("MarkdownTableCellContents"):
            cell.tooltip = None


class ReplyMarkdown(Markdown):
    """One reply, also while it streams in."""

    BLOCKS: ClassVar[dict[str, type[MarkdownBlock]]] = {  # type: ignore[misc]  # as Textual says
        **Markdown.BLOCKS,
        "table_open": _Table,
    }

    def __init__(self, text: str = "") -> None:
        super().__init__(printable(text), parser_factory=_parser, open_links=False, classes="reply")
        self._stream: MarkdownStream | None = None
        self._written = printable(text)

    async def show(self, text: str, *, streaming: bool = False) -> None:
        """Show the text. With ``streaming`` only the new part is read and drawn."""
        text = printable(text)
        if streaming and text.startswith(self._written):
            self._stream = self._stream or Markdown.get_stream(self)
            await self._stream.write(text[len(self._written) :])
        elif self._stream is not None or text != self._written:
            await self.stop_stream()
            await self.update(text)
        self._written = text

    async def stop_stream(self) -> None:
        """Stop streaming. A later ``show`` reads the whole text."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()

    async def on_unmount(self) -> None:
        await self.stop_stream()
