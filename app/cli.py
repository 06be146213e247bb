"""The command ``personalpeft``: its commands in sections, and the exit codes of its errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import click

from personalpeft.errors import PluginError
from personalpeft.extras import extra_required
from personalpeft.plugins import COMMANDS, Plugins
from personalpeft.settings import resolve
from personalpeft_app.commands.chat import ask, chat, tui
from personalpeft_app.commands.daemon import daemon
from personalpeft_app.commands.feedback_cmds import FEEDBACK
from personalpeft_app.commands.forget import forget, forget_user, verify_certificate
from personalpeft_app.commands.import_export import EXCHANGE, publish
from personalpeft_app.commands.inspect_cmds import INSPECT
from personalpeft_app.commands.learn import learn, practice, rebase, rollback, scope, set_weight
from personalpeft_app.commands.maintenance import MAINTAIN, completion, demo, doctor, verify
from personalpeft_app.commands.models import models
from personalpeft_app.commands.serve import api_key, serve
from personalpeft_app.error_output import (
    BROKEN_PIPE,
    STOPPED,
    USAGE,
    discard_stdout,
    print_error,
    report_exception,
)
from personalpeft_app.options import PROGRAM, GlobalOptions, Group

PLUGIN_COMMANDS_TITLE = "Of installed plugins"


class Cli(Group):
    """The outermost group. It turns every error into a message and an exit code.

    The commands of plugins are known by name. A plugin is imported when its command is run, and not
    for the help.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args)
        _open_closed_streams()
        for stream in (sys.stdout, sys.stderr):
            # A terminal without a character shows it as an escape.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        elif arguments[:1] == ["version"]:
            arguments = ["--version"]
        common = GlobalOptions()
        extra = {**extra, "prog_name": PROGRAM, "standalone_mode": False, "obj": common}
        as_data = "--json" in arguments
        try:
            code = super().main(arguments, *rest, **extra)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            code = USAGE
        except click.ClickException as error:
            hint = ""
            if isinstance(error, click.UsageError):
                hint = f"Run: {error.ctx.command_path if error.ctx else PROGRAM} --help"
            message, code = error.format_message(), error.exit_code
            print_error(message, hint, kind="Usage", code=code, as_data=as_data)
        except click.Abort:
            code = print_error("Stopped.", "", kind="Cancelled", code=STOPPED, as_data=as_data)
        except Exception as error:  # noqa: BLE001 - the one place that must let nothing pass
            code = report_exception(error, as_data=common.json)
        sys.exit(code if isinstance(code, int) else 0)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        own = super().get_command(ctx, name)
        if own is not None or name not in _plugins().names(COMMANDS):
            return own
        loaded = _plugins().command(name)
        if not isinstance(loaded, click.Command):
            raise PluginError(
                f"The command {name} is a {type(loaded).__name__} and no click.Command.",
                hint="Report it to the plugin's authors.",
            )
        return loaded

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_commands(ctx, formatter)
        summaries = {
            entry.name: (entry.dist.metadata["Summary"] if entry.dist else None) or ""
            for entry in entry_points(group=COMMANDS)
        }
        names = [name for name in _plugins().names(COMMANDS) if name not in self.commands]
        if names:
            limit = formatter.width - 6 - max(map(len, names))
            with formatter.section(PLUGIN_COMMANDS_TITLE):
                formatter.write_dl([(name, summaries[name][:limit]) for name in names])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with extra_required():
                result = super().invoke(ctx)
            sys.stdout.flush()
        # Click itself would end with other codes, or write an empty line first.
        except BrokenPipeError as error:
            discard_stdout()
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        except KeyboardInterrupt as error:
            raise click.Abort from error
        return result


@click.group(
    PROGRAM,
    cls=Cli,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=(
        'ask "How do I boil an egg?"',
        'feedback --edit "Eight minutes in boiling water."',
        "learn",
        "rollback style",
    ),
    renamed={
        "lessons": "signals",
        "report": "activity",
        "token": "api-key",
        "weigh": "set-weight",
    },
)
@click.version_option(None, "--version", "-V", package_name=PROGRAM, message="%(prog)s %(version)s")
def cli() -> None:
    """A personal model: ask it, correct it, let it learn from that, and undo what you do not like.

    Data goes to stdout, notes and errors to stderr. Start with: personalpeft demo
    """


def _plugins() -> Plugins:
    return Plugins(resolve(None, os.environ).plugins)


def _checkout_commands() -> tuple[click.Command, ...]:
    """Return the benchmarks of a checkout's tests; none when installed."""
    tests = Path(__file__).resolve().parents[1] / "tests"
    if not (tests / "benchmarks" / "cli.py").is_file():
        return ()
    sys.path.append(str(tests))
    from benchmarks.cli import bench  # type: ignore[import-not-found]

    return (bench,)


cli.add_section("Chat", (ask, chat, tui, demo))
cli.add_section("Feedback", FEEDBACK)
cli.add_section(
    "Learn", (learn, daemon, practice, rollback, rebase, set_weight, scope, forget, forget_user)
)
cli.add_section("Inspect", (*INSPECT, models))
cli.add_section("Import and export", EXCHANGE)
cli.add_section("Serve", (serve, api_key, publish))
cli.add_section(
    "Maintain",
    (doctor, verify, verify_certificate, *MAINTAIN, *_checkout_commands(), completion),
)


def _open_closed_streams() -> None:
    """Open the standard streams that the parent closed, as cron and supervisors may.

    Otherwise the next file gets the number of one. What a library writes to stderr would then go
    into the database.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays
            setattr(sys, name, stream)


def main() -> None:
    cli.main()
