"""Every key and command of the terminal chat.

The widgets take their bindings from these tables. The help on F1, the palette and
docs/how-to/terminal-chat.md show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from textual.binding import Binding, BindingType


class Key(NamedTuple):
    """A key, or several, what it does, and the actions by key where they are bindings."""

    press: str
    does: str
    actions: Mapping[str, str] = {}


KEYS: dict[str, tuple[Key, ...]] = {
    "Everywhere": (
        Key("F1", "show this list", {"f1": "keys"}),
        Key("Ctrl+P", "find a command by name: training off, forget this user"),
        Key("F2", "show the conversations", {"f2": "conversations"}),
        Key("F3", "show your model: stack, revisions, report, why, memory", {"f3": "model"}),
        Key("F4", "add a fact", {"f4": "remember"}),
        Key("Ctrl+N", "start a conversation", {"ctrl+n": "new"}),
        Key("Ctrl+R", "regenerate the last reply", {"ctrl+r": "retry"}),
        Key("Ctrl+L", "learn, or cancel the learn", {"ctrl+l": "learn"}),
        Key("Esc", "stop the reply; otherwise go to the prompt", {"escape": "stop"}),
        Key("Tab", "go to the next part of the screen"),
        Key("Ctrl+Q", "quit"),
    ),
    "In the prompt": (
        Key("Enter", "send"),
        Key("Ctrl+J", "insert a line break"),
        Key("Ctrl+↑", "go to the replies; ↑ too, if the prompt is empty", {"ctrl+up": "app.read"}),
        Key("Ctrl+C", "copy the selection; otherwise stop the reply"),
    ),
    "On a reply": (
        Key("↑ ↓", "go to another reply", {"up,k": "app.select(-1)", "down,j": "app.select(1)"}),
        Key("+ -", "rate it good, not good", {"plus": "app.good", "minus": "app.bad"}),
        Key("e", "edit it in its place", {"e": "app.edit_reply"}),
        Key("c", "comment: add a rule for all replies", {"c": "app.comment"}),
        Key("r", "regenerate it", {"r": "app.retry"}),
        Key("y", "copy it", {"y": "app.copy_reply"}),
        Key("w", "show why", {"w": "app.why"}),
        Key("o", "show the address of a link, then open it", {"o": "app.links"}),
        Key("Enter", "go back to the prompt", {"enter": "app.write"}),
    ),
    "While editing a reply": (
        Key("Ctrl+S", "save the edit", {"ctrl+s": "app.save_edit"}),
        Key("Esc", "leave; the draft stays", {"escape": "app.close_editor"}),
    ),
    "In your model": (
        Key("← →", "go to another tab"),
        Key("↓", "go into the tab", {"down": "app.focus_next", "up": "app.focus_previous"}),
    ),
    "In the stack": (
        Key(
            "← →",
            "change the weight of a layer",
            {"left,minus": "step(-1)", "right,plus": "step(1)"},
        ),
        Key("1, 0", "set the weight to 1, to 0", {"1": "set(1.0)", "0": "set(0.0)"}),
    ),
    "In the revisions": (
        Key("Enter", "make it live"),
        Key("b", "compare it blind with the live one", {"b": "act('compare')"}),
    ),
    "In why and memory": (
        Key(
            "d",
            "forget an entry; asks first and lists the consequences",
            {"d,delete": "act('forget')"},
        ),
    ),
    "In a comparison": (
        Key("1, 2", "choose that answer", {"1": "choose(1)", "2": "choose(2)"}),
        Key("n, Esc", "choose neither", {"n,escape": "leave"}),
    ),
}


def bindings(where: str, *more: BindingType) -> list[BindingType]:
    """Return the bindings of a group of keys, and more."""
    found = [
        Binding(keys, action, key.does)
        for key in KEYS[where]
        for keys, action in key.actions.items()
    ]
    return [*found, *more]


# The palette: name, description and action of each command.
COMMANDS = (
    ("Learn, or cancel the learn", "Train on all new feedback (^L)", "learn"),
    ("Good", "Rate the selected reply good (+)", "good"),
    ("Not good", "Rate the selected reply not good (-)", "bad"),
    ("Edit the reply", "Write the reply that you wanted (e)", "edit_reply"),
    ("Comment", "Add a rule for all replies (c)", "comment"),
    ("Remember a fact", "Add a fact for all conversations (F4)", "remember"),
    ("Regenerate", "Answer the last prompt again (^R)", "retry"),
    ("Copy the reply", "To the clipboard of this terminal (y)", "copy_reply"),
    ("Stop", "End the streaming reply (Esc)", "stop"),
    ("New conversation", "The others stay (^N)", "new"),
    ("Conversations", "Go to another conversation (F2)", "conversations"),
    ("Links", "Open a link of the selected reply (o)", "links"),
    ("Why", "Show what the selected reply was based on (w)", "why"),
    ("Stack", "Layers and their weights (F3)", "open('stack')"),
    ("Revisions", "Every revision and its gain", "open('revisions')"),
    ("Memory", "Rules and facts", "open('memory')"),
    ("Report", "The report of the last learn", "report"),
    ("Roll back", "Undo the last change of the topmost layer", "roll_back"),
    ("Compare blind", "Answer the selected prompt with and without the last change", "compare"),
    ("Training on or off", "Whether layers may be trained on new feedback", "training"),
    ("Another base", "Build your layers anew on it, compare, and switch or keep", "rebase"),
    ("Forget this user", "Erase all turns, feedback and layers; asks for the id", "forget_user"),
    ("Light or dark", "Switch the colours", "colours"),
    ("Keys", "Show all keys (F1)", "keys"),
    ("Quit", "Leave the chat (^Q)", "quit"),
)
