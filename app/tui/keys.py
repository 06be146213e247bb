"""Every key and every command, once: the help on F1, docs/how-to/terminal-chat.md and the palette are made of these tables."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """What to press, and what that does."""

    press: str
    does: str


KEYS: dict[str, tuple[Key, ...]] = {
    "Everywhere": (
        Key("F1", "this list"),
        Key("Ctrl+P", "all commands, by name"),
        Key("F2", "the conversations"),
        Key("F3", "your model: stack, revisions, report, why, memory"),
        Key("F4", "tell a fact about you"),
        Key("Ctrl+N", "a new conversation"),
        Key("Ctrl+R", "ask for the last reply again"),
        Key("Ctrl+L", "learn from what is new; again: stop"),
        Key("Esc", "stop the reply; else go where you type"),
        Key("Tab", "from one part of the screen to the next"),
        Key("Ctrl+Q", "leave"),
    ),
    "Where you type": (
        Key("Enter", "send"),
        Key("Ctrl+J", "a new line"),
        Key("Ctrl+↑", "to the replies; ↑ too, with nothing typed"),
        Key("Ctrl+C", "copy what is selected; else stop the reply"),
    ),
    "On a reply": (
        Key("↑ ↓", "another reply"),
        Key("+ -", "it was good, it was not"),
        Key("e", "edit it in its place"),
        Key("c", "comment: a rule to follow from now on"),
        Key("r", "ask for it again"),
        Key("y", "copy it"),
        Key("w", "why it was so"),
        Key("o", "open a link in it, once you have seen where it leads"),
        Key("Enter", "back to where you type"),
    ),
    "While you edit a reply": (
        Key("Ctrl+S", "keep it: that is how it should have been"),
        Key("Esc", "leave it; what you typed stays there"),
    ),
    "In your model": (
        Key("← →", "another tab"),
        Key("↓", "into what the tab shows"),
    ),
    "In the stack": (
        Key("← →", "turn a layer's weight"),
        Key("1, 0", "as it was learned, without it"),
    ),
    "In the revisions": (
        Key("Enter", "make it live"),
        Key("b", "compare it blind with what is live"),
    ),
    "In why and memory": (Key("d", "forget one for good; asks first, and says what goes with it"),),
    "In a comparison": (
        Key("1, 2", "that answer is better"),
        Key("n, Esc", "neither"),
    ),
}

# What the palette lists: name, what it does, and the action.
COMMANDS = (
    ("Learn, or stop learning", "From everything that is new (^L)", "learn"),
    ("Good", "The selected reply was good (+)", "good"),
    ("Not good", "The selected reply was not good (-)", "bad"),
    ("Edit the reply", "Say how it should have been (e)", "edit_reply"),
    ("Comment", "A rule to follow from now on (c)", "comment"),
    ("Remember a fact", "About you, for all conversations (F4)", "remember"),
    ("Ask again", "Another reply to the last question (^R)", "retry"),
    ("Copy the reply", "To the clipboard of this terminal (y)", "copy_reply"),
    ("Stop", "The reply that is being written (Esc)", "stop"),
    ("New conversation", "The others stay (^N)", "new"),
    ("Conversations", "Go to another one (F2)", "conversations"),
    ("Links", "Open one of the selected reply's (o)", "links"),
    ("Why", "What the selected reply was made of (w)", "why"),
    ("Stack", "Layers and their weights (F3)", "open('stack')"),
    ("Revisions", "Every revision, and what it gained", "open('revisions')"),
    ("Memory", "Rules and facts, each to be forgotten", "open('memory')"),
    ("Report", "All that the last learn said", "report"),
    ("Roll back", "Undo the last change of the highest layer", "roll_back"),
    ("Compare blind", "The selected question, with and without the last change", "compare"),
    ("Light or dark", "The colours", "colours"),
    ("Keys", "All of them (F1)", "keys"),
    ("Quit", "Leave (^Q)", "quit"),
)
