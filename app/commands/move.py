"""Taking a user or an adapter out, and in."""

from __future__ import annotations

import shlex

import click

from personalpeft_app import opening
from personalpeft_app.options import Common, command
from personalpeft_app.output import note, show
from personalpeft_app.progress import Display


@command(
    "export", examples=("personalpeft export ada.personal", "personalpeft export --user ada --no-adapters ada.personal")
)
@click.argument("file")
@click.option("--no-adapters", is_flag=True, help="Leave out what was built; it can be learned again.")
def export(common: Common, file: str, no_adapters: bool) -> None:
    """Write all of a user into one FILE.

    What was said and answered, the revisions with their reports, and the adapters. FILE must not be there yet. It is not
    encrypted: whoever has it has everything that was ever said.
    """
    with opening.user(common, "read") as user:
        written = user.export(file, adapters=not no_adapters)
    show(common, written, str(written.path))
    note(
        common,
        f"{written.turns} turns, {written.signals} signals, {written.revisions} revisions, {written.adapters} adapters;"
        f" {written.bytes:,} bytes. To take it in: personalpeft import",
    )


@command("import", examples=("personalpeft import ada.personal", "personalpeft import ada.personal --as ada.home"))
@click.argument("file")
@click.option("--as", "as_user", metavar="ID", help="Under this name.  [default: that of the file]")
def import_(common: Common, file: str, as_user: str | None) -> None:
    """Take in the user of a FILE that export wrote.

    There must be nobody of that name yet. What was built comes along, and is live at once, where it was built on the base
    that is open; else the next learn builds it from what was said.
    """
    display = Display(common)
    with opening.opened(common, "make", display) as runtime, display:
        taken = runtime.import_user(file, as_user=as_user)
    show(common, taken, taken.user)
    note(common, f"{taken.turns} turns, {taken.signals} signals, {taken.revisions} revisions came in.")
    if taken.left_out:
        note(common, f"{taken.left_out} revisions did not: {taken.why}. Next: personalpeft learn --user {taken.user}")


@command(
    "export-peft", examples=("personalpeft export-peft my-adapter", "personalpeft export-peft --layer style my-style")
)
@click.argument("folder")
@click.option("--layer", help="Only this layer.  [default: the whole stack as one adapter]")
def export_peft(common: Common, folder: str, layer: str | None) -> None:
    """Write what is live as an adapter that PEFT loads.

    FOLDER must be empty or not there.
    """
    display = Display(common)
    with opening.user(common, "read", display) as user, display:
        target = user.export_peft(folder, layer=layer)
    show(common, {"folder": target, "user": user.id}, str(target))


@command(
    "import-peft",
    examples=("personalpeft import-peft my-adapter", "personalpeft import-peft my-adapter --layer skill.email"),
)
@click.argument("folder")
@click.option("--layer", default="style", show_default=True, help="What it becomes: style, memory or skill.NAME.")
def import_peft(common: Common, folder: str, layer: str) -> None:
    """Take a PEFT adapter in, and make it live.

    What is in FOLDER becomes a revision of a layer. It is not judged: naming it is your own word. To take it back: personalpeft rollback
    """
    from personalpeft.ids import check_layer_name

    check_layer_name(layer)
    display = Display(common)
    with opening.user(common, "make", display) as user, display:
        revision = user.import_peft(folder, layer=layer)
    show(common, revision, revision.id)
    note(common, f"Live for {user.id}. To take it back: personalpeft rollback {layer}")


@command(
    "export-gguf", examples=("personalpeft export-gguf ada.gguf", "personalpeft export-gguf --layer style style.gguf")
)
@click.argument("file")
@click.option("--layer", help="Only this layer.  [default: the whole stack as one adapter]")
def export_gguf(common: Common, file: str, layer: str | None) -> None:
    """Write what is live as an adapter that llama.cpp loads.

    It goes with the base's GGUF file. FILE must not be there yet.
    """
    display = Display(common)
    with opening.user(common, "read", display) as user, display:
        target = user.export_gguf(file, layer=layer)
    show(common, {"file": target, "user": user.id}, str(target))


@command("import-gguf", examples=("personalpeft import-gguf adapter.gguf --layer skill.email",))
@click.argument("file")
@click.option("--layer", default="style", show_default=True, help="What it becomes: style, memory or skill.NAME.")
def import_gguf(common: Common, file: str, layer: str) -> None:
    """Take a GGUF adapter in, and make it live.

    What is in FILE becomes a revision of a layer. It is not judged: naming it is your own word. To take it back: personalpeft rollback
    """
    from personalpeft.ids import check_layer_name

    check_layer_name(layer)
    display = Display(common)
    with opening.user(common, "make", display) as user, display:
        revision = user.import_gguf(file, layer=layer)
    show(common, revision, revision.id)
    note(common, f"Live for {user.id}. To take it back: personalpeft rollback {layer}")


@command(
    "export-merged", examples=("personalpeft export-merged my-model", "personalpeft export-merged --form gguf my-model")
)
@click.argument("folder")
@click.option(
    "--form",
    type=click.Choice(["safetensors", "gguf"]),
    default="safetensors",
    show_default=True,
    help="safetensors for transformers; gguf for llama.cpp, with a Modelfile for Ollama.",
)
def export_merged(common: Common, folder: str, form: str) -> None:
    """Write the base with what is live in its weights.

    A model for programs that know of no layers, as large as the base. FOLDER must be empty or not there.
    """
    display = Display(common)
    with opening.user(common, "read", display) as user, display:
        target = user.export_merged(folder, form="gguf" if form == "gguf" else "safetensors")
    show(common, {"folder": target, "user": user.id}, str(target))
    if form == "gguf":
        note(common, f"For Ollama: ollama create {user.id} -f {shlex.quote(str(target / 'Modelfile'))}")
