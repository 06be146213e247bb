"""What comes over the conversation: a text to read, and two answers to choose between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, OptionList, Static
from textual.widgets.option_list import Option

from personalpeft_app.output import printable
from personalpeft_app.tui.keys import KEYS
from personalpeft_app.tui.markdown import ReplyMarkdown

if TYPE_CHECKING:
    from personalpeft.chat.compare import Comparison, LabeledComparison


class TextDialog(ModalScreen[None]):
    """A text with a title; any of the usual keys closes it."""

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
    """The help on F1."""
    widest = max(len(key.press) for keys in KEYS.values() for key in keys)
    parts: list[tuple[str, str]] = []
    for where, keys in KEYS.items():
        parts.append((f"{where}\n", "bold"))
        for key in keys:
            parts += [(f"  {key.press:<{widest}}  ", "$primary"), (f"{key.does}\n", "")]
        parts.append(("\n", ""))
    return TextDialog("Keys", Content.assemble(*parts[:-1]))


class LinkPicker(ModalScreen[str | None]):
    """The addresses that a reply links to, whole, one of which a person may want opened; nothing is opened before."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "dismiss", "Close")]

    def __init__(self, addresses: Sequence[str], at: int = 0) -> None:
        super().__init__()
        self._addresses = addresses
        self._at = at

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Open in a browser?"
            sheet.border_subtitle = "enter opens it, esc does not"
            addresses = OptionList(
                *(Option(Content(each)) for each in self._addresses), compact=True, id="links"
            )
            addresses.highlighted = self._at
            yield addresses

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._addresses[event.option_index])


class ConfirmDialog(ModalScreen[bool]):
    """Something that cannot be undone, with all that it would do; true where a person wants it all the same."""

    AUTO_FOCUS = "#no"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "Yes"),
        Binding("n,escape", "dismiss(False)", "No"),
    ]

    def __init__(self, title: str, text: Content, yes: str, no: str) -> None:
        super().__init__()
        self._said = title, text, yes, no

    def compose(self) -> ComposeResult:
        title, text, yes, no = self._said
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = title
            with VerticalScroll(classes="body"):
                yield Static(text, markup=False)
            with Horizontal(classes="choices"):
                yield Button(f"y  {yes}", id="yes", compact=True)
                yield Button(f"n  {no}", id="no", compact=True)

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")


class BlindCompareDialog(ModalScreen[None]):
    """Two answers, in an order drawn by chance. Whose they are is said once one of them was chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("1", "choose(1)", "The first"),
        Binding("2", "choose(2)", "The second"),
        Binding("n,escape", "leave", "Neither"),
        Binding("enter", "close_when_told", "Close", show=False),
    ]

    # Neither answer may look as if it were chosen already.
    AUTO_FOCUS = ""

    def __init__(self, comparison: Comparison, choose: Callable[[int], None]) -> None:
        super().__init__()
        self._comparison = comparison
        self._choose = choose
        self._asked = False
        self._told = False

    def compose(self) -> ComposeResult:
        with Vertical(classes="sheet") as sheet:
            sheet.border_title = "Which is better?"
            yield Static(
                Content.assemble(
                    ("› ", "bold $primary"), (printable(self._comparison.prompt), "bold")
                )
            )
            with Horizontal(id="answers"):
                for number, answer in enumerate(self._comparison.answers, 1):
                    with VerticalScroll(classes="answer", id=f"answer-{number}") as box:
                        box.border_title = str(number)
                        yield ReplyMarkdown(answer.text)
            with Horizontal(id="choices"):
                yield Button("1 is better", id="choose-1", compact=True)
                yield Button("2 is better", id="choose-2", compact=True)
                yield Button("n  neither", id="leave", compact=True)
            yield Static(id="told", markup=False)

    def on_mount(self) -> None:
        self.query_one("#told").display = False

    def on_button_pressed(self, event: Button.Pressed) -> None:
        {"choose-1": lambda: self.action_choose(1), "choose-2": lambda: self.action_choose(2)}.get(
            event.button.id or "", self.action_leave
        )()

    def action_choose(self, number: int) -> None:
        if not self._asked:
            self._asked = True
            self._choose(number)

    def action_leave(self) -> None:
        self.dismiss(None)

    def action_close_when_told(self) -> None:
        if self._told:
            self.dismiss(None)

    def tell(self, choice: LabeledComparison) -> None:
        """The choice is kept; now it may be said whose the answers are."""
        self._told = True
        if not self.is_attached:
            return
        for number, answer in enumerate(self._comparison.answers, 1):
            box = self.query_one(f"#answer-{number}")
            box.border_title = f"{number}: {answer.revision}"
            box.set_class(answer.revision == choice.chosen, "-chosen")
        self.query_one("#choices").display = False
        told = self.query_one("#told", Static)
        told.update(
            f"You chose {choice.chosen} rather than {choice.other}. That is kept. Esc closes."
        )
        told.display = True

    def try_again(self) -> None:
        """The choice could not be kept."""
        self._asked = False
