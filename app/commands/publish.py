"""The command that publishes live stacks for vLLM servers."""

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
    help="The parent folder.  [default: where a server of this home looks]",
)
def publish(common: GlobalOptions, users: tuple[str, ...], to: str | None) -> None:
    """Publish live stacks for vLLM servers, and print their names.

    It publishes each USER (or --user), or all users. A vLLM server with our plugin
    (plugins/vllm_resolver) serves a name, personalpeft:DIGEST, as a model. The folder keeps the
    last published stack of each user, so publish again after a learn. Existing files are not
    written again.

    Forgetting deletes the published stacks of a user, here and in each named folder that can be
    reached.
    """
    names = users or ((common.user,) if common.user else None)
    display = Display(common)
    with session.open_runtime(common, "change", display) as runtime, display:
        published = runtime.publish(names, to=to, progress=display)
    rows = [(each.user, each.name or f"nothing: {each.reason}") for each in published.stacks]
    emit(common, published, format_table(("USER", "NAME"), rows))
    counts = f"{published.written} written, {published.taken} deleted"
    info(common, f"{published.folder}: {counts}.")
