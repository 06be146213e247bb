"""In and out: a user's stack as a PEFT folder, and a PEFT folder as a revision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from personalpeft.adapters.packed import pack
from personalpeft.adapters.peft_folder import export_peft, export_stack_peft, import_peft
from personalpeft.bases.base import Base
from personalpeft.clock import Clock
from personalpeft.learning.plan import layers_below
from personalpeft.learning.publishing import given
from personalpeft.serving.engine import Engine
from personalpeft.store.base import Store
from personalpeft.types import Revision, Stack, StackEntry


def write_folder(engine: Engine, entries: Sequence[StackEntry], folder: Path, *, whole: bool) -> Path:
    """Writes a whole stack as one LoRA, or the first entry as it was learned; the folder that was written."""
    target = folder.expanduser().absolute()
    base = engine.backend.base
    parts = [(engine.adapter(entry.digest), entry.weight) for entry in entries]
    if whole:
        export_stack_peft(parts, base.architecture, target, base_name=base.card.name)
    else:
        export_peft(parts[0][0], base.architecture, target, base_name=base.card.name)
    return target


def take_folder(store: Store, base: Base, clock: Clock, user: str, live: Stack, folder: Path, layer: str) -> Revision:
    """Records a PEFT folder as a revision of a layer, not judged, and makes it the head."""
    began = clock.timer()
    adapter = import_peft(folder.expanduser().absolute(), base.architecture, layer=layer, base=base.digest)
    blob = pack(adapter)
    digest = store.blobs.put(blob)
    manifest = adapter.manifest
    # A learn on top of it has to know its shape, which a foreign recipe does not say in our words.
    shape = {"rank": manifest.rank, "alpha": manifest.scaling * manifest.rank, "targets": list(manifest.targets)}
    revision = given(
        user,
        layer,
        digest,
        base.digest,
        {**manifest.recipe, **shape},
        reason="imported by name, not judged",
        at=clock.now(),
        below=layers_below(live, layer),
        seconds=clock.timer() - began,
    )
    store.catalog.add_revision(revision, blob, {"imported": revision.id}, promote=True, cause="import")
    return revision
