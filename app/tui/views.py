"""What the screen says, as styled text made of values. Everything that a person or a model wrote goes in as text and never
as markup, with its control characters shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from textual.content import Content

from personalpeft.formatting import pluralize
from personalpeft.learning.report import excerpt, signal_text
from personalpeft.types import Verdict
from personalpeft_app.output import format_time, printable
from personalpeft_app.tui.conversation import Exchange
from personalpeft_app.tui.forgettable_list import ListRow
from personalpeft_app.tui.theme import DIM
from personalpeft_app.tui.user_session import ModelState

if TYPE_CHECKING:
    from personalpeft import LearnReport, Provenance
    from personalpeft.erasure import ForgetReport
    from personalpeft.memory.types import Item
    from personalpeft.types import Layer, Revision

_MARKS = {
    Verdict.PROMOTED: ("●", "$success"),
    Verdict.REFUSED: ("○", "$error"),
    Verdict.ABSTAINED: ("◌", "$warning"),
}


def bar(part: float, width: int) -> str:
    """A bar over a part (0 to 1) of a width in cells, to half a cell."""
    halves = round(max(0.0, min(1.0, part)) * width * 2)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def placeholder(exchange: Exchange, *, loaded: bool) -> Content:
    """What stands in the place of a reply that cannot be shown; empty if it can."""
    loading = "waits for the model, which is being loaded …"
    match exchange.status:
        case "waiting":
            text = "waits until the reply before it is there …" if loaded else loading
        case "writing" if not exchange.reply:
            text = "…" if loaded else loading
        case "failed":
            return Content.assemble(("✗ ", "bold $error"), (printable(exchange.problem), "$error"))
        case _:
            text = "" if exchange.text.strip() else "(nothing)"
    return Content.assemble((text, f"italic {DIM}"))


def feedback(exchange: Exchange) -> Content:
    """The feedback on a reply."""
    parts: list[tuple[str, str]] = []
    if exchange.status == "stopped":
        parts.append(("■ stopped", DIM))
    if exchange.rating:
        parts.append(("▲ good", "$success") if exchange.rating > 0 else ("▼ not good", "$error"))
    if exchange.edited is not None:
        parts.append(("✎ edited", "$accent"))
    if exchange.comments:
        parts.append((f"¶ {pluralize(exchange.comments, 'comment')}", "$accent"))
    return Content("   ").join(Content.assemble(part) for part in parts)


def status(user: str, standing: ModelState, going: Sequence[tuple[str, float]]) -> Content:
    """The footer's left: who answers, what goes on now and how far it is, and how much there is to learn."""
    stack = (
        "…"
        if standing.stack is None
        else standing.stack[:8]
        if any(each.head for each in standing.layers)
        else "base"
    )
    parts = [Content.assemble((user, "bold"), (f"@{stack}", "$primary"))]
    if standing.problem:
        parts.append(Content.assemble(("the stack cannot answer", "bold $error")))
    parts += [_going(*each) for each in going]
    if standing.fresh and not going:
        parts.append(Content.assemble((f"{standing.fresh} to learn", "$accent")))
    return Content("  ").join(parts)


def _going(stage: str, done: float) -> Content:
    name = (excerpt(printable(stage), 26), "$accent")
    # A stage that has only begun says nothing of how long it takes.
    if not done:
        return Content.assemble(name, (" …", "$accent"))
    filled = bar(done, 8)
    return Content.assemble(
        name, " ", (filled, "$accent"), ("·" * (8 - len(filled)), DIM), f" {done:4.0%}"
    )


def layer(each: Layer, width: int) -> Content:
    """A layer's name and what is live in it."""
    live = (each.head or "the bare base").partition("@")
    name = live[2] or live[0]
    room = max(1, width - len(each.name) - len(each.scope) - len(name) - 2)
    return Content.assemble(
        (each.name, "bold"), (f" {each.scope}", DIM), " " * room, (name, "$primary")
    )


def gain(revision: Revision) -> float | None:
    """How much likelier the answers held back became with it, in nats a token; None where that was not measured."""
    target = revision.scores.get("target") or {}
    if not target.get("asked") or target.get("before") is None or target.get("after") is None:
        return None
    return float(target["after"]) - float(target["before"])


def revision(each: Revision, *, live: bool, largest: float, width: int) -> Content:
    """Two lines of the list: verdict, id and time; a bar of what it gained, as a part of the ``largest`` gain."""
    mark, colour = _MARKS[each.verdict]
    won = gain(each)
    head = each.id.rpartition("@")[2]
    word = "live" if live else f"{each.verdict}"
    first = [
        (f"{mark} ", colour),
        (f"{each.layer} ", "bold" if live else ""),
        (head, ""),
        (f"  {word}", colour),
    ]
    if won is None:
        second: list[tuple[str, str]] = [("  not measured", DIM)]
    else:
        figure = f" {won:+.2f}"
        filled = bar(abs(won) / largest if largest else 0.0, width - 3 - len(figure) - 13)
        second = [("  ", ""), (filled or "╸", colour), (figure, "" if won > 0 else "$error")]
    last = (
        ("  on probation", "$warning") if each.probation else (f"  {format_time(each.at)[5:]}", DIM)
    )
    return Content.assemble(*first, "\n", *second, last)


def revisions_in_order(
    revisions: Sequence[Revision], layers: Iterable[Layer]
) -> list[tuple[str, Revision | None]]:
    """The rows of the list: each layer's revisions, newest first, and then None for the bare base."""
    rows: list[tuple[str, Revision | None]] = []
    for each in layers:
        rows += [(each.name, found) for found in reversed(revisions) if found.layer == each.name]
        rows.append((each.name, None))
    return rows


def report(last: LearnReport | None) -> Content:
    """The last report, short enough for the side panel."""
    if last is None:
        return Content.assemble(("No learn yet. Correct a few replies, then press ^L.", DIM))
    word = last.event if last.event != "learn" else str(last.verdict)
    mark, colour = _MARKS[last.verdict]
    parts: list[tuple[str, str]] = [
        (f"{mark} {last.layer}: {word}", f"bold {colour}"),
        (
            ", on probation" if last.probation else ", accepted by you" if last.accepted else "",
            "$warning",
        ),
        (
            f"\n{format_time(last.at)} · {pluralize(last.steps, 'step')} · {last.seconds:.0f} s\n",
            DIM,
        ),
        (f"\n{printable(last.reason)}\n", ""),
    ]
    for use in dict.fromkeys(source.use for source in last.sources):
        these = [source for source in last.sources if source.use == use]
        parts.append((f"\n{use}: {len(these)}\n", "bold"))
        parts += [(f"  {printable(excerpt(source.text, 34))}\n", "") for source in these[:4]]
        if len(these) > 4:
            parts.append((f"  … and {len(these) - 4} more\n", DIM))
    for example in last.examples[:2]:
        parts += [
            (f"\n› {printable(excerpt(example.prompt, 34))}\n", "bold"),
            (f"before  {printable(excerpt(example.before, 90))}\n", DIM),
            (f"after   {printable(excerpt(example.after, 90))}\n", "$success"),
        ]
    return Content.assemble(*parts)


def why(account: Provenance | None) -> list[ListRow]:
    """Why the selected reply was as it was: each thing that went into it, and the reply itself."""
    if account is None:
        return [ListRow(Content.assemble(("Select a reply that is in the ledger.", DIM)))]
    turn = account.turn
    rows = [_forgettable_row("this reply", turn.reply, turn.id)]
    for part in account.parts:
        mark, colour = _MARKS[part.revision.verdict]
        rows.append(_heading(f"{mark} {part.revision.id}", colour, f"  × {part.weight:g}"))
        rows += [_forgettable_row(str(s.kind), signal_text(s), s.id) for s in part.signals]
    rows += [_heading(f"○ {each}", DIM, "  forgotten since") for each in account.forgotten]
    if account.items:
        rows.append(_heading("In the prompt", "", ""))
        rows += [_forgettable_row(str(s.kind), signal_text(s), s.id) for s in account.items]
    if len(rows) == 1:
        rows.append(
            ListRow(Content.assemble(("\nThe bare base answered, with nothing of yours.", DIM)))
        )
    return rows


def memory(items: Sequence[Item]) -> list[ListRow]:
    """The rules and the facts that act now, the newest first."""
    rows: list[ListRow] = []
    for kind, title in (
        ("rule", "Rules, in every prompt"),
        ("fact", "Facts, looked up when they are near"),
    ):
        own = [each for each in reversed(items) if each.kind == kind]
        if own:
            rows.append(_heading(title, "", "", first=not rows))
            rows += [
                _forgettable_row(format_time(each.at)[5:10], each.text, each.id) for each in own
            ]
    return rows or [
        ListRow(Content.assemble(("Nothing yet. F4 tells a fact, c on a reply a rule.", DIM)))
    ]


def would_forget(what: Content, report: ForgetReport) -> Content:
    """What would go with something that is to be forgotten, and what would be built anew."""
    parts: list[Content | str] = [what, "\n"]
    gone = ((report.turns, "turn"), (report.signals, "signal"), (report.revisions, "revision"))
    with_it = [pluralize(len(ids), each) for ids, each in gone if ids]
    parts.append(f"\nDestroyed for good: {', '.join(with_it)}.")
    if report.emptied:
        parts.append(f"\nEmptied: {pluralize(len(report.emptied), 'turn')} that had it in view.")
    for layer, head in report.heads.items():
        parts.append(
            f"\n{layer} goes back to {head or 'the bare base'}, and is built anew from what is left."
        )
    if report.stands:
        parts.append(
            f"\nThe same words stand in {pluralize(len(report.stands), 'other place')}, which stay."
        )
    return Content.assemble(*parts)


def _heading(text: str, colour: str, more: str, *, first: bool = False) -> ListRow:
    return ListRow(
        Content.assemble("" if first else "\n", (text, f"bold {colour}".strip()), (more, DIM))
    )


def _forgettable_row(what: str, text: str, item: str) -> ListRow:
    return ListRow(Content.assemble((f"{what}: ", DIM), printable(excerpt(text, 60))), item)
