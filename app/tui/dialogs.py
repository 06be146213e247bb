"""The dialogs over the screen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, OptionList, Static
from textual.widgets.option_list import Option

from personalpeft.errors import PersonalPeftError
from personalpeft_app.output import printable
from personalpeft_app.tui import views
from personalpeft_app.tui.keys import KEYS
from personalpeft_app.tui.markdown import ReplyMarkdown
from personalpeft_app.tui.notifier import show_error, show_note

if TYPE_CHECKING:
    from personalpeft.chat.compare import Comparison
    from personalpeft.erasure import ForgetUserReport
    from personalpeft.rebase import RebaseReport
    from personalpeft_app.tui.user_session import UserSession


class TextDialog(ModalScreen[None]):
    """A text with a title."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,f1,enter", "dismiss", "Close")]

    def __init__(self, title: str, text: Content) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="sheet") as sheet:
            sheet.border_title = self._title
            sheet.border_subtitle = "esc closes"
            yield Static(self._text, markup=False)


def keys_help() -> TextDialog:
    """Return the help on F1."""
    widest = max(len(key.press) for keys in KEYS.values() for key in keys)
    parts: list[tuple[str, str]] = []
    for where, keys in KEYS.items():
        parts.append((f"{where}\n", "bold"))
        for key in keys:
            parts += [(f"  {key.press:<{widest}}  ", "$primary"), (f"{key.does}\n", "")]
        parts.append(("\n", ""))
    return TextDialog("Keys", Content.assemble(*parts[:-1]))


class LinkPicker(ModalScreen[str | None]):
    """The whole addresses of links, one of which the user may open."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, addresses: Sequence[str]) -> None:
        super().__init__()
        self._addresses = addresses

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Open in a browser?"
            sheet.border_subtitle = "enter opens it, esc does not"
            addresses = (Option(Content(each)) for each in self._addresses)
            yield OptionList(*addresses, compact=True, id="links")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._addresses[event.option_index])


class BasePicker(ModalScreen[str | None]):
    """The bases of this machine, one of which the user may pick."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, names: Sequence[str], here: str) -> None:
        super().__init__()
        self._names, self._here = names, here

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Build your layers on which base?"
            sheet.border_subtitle = "enter builds and compares, esc does not"
            texts = (
                f"{each}  (open: after a change of its recipe or weights)"
                if each == self._here
                else each
                for each in self._names
            )
            yield OptionList(*(Option(Content(each)) for each in texts), compact=True, id="links")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._names[event.option_index])


class ConfirmDialog(ModalScreen[bool]):
    """Ask before an act that cannot be undone."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, text: Content, yes: str, no: str) -> None:
        super().__init__()
        self._title, self._text, self._yes, self._no = title, text, yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = self._title
            with VerticalScroll(classes="body"):
                yield Static(self._text, markup=False)
            with Horizontal(classes="choices"):
                yield Button(f"y  {self._yes}", action="screen.dismiss(True)", compact=True)
                yield Button(
                    f"n  {self._no}", id="no", action="screen.dismiss(False)", compact=True
                )


class RebaseDialog(ModalScreen[bool]):
    """The answers of both stacks side by side. Returns whether to switch to the new one."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Switch"),
        Binding("n,escape", "dismiss(False)", "Keep"),
    ]

    def __init__(self, report: RebaseReport) -> None:
        super().__init__()
        self._report = report

    def compose(self) -> ComposeResult:
        report = self._report
        before = "its bare base" if report.against_bare_base else "now"
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = f"Switch to {report.name}?"
            yield Static(views.rebase(report), markup=False)
            with Horizontal(id="answers"):
                for title, after in ((before, False), (f"on {report.name}", True)):
                    with VerticalScroll(classes="answer") as box:
                        box.border_title = title
                        yield Static(views.rebase_answers(report, after=after), markup=False)
            with Horizontal(classes="choices"):
                yield Button("y  switch", action="screen.dismiss(True)", compact=True)
                yield Button(
                    "n  keep what is live", id="no", action="screen.dismiss(False)", compact=True
                )


class ForgetUserDialog(ModalScreen[bool]):
    """Ask for the user's id before everything of them is erased."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", "No")]

    def __init__(self, preview: ForgetUserReport) -> None:
        super().__init__()
        self._preview = preview

    def compose(self) -> ComposeResult:
        user = self._preview.user
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = f"Forget {user} for good?"
            sheet.border_subtitle = "esc keeps everything"
            yield Static(views.forget_user_preview(self._preview), markup=False)
            yield Input(placeholder=f"Type {user}, then Enter.")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.value.strip() == self._preview.user:
            self.dismiss(True)
        else:
            show_note(self, f"That is not {self._preview.user}; nothing is erased.")


class BlindCompareDialog(ModalScreen[bool]):
    """Two answers in random order. It names them after a choice. Returns whether one was made."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "choose(1)", "The first"),
        Binding("2", "choose(2)", "The second"),
        Binding("n,escape", "leave", "Neither"),
        Binding("enter", "close", "Close", show=False),
    ]

    # Neither answer may look chosen.
    AUTO_FOCUS = ""

    def __init__(self, comparison: Comparison, session: UserSession) -> None:
        super().__init__()
        self._comparison = comparison
        self._session = session
        self._is_choosing = False
        self._is_chosen = False

    def compose(self) -> ComposeResult:
        prompt = printable(self._comparison.prompt)
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Which is better?"
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

    def action_choose(self, number: int) -> None:
        if not self._is_choosing:
            self._is_choosing = True
            self._choose(number)

    @work
    async def _choose(self, number: int) -> None:
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
