"""The dialogs over the screen."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import dedent
from typing import ClassVar, TypeVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from personalpeft.chat.compare import Comparison
from personalpeft.erasure import ForgetReport, ForgetUserReport
from personalpeft.errors import PersonalPeftError
from personalpeft.rebase import RebaseReport
from personalpeft_app.output import printable
from personalpeft_app.tui import views
from personalpeft_app.tui.keys import KEYS, bindings
from personalpeft_app.tui.markdown import ReplyMarkdown
from personalpeft_app.tui.notifier import show_error, show_note
from personalpeft_app.tui.user_session import UserSession

T = TypeVar("T")


class Dialog(ModalScreen[T]):
    """A sheet over the screen, with a title above and a hint below."""

    SHEET: ClassVar[type[Vertical | VerticalScroll]] = Vertical

    def __init__(self, title: str, hint: str = "") -> None:
        super().__init__()
        self._title, self._hint = title, hint

    def compose(self) -> ComposeResult:
        with self.SHEET(classes="sheet") as sheet:
            sheet.border_title, sheet.border_subtitle = self._title, self._hint
            yield from self.body()

    def body(self) -> ComposeResult:
        """Yield what is on the sheet."""
        raise NotImplementedError


class TextDialog(Dialog[None]):
    """A text with a title."""

    SHEET = VerticalScroll
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,f1,enter", "dismiss", "Close")]

    def __init__(self, title: str, text: Content) -> None:
        super().__init__(title, "esc closes")
        self._text = text

    def body(self) -> ComposeResult:
        yield Static(self._text, markup=False)


def keys_help() -> TextDialog:
    widest = max(len(key.press) for keys in KEYS.values() for key in keys)
    parts: list[tuple[str, str]] = []
    for where, keys in KEYS.items():
        parts.append((f"{where}\n", "bold"))
        for key in keys:
            parts += [(f"  {key.press:<{widest}}  ", "$primary"), (f"{key.does}\n", "")]
        parts.append(("\n", ""))
    return TextDialog("Keys", Content.assemble(*parts[:-1]))


class Picker(Dialog[str | None]):
    """A list, of which the user may pick one value. ``options`` has the text of each value."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, title: str, hint: str, options: Mapping[str, str]) -> None:
        super().__init__(title, hint)
        self._options = options

    def body(self) -> ComposeResult:
        texts = (Option(Content(each)) for each in self._options.values())
        yield OptionList(*texts, compact=True, id="options")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(list(self._options)[event.option_index])


class ConfirmDialog(Dialog[bool]):
    """Ask before an act, below what the user should know of it."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, *facts: Widget, yes: str, no: str) -> None:
        super().__init__(title)
        self._facts, self._yes, self._no = facts, yes, no

    def body(self) -> ComposeResult:
        yield from self._facts
        with Horizontal(classes="choices"):
            yield Button(f"y  {self._yes}", action="screen.dismiss(True)", compact=True)
            yield Button(f"n  {self._no}", id="no", action="screen.dismiss(False)", compact=True)


def forget_dialog(text: Content, report: ForgetReport) -> ConfirmDialog:
    """Ask whether to forget an item, below its text and what would be erased."""
    _, _, erased = str(report).partition("\n")
    preview = Static(Content.assemble(text, "\n\n", printable(dedent(erased))), markup=False)
    facts = VerticalScroll(preview, classes="body")
    return ConfirmDialog("Forget this for good?", facts, yes="forget it", no="keep it")


def rebase_dialog(report: RebaseReport) -> ConfirmDialog:
    """Ask whether to switch to the new stack, below the answers of both side by side."""
    boxes = []
    before = "its bare base" if report.against_bare_base else "now"
    for title, after in ((before, False), (f"on {report.name}", True)):
        answers = Static(views.rebase_answers(report, after=after), markup=False)
        boxes.append(VerticalScroll(answers, classes="answer"))
        boxes[-1].border_title = title
    facts = Static(views.rebase(report), markup=False), Horizontal(*boxes, id="answers")
    return ConfirmDialog(f"Switch to {report.name}?", *facts, yes="switch", no="keep what is live")


class ForgetUserDialog(Dialog[bool]):
    """Ask for the user's id before everything of them is erased."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", "No")]

    def __init__(self, preview: ForgetUserReport) -> None:
        super().__init__(f"Forget {preview.user} for good?", "esc keeps everything")
        self._preview = preview

    def body(self) -> ComposeResult:
        more = "What was typed here is lost too. Backups and exported files are not changed."
        yield Static(printable(f"{self._preview}\n{more}\n"), markup=False)
        yield Input(placeholder=f"Type {self._preview.user}, then Enter.")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip() == self._preview.user:
            self.dismiss(True)
        else:
            show_note(self, f"That is not {self._preview.user}; nothing is erased.")


class BlindCompareDialog(Dialog[bool]):
    """Two answers in random order. It names them after a choice. Returns whether one was made."""

    BINDINGS: ClassVar[list[BindingType]] = bindings(
        "In a comparison", Binding("enter", "close", "Close", show=False)
    )

    # Neither answer may look chosen.
    AUTO_FOCUS = ""

    def __init__(self, comparison: Comparison, session: UserSession) -> None:
        super().__init__("Which is better?")
        self._comparison = comparison
        self._session = session
        self._is_choosing = False
        self._is_chosen = False

    def body(self) -> ComposeResult:
        prompt = printable(self._comparison.prompt)
        yield Static(Content.assemble(("› ", "bold $primary"), (prompt, "bold")))
        with Horizontal(id="answers"):
            for number, answer in enumerate(self._comparison.answers, 1):
                with VerticalScroll(classes="answer", id=f"answer-{number}") as box:
                    box.border_title = str(number)
                    yield ReplyMarkdown(answer.text)
        with Horizontal(classes="choices"):
            yield Button("1 is better", action="screen.choose(1)", compact=True)
            yield Button("2 is better", action="screen.choose(2)", compact=True)
            yield Button("n  neither", action="screen.leave", compact=True)
        yield Static(id="choice", markup=False)

    def on_mount(self) -> None:
        self.query_one("#choice").display = False

    @work
    async def action_choose(self, number: int) -> None:
        if self._is_choosing:
            return
        self._is_choosing = True
        try:
            label = await self._session.call(self._comparison.choose, number)
        except PersonalPeftError as error:
            self._is_choosing = False
            show_error(self, error)
            return
        self._is_chosen = True
        for at, answer in enumerate(self._comparison.answers, 1):
            box = self.query_one(f"#answer-{at}")
            box.border_title = f"{at}: {answer.revision}"
            box.set_class(answer.revision == label.chosen, "-chosen")
        self.query_one(".choices").display = False
        choice = self.query_one("#choice", Static)
        choice.update(f"You chose {label.chosen} over {label.other}, as recorded. Esc closes.")
        choice.display = True

    def action_leave(self) -> None:
        self.dismiss(self._is_chosen)

    def action_close(self) -> None:
        if self._is_chosen:
            self.dismiss(True)
