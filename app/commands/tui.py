"""The command ``tui``: the chat that fills the terminal."""

from __future__ import annotations

import os
import sys

import click

from personalpeft_app import session
from personalpeft_app.error_output import wrap_bug
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import printable


@command("tui", examples=("personalpeft tui", "personalpeft tui --user ada"))
def tui(common: GlobalOptions) -> None:
    """Chat in the whole terminal.

    Shows conversations, feedback, edits in place, revisions and provenance. Works with keyboard and
    mouse; F1 lists the keys.

    The model loads in the background; questions wait for it.
    """
    from personalpeft_app.tui.app import Tui
    from personalpeft_app.tui.user_session import TaskHandle, UserSession

    if (
        not all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
        or os.environ.get("TERM") == "dumb"
    ):
        raise click.UsageError(
            "The terminal chat needs a terminal that can be drawn on. Elsewhere: personalpeft chat"
        )
    loading = TaskHandle()

    with session.open_runtime(common, "make", loading.progress) as runtime:
        user = runtime.user(common.user_id())
        app = Tui(UserSession(runtime, user, lambda error: wrap_bug(error, common)), loading)
        app.run()
    for text in app.unsent:
        click.echo(f"Not sent: {printable(text)}", err=True)
    if app.failure is not None:
        raise app.failure
