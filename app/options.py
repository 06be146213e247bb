"""Options that every command takes, before or after its name, and the layout of help.

Imports nothing but click, so that help is shown at once.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import click

import personalpeft

if TYPE_CHECKING:
    from personalpeft_app.progress import Display

PROGRAM = "personalpeft"
USER = "PERSONALPEFT_USER"
BASE = "PERSONALPEFT_BASE"

_NEGATIVE_NUMBER = re.compile(r"-\d[\d.e]*")

Function = TypeVar("Function", bound=Callable[..., Any])
Decorator: TypeAlias = Callable[[Callable[..., Any]], click.Command]


@dataclass
class GlobalOptions:
    """The options of every command. A value after the command's name overrides one before it."""

    user: str | None = None
    home: str | None = None
    base: str | None = None
    backend: str | None = None
    json: bool = False
    quiet: bool = False

    @cached_property
    def display(self) -> Display:
        """What shows progress, while it is entered."""
        from personalpeft_app.progress import Display

        return Display(self)

    def user_id(self) -> str:
        """Return ``--user``, else PERSONALPEFT_USER, else an id of the login name's own, else "me"
        where there is no login name.
        """
        if self.user is not None:
            return self.user
        named = os.environ.get(USER)
        if not named:
            return _login_id() or "me"
        from personalpeft.errors import InvalidId
        from personalpeft.ids import check_user_id

        try:
            return check_user_id(named)
        except InvalidId as error:
            raise InvalidId(f"{USER} is set: {error.message}", hint=error.hint) from error

    def base_name(self) -> str:
        """Return ``--base``, else PERSONALPEFT_BASE, else the default."""
        return self.base or os.environ.get(BASE) or personalpeft.DEFAULT_BASE

    def paths(self) -> tuple[Path, Path]:
        """Return the home and the cache. Neither need exist."""
        from personalpeft.settings import resolve

        settings = resolve(self.home, os.environ)
        return settings.home, settings.cache


GLOBAL_OPTIONS_TITLE = "Options of every command, before or after its name"


class _GlobalOption(click.Option):
    """An option of every command, whose value goes to the context's ``GlobalOptions``.

    Help lists it apart from the command's own.
    """

    def __init__(self, *names: str, **attributes: Any) -> None:
        super().__init__(names, expose_value=False, callback=_note, default=None, **attributes)


def _note(ctx: click.Context, option: click.Parameter, value: Any) -> None:
    if value is not None and option.name is not None:
        setattr(ctx.ensure_object(GlobalOptions), option.name, value)


_GLOBAL_OPTIONS = (
    _GlobalOption(
        "--user",
        metavar="ID",
        help=f"The user.  [default: {USER}, else your login name]",
    ),
    _GlobalOption(
        "--home",
        metavar="FOLDER",
        help="The folder of all data.  [default: PERSONALPEFT_HOME, else the platform's data folder]",
    ),
    _GlobalOption(
        "--base",
        metavar="NAME|PATH",
        help="The base: a name that models lists, a card or a model's folder."
        f"  [default: {BASE}, else {personalpeft.DEFAULT_BASE}]",
    ),
    _GlobalOption(
        "--backend",
        metavar="NAME",
        help="What runs the base: torch, for many users; llamacpp, for one; vllm, on the server of"
        " PERSONALPEFT_VLLM_URL; or fake for tests.  [default: auto, llamacpp or torch]",
    ),
    _GlobalOption("--json", is_flag=True, help="Print data and errors as JSON."),
    _GlobalOption("--quiet", "-q", is_flag=True, help="No progress and no notes."),
)


class _Help(click.Command):
    """A command with the global options, whose help ends with examples.

    Args:
        examples: Command lines to show at the end of the help, without the program's name. One that
            begins with "$ " is a line of the shell.
        renamed: Former names of options, or of a group's commands, which work for one release, and
            the current ones.
        params: The command's own parameters.
    """

    def __init__(
        self,
        *,
        examples: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        params: Sequence[click.Parameter] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(params=[*_GLOBAL_OPTIONS, *params], **kwargs)
        self.examples = tuple(map(_whole_line, examples))
        self.renamed = dict(renamed or {})

    def current_name(self, argument: str) -> str:
        """Return the argument with the current name of its option, and warn of a former one."""
        name, equals, value = argument.partition("=")
        if name not in self.renamed:
            return argument
        new = self.renamed[name]
        click.echo(f"{name} is now called {new}; the next release drops the old name.", err=True)
        return new + equals + value

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._check_option_values(ctx, args))

    def _check_option_values(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Return the arguments, with negative numbers marked as no options.

        Raises ``click.UsageError`` for an option in place of another option's value.
        """
        options = {
            name: option
            for option in self.get_params(ctx)
            if isinstance(option, click.Option)
            for name in option.opts
        }
        parsed, positional = [], []
        rest = list(args)
        while rest and rest[0] != "--":
            argument = rest.pop(0)
            option = options.get(argument)
            if option is None and not ctx.allow_interspersed_args:
                # What follows belongs to the group's command.
                return args
            # A single dash is the standard input.
            is_text = argument == "-" or not argument.startswith("-")
            if is_text or _NEGATIVE_NUMBER.fullmatch(argument):
                positional.append(argument)
                continue
            parsed.append(argument)
            if option is None or option.is_flag or not rest:
                continue
            if rest[0] in options or rest[0].startswith("--"):
                raise click.UsageError(
                    f"{argument} needs a value, and {rest[0]} follows. To give it as the value: "
                    f"{argument}={rest[0]}",
                    ctx,
                )
            parsed.append(rest.pop(0))
        positional += rest[1:]
        return [*parsed, "--", *positional] if positional else parsed

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            # Arguments are left out, because the text above explains them.
            if record is not None and isinstance(parameter, click.Option):
                (common if isinstance(parameter, _GlobalOption) else own).append(record)
        for title, records in (("Options", own), (GLOBAL_OPTIONS_TITLE, common)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


class Command(_Help):
    """A command of the program.

    Args:
        surplus: What to do instead of an argument too many; "{}" stands for the argument.
    """

    # So that this class reports those that are too many.
    allow_extra_args = True

    def __init__(self, *, surplus: str = "", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.surplus = surplus

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        left = super().parse_args(ctx, [self.current_name(each) for each in args])
        if left and not ctx.resilient_parsing:
            hint = self.surplus and f" {self.surplus.format(shlex.quote(left[0]))}"
            raise click.UsageError(f"Got {left[0]!a}, which is an argument too many.{hint}", ctx)
        return left


class Group(_Help, click.Group):
    """A group whose help lists its commands in sections.

    Args:
        default: The name of the command that runs where none is given. Else help is shown.
    """

    def __init__(self, *, default: str = "", **kwargs: Any) -> None:
        super().__init__(invoke_without_command=bool(default), **kwargs)
        self._default = default
        self._sections: dict[str, list[str]] = {}

    def invoke(self, ctx: click.Context) -> Any:
        result = super().invoke(ctx)
        if self._default and ctx.invoked_subcommand is None:
            return ctx.invoke(self.commands[self._default])
        return result

    def add_section(self, title: str, commands: Sequence[click.Command]) -> None:
        """Add commands under a heading of the help, in this order."""
        for command in commands:
            self.add_command(command)
        self._sections[title] = [str(command.name) for command in commands]

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in self._sections.values() for name in names]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, [self.current_name(args[0]), *args[1:]])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        self.format_commands(ctx, formatter)
        _Help.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        longest = max(len(name) for name in self.list_commands(ctx))
        limit = formatter.width - 6 - longest
        for title, names in self._sections.items():
            rows = [
                (name.ljust(longest), self.commands[name].get_short_help_str(limit))
                for name in names
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


def command(name: str, *, examples: Sequence[str], **attributes: Any) -> Decorator:
    """Make a ``Command`` of a function whose first argument is the global options."""

    def decorate(function: Callable[..., Any]) -> click.Command:
        make = click.command(name, cls=Command, examples=examples, **attributes)
        result: click.Command = make(click.pass_obj(function))
        return result

    return decorate


def option(*names: str, **attributes: Any) -> Callable[[Function], Function]:
    """Add an option whose help names its default."""
    return click.option(*names, show_default=True, **attributes)


def flag(*names: str, help: str) -> Callable[[Function], Function]:
    """Add an option without a value."""
    return click.option(*names, is_flag=True, help=help)


def switch_off(name: str, parameter: str, *, help: str) -> Callable[[Function], Function]:
    """Add an option that sets a parameter to False. Without it, it is True."""
    return click.option(name, parameter, flag_value=False, default=True, help=help)


def no_train_flag(help: str) -> Callable[[Function], Function]:
    """Add ``--no-train`` as the library's ``train``: False, or None for the user's setting."""
    return click.option("--no-train", "train", flag_value=False, default=None, help=help)


def _whole_line(example: str) -> str:
    if example.startswith("$ "):
        return example.removeprefix("$ ")
    return f"{PROGRAM} {example.removeprefix(f'{PROGRAM} ')}"


def _login_id() -> str | None:
    """Return the login name if it is an id, else an id that no other name has; None without one."""
    import getpass

    from personalpeft.ids import USER_ID

    try:
        name = getpass.getuser()
    except (OSError, KeyError, ImportError):
        return None
    if not name:
        return None
    if USER_ID.fullmatch(name) and ".." not in name:
        return name
    import hashlib
    import re

    plain = re.sub("[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    mark = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:6]
    return f"{plain or 'user'}-{mark}"
