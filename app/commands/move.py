"""Taking adapters out and in."""

from __future__ import annotations

import click

from personalpeft_app import opening
from personalpeft_app.options import Common, command
from personalpeft_app.output import note, show
from personalpeft_app.progress import Display


@command("export", examples=("personalpeft export my-adapter", "personalpeft export --layer style my-style"))
@click.argument("folder")
@click.option("--format", "format_", default="peft", show_default=True, help="The format; so far there is one.")
@click.option("--layer", help="Only this layer.  [default: the whole stack as one adapter]")
def export(common: Common, folder: str, format_: str, layer: str | None) -> None:
    """Write what is live as an adapter that PEFT loads.

    FOLDER must be empty or not there.
    """
    display = Display(common)
    with opening.user(common, "read", display) as user, display:
        # A format that is unknown is refused by the library, whose message says which there are.
        target = user.export(folder, format=format_, layer=layer)  # type: ignore[arg-type]
    show(common, {"folder": target, "format": format_, "user": user.id}, str(target))


@command("import", examples=("personalpeft import my-adapter", "personalpeft import my-adapter --layer skill.email"))
@click.argument("folder")
@click.option("--layer", default="style", show_default=True, help="What it becomes: style, memory or skill.NAME.")
def import_(common: Common, folder: str, layer: str) -> None:
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
