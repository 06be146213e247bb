"""Show progress on stderr: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Self

import click

from personalpeft_app.options import GlobalOptions
from personalpeft_app.output import supports_color

if TYPE_CHECKING:
    from rich.progress import Progress

# Work that ends sooner shows nothing.
_DELAY = 0.7


class Display:
    """A context manager that shows ``(stage, done)`` calls while it is entered.

    It can be entered again. Leaving it removes the bar, so the next output starts on a clean line.
    """

    def __init__(self, common: GlobalOptions) -> None:
        self._terminal = sys.stderr.isatty()
        # A program that reads JSON may read stderr too, so it must hold nothing but an error.
        self._shown = not common.quiet and (self._terminal or not common.json)
        self._lock = threading.Lock()
        self._open = False
        self._bar: Progress | None = None
        self._timer: threading.Timer | None = None
        self._stage = ""
        self._done = 0.0

    def __enter__(self) -> Self:
        self._open = self._shown
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._open = False
            if self._timer is not None:
                self._timer.cancel()
            if self._bar is not None:
                self._bar.stop()
            self._timer = self._bar = None
            self._stage = ""

    def __call__(self, stage: str, done: float) -> None:
        with self._lock:
            if not self._open:
                return
            new = stage != self._stage
            self._stage, self._done = stage, done
            if not self._terminal:
                if new:
                    click.echo(f"{stage} ...", err=True)
            elif self._bar is not None:
                self._draw(self._bar, new)
            elif self._timer is None:
                self._timer = threading.Timer(_DELAY, self._begin)
                self._timer.daemon = True
                self._timer.start()

    def print(self, text: str) -> None:
        """Print a line above the bar. A signal handler may call it: it takes no lock."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            click.echo(text, err=True)

    def _draw(self, bar: Progress, new: bool) -> None:
        (task,) = bar.task_ids
        if new:
            bar.reset(task)
        # Without any progress the duration is unknown: the bar pulses, without a share.
        bar.update(
            task,
            share=f"{self._done:.0%}" if self._done > 0 else "",
            description=self._stage,
            completed=self._done,
            total=1.0 if self._done > 0 else None,
        )

    def _begin(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        with self._lock:
            if not self._open:
                return
            console = Console(stderr=True, no_color=not supports_color())
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[share]:>4}"),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console, transient=True)
            self._bar.add_task(self._stage, total=None, share="")
            self._draw(self._bar, False)
            self._bar.start()
