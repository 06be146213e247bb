"""The command ``personalpeft adopt``: saved weights become a layer of a user."""

from __future__ import annotations

import click

from personalpeft.clock import SYSTEM
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft_app import session
from personalpeft_app.interrupts import long_call
from personalpeft_app.options import GlobalOptions, command, option
from personalpeft_app.output import emit, info
from personalpeft_tinker_server import models
from personalpeft_tinker_server.checkpoints import Checkpoints
from personalpeft_tinker_server.database import FOLDER, Database
from personalpeft_tinker_server.sources import Sources


@command(
    "adopt",
    examples=(
        "adopt tinker://RUN/sampler_weights/NAME --layer skill.email --user ada",
        "adopt tinker://RUN/weights/NAME --accept",
    ),
)
@click.argument("path")
@option("--layer", default="style", help="The layer that they become: style, memory or skill.NAME.")
@click.option(
    "--accept",
    is_flag=True,
    help="Make them live even if the gate refuses them; that is recorded.",
)
def adopt(common: GlobalOptions, path: str, layer: str, accept: bool) -> None:
    """Make weights that a client of Tinker's API saved a layer of the user.

    PATH is what the client got when it saved them. A gate judges them on lessons that nothing live
    was trained on, and makes them live if they are better. Prints a report. A refusal is no error
    and changes nothing that is live. The server may run meanwhile.
    """
    check_layer_name(layer)
    request = models.Adopt(
        tinker_path=path, user=check_user_id(common.user_id()), layer=layer, accept=accept
    )
    with session.open_runtime(common, "change") as runtime, long_call(common) as watched:
        database = Database(runtime.plugin_data(FOLDER), beside_server=True)
        try:
            Sources(runtime, database).erase_forgotten()
            checkpoints = Checkpoints(runtime, database, SYSTEM)
            report = checkpoints.adopt(checkpoints.owner_of(path), request, **watched)
        finally:
            database.close()
    emit(common, report, str(report))
    if not report.live:
        info(common, "To make them live anyway: --accept")
