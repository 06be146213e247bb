"""Taking a user or an adapter out, and in."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from personalpeft.formatting import pluralize
from personalpeft_app import session
from personalpeft_app.options import GlobalOptions, command
from personalpeft_app.output import emit, info
from personalpeft_app.progress import Display

if TYPE_CHECKING:
    from personalpeft import User
    from personalpeft.adapter_io import MergedForm
    from personalpeft.archive import ExportSummary, ImportSummary
    from personalpeft.types import Revision


@command(
    "export",
    examples=(
        "personalpeft export ada.personal",
        "personalpeft export --user ada --no-adapters ada.personal",
    ),
)
@click.argument("file")
@click.option(
    "--no-adapters", is_flag=True, help="Leave out what was built; it can be learned again."
)
def export(common: GlobalOptions, file: str, no_adapters: bool) -> None:
    """Write all of a user into one FILE.

    What was said and answered, the revisions with their reports, and the adapters. FILE must not be there yet. It is not
    encrypted: whoever has it has everything that was ever said.
    """
    with session.open_user(common, "read") as user:
        written = user.export(file, adapters=not no_adapters)
    emit(common, written, str(written.path))
    info(
        common,
        f"{_count_contents(written)}, {pluralize(written.adapters, 'adapter')}; "
        f"{written.bytes:,} bytes. To import it: personalpeft import",
    )


@command(
    "import",
    examples=("personalpeft import ada.personal", "personalpeft import ada.personal --as ada.home"),
)
@click.argument("file")
@click.option("--as", "as_user", metavar="ID", help="Under this name.  [default: that of the file]")
def import_(common: GlobalOptions, file: str, as_user: str | None) -> None:
    """Take in the user of a FILE that export wrote.

    There must be nobody of that name yet. What was built comes along, and is live at once, where it was built on the base
    that is open; else the next learn builds it from what was said.
    """
    display = Display(common)
    with session.open_runtime(common, "make", display) as runtime, display:
        taken = runtime.import_user(file, as_user=as_user)
    emit(common, taken, taken.user)
    info(common, f"{_count_contents(taken)} came in.")
    if taken.left_out:
        info(
            common,
            f"{pluralize(taken.left_out, 'revision')} did not: {taken.why}. Next: personalpeft learn --user {taken.user}",
        )


def _count_contents(of: ExportSummary | ImportSummary) -> str:
    return ", ".join(
        (
            pluralize(of.turns, "turn"),
            pluralize(of.signals, "signal"),
            pluralize(of.revisions, "revision"),
        )
    )


_one_layer = click.option(
    "--layer", help="Only this layer.  [default: the whole stack as one adapter]"
)
_as_layer = click.option(
    "--layer",
    default="style",
    show_default=True,
    help="What it becomes: style, memory or skill.NAME.",
)


@command(
    "export-peft",
    examples=(
        "personalpeft export-peft my-adapter",
        "personalpeft export-peft --layer style my-style",
    ),
)
@click.argument("folder")
@_one_layer
def export_peft(common: GlobalOptions, folder: str, layer: str | None) -> None:
    """Write what is live as an adapter that PEFT loads.

    FOLDER must be empty or not there.
    """
    _export_to(common, "folder", lambda user: user.export_peft(folder, layer=layer))


@command(
    "import-peft",
    examples=(
        "personalpeft import-peft my-adapter",
        "personalpeft import-peft my-adapter --layer skill.email",
    ),
)
@click.argument("folder")
@_as_layer
def import_peft(common: GlobalOptions, folder: str, layer: str) -> None:
    """Take a PEFT adapter in, and make it live.

    What is in FOLDER becomes a revision of a layer. It is not judged: naming it is your own word. To take it back: personalpeft rollback
    """
    _import_layer(common, layer, lambda user: user.import_peft(folder, layer=layer))


@command(
    "export-gguf",
    examples=(
        "personalpeft export-gguf ada.gguf",
        "personalpeft export-gguf --layer style style.gguf",
    ),
)
@click.argument("file")
@_one_layer
def export_gguf(common: GlobalOptions, file: str, layer: str | None) -> None:
    """Write what is live as an adapter that llama.cpp loads.

    It goes with the base's GGUF file. FILE must not be there yet.
    """
    _export_to(common, "file", lambda user: user.export_gguf(file, layer=layer))


@command("import-gguf", examples=("personalpeft import-gguf adapter.gguf --layer skill.email",))
@click.argument("file")
@_as_layer
def import_gguf(common: GlobalOptions, file: str, layer: str) -> None:
    """Take a GGUF adapter in, and make it live.

    What is in FILE becomes a revision of a layer. It is not judged: naming it is your own word. To take it back: personalpeft rollback
    """
    _import_layer(common, layer, lambda user: user.import_gguf(file, layer=layer))


@command(
    "export-merged",
    examples=(
        "personalpeft export-merged my-model",
        "personalpeft export-merged --form gguf my-model",
    ),
)
@click.argument("folder")
@click.option(
    "--form",
    type=click.Choice(["safetensors", "gguf"]),
    default="safetensors",
    show_default=True,
    help="safetensors for transformers; gguf for llama.cpp, with a Modelfile for Ollama.",
)
def export_merged(common: GlobalOptions, folder: str, form: MergedForm) -> None:
    """Write the base with what is live in its weights.

    A model for programs that know of no layers, as large as the base. FOLDER must be empty or not there.
    """
    target = _export_to(common, "folder", lambda user: user.export_merged(folder, form=form))
    if form == "gguf":
        modelfile = shlex.quote(str(target / "Modelfile"))
        info(common, f"For Ollama: ollama create {common.user_id()} -f {modelfile}")


def _export_to(common: GlobalOptions, what: str, write: Callable[[User], Path]) -> Path:
    """Has the user that is meant write something, and says where ``what`` was written lies."""
    display = Display(common)
    with session.open_user(common, "read", display) as user, display:
        target = write(user)
    emit(common, {what: target, "user": user.id}, str(target))
    return target


def _import_layer(common: GlobalOptions, layer: str, take: Callable[[User], Revision]) -> None:
    """Has the user that is meant take something in as a layer, and says what it became."""
    from personalpeft.ids import check_layer_name

    # Before anybody is made who then has nothing.
    check_layer_name(layer)
    display = Display(common)
    with session.open_user(common, "make", display) as user, display:
        revision = take(user)
    emit(common, revision, revision.id)
    info(common, f"Live for {user.id}. To take it back: personalpeft rollback {layer}")
