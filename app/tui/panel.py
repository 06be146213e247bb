"""The side panel: the stack with weights to turn, the revisions with what each gained, the last report, why a reply
was so, and the memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widget import Widget
from textual.widgets import OptionList, Static, TabbedContent, TabPane
from textual.widgets.option_list import Option

from personalpeft_app.tui import views
from personalpeft_app.tui.said import Said
from personalpeft_app.tui.work import Standing

if TYPE_CHECKING:
    from personalpeft import Why
    from personalpeft.types import Layer, Revision

WIDTH = 36
_MOST = 2.0
_STEP = 0.1


class Weight(Widget, can_focus=True):
    """A layer and its weight, from 0 to 2, to turn with the arrow keys or the mouse."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left,minus", "turn(-1)", "Less"),
        Binding("right,plus", "turn(1)", "More"),
        Binding("0", "set(0.0)", "Without it"),
        Binding("1", "set(1.0)", "As it was learned"),
    ]

    class Turned(Message):
        """Somebody wants another weight."""

        def __init__(self, layer: str, weight: float) -> None:
            super().__init__()
            self.layer = layer
            self.weight = weight

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self._of = layer
        self.weight = layer.weight

    @property
    def of(self) -> str:
        """Whose weight it is."""
        return self._of.name

    def show(self, layer: Layer) -> None:
        """What is so now."""
        self._of, self.weight = layer, layer.weight
        self.refresh()

    def render(self) -> Content:
        width = self.size.width
        rail = width - 6
        at = round(max(0.0, min(1.0, self.weight / _MOST)) * (rail - 1))
        knob = "◆" if self.has_focus else "●"
        return Content.assemble(
            views.layer(self._of, width),
            "\n",
            ("━" * at, "$primary"),
            (knob, "bold $accent" if self.has_focus else "bold $primary"),
            ("─" * (rail - 1 - at), views.DIM),
            (f" {self.weight:5.2f}", "bold" if self.has_focus else ""),
        )

    def watch_has_focus(self, focus: bool) -> None:
        self.refresh()

    def action_turn(self, steps: int) -> None:
        self.action_set(round(self.weight + steps * _STEP, 2))

    def action_set(self, weight: float) -> None:
        weight = max(0.0, min(_MOST, weight))
        if weight != self.weight:
            self.weight = weight
            self.refresh()
            self.post_message(self.Turned(self.of, weight))

    def on_click(self, event: events.Click) -> None:
        rail = self.size.width - 6
        if event.y == 1 and event.x < rail:
            self.action_set(round(event.x / (rail - 1) * _MOST / _STEP) * _STEP)


class Revisions(OptionList):
    """Every revision, each layer's newest first, and what each gained on the answers that were held back."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("b", "compare", "Compare blind")]

    class Wanted(Message):
        """A revision is to be made live, or to be compared; None is the bare base."""

        def __init__(self, layer: str, revision: str | None, *, compare: bool) -> None:
            super().__init__()
            self.layer = layer
            self.revision = revision
            self.compare = compare

    def __init__(self) -> None:
        super().__init__(id="revisions", compact=True)
        self._rows: list[tuple[str, Revision | None]] = []

    def show(self, standing: Standing) -> None:
        """What is so now; the highlighted row stays where it was."""
        heads = {layer.name: layer.head for layer in standing.layers}
        largest = max((abs(views.gain(each) or 0.0) for each in standing.revisions), default=0.0)
        at = self.highlighted
        self._rows = views.revisions_in_order(standing.revisions, standing.layers)
        self.clear_options()
        for layer, each in self._rows:
            live = heads[layer] == (each.id if each else None)
            if each is None:
                text = Content.assemble(("◦ ", views.DIM), f"{layer} ", ("the bare base", ""), "  live" if live else "")
            else:
                text = views.revision(each, live=live, largest=largest, width=WIDTH)
            self.add_option(Option(text))
        if self._rows:
            self.highlighted = min(at or 0, len(self._rows) - 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        layer, each = self._rows[event.option_index]
        self.post_message(self.Wanted(layer, each.id if each else None, compare=False))

    def action_compare(self) -> None:
        if self.highlighted is not None:
            layer, each = self._rows[self.highlighted]
            self.post_message(self.Wanted(layer, each.id if each else None, compare=True))


class Panel(Vertical):
    """All of it, under tabs."""

    def compose(self) -> ComposeResult:
        with TabbedContent(id="tabs"):
            with TabPane("Stack", id="stack-tab"), VerticalScroll():
                yield Static(id="no-stack", markup=False)
                yield Vertical(id="weights")
                yield Static(_TURNING, id="turning")
            with TabPane("Built", id="revisions-tab"):
                yield Revisions()
                yield Static(_CHANGING, id="changing")
            with TabPane("Report", id="report-tab"), VerticalScroll():
                yield Static(id="report", markup=False)
            with TabPane("Why", id="why-tab"):
                yield Said("why")
                yield Static(_FORGETTING, classes="forgetting")
            with TabPane("Memory", id="memory-tab"):
                yield Said("memory")
                yield Static(_FORGETTING, classes="forgetting")

    async def show(self, standing: Standing) -> None:
        """What is so now."""
        known = {weight.of: weight for weight in self.query(Weight)}
        for name in known.keys() - {layer.name for layer in standing.layers}:
            await known[name].remove()
        for layer in standing.layers:
            if layer.name in known:
                known[layer.name].show(layer)
            else:
                await self.query_one("#weights").mount(Weight(layer))
        nothing = self.query_one("#no-stack", Static)
        nothing.update(standing.problem or "The bare base answers: nothing was learned yet.")
        nothing.display = bool(standing.problem) or not standing.layers
        self.query_one("#turning").display = bool(standing.layers)
        self.query_one(Revisions).show(standing)
        self.query_one("#changing").display = bool(standing.revisions)
        self.query_one("#report", Static).update(views.report(standing.report))
        self.query_one("#memory", Said).show(views.memory(standing.items))

    def explain(self, account: Why | None) -> None:
        """Why the selected reply was as it was."""
        self.query_one("#why", Said).show(views.why(account))

    def turn_to(self, tab: str) -> None:
        """Shows a tab: "stack", "revisions", "report", "why" or "memory"."""
        self.query_one(TabbedContent).active = f"{tab}-tab"

    @property
    def tab(self) -> str:
        """The tab that is shown."""
        return self.query_one(TabbedContent).active.removesuffix("-tab")


_TURNING = "[$secondary][b $primary]← →[/] turn a weight, [b $primary]1[/] as learned, [b $primary]0[/] without[/]"
_FORGETTING = "[$secondary][b $primary]d[/] forgets one; it asks first[/]"
_CHANGING = "[$secondary][b $primary]Enter[/] makes it live  [b $primary]b[/] compares blind[/]"
