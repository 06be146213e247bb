"""Commands that export, import and publish users and adapters."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

import personalpeft
from personalpeft.formatting import pluralize
from personalpeft.types import Revision
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command, option, switch_off
from personalpeft_app.output import emit, format_table, info

if TYPE_CHECKING:
    from personalpeft.adapter_io import MergedForm
    from personalpeft.archive import ExportSummary, ImportSummary


@command("export", examples=("export ada.personal", "export --user ada --no-adapters ada.personal"))
@click.argument("file")
@switch_off("--no-adapters", "adapters", help="Leave out the adapters, which can be learned again.")
def export(common: GlobalOptions, file: str, adapters: bool) -> None:
    """Write all data of a user into one new FILE.

    It holds the turns, the feedback, the revisions with their reports, and the adapters. It is not
    encrypted.
    """
    with session.open_user(common, "change") as user:
        summary = user.export(file, adapters=adapters)
    emit(common, summary, str(summary.path))
    contents = f"{_count_contents(summary)}, {pluralize(summary.adapters, 'adapter')}"
    info(common, f"{contents}; {summary.bytes:,} bytes. To import it: personalpeft import")


@command("import", examples=("import ada.personal", "import ada.personal --as ada.home"))
@click.argument("file")
@click.option(
    "--as", "as_user", metavar="ID", help="The id of the new user.  [default: that of the file]"
)
def import_(common: GlobalOptions, file: str, as_user: str | None) -> None:
    """Import the user of a FILE that export wrote.

    The id must be new. The revisions are live at once if they were built on the open base.
    Otherwise the next learn builds new ones from the feedback.
    """
    with session.open_runtime(common, "make") as runtime, common.display:
        summary = runtime.import_user(file, as_user=as_user)
    emit(common, summary, summary.user)
    info(common, f"Imported {_count_contents(summary)}.")
    if summary.left_out:
        left_out = pluralize(summary.left_out, "revision")
        info(common, f"Left out {left_out}: {summary.why}.")
        info(common, f"To build them: personalpeft learn --user {summary.user}")


def _count_contents(of: ExportSummary | ImportSummary) -> str:
    counts = {"turn": of.turns, "signal": of.signals, "revision": of.revisions}
    return ", ".join(pluralize(count, noun) for noun, count in counts.items())


_one_layer = click.option(
    "--layer", help="Only this layer.  [default: the whole stack as one adapter]"
)
_as_layer = option(
    "--layer", default="style", help="The layer that it becomes: style, memory or skill.NAME."
)


@command("export-peft", examples=("export-peft my-adapter", "export-peft --layer style my-style"))
@click.argument("folder")
@_one_layer
def export_peft(common: GlobalOptions, folder: str, layer: str | None) -> None:
    """Write the live stack as a PEFT adapter.

    FOLDER must be empty or new.
    """
    _export_to(common, "folder", lambda user: user.export_peft(folder, layer=layer))


@command(
    "import-peft", examples=("import-peft my-adapter", "import-peft my-adapter --layer skill.email")
)
@click.argument("folder")
@_as_layer
def import_peft(common: GlobalOptions, folder: str, layer: str) -> None:
    """Import the PEFT adapter in FOLDER, and make it live.

    It becomes a revision of a layer, without a judgement by the gate. To undo it: personalpeft
    rollback
    """
    _import_layer(common, layer, lambda user: user.import_peft(folder, layer=layer))


@command("export-gguf", examples=("export-gguf ada.gguf", "export-gguf --layer style style.gguf"))
@click.argument("file")
@_one_layer
def export_gguf(common: GlobalOptions, file: str, layer: str | None) -> None:
    """Write the live stack as a GGUF adapter for llama.cpp.

    llama.cpp loads it beside the base's GGUF file. FILE must be new.
    """
    _export_to(common, "file", lambda user: user.export_gguf(file, layer=layer))


@command("import-gguf", examples=("import-gguf adapter.gguf --layer skill.email",))
@click.argument("file")
@_as_layer
def import_gguf(common: GlobalOptions, file: str, layer: str) -> None:
    """Import the GGUF adapter in FILE, and make it live.

    It becomes a revision of a layer, without a judgement by the gate. To undo it: personalpeft
    rollback
    """
    _import_layer(common, layer, lambda user: user.import_gguf(file, layer=layer))


@command("export-merged", examples=("export-merged my-model", "export-merged --form gguf my-model"))
@click.argument("folder")
@option(
    "--form",
    type=click.Choice(["safetensors", "gguf"]),
    default="safetensors",
    help="safetensors for transformers; gguf for llama.cpp, with a Modelfile for Ollama.",
)
def export_merged(common: GlobalOptions, folder: str, form: MergedForm) -> None:
    """Write the base with the live stack merged into its weights.

    The result is as large as the base, for programs without LoRA. FOLDER must be empty or new.
    """
    target = _export_to(common, "folder", lambda user: user.export_merged(folder, form=form))
    if form == "gguf":
        modelfile = shlex.quote(str(target / "Modelfile"))
        info(common, f"For Ollama: ollama create {common.user_id()} -f {modelfile}")


def _export_to(
    common: GlobalOptions, what: str, write: Callable[[personalpeft.User], Path]
) -> Path:
    """Let the user write a file or folder (``what``), and print its path."""
    with session.open_user(common, "change") as user, common.display:
        target = write(user)
    emit(common, {what: target, "user": user.id}, str(target))
    return target


def _import_layer(
    common: GlobalOptions, layer: str, read: Callable[[personalpeft.User], Revision]
) -> None:
    """Let the user import a layer, and print the revision."""
    from personalpeft.ids import check_layer_name

    # An invalid name must not create a user.
    check_layer_name(layer)
    with session.open_user(common, "make") as user, common.display:
        revision = read(user)
    emit(common, revision, revision.id)
    info(common, f"Live for {user.id}. To undo it: personalpeft rollback {layer} --user {user.id}")


@command("publish", examples=("publish", "publish ada bo", "publish --to /srv/stacks --json"))
@click.argument("users", nargs=-1, metavar="[USER]...")
@click.option(
    "--to",
    metavar="FOLDER",
    help="The parent folder.  [default: where a server of this home looks]",
)
def publish(common: GlobalOptions, users: tuple[str, ...], to: str | None) -> None:
    """Publish live stacks for vLLM servers.

    Prints their names. It publishes each USER (or --user), or all users. A vLLM server with our
    plugin (plugins/vllm_resolver) serves a name, personalpeft:DIGEST, as a model. The folder keeps
    the last published stack of each user, so publish again after a learn. Existing files are not
    written again.

    Forgetting deletes the published stacks of a user, here and in each named folder that can be
    reached.
    """
    names = users or ((common.user,) if common.user else None)
    with session.open_runtime(common, "change") as runtime, common.display:
        published = runtime.publish(names, to=to, progress=common.display)
    rows = [(each.user, each.name or each.reason) for each in published.stacks]
    emit(common, published, format_table(("USER", "NAME"), rows))
    counts = f"{published.written} written, {published.taken} deleted"
    info(common, f"{published.folder}: {counts}.")


EXCHANGE = (export, import_, export_peft, import_peft, export_gguf, import_gguf, export_merged)
"""The commands in the order of the help, without ``publish``."""
