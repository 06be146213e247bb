"""Commands that erase items and users, and that check the certificates of it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

import personalpeft
from personalpeft.errors import InvalidInput
from personalpeft_app import session
from personalpeft_app.interrupts import long_call
from personalpeft_app.options import GlobalOptions, command, flag, switch_off
from personalpeft_app.output import emit, info
from personalpeft_app.text_input import read_argument

certificate_option = click.option(
    "--certificate",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Write a signed certificate as JSON, and beside it a page to read.",
)


@command(
    "forget",
    examples=(
        "forget s_01k2 --dry-run",
        "forget last",
        "forget last --conversation --certificate erased.json",
        "forget skill.email --yes --json",
    ),
)
@click.argument("item")
@flag("--conversation", help="The whole conversation that the turn is in.")
@flag("--dry-run", help="Only list what would be erased.")
@switch_off("--later", "rebuild", help="Erase now, and rebuild with the next learn.")
@flag("--yes", help="Do not ask first.")
@certificate_option
@flag(
    "--check-rebuild",
    "reproduce",
    help="For the certificate, build each live revision again and compare the bytes.",
)
def forget(
    common: GlobalOptions,
    item: str,
    dry_run: bool,
    yes: bool,
    certificate: Path | None,
    **options: Any,
) -> None:
    """Erase a turn, a fact, a rule or other feedback, a conversation or a layer, for good.

    ITEM is an id that turns, signals or memory lists, its beginning, or "last" for the newest turn.
    Or it is a layer: style, memory or skill.NAME. It is erased with all that it was taught. For a
    whole user: personalpeft forget-user

    Its text is deleted from every file of the home, with each revision trained on it. Live layers
    are rebuilt without it. This cannot be undone. Backups and exported files are not changed.

    On a terminal it lists what would be erased and asks. Ctrl-C stops only the rebuilding.

    A certificate states what was erased, signed and without its words. It measures how far the
    model knew it, before and after. To check one: personalpeft verify-certificate
    """
    _check_certificate(certificate, dry_run)
    if options["reproduce"] and certificate is None:
        raise click.UsageError("--check-rebuild needs --certificate.")
    with session.open_user(common, "read" if dry_run else "change") as user:
        if not (dry_run or yes):
            preview = user.forget(item, conversation=options["conversation"], dry_run=True)
            _confirm(common, preview, "Forget this for good?")
        note = "It is erased; rebuilding stops after this step."
        with long_call(common, note) as watched:
            wanted = certificate is not None
            report = user.forget(item, dry_run=dry_run, certificate=wanted, **watched, **options)
    emit(common, report, str(report))
    _write_certificate(common, certificate, report.certificate)


@command("forget-user", examples=("forget-user ada --dry-run", "forget-user ada --yes --json"))
@click.argument("name", metavar="USER")
@flag("--dry-run", help="Only list what would be erased.")
@flag("--yes", help="Do not ask first.")
@certificate_option
def forget_user(
    common: GlobalOptions, name: str, dry_run: bool, yes: bool, certificate: Path | None
) -> None:
    """Erase a user for good, with all data.

    That is all turns, feedback, layers, published copies and API keys. This cannot be undone. Backups
    and exported files are not changed; to keep a copy, export the user first. On a terminal it
    lists what would be erased and asks.
    """
    _check_certificate(certificate, dry_run)
    with session.open_runtime(common, "read" if dry_run else "change") as runtime:
        if not (dry_run or yes):
            preview = runtime.forget_user(name, dry_run=True)
            _confirm(common, preview, f"Forget {name} for good?")
        with common.display:
            report = runtime.forget_user(
                name, dry_run=dry_run, certificate=certificate is not None, progress=common.display
            )
    emit(common, report, str(report))
    _write_certificate(common, certificate, report.certificate)


@command(
    "verify-certificate",
    examples=(
        "verify-certificate erased.json",
        "verify-certificate erased.json --json",
        'verify-certificate erased.json --text "My dog is called Biscuit."',
    ),
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--key", metavar="PUBLIC", help="The key that must have signed it: 64 hex digits.")
@click.option(
    "--text", metavar="TEXT", help="Also print which items had exactly this text; '-' reads stdin."
)
def verify_certificate(
    common: GlobalOptions, file: Path, key: str | None, text: str | None
) -> None:
    """Check a certificate of erasure, and print its page.

    FILE is the JSON that forget wrote. No home is needed, except with --text: only the home that
    made a certificate can tell which items it is about.

    Without --key any key may have signed it; compare the printed one with that of the home.

    The exit code is 0 if the signature is right, else 8.
    """
    certificate = personalpeft.verify_certificate(file, key=key)
    items: tuple[str, ...] | None = None
    if text is not None:
        text = read_argument(text, what="text")
        with session.open_runtime(common, "read") as runtime:
            items = runtime.items_with_text(certificate, text)
    found = {} if items is None else {"items": items}
    data = {"valid": True, "public_key": certificate.public_key, **found}
    emit(common, {**data, "statement": certificate.statement}, certificate.to_markdown().rstrip())
    info(common, f"The signature is right. Signed by {certificate.public_key}.")
    if items is not None:
        info(common, f"Items with this text: {', '.join(items) or 'none'}.")


def _check_certificate(file: Path | None, dry_run: bool) -> None:
    """Check that a certificate can be written, before anything is erased."""
    if file is None:
        return
    if dry_run:
        raise click.UsageError("A dry run has no certificate.")
    from personalpeft.certificate import check_certificate_path

    check_certificate_path(file)


def _write_certificate(
    common: GlobalOptions, file: Path | None, certificate: personalpeft.Certificate | None
) -> None:
    if file is not None and certificate is not None:
        try:
            path, page = certificate.write(file)
        except InvalidInput:
            # It cannot be made again.
            click.echo(certificate.to_json(), nl=False)
            raise
        info(common, f"The certificate is {path}, to read: {page}.")


def _confirm(common: GlobalOptions, preview: object, question: str) -> None:
    """Show the preview and ask for consent. Raises a usage error where no terminal is open."""
    if common.json or not sys.stdin.isatty():
        raise click.UsageError("This cannot be undone. Give --yes, or --dry-run to look.")
    click.echo(str(preview), err=True)
    click.confirm(question, abort=True, err=True)
