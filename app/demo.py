"""The main job from its beginning to its end, on a made-up person: ask, correct, learn, compare, take back."""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from personalpeft.types import Verdict
from personalpeft_app import session
from personalpeft_app.commands.learn import run_learn
from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import emit, info, printable
from personalpeft_app.progress import Display
from personalpeft_app.styles import LESSONS, STYLES, UNSEEN

if TYPE_CHECKING:
    from personalpeft import User

STYLE = "in short"
QUESTIONS = UNSEEN[:4]
FACTS = (
    ("My dog is called Biscuit.", "What is my dog called?"),
    ("My sister Nadia is a midwife.", "What is Nadia's job?"),
)
_PERSON = "ada"
_LONGEST = 40


@dataclass
class Findings:
    """What the demo saw, as data. ``holds`` counts the answers that are in the style; ``restored`` those that were the
    same to the byte after the rollback.
    """

    home: Path
    facts: list[dict[str, str]] = field(default_factory=list)
    answers: list[dict[str, str]] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    holds_before: int = 0
    holds_after: int = 0
    restored: int = 0
    seconds: float = 0.0


def run(common: GlobalOptions, *, keep: bool) -> None:
    """Shows it all on stdout. Leaves with exit code 1 where a rollback did not bring the old answers back."""
    began = time.monotonic()
    with ExitStack() as at_the_end:
        home = Path(tempfile.mkdtemp(prefix="personalpeft-demo-"))
        if not keep:
            at_the_end.callback(shutil.rmtree, home, ignore_errors=True)
        info(
            common,
            f"The demo has a home of its own, {home}, which {'is kept' if keep else 'is deleted at the end'}.",
        )
        display = Display(common)
        own = replace(common, home=str(home), user=_PERSON, base=_base(common))
        with session.open_user(own, "make", display) as user:
            found = _Show(common, user, display, Findings(home)).perform()
        found.seconds = round(time.monotonic() - began, 1)
    emit(
        common,
        found,
        f"\nDone in {found.seconds:.0f} seconds{f'; the home is {home}' if keep else ''}.",
    )
    if found.restored != len(QUESTIONS):
        raise click.exceptions.Exit(1)


def _base(common: GlobalOptions) -> str:
    """The base's name; for a card of the person's own, its path, since the demo's home does not have it."""
    name = common.base_name()
    card = common.paths()[0] / "models" / f"{name}.toml"
    return str(card) if card.is_file() else name


class _Show:
    """The acts of the demo, each on what the ones before it left."""

    def __init__(
        self, common: GlobalOptions, user: User, display: Display, found: Findings
    ) -> None:
        self._common = common
        self._user = user
        self._display = display
        self._found = found
        self._style = next(style for style in STYLES if style.name == STYLE)

    def perform(self) -> Findings:
        """All acts in order."""
        self._remember()
        before = self._ask_all("Asking before")
        self._correct()
        self._learn()
        after = self._ask_all("Asking after")
        self._compare(before, after)
        self._take_back(before)
        return self._found

    def _remember(self) -> None:
        self._title("1. Facts act at once")
        with self._display as display:
            for number, (fact, question) in enumerate(FACTS):
                display("Asking", number / len(FACTS))
                without = self._ask(question)
                self._user.remember(fact)
                with_it = self._ask(question)
                self._found.facts.append(
                    {"fact": fact, "question": question, "before": without, "after": with_it}
                )
        rows = [
            [f"{each['question']} ({each['fact']})", each["before"], each["after"]]
            for each in self._found.facts
        ]
        self._table(["question (and the fact)", "before the fact was said", "after"], rows)

    def _correct(self) -> None:
        self._title(f"2. {len(LESSONS)} replies are corrected: each as it should have been")
        rows = []
        with self._display as display:
            for number, (question, answer) in enumerate(LESSONS):
                display("Asking and correcting", number / len(LESSONS))
                reply = self._user.chat(question, temperature=0, max_tokens=24)
                edit = self._style.apply(answer)
                self._user.feedback(reply, edit=edit)
                rows.append([question, reply.text, edit])
        self._table(["question", "reply", "edited to"], rows[:2])
        self._print(f"... and {len(rows) - 2} more like these.")

    def _learn(self) -> None:
        self._title("3. It learns from them, and a gate judges the result")
        report = run_learn(self._common, self._user, self._display)
        self._found.report = report.as_json()
        self._print(str(report))
        if report.verdict is not Verdict.PROMOTED:
            self._print("It was not promoted, so the answers below are as before.")

    def _compare(self, before: Sequence[str], after: Sequence[str]) -> None:
        self._title("4. Questions that it never saw, before and after")
        for question, old, new in zip(QUESTIONS, before, after, strict=True):
            self._found.answers.append({"question": question, "before": old, "after": new})
            self._found.holds_before += self._style.holds(old)
            self._found.holds_after += self._style.holds(new)
        self._table(
            ["question", "before", "after"],
            [[each["question"], each["before"], each["after"]] for each in self._found.answers],
        )
        of = len(QUESTIONS)
        self._print(
            f"As the corrections were: {self._found.holds_before} of {of} before, {self._found.holds_after} of {of} after."
        )

    def _take_back(self, before: Sequence[str]) -> None:
        self._title("5. Whatever was learned can be taken back")
        if self._user.history():
            self._user.rollback("style")
        again = self._ask_all("Asking again")
        self._found.restored = sum(old == new for old, new in zip(before, again, strict=True))
        for move in self._user.history():
            self._found.history.append(
                {"cause": move.cause, "before": move.before, "after": move.after}
            )
            self._print(
                f"{move.cause:<9} {move.before or 'the base'} -> {move.after or 'the base'}"
            )
        self._print(
            f"{self._found.restored} of {len(QUESTIONS)} answers are again the old ones, byte for byte."
        )

    def _ask(self, question: str) -> str:
        return self._user.chat(question, temperature=0, max_tokens=_LONGEST).text

    def _ask_all(self, stage: str) -> list[str]:
        replies = []
        with self._display as display:
            for number, question in enumerate(QUESTIONS):
                display(stage, number / len(QUESTIONS))
                replies.append(self._ask(question))
        return replies

    def _title(self, text: str) -> None:
        self._print(f"\n{text}\n")

    def _print(self, text: str) -> None:
        if not self._common.json:
            click.echo(printable(text))

    def _table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        if self._common.json:
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=box.ROUNDED if sys.stdout.isatty() else box.ASCII2, show_lines=True, expand=True
        )
        for heading, ratio in zip(headings, (2, 3, 3), strict=True):
            table.add_column(Text(heading), ratio=ratio)
        for row in rows:
            table.add_row(*[Text(printable(cell)) for cell in row])
        Console(file=sys.stdout, highlight=False).print(table)
