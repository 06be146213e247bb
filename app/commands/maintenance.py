"""Commands that maintain an installation and a home."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import personalpeft
from personalpeft.errors import Damaged, get_error_codes
from personalpeft.formatting import pluralize
from personalpeft_app import session
from personalpeft_app.interrupts import long_call
from personalpeft_app.options import GlobalOptions, command, flag, option
from personalpeft_app.output import emit, format_table, info


@command("doctor", examples=("doctor", "doctor --load --json"))
@flag("--load", help="Prepare and load the base too.")
def doctor(common: GlobalOptions, load: bool) -> None:
    """Check the installation, the home and the base.

    Prints what to do about each fault.

    The exit code is 0 without a fault, else that of the first one.
    """
    from personalpeft.diagnostics import run_check, run_checks
    from personalpeft_app.daemon.settings import FILE, read_settings

    home, _ = common.paths()

    def check_settings() -> str:
        read_settings(home)
        return "every setting is valid" if (home / FILE).exists() else "not there: the defaults"

    backend = common.backend or "auto"
    with common.display:
        checks = (
            *run_checks(
                common.home, common.base_name(), backend, load=load, progress=common.display
            ),
            run_check(FILE, check_settings),
        )
    rows = [("ok" if check.ok else "WRONG", check.name, check.message) for check in checks]
    hints = [f"\n{check.name}: {check.hint}" for check in checks if check.hint]
    emit(common, {"checks": checks}, format_table(("", "CHECK", "RESULT"), rows) + "".join(hints))
    raise click.exceptions.Exit(next((check.exit_code for check in checks if not check.ok), 0))


@command("verify", examples=("verify", "verify --repair", "verify --json"))
@flag("--repair", help="Build missing and damaged adapter files again, and list the rest.")
def verify(common: GlobalOptions, repair: bool) -> None:
    """Check the contents of the home and the prepared bases.

    Computes every digest again and lists what is wrong. Changes nothing.

    With --repair, adapter files that are lost or damaged are built again from the feedback. They
    are put back only if their digest is the recorded one, as on the same kind of processor. No live
    revision is replaced by another. What killed programs left unfinished is deleted.

    The exit code is 0 without a problem, or none left, else 8.
    """
    data: Any
    if repair:
        with session.open_runtime(common, "change") as runtime, long_call(common) as watched:
            report = runtime.repair(**watched)
        problems, data, text = report.problems, report, str(report)
    else:
        with session.open_runtime(common, "read") as runtime:
            problems = runtime.verify()
        data, text = {"problems": problems}, ""
    lines = [f"{problem.where}: {problem.fault}\n  {problem.remedy}" for problem in problems]
    emit(common, data, "\n".join([*([text] if text else []), *lines]))
    if problems:
        raise click.exceptions.Exit(get_error_codes(Damaged("")).exit_code)
    info(common, "There is no problem.")


@command(
    "rebuild",
    examples=("rebuild --check", "rebuild --check style@69c31c", "rebuild --check --all --json"),
)
@click.argument("revision", required=False)
@flag("--check", help="Build anew, compare and change nothing. Required.")
@flag("--all", "all_users", help="The live revisions of all users.")
def rebuild(common: GlobalOptions, revision: str | None, check: bool, all_users: bool) -> None:
    """Build a revision again from its feedback, and compare the digests.

    REVISION is an id or its beginning.  [default: the live revision of each layer]

    The same feedback, recipe, base and seed give the same bytes, on the same kind of processor and
    with the same libraries. Otherwise it prints what differs and how near the weights came. Takes
    as long as the learns did. Changes nothing.

    The exit code is 0 if all are equal, else 8.
    """
    if not check:
        raise click.UsageError("Give --check. To build a layer anew: learn --from-scratch")
    if revision is not None and all_users:
        raise click.UsageError("REVISION and --all exclude each other.")
    with session.open_runtime(common, "read") as runtime, long_call(common) as watched:
        names = [common.user_id()]
        if all_users:
            names = [each.id for each in runtime.iter_users()]
        reports = []
        for user in (runtime.user(name, create=False) for name in names):
            heads = [layer.head for layer in user.layers() if layer.head]
            reports += [
                user.reproduce(each, **watched) for each in ([revision] if revision else heads)
            ]
    empty = "No revision is live: there is nothing to check."
    emit(common, {"revisions": reports}, "\n".join(map(str, reports)), empty=empty)
    if not all(report.equal for report in reports):
        raise click.exceptions.Exit(get_error_codes(Damaged("")).exit_code)


@command("backup", examples=("backup /mnt/disk/personalpeft", "backup ./copies --keep 3 --json"))
@click.argument("folder", type=click.Path())
@option("--keep", type=click.IntRange(1), default=7, help="How many copies stay in the FOLDER.")
def backup(common: GlobalOptions, folder: str, keep: int) -> None:
    """Copy the home into FOLDER, beside earlier copies.

    The home may be in use. A home of an earlier version is copied as it is. Each copy is a home. To
    put one back: personalpeft restore
    """
    with session.open_runtime(common, "read") as runtime:
        made = runtime.maintenance.back_up(folder, keep=keep)
    emit(common, made, str(made.path))
    if made.missing:
        info(common, f"Adapters missing or damaged: {len(made.missing)}. Run: personalpeft verify")
    info(
        common,
        f"{pluralize(made.files, 'adapter')}. To put it back: personalpeft restore {made.path}",
    )


@command(
    "restore",
    examples=("restore /mnt/disk/personalpeft", "restore ./copies/copy-000002-20260302 --replace"),
)
@click.argument("backup", type=click.Path())
@flag("--replace", help="Replace a home that is there. It is kept beside.")
@click.option(
    "--forgotten-in",
    metavar="FOLDER",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A folder with another forgotten.jsonl or a newer database; can be repeated.",
)
def restore(
    common: GlobalOptions, backup: str, replace: bool, forgotten_in: tuple[Path, ...]
) -> None:
    """Put a BACKUP in place of the home.

    BACKUP is a copy that backup made, or their folder, for the newest. What was forgotten since is
    forgotten again first. Stop other programs that use the home.
    """
    home, _ = common.paths()
    with common.display:
        report = personalpeft.restore(
            backup,
            home,
            replace=replace,
            forgotten_in=forgotten_in,
            passphrase=session.ask_passphrase(home),
            progress=common.display,
        )
    emit(common, report, str(report))


@command(
    "encrypt", examples=("encrypt", "encrypt --key passphrase", "encrypt --rotate", "encrypt --off")
)
@click.option(
    "--key",
    type=click.Choice(["keyring", "file", "passphrase"]),
    help="Where the key comes from.  [default: the keyring if there is one, else a file]",
)
@flag("--rotate", help="Give an encrypted home a new key.")
@flag("--off", help="Store the home without encryption again.")
def encrypt(common: GlobalOptions, key: str | None, rotate: bool, off: bool) -> None:
    """Encrypt the home: its database and adapters.

    The key lies in the system's keyring or in a file outside of the home, or is made from a
    passphrase. Keep a copy of it: without the key all is lost. A passphrase is read from
    PERSONALPEFT_PASSPHRASE, or asked for.

    Writes the home anew, verifies it, and then replaces the former files. Stop other programs that
    use the home.
    """
    if off and (key or rotate):
        raise click.UsageError("--off excludes --key and --rotate.")
    home, _ = common.paths()
    passphrase, new = session.ask_passphrase(home), None
    if key == "passphrase" and sys.stdin.isatty():
        new = click.prompt("New passphrase", hide_input=True, confirmation_prompt=True, err=True)
    with common.display:
        if off:
            report = personalpeft.decrypt(home, passphrase=passphrase, progress=common.display)
        else:
            report = personalpeft.encrypt(
                home,
                key,
                rotate=rotate,
                passphrase=passphrase,
                new_passphrase=new,
                progress=common.display,
            )
    emit(common, report, str(report))


@command("gc", examples=("gc --dry-run", "gc --json"))
@flag("--dry-run", help="Only list what would be deleted.")
def gc(common: GlobalOptions, dry_run: bool) -> None:
    """Delete unused files. Turns, feedback and every revision stay.

    Unused are adapters that no revision has named for a day, and partial files. So is the state of
    learns that were not resumed for a week.

    Safe while other programs use the home.
    """
    with common.display, session.open_runtime(common, "read" if dry_run else "change") as runtime:
        garbage = runtime.collect_garbage(dry_run=dry_run, progress=common.display)
    rows = [
        ("adapters", str(garbage.blobs)),
        ("partial files", str(garbage.parts)),
        ("sessions", str(garbage.sessions)),
    ]
    emit(common, garbage, format_table(("WHAT", "FILES"), rows))
    info(common, f"{garbage.bytes:,} bytes {'would be ' if dry_run else ''}freed.")


@command("path", examples=("path", "path cache", "path --json"))
@click.argument("what", type=click.Choice(["home", "cache", "models"]), default="home")
def path(common: GlobalOptions, what: str) -> None:
    """Print the path of a folder.

    The home holds your data; the cache holds what can be made again. Your own cards belong in
    models.  [default: home]
    """
    home, cache = common.paths()
    folders = {"home": home, "cache": cache, "models": home / "models"}
    emit(common, folders, str(folders[what]))


@command(
    "completion",
    examples=(
        "completion bash >> ~/.bashrc",
        "completion fish > ~/.config/fish/completions/personalpeft.fish",
    ),
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, common: GlobalOptions, shell: str) -> None:
    """Print the completion script of your shell."""
    from click.shell_completion import get_completion_class

    root = ctx.find_root()
    complete: Any = get_completion_class(shell)
    script = complete(root.command, {}, str(root.info_name), "_PERSONALPEFT_COMPLETE").source()
    emit(common, {"shell": shell, "script": script}, script)


@command("demo", examples=("demo", "demo --keep"))
@flag("--keep", help="Keep the temporary home at the end.")
def demo(common: GlobalOptions, keep: bool) -> None:
    """Show the whole cycle in about three minutes.

    Asks, remembers, corrects, learns, compares and rolls back, on the real base.

    The home is a temporary folder, whatever --home says, and is deleted at the end.
    """
    from personalpeft_app.demo import run

    run(common, keep=keep)


MAINTAIN = (rebuild, backup, restore, encrypt, gc, path)
"""The commands that only maintain, in the order of the help."""
