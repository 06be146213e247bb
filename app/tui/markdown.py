"""Replies as Markdown: from text to lines of styled text for a width, and the links in it.

Invariants: whatever a model wrote is text. HTML is shown as it stands, no picture is fetched, and a link is a word until a
person who has read the whole address says that it is to be opened. While a reply is being written, what is shown
of it so far changes as little as can be: a mark that is not closed yet counts as closed at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock, table
from markdown_it.tree import SyntaxTreeNode
from textual.content import Content
from textual.style import Style

from personalpeft_app.output import printable

# Cells that text needs at least.
_NARROWEST = 8
DIM = "$secondary"
_STYLES = {"strong": "bold", "em": "italic", "s": "strike"}
_WEB = re.compile(r"https?://", re.IGNORECASE)
_RULE = 24
# Cells beyond those that were written which a table may be filled up with.
_MOST_ADDED = 100


@cache
def _reader() -> MarkdownIt:
    # Without headings that are made by the line below them: while one is read along, a list that begins would make one.
    reader = (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable("lheading")
    )
    reader.block.ruler.at("table", _bounded_table, {"alt": ["paragraph", "reference"]})
    return reader


def _bounded_table(state: StateBlock, start: int, end: int, silent: bool) -> bool:
    """Read a table whose cells were written.

    Each row is filled up to the columns of the first, so few characters could ask for any number of cells. Such lines are text.
    """
    known: dict[str, int] = state.env.setdefault(
        "personalpeft", {"text until": 0, "lines until": 0}
    )
    if start < known["text until"] or not table(state, start, end, True):
        return False
    if start >= known["lines until"]:
        last = start
        while last < state.lineMax and not state.isEmpty(last):
            last += 1
        known["lines until"] = last
    last = known["lines until"]
    head, rule, beyond = state.bMarks[start], state.bMarks[start + 1], state.bMarks[last]
    columns = state.src.count("|", head, rule) + 1
    if columns * (last - start) > 2 * state.src.count("|", head, beyond) + columns + _MOST_ADDED:
        known["text until"] = last
        return False
    return table(state, start, end, silent)


def rendered(text: str, width: int, *, writing: bool = False) -> Content:
    """The text in lines of at most ``width`` cells; ``writing``: more of it is to come, and a mark at its end says so."""
    if writing:
        text = _closed(text)
    text = printable(text).expandtabs(4)
    tree = SyntaxTreeNode(_reader().parse(text))
    lines = list(_spaced(tree.children, max(_NARROWEST, width - 1), text.split("\n")))
    if writing:
        lines[-1:] = [Content.assemble(*lines[-1:], ("▌", "$primary"))]
    return Content("\n").join(lines)


def links(text: str) -> tuple[str, ...]:
    """The addresses on the web that a text links to, each once, in order."""
    found = (
        node
        for node in SyntaxTreeNode(_reader().parse(printable(text))).walk()
        if node.type in ("link", "image")
    )
    return tuple(dict.fromkeys(address for node in found if _WEB.match(address := _address(node))))


def _closed(text: str) -> str:
    head, _, last = text.rpartition("\n")
    fences = sum(line.lstrip().startswith("```") for line in text.split("\n"))
    if fences % 2:
        return text
    last = last.rstrip("*_~`")
    for mark in ("`", "**", "~~"):
        if last.count(mark) % 2:
            last = last.rstrip() + mark
            break
    return f"{head}\n{last}" if head or text.startswith("\n") else last


def _spaced(
    nodes: Iterable[SyntaxTreeNode], width: int, source: Sequence[str]
) -> Iterator[Content]:
    """Blocks with a line between two."""
    for number, node in enumerate(nodes):
        if number:
            yield Content("")
        yield from _block(node, width, source)


def _block(node: SyntaxTreeNode, width: int, source: Sequence[str]) -> Iterator[Content]:
    match node.type:
        case "heading":
            style = "bold $primary" if node.tag in ("h1", "h2") else "bold"
            yield from (line.stylize_before(style) for line in _words(node, width))
        case "bullet_list" | "ordered_list":
            yield from _list(node, width, source)
        case "blockquote":
            if width - 2 >= _NARROWEST:
                yield from _under("▎ ", "▎ ", DIM, _spaced(node.children, width - 2, source))
            else:
                yield from _spaced(node.children, width, source)
        case "fence" | "code_block":
            code = printable(node.content.rstrip("\n")).split("\n")
            folded = [part for line in code for part in Content(line).fold(width - 2)]
            yield from _under("│ ", "│ ", DIM, (line.stylize_before("$accent") for line in folded))
        case "hr":
            yield Content.assemble(("─" * min(width, _RULE), DIM))
        case "table":
            yield from _table(node, width, source)
        case _ if node.children:
            yield from _words(node, width)
        case _:
            yield from Content(printable(node.content)).wrap(width)


def _list(node: SyntaxTreeNode, width: int, source: Sequence[str]) -> Iterator[Content]:
    first = int(node.attrs.get("start", 1)) if node.type == "ordered_list" else None
    tight = all(
        child.hidden
        for item in node.children
        for child in item.children
        if child.type == "paragraph"
    )
    for number, item in enumerate(node.children):
        if number and not tight:
            yield Content("")
        mark = "• " if first is None else f"{first + number}. "
        # A deep list, or one with a long number, leaves no room beside its mark: what it marks then stands below.
        beside = width - len(mark) >= _NARROWEST
        blocks = [
            list(_block(child, width - len(mark) if beside else width, source))
            for child in item.children
        ]
        inner: list[Content] = []
        for lines in blocks:
            inner += [Content("")] if inner and not tight else []
            inner += lines
        if beside:
            yield from _under(mark, " " * len(mark), "$primary", inner or [Content("")])
        else:
            yield from Content.styled(mark.strip(), "$primary").fold(width)
            yield from inner


def _under(first: str, rest: str, style: str, lines: Iterable[Content]) -> Iterator[Content]:
    """Lines with something before the first and something before each of the others."""
    for number, line in enumerate(lines):
        yield Content.assemble((rest if number else first, style), line)


def _table(node: SyntaxTreeNode, width: int, source: Sequence[str]) -> Iterator[Content]:
    rows = [
        [_inline(cell.children) for cell in row.children]
        for part in node.children
        for row in part.children
    ]
    widths = [
        max(row[at].cell_length for row in rows if at < len(row)) for at in range(len(rows[0]))
    ]
    if sum(widths) + 3 * (len(widths) - 1) > width:
        begin, end = node.map or (0, 0)
        for line in source[begin:end]:
            yield from Content(printable(line)).fold(width)
        return
    for number, row in enumerate(rows):
        cells = [
            cell.pad_right(wide - cell.cell_length) for cell, wide in zip(row, widths, strict=False)
        ]
        across = Content.assemble(*_between(cells, (" │ ", DIM)))
        yield across.stylize_before("bold") if number == 0 else across
        if number == 0:
            yield Content.assemble(("─┼─".join("─" * wide for wide in widths), DIM))


def _between(cells: Sequence[Content], gap: tuple[str, str]) -> Iterator[Content | tuple[str, str]]:
    for number, cell in enumerate(cells):
        if number:
            yield gap
        yield cell


def _words(node: SyntaxTreeNode, width: int) -> list[Content]:
    """The lines of what has words in it: as they were written, and wrapped where they are too long."""
    return [
        part.rstrip()
        for line in _inline(node.children).split("\n", allow_blank=True)
        for part in _wrapped(line, width)
    ]


def _wrapped(line: Content, width: int) -> list[Content]:
    return line.wrap(width) if line.plain else [line]


def _inline(nodes: Iterable[SyntaxTreeNode]) -> Content:
    return Content("").join(map(_leaf, nodes))


def _leaf(node: SyntaxTreeNode) -> Content:
    match node.type:
        case "softbreak" | "hardbreak":
            return Content("\n")
        case "code_inline":
            return Content.assemble((printable(node.content), "$accent"))
        case "link" | "image":
            text = _inline(node.children)
            address = _address(node)
            if not _WEB.match(address):
                return text
            return (text if text.plain else Content(address)).stylize(_Link(address).style)
        case "inline":
            return _inline(node.children)
        case kind if kind in _STYLES:
            return _inline(node.children).stylize(_STYLES[kind])
        case _:
            return Content(printable(node.content))


def _address(node: SyntaxTreeNode) -> str:
    return printable(str(node.attrs.get("href") or node.attrs.get("src") or ""))


@dataclass(frozen=True, slots=True)
class _Link:
    """A click asks; it opens nothing."""

    address: str

    @property
    def style(self) -> Style:
        return Style.from_meta({"@click": ("app.follow", (self.address,))}) + Style(underline=True)
