"""Putting what is live where servers elsewhere find it."""

from __future__ import annotations

import click

from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, format_table, info
from personalpeft_app.progress import Display


@command(
    "publish",
    examples=(
        "personalpeft publish",
        "personalpeft publish ada bo",
        "personalpeft publish --to /srv/stacks --json",
    ),
)
@click.argument("users", nargs=-1, metavar="[USER]...")
@click.option(
    "--to",
    metavar="FOLDER",
    help="Below this folder.  [default: where a server of this home finds it]",
)
def publish(common: GlobalOptions, users: tuple[str, ...], to: str | None) -> None:
    """Put what is live where vLLM servers elsewhere find it by name.

    Of each USER (or --user), or of everybody. Prints the names, personalpeft:DIGEST, which such a server with our plugin takes for a model
    (plugins/vllm_resolver). The folder keeps one stack for each user who was ever published there: what was live when they were
    published last. So do it again after a learn; what is there already is not written again.

    A forgetting takes what is published of the user away, here and in each folder that was named and can be reached.
    """
    asked = users or ((common.user,) if common.user else None)
    display = Display(common)
    with session.open_runtime(common, "change", display) as runtime, display:
        done = runtime.publish(asked, to=to, progress=display)
    rows = [(each.user, each.name or f"nothing: {each.reason}") for each in done.stacks]
    emit(common, done, format_table(("USER", "NAME"), rows))
    info(common, f"{done.folder}: {done.written} written, {done.taken} taken away.")
