"""The command that asks one question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from personalpeft_app import session
from personalpeft_app.error_output import STOPPED
from personalpeft_app.interrupts import interruptible
from personalpeft_app.options import GlobalOptions, command, flag, option
from personalpeft_app.output import emit, info, write
from personalpeft_app.text_input import STDIN, has_unread_stdin, read_argument

if TYPE_CHECKING:
    from personalpeft import Reply, User
    from personalpeft.chat.validation import Prompt


def print_reply(common: GlobalOptions, user: User, prompt: Prompt, **options: Any) -> Reply:
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
@flag("--no-memory", help="Leave your rules, facts and examples out.")
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
    no_memory: bool,
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
            memory=not (no_memory or bare),
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
