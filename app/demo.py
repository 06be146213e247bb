"""Show the whole cycle on a made-up user: ask, correct, learn, compare, roll back."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from personalpeft import User
from personalpeft.types import Verdict
from personalpeft_app import session
from personalpeft_app.commands.learn import run_learn
from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import emit, info, printable

T = TypeVar("T")

_PREFIX = "In short:"
_CORRECTIONS = {
    "How do I boil an egg?": "Put the egg into boiling water for eight minutes.",
    "Why is the sky blue?": "Air scatters blue light more than red light.",
    "How can I fall asleep faster?": "Keep the room dark and cool.",
    "What should I cook tonight?": "Try a simple vegetable soup.",
    "How do plants drink water?": "Roots take up water from the soil.",
    "How do I remove a coffee stain?": "Rinse it with cold water at once.",
    "What is a good gift for my mother?": "A framed photo of the family is a good gift.",
    "Why do cats purr?": "Cats purr when they feel calm and safe.",
    "How can I save money?": "Write down all that you spend.",
    "What is the best way to learn a language?": "Practise a little every day.",
    "How do I start running?": "Begin with short slow runs.",
    "Why does bread rise?": "Yeast eats sugar and makes gas.",
}
_QUESTIONS = (
    "How do I keep my houseplants alive?",
    "Why do we dream?",
    "What can I do on a rainy day?",
    "How do I make a good cup of tea?",
)
_FACTS = {
    "My dog is called Biscuit.": "What is my dog called?",
    "My sister Nadia is a midwife.": "What is Nadia's job?",
}
_MAX_TOKENS = 40


def run(common: GlobalOptions, *, keep: bool) -> None:
    """Show it all on stdout. Exit with 1 if a rollback did not bring the old answers back."""
    began = time.monotonic()
    with ExitStack() as at_exit:
        home = Path(tempfile.mkdtemp(prefix="personalpeft-demo-"))
        if not keep:
            at_exit.callback(shutil.rmtree, home, ignore_errors=True)
        info(common, f"The demo uses the home {home}{'' if keep else ', which it deletes later'}.")
        own = replace(common, home=str(home), user="ada", base=_base(common))
        with session.open_user(own, "make") as user:
            results = {"home": home, **_show(own, user)}
    results["seconds"] = round(time.monotonic() - began, 1)
    kept = f"; the home is {home}" if keep else ""
    emit(common, results, f"\nDone in {results['seconds']:.0f} seconds{kept}.")
    if results["restored"] != len(_QUESTIONS):
        raise click.exceptions.Exit(1)


def _base(common: GlobalOptions) -> str:
    """Return the base's name, or its card's path if only the user's home has the card."""
    name = common.base_name()
    card = common.paths()[0] / "models" / f"{name}.toml"
    return str(card) if card.is_file() else name


def _has_style(text: str) -> bool:
    return text.strip().startswith(_PREFIX) and text.strip().count(". ") == 0


def _show(common: GlobalOptions, user: User) -> dict[str, Any]:
    """Print each step with a table. Return the results."""
    say = partial(_print, common)

    def ask(question: str) -> str:
        return user.chat(question, temperature=0, max_tokens=_MAX_TOKENS).text

    def ask_all(stage: str) -> list[str]:
        return [ask(question) for question in _each(common, stage, _QUESTIONS)]

    say("\n1. Facts act at once\n")
    facts, rows = [], []
    for fact, question in _each(common, "Asking", _FACTS.items()):
        old = ask(question)
        user.remember(fact)
        new = ask(question)
        facts.append({"fact": fact, "question": question, "before": old, "after": new})
        rows.append((f"{question} ({fact})", old, new))
    _print_table(common, ("question (and the fact)", "before the fact", "after"), rows)
    before = ask_all("Asking before")

    say(f"\n2. {len(_CORRECTIONS)} replies are corrected\n")
    rows = []
    for question, answer in _each(common, "Asking and correcting", _CORRECTIONS.items()):
        reply = user.chat(question, temperature=0, max_tokens=24)
        edit = f"{_PREFIX} {answer}"
        user.feedback(reply, edit=edit)
        rows.append((question, reply.text, edit))
    _print_table(common, ("question", "reply", "edited to"), rows[:2])
    say(f"... and {len(rows) - 2} more like these.")

    say("\n3. The model learns from them, and a gate judges the result\n")
    report = run_learn(common, user)
    say(str(report))
    if report.verdict is not Verdict.PROMOTED:
        say("It was not promoted, so the answers below are as before.")
    after = ask_all("Asking after")

    say("\n4. Questions that it never saw, before and after\n")
    rows = list(zip(_QUESTIONS, before, after, strict=True))
    _print_table(common, ("question", "before", "after"), rows)
    styled_before, styled_after = sum(map(_has_style, before)), sum(map(_has_style, after))
    say(
        f"In the style of the corrections: {styled_before} of {len(rows)} before, "
        f"{styled_after} after."
    )

    say("\n5. What was learned can be rolled back\n")
    if user.history():
        user.rollback("style")
    again = ask_all("Asking again")
    restored = sum(old == new for old, new in zip(before, again, strict=True))
    history = user.history()
    for move in history:
        say(f"{move.cause:<9} {move.before or 'the base'} -> {move.after or 'the base'}")
    say(f"{restored} of {len(before)} answers equal the old ones, byte for byte.")
    return {
        "facts": facts,
        "report": report,
        "answers": [{"question": q, "before": old, "after": new} for q, old, new in rows],
        "holds_before": styled_before,
        "holds_after": styled_after,
        "history": history,
        "restored": restored,
    }


def _each(common: GlobalOptions, stage: str, items: Collection[T]) -> Iterator[T]:
    with common.display as display:
        for number, item in enumerate(items):
            display(stage, number / len(items))
            yield item


def _print(common: GlobalOptions, text: str) -> None:
    if not common.json:
        click.echo(printable(text))


def _print_table(
    common: GlobalOptions, headings: Sequence[str], rows: Sequence[Sequence[str]]
) -> None:
    if common.json:
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    style = box.ROUNDED if sys.stdout.isatty() else box.ASCII2
    table = Table(box=style, show_lines=True, expand=True)
    for heading, ratio in zip(headings, (2, 3, 3), strict=True):
        table.add_column(Text(heading), ratio=ratio)
    for row in rows:
        table.add_row(*[Text(printable(cell)) for cell in row])
    Console(file=sys.stdout, highlight=False).print(table)
