"""Styled text made of values.

Invariant: texts of users and models are text and never markup. Their control characters are
escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from textual.content import Content

from personalpeft import ConversationSummary, LearnReport, Provenance
from personalpeft.formatting import pluralize
from personalpeft.learning.report import excerpt, signal_text
from personalpeft.memory.types import Item
from personalpeft.rebase import RebaseReport
from personalpeft.types import Layer, Revision, Verdict
from personalpeft_app.output import format_time, printable
from personalpeft_app.tui.conversation import Exchange
from personalpeft_app.tui.theme import DIM
from personalpeft_app.tui.user_session import ModelState

# The text of a row in a list, and its value. The value is None if the row cannot be chosen.
Row: TypeAlias = tuple[Content, Any]

# In cells: the room for a title in the list of conversations, and for a revision in its pane.
_TITLE_WIDTH = 22
_PANE_WIDTH = 34
_MARKS = {
    None: ("·", DIM),
    Verdict.PROMOTED: ("●", "$success"),
    Verdict.REFUSED: ("○", "$error"),
    Verdict.ABSTAINED: ("◌", "$warning"),
}


def bar(part: float, width: int) -> str:
    """Draw a bar over a part (0 to 1) of a width in cells, to half a cell."""
    halves = round(max(0.0, min(1.0, part)) * width * 2)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def placeholder(exchange: Exchange, *, loaded: bool) -> Content:
    """Return the text in place of a missing reply; empty if there is a reply."""
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


def status(user: str, state: ModelState, tasks: Sequence[tuple[str, float]]) -> Content:
    """Return the footer: the user, the stack, the running tasks and the pending lessons."""
    stack = "base" if state.stack is not None else "…"
    if state.stack is not None and any(each.head for each in state.layers):
        stack = state.stack[:8]
    parts = [Content.assemble((user, "bold"), (f"@{stack}", "$primary"))]
    if not state.training:
        parts.append(Content.assemble(("no training", "$warning")))
    if state.problem:
        parts.append(Content.assemble(("the stack cannot answer", "bold $error")))
    parts += [_progress(*each) for each in tasks]
    if state.pending and not tasks:
        parts.append(Content.assemble((f"{state.pending} to learn", "$accent")))
    return Content("  ").join(parts)


def _progress(stage: str, done: float) -> Content:
    name = (excerpt(printable(stage), 26), "$accent")
    if not done:
        return Content.assemble(name, (" …", "$accent"))
    filled = bar(done, 8)
    return Content.assemble(
        name, " ", (filled, "$accent"), ("·" * (8 - len(filled)), DIM), f" {done:4.0%}"
    )


def conversation(
    key: str, title: str, last: ConversationSummary | None, *, busy: bool, shown: bool
) -> Row:
    """Return a row of the list: the title, and below it the last turn and the number of turns.

    ``last`` is None for a conversation without a turn.
    """
    below = ""
    if busy:
        below = "writing …"
    elif last is not None:
        below = f"{format_time(last.updated_at)[5:]} · {last.num_turns}"
    title = excerpt(printable(" ".join(title.split()) or "A new conversation"), _TITLE_WIDTH)
    mark = ("▸ " if shown else "  ", "$primary")
    return Content.assemble(mark, (title, "bold" if shown else ""), "\n  ", (below, DIM)), key


def layer(each: Layer, width: int) -> Content:
    head = each.head.rpartition("@")[2] if each.head else "the bare base"
    room = max(1, width - len(each.name) - len(each.scope) - len(head) - 2)
    return Content.assemble(
        (each.name, "bold"), (f" {each.scope}", DIM), " " * room, (head, "$primary")
    )


def revisions(state: ModelState) -> Iterator[Row]:
    """Yield each layer's revisions, newest first, then its bare base: (layer, revision)."""
    largest = max((abs(_gain(each) or 0.0) for each in state.revisions), default=0.0)
    for each in state.layers:
        for revision in reversed(state.revisions):
            if revision.layer == each.name:
                is_live = each.head == revision.id
                text = _revision(revision, live=is_live, largest=largest)
                yield text, (each.name, revision.id)
        live = "" if each.head else "  live"
        base = Content.assemble(("◦ ", DIM), f"{each.name} the bare base{live}")
        yield base, (each.name, None)


def _revision(each: Revision, *, live: bool, largest: float) -> Content:
    mark, colour = _MARKS[each.verdict]
    gain = _gain(each)
    first = [
        (f"{mark} ", colour),
        (f"{each.layer} ", "bold" if live else ""),
        (each.id.rpartition("@")[2], ""),
        ("  live" if live else f"  {each.verdict}", colour),
    ]
    if gain is None:
        second: list[tuple[str, str]] = [("  not measured", DIM)]
    else:
        figure = f" {gain:+.2f}"
        # The end of the line is two spaces and a time.
        width = _PANE_WIDTH - 3 - len(figure) - 13
        filled = bar(abs(gain) / largest if largest else 0.0, width) or "╸"
        second = [("  ", ""), (filled, colour), (figure, "" if gain > 0 else "$error")]
    last = (
        ("  on probation", "$warning") if each.probation else (f"  {format_time(each.at)[5:]}", DIM)
    )
    return Content.assemble(*first, "\n", *second, last)


def _gain(revision: Revision) -> float | None:
    """Return the gain of the held-out answers in nats a token, None if it was not measured."""
    target = revision.scores.get("target") or {}
    if not target.get("asked") or target.get("before") is None or target.get("after") is None:
        return None
    return float(target["after"]) - float(target["before"])


def report(last: LearnReport | None) -> Content:
    """Return the last report, short enough for the side pane."""
    if last is None:
        return Content.assemble(("No learn yet. Correct a few replies, then press ^L.", DIM))
    mark, colour = _MARKS[last.verdict]
    parts: list[tuple[str, str]] = [
        (f"{mark} {last.layer}: {last.outcome.text}", f"bold {colour}"),
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
    parts += [(f"\n{use}: {count}\n", "bold") for use, count in last.other_sources]
    for example in last.examples[:2]:
        parts += [
            (f"\n› {printable(excerpt(example.prompt, 34))}\n", "bold"),
            (f"before  {printable(excerpt(example.before, 90))}\n", DIM),
            (f"after   {printable(excerpt(example.after, 90))}\n", "$success"),
        ]
    return Content.assemble(*parts)


def why(provenance: Provenance | None) -> list[Row]:
    """Return rows for the selected reply, and for each revision and signal behind it."""
    if provenance is None:
        return [_note("Select a reply that is in the ledger.")]
    turn = provenance.turn
    rows = [_item("this reply", turn.reply, turn.id)]
    for part in provenance.parts:
        mark, colour = _MARKS[part.revision.verdict]
        rows.append(_heading(f"\n{mark} {part.revision.id}", colour, f"  × {part.weight:g}"))
        rows += [_item(str(s.kind), signal_text(s), s.id) for s in part.signals]
    rows += [_heading(f"\n○ {each}", DIM, "  forgotten since") for each in provenance.forgotten]
    if provenance.items:
        rows.append(_heading("\nIn the prompt"))
        rows += [_item(str(s.kind), signal_text(s), s.id) for s in provenance.items]
    if len(rows) == 1:
        rows.append(_note("\nThe bare base answered, without your feedback."))
    return rows


def memory(items: Sequence[Item]) -> list[Row]:
    """Return the rules and facts in effect, newest first."""
    rows: list[Row] = []
    titles = {"rule": "Rules, in every prompt", "fact": "Facts, retrieved for similar prompts"}
    for kind, title in titles.items():
        own = [each for each in reversed(items) if each.kind == kind]
        if own:
            rows.append(_heading(f"\n{title}" if rows else title))
            rows += [_item(format_time(each.at)[5:10], each.text, each.id) for each in own]
    return rows or [_note("Nothing yet. F4 adds a fact, c on a reply a rule.")]


def rebase(report: RebaseReport) -> Content:
    """Return how the new stack did against the live one, and what the gate says."""
    mark, colour = _MARKS[report.verdict]
    counts = f"  {report.improved} improved, {report.regressed} regressed, {report.tied} tied"
    return Content.assemble(
        (f"{mark} {report.outcome.text}", colour),
        (f"{counts if report.questions else ''}\n", "bold"),
        printable(report.reason),
    )


def rebase_answers(report: RebaseReport, *, after: bool) -> Content:
    """Return the questions of a comparison, each with the answer of one side."""
    parts: list[tuple[str, str]] = []
    for each in report.examples:
        answer = each.after if after else each.before
        parts += [
            (f"› {printable(excerpt(each.prompt, 80))}\n", "bold"),
            (f"{printable(answer).strip() or '(nothing)'}\n\n", ""),
        ]
    return Content.assemble(*parts or [("Nothing is held out to ask.", DIM)])


def _heading(text: str, colour: str = "", more: str = "") -> Row:
    return Content.assemble((text, f"bold {colour}".strip()), (more, DIM)), None


def _note(text: str) -> Row:
    return Content.assemble((text, DIM)), None


def _item(label: str, text: str, item: str) -> Row:
    return Content.assemble((f"{label}: ", DIM), printable(excerpt(text, 60))), item
