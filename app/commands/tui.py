"""The chat that fills the terminal."""

from __future__ import annotations

import os
import sys

import click

from personalpeft.errors import PersonalPeftError
from personalpeft_app import session
from personalpeft_app.error_output import wrap_bug
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import printable


@command("tui", examples=("personalpeft tui", "personalpeft tui --user ada"))
def tui(common: GlobalOptions) -> None:
    """Talk, with the whole terminal.

    Conversations, thumbs, edits in place, what was learned and why, all by keyboard or mouse. F1 lists the keys.

    The model is loaded behind the prompt; what you ask meanwhile waits for it.
    """
    from personalpeft_app.tui.app import Tui
    from personalpeft_app.tui.user_session import TaskHandle, UserSession

    if (
        not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
        or os.environ.get("TERM") == "dumb"
    ):
        raise click.UsageError(
            "This needs a terminal that can be drawn on. Elsewhere: personalpeft chat"
        )
    loading = TaskHandle()

    def bug(error: Exception) -> PersonalPeftError:
        return wrap_bug(error, common)

    with session.open_runtime(common, "make", loading.progress) as runtime:
        app = Tui(UserSession(runtime, runtime.user(common.user_id())), loading, bug)
        app.run()
    for text in app.unsent:
        click.echo(f"Not sent: {printable(text)}", err=True)
    if app.broken is not None:
        raise app.broken
