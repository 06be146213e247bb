"""The commands that ask: one question, and chats in plain lines or in the whole terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click

import personalpeft
from personalpeft.errors import InvalidInput, NotFound, PersonalPeftError, suggest_nearest
from personalpeft_app import session
from personalpeft_app.commands.learn import run_learn
from personalpeft_app.error_output import STOPPED, report_error
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, flag, option, switch_off
from personalpeft_app.output import emit, info, printable, write
from personalpeft_app.text_input import STDIN, has_unread_stdin, read_argument


def print_reply(
    common: GlobalOptions, user: personalpeft.User, prompt: str, **options: Any
) -> personalpeft.Reply:
    """Print a reply as it is generated, unless --json. Ctrl-C keeps the text so far."""
    with interruptible() as cancelled:
        with common.display:
            stream = user.stream(prompt, cancelled=cancelled, **options)
            if cancelled():
                # Ctrl-C while the model was loading: there is no text to keep.
                raise KeyboardInterrupt
        try:
            for piece in stream:
                if not common.json:
                    write(piece)
        finally:
            stream.close()
    if not common.json:
        write("\n" if not stream.reply.text.endswith("\n") else "")
    return stream.reply


@command(
    "ask",
    examples=(
        'ask "How do I boil an egg?"',
        "ask - --max-tokens 100 < question.txt",
        'ask --bare --json "How do I boil an egg?"',
    ),
    surplus="Put the prompt in quotation marks.",
)
@click.argument("prompt", required=False)
@click.option(
    "--temperature",
    type=click.FloatRange(0, 10),
    help="0 is greedy.  [default: the base's]",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample from the likeliest tokens only.  [default: the base's]",
)
@click.option(
    "--max-tokens", type=click.IntRange(1), help="The longest reply.  [default: the base's]"
)
@option("--seed", type=click.IntRange(0), default=0, help="The same seed gives the same reply.")
@click.option(
    "--stop",
    multiple=True,
    metavar="TEXT",
    help="End the reply before this text; can be repeated.",
)
@switch_off("--no-memory", "memory", help="Leave your rules, facts and examples out.")
@click.option(
    "--layer",
    "layers",
    multiple=True,
    help="Attach only this layer; can be repeated.  [default: all]",
)
@flag("--bare", help="Ask the bare base, without layers and memory.")
def ask(
    common: GlobalOptions,
    prompt: str | None,
    memory: bool,
    layers: tuple[str, ...],
    bare: bool,
    **sampling: Any,
) -> None:
    """Ask one question, and print the reply as it is generated.

    It is stored as a turn, which feedback can name.

    PROMPT may be '-' or missing, to read it from stdin.
    """
    from personalpeft.chat.validation import check_prompt

    if bare and layers:
        raise click.UsageError("--bare attaches no layer, so --layer cannot be given with it.")
    text = read_argument(prompt, what="prompt")
    check_prompt(text)
    with session.open_user(common, "make") as user:
        # A loop that reads its prompts from stdin keeps it, so it is not appended.
        if prompt not in (None, STDIN) and has_unread_stdin():
            info(common, "The text on stdin is not read. To ask about it, put it into the prompt.")
        reply = print_reply(
            common,
            user,
            text,
            memory=memory and not bare,
            layers=[] if bare else list(layers) or None,
            **sampling,
        )
    emit(common, reply, "")
    if reply.finish_reason == "cancelled":
        info(common, f"Stopped; the text so far is stored as {reply.turn_id}.")
        raise click.exceptions.Exit(STOPPED)
    answered = ", ".join(entry.revision for entry in reply.stack.entries) or "the bare base"
    cut = " · cut at --max-tokens" if reply.finish_reason == "length" else ""
    info(common, f"{reply.turn_id} · {answered}{cut}")


_PROMPT = "> "
_HELP = """\
/up, /down         the last reply was good, was not good
/edit [TEXT]       the reply as it should have been; without TEXT, edit it on the next line
/prefer TEXT       another text that is better
/comment TEXT      a rule to follow from now on
/remember TEXT     a fact about you
/learn             learn from the feedback so far
/why               why the last reply was as it was
/new               begin a new conversation
/help              this list
/quit              leave (so does Ctrl-D); Ctrl-C only stops a reply"""


@dataclass
class PlainChat:
    """A conversation by its id, and the reply that feedback is about.

    A line that begins with a slash is a command.
    """

    common: GlobalOptions
    user: personalpeft.User
    conversation_id: str | None = None
    last: personalpeft.Reply | None = None

    def ask(self, text: str) -> None:
        """Continue the conversation and print the reply."""
        reply = print_reply(self.common, self.user, text, conversation_id=self.conversation_id)
        if self.common.json:
            emit(self.common, reply, "")
        self.last = reply
        self.conversation_id = reply.conversation_id
        if reply.dropped_messages:
            info(
                self.common,
                f"The conversation exceeds the context of the base: its oldest "
                f"{reply.dropped_messages} messages were left out.",
            )
        if reply.finish_reason == "cancelled":
            info(self.common, "Stopped.")

    def run(self, line: str) -> None:
        """Run a command. Raises ``NotFound`` for an unknown one, ``EOFError`` to leave."""
        name, _, rest = line[1:].partition(" ")
        actions: dict[str, Callable[[str], None]] = {
            "up": lambda rest: self._feedback(rating=1),
            "down": lambda rest: self._feedback(rating=-1),
            "edit": lambda rest: self._feedback(edit=rest or self._edited()),
            "prefer": lambda rest: self._feedback(prefer=_text(rest, "/prefer")),
            "comment": lambda rest: self._feedback(comment=_text(rest, "/comment")),
            "remember": self._remember,
            "learn": self._learn,
            "why": self._why,
            "new": self._new,
            "help": lambda rest: info(self.common, _HELP),
            "quit": _quit,
        }
        if name not in actions:
            raise NotFound(
                f"There is no command /{name}.",
                hint=f"{suggest_nearest(name, actions, what='command')} See /help.",
            )
        actions[name](rest.strip())

    def _reply(self) -> personalpeft.Reply:
        if self.last is None:
            raise NotFound("There is no reply yet.", hint="Ask something first.")
        return self.last

    def _feedback(self, **feedback: Any) -> None:
        signal = self.user.feedback(self._reply(), **feedback)
        info(self.common, f"Recorded as {signal}.")

    def _edited(self) -> str:
        return _read("edit> ", prefill=" ".join(self._reply().text.split("\n")))

    def _remember(self, rest: str) -> None:
        info(self.common, f"Recorded as {self.user.remember(_text(rest, '/remember'))}.")

    def _learn(self, rest: str) -> None:
        report = run_learn(self.common, self.user)
        emit(self.common, report, str(report))

    def _why(self, rest: str) -> None:
        provenance = self.user.why(self._reply())
        emit(self.common, provenance, str(provenance))

    def _new(self, rest: str) -> None:
        self.conversation_id, self.last = None, None
        info(self.common, "A new conversation.")


@command(
    "chat",
    examples=("chat", "chat --user ada"),
    surplus="To ask one question: personalpeft ask {}",
)
@switch_off("--no-train", "train", help="Feedback in this chat must not be trained on.")
def chat(common: GlobalOptions, train: bool) -> None:
    """Chat in plain lines, in one conversation.

    /help lists the commands that a line can give.

    Ctrl-C stops a reply and not the chat; Ctrl-D or /quit leaves.
    """
    with session.open_user(common, "make", train=train) as user:
        if _is_terminal():
            info(common, f"You are {user.id}. /help lists what else you can do; Ctrl-D leaves.")
        plain_chat = PlainChat(common, user)
        while True:
            try:
                line = _read(_PROMPT).strip()
                if line.startswith("/"):
                    plain_chat.run(line)
                elif line:
                    plain_chat.ask(line)
            except EOFError:
                break
            except KeyboardInterrupt:
                info(common, "\nCtrl-D or /quit leaves.")
            except PersonalPeftError as error:
                report_error(error, as_data=common.json)


def _read(prompt: str, prefill: str = "") -> str:
    """Return the next line. Raises ``EOFError`` at the end of the input."""
    if not _is_terminal():
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")
    try:
        import readline
    except ImportError:
        return input(prompt)
    readline.set_startup_hook(lambda: readline.insert_text(prefill))
    try:
        return input(prompt)
    except EOFError:
        click.echo()
        raise
    finally:
        readline.set_startup_hook(None)


def _is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _text(rest: str, name: str) -> str:
    if not rest:
        raise InvalidInput(
            f"{name} needs a text.", hint=f"Say: {name} and then the text, on one line."
        )
    return rest


def _quit(rest: str) -> None:
    raise EOFError


def can_draw() -> bool:
    """Return whether a program can draw on the terminal and read its keys."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    return all(each.isatty() for each in streams) and os.environ.get("TERM") != "dumb"


@command("tui", examples=("tui", "tui --user ada"))
@switch_off("--no-train", "train", help="Feedback in this chat must not be trained on.")
def tui(common: GlobalOptions, train: bool) -> None:
    """Chat in the whole terminal.

    Shows conversations, feedback, edits in place, revisions and provenance. Works with keyboard and
    mouse; F1 lists the keys.

    The model loads in the background; questions wait for it.
    """
    from personalpeft_app.tui.app import Tui
    from personalpeft_app.tui.user_session import TaskHandle, UserSession

    if not can_draw():
        raise click.UsageError(
            "The terminal chat needs a terminal that can be drawn on. Elsewhere: personalpeft chat"
        )
    while True:
        loading = TaskHandle("Loading the model")
        with session.open_runtime(common, "make", loading.progress, train=train) as runtime:
            user = runtime.user(common.user_id())
            app = Tui(UserSession(runtime, user), loading)
            app.run()
        for text in app.unsent:
            click.echo(f"Not sent: {printable(text)}", err=True)
        if app.base is None:
            break
        common = replace(common, base=app.base)
        info(common, f"Your layers are on {app.base} now. From now on: --base {app.base}")
    if app.erased is not None:
        click.echo(str(app.erased))
    if app.failure is not None:
        raise app.failure
