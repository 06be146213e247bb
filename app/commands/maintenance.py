"""Looking after an installation and a home."""

from __future__ import annotations

import click

from personalpeft.errors import Damaged, get_error_codes
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, format_table, info
from personalpeft_app.progress import Display


@command("doctor", examples=("personalpeft doctor", "personalpeft doctor --load --json"))
@click.option("--load", is_flag=True, help="Prepare and load the base too.")
def doctor(common: GlobalOptions, load: bool) -> None:
    """Check the installation, the home and the base.

    Says what to do about what is wrong.

    The exit code is 0 when nothing is wrong, else that of the first error.
    """
    from personalpeft_app.doctor import run_checks

    display = Display(common)
    with display:
        findings = run_checks(common, display, load=load)
    rows = [
        ("ok" if finding.ok else "WRONG", finding.name, finding.message) for finding in findings
    ]
    hints = [f"\n{finding.name}: {finding.hint}" for finding in findings if finding.hint]
    emit(
        common, {"checks": findings}, format_table(("", "WHAT", "HOW IT IS"), rows) + "".join(hints)
    )
    code = next((finding.exit_code for finding in findings if not finding.ok), 0)
    raise click.exceptions.Exit(code)


@command("verify", examples=("personalpeft verify", "personalpeft verify --json"))
def verify(common: GlobalOptions) -> None:
    """Check everything that the home holds.

    Derives every digest again and lists what does not hold; changes nothing.

    The exit code is 0 when all is well, 8 when there is a problem.
    """
    with session.open_runtime(common, "change") as runtime:
        problems = runtime.verify()
    lines = [f"{problem.where}: {problem.fault}\n  {problem.remedy}" for problem in problems]
    emit(common, {"problems": problems}, "\n".join(lines))
    if problems:
        raise click.exceptions.Exit(get_error_codes(Damaged("")).exit_code)
    info(common, "All is well.")


@command("gc", examples=("personalpeft gc --dry-run", "personalpeft gc --json"))
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def gc(common: GlobalOptions, dry_run: bool) -> None:
    """Take away files that nothing needs.

    Adapters that no revision has named for a day, halves of files that were being written when the power went, and the
    state of learns that nobody resumed for a week. What was said and what can be rolled back to always stays.

    Safe while others use the home.
    """
    display = Display(common)
    with display, session.open_runtime(common, "read" if dry_run else "change") as runtime:
        found = runtime.collect_garbage(dry_run=dry_run, progress=display)
    rows = [
        ("adapters", str(found.blobs)),
        ("halves of files", str(found.parts)),
        ("sessions", str(found.sessions)),
    ]
    emit(common, found, format_table(("WHAT", "FILES"), rows))
    info(common, f"{found.bytes:,} bytes {'would be ' if dry_run else ''}freed.")


@command(
    "path", examples=("personalpeft path", "personalpeft path cache", "personalpeft path --json")
)
@click.argument("what", type=click.Choice(["home", "cache", "models"]), default="home")
def path(common: GlobalOptions, what: str) -> None:
    """Print where things are kept.

    The home holds what cannot be made again, the cache what can; your own cards go into models.  [default: home]
    """
    home, cache = common.paths()
    places = {"home": home, "cache": cache, "models": home / "models"}
    emit(common, places, str(places[what]))


@command(
    "completion",
    examples=(
        "personalpeft completion bash >> ~/.bashrc",
        "personalpeft completion fish > ~/.config/fish/completions/personalpeft.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, common: GlobalOptions, shell: str) -> None:
    """Print what completes commands in your shell."""
    from click.shell_completion import get_completion_class

    made = get_completion_class(shell)
    if made is None:
        raise click.UsageError(f"There is no completion for {shell}.")
    root = ctx.find_root()
    script = made(root.command, {}, str(root.info_name), "_PERSONALPEFT_COMPLETE").source()
    emit(common, {"shell": shell, "script": script}, script)


@command("demo", examples=("personalpeft demo", "personalpeft demo --keep"))
@click.option("--keep", is_flag=True, help="Keep the throw-away home at the end.")
def demo(common: GlobalOptions, keep: bool) -> None:
    """See it all work, in about three minutes.

    Asks, remembers, corrects, learns, compares, and takes it all back, on the real base.

    The home is a temporary folder, whatever --home says,
    and is deleted at the end.
    """
    from personalpeft_app.demo import run

    run(common, keep=keep)
