"""The command that compares two revisions blind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from personalpeft.formatting import to_json
from personalpeft_app import session
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, flag, option
from personalpeft_app.output import emit, info, printable
from personalpeft_app.text_input import read_argument

if TYPE_CHECKING:
    from personalpeft.chat.compare import Comparison, LabeledComparison

NEITHER = "neither"


@command(
    "compare",
    examples=(
        'compare "How do I boil an egg?"',
        'compare "How do I boil an egg?" live base',
        'compare "How do I boil an egg?" --json',
        'compare "How do I boil an egg?" --json --choose 1f4a09c2',
    ),
)
@click.argument("prompt")
@click.argument("a", default="live", metavar="[A]")
@click.argument("b", default="previous", metavar="[B]")
@option("--layer", default="style", help="The layer.")
@click.option(
    "--max-tokens", type=click.IntRange(1), help="The longest answer.  [default: the base's]"
)
@flag("--no-memory", help="Leave your rules and facts out.")
@click.option(
    "--choose",
    metavar="1|2|NAME|neither",
    help="The choice, instead of a question; NAME is from --json.",
)
def compare(
    common: GlobalOptions,
    prompt: str,
    no_memory: bool,
    choose: str | None,
    **options: Any,
) -> None:
    """Compare two answers to a PROMPT blind, and choose one.

    Two revisions of a layer answer, in random order. Your choice is recorded as a preference. Then
    the revisions are named.

    A and B are revisions: the beginnings of their ids, 'live', 'previous' or 'base'. 'previous' was
    live before the last change.
    [default: live previous]

    A program runs it twice: with --json alone, then with --choose and a name. The same revisions
    give the same answers.
    """
    prompt = read_argument(prompt, what="prompt")
    with session.open_user(common, "change") as user:
        with interruptible() as cancelled, common.display:
            comparison = user.compare(prompt, memory=not no_memory, cancelled=cancelled, **options)
        if choose is None and not common.json and not comparison.same and sys.stdin.isatty():
            click.echo(printable(str(comparison)))
            choose = click.prompt(
                "\nWhich is better?", type=click.Choice(["1", "2", NEITHER]), err=True
            )
        choice = None if choose in (None, NEITHER) else comparison.choose(choose)
    data = {**comparison.as_json(), "choice": to_json(choice)}
    emit(
        common, data, str(comparison) if choose is None else _format_comparison(comparison, choice)
    )
    if comparison.same:
        info(common, "Both answers are equal, so there is no choice.")


def _format_comparison(comparison: Comparison, choice: LabeledComparison | None) -> str:
    revisions = " and ".join(
        f"{number} is {each.revision}" for number, each in enumerate(comparison.answers, 1)
    )
    recorded = (
        f"{choice.signal}: {choice.chosen} rather than {choice.other}"
        if choice
        else "nothing was recorded"
    )
    return f"{revisions}; {recorded}"
