"""What several commands of ``bench`` need: options, their check, and progress as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from personalpeft_app.options import Function, GlobalOptions, option
from personalpeft_app.output import info


def repeat_option(default: int) -> Callable[[Function], Function]:
    """Return the option for the number of repetitions."""
    help_ = "Repetitions; of their figures the median counts."
    return option("--repeat", type=click.IntRange(1), default=default, help=help_)


def keep_option(*, required: bool = False) -> Callable[[Function], Function]:
    """Return the option for the folder of a ``ResultCache``."""
    return click.option(
        "--keep",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        required=required,
        help="Where each figure is kept at once: the same command goes on there, and several can share the work.",
    )


def printer(common: GlobalOptions) -> Callable[[str], None]:
    """Return a function that prints progress to stderr."""
    return lambda text: info(common, text)


def need_torch(common: GlobalOptions) -> None:
    """Refuse another backend than torch."""
    if common.backend not in (None, "torch"):
        raise click.BadParameter("this measures the torch backend.", param_hint="--backend")
