"""Export a user's stack for other programs, and import their adapters as revisions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias, get_args

from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.gguf import import_gguf_lora, write_gguf_lora
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.formats.peft import export_peft, export_stack_peft, import_peft
from personalpeft.adapters.merge import write_merged_folder, write_merged_gguf
from personalpeft.adapters.types import Adapter
from personalpeft.backends.llamacpp.tokenizer_check import check_tokenizer
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.types import Base
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine
from personalpeft.errors import InvalidInput, WeightsError
from personalpeft.learning.layers import stack_below
from personalpeft.learning.publish import imported_revision
from personalpeft.store.store import Store
from personalpeft.types import Revision, Stack, StackEntry

MergedForm: TypeAlias = Literal["safetensors", "gguf"]
"""The format of a merged model: for transformers, or for llama.cpp and Ollama."""


def export_peft_folder(
    engine: Engine, entries: Sequence[StackEntry], folder: Path, *, whole: bool
) -> Path:
    """Write a whole stack as one LoRA, or its first entry alone. Return the folder."""
    target = folder.expanduser().absolute()
    base = engine.backend.base
    parts = [(engine.read_adapter(entry.digest), entry.weight) for entry in entries]
    if whole:
        export_stack_peft(parts, base.architecture, target, base_name=base.card.name)
    else:
        export_peft(parts[0][0], base.architecture, target, base_name=base.card.name)
    return target


def export_gguf(engine: Engine, entries: Sequence[StackEntry], file: Path) -> Path:
    """Write a stack as a GGUF LoRA and return the file."""
    target = file.expanduser().absolute()
    base = engine.backend.base
    names = _names(base)
    stack = compose([(engine.read_adapter(entry.digest), entry.weight) for entry in entries])
    if target.exists():
        raise InvalidInput(f"{target} already exists.", hint="Name a file that does not exist yet.")
    try:
        with TemporaryDirectory(prefix=".personalpeft-", dir=target.parent) as folder:
            part = Path(folder, target.name)
            write_gguf_lora(names, stack, part, title=f"personalpeft for {base.card.title}")
            part.replace(target)
    except OSError as error:
        raise InvalidInput(
            f"{target} cannot be written: {error.strerror or error}.",
            hint="Choose a place that can be written to.",
        ) from error
    return target


def export_merged(
    engine: Engine, entries: Sequence[StackEntry], folder: Path, form: MergedForm
) -> Path:
    """Merge a stack into the base's weights, write them, and return the folder."""
    if form not in get_args(MergedForm):
        raise InvalidInput(
            f"form must be one of {', '.join(get_args(MergedForm))}, got {form!a}.",
            hint="safetensors is for transformers, gguf for llama.cpp.",
        )
    target = folder.expanduser().absolute()
    base = engine.backend.base
    stack = compose([(engine.read_adapter(entry.digest), entry.weight) for entry in entries])
    if form == "gguf":
        write_merged_gguf(base, stack, target, partial(check_tokenizer, base))
    else:
        write_merged_folder(base, stack, target)
    return target


def import_peft_folder(
    store: Store, base: Base, clock: Clock, user: str, live: Stack, folder: Path, layer: str
) -> Revision:
    """Record a PEFT folder as a revision of a layer and make it live, without a judgement."""
    started = clock.timer()
    adapter = import_peft(
        folder.expanduser().absolute(), base.architecture, layer=layer, base=base.digest
    )
    return _import(store, adapter, clock, started, user, live)


def import_gguf(
    store: Store, base: Base, clock: Clock, user: str, live: Stack, file: Path, layer: str
) -> Revision:
    """Record a GGUF LoRA as a revision of a layer and make it live, without a judgement."""
    started = clock.timer()
    target, names = file.expanduser().absolute(), _names(base)
    adapter = import_gguf_lora(target, base.architecture, names, layer=layer, base=base.digest)
    return _import(store, adapter, clock, started, user, live)


def _names(base: Base) -> GgufNames:
    """Return the base's tensor names in GGUF. A base without them is invalid input here."""
    try:
        return gguf_names(base)
    except WeightsError as error:
        raise InvalidInput(error.message, hint=error.hint) from error


def _import(
    store: Store, adapter: Adapter, clock: Clock, started: float, user: str, live: Stack
) -> Revision:
    manifest = adapter.manifest
    blob = pack(adapter)
    digest = store.blobs.put(blob)
    # A learn on top of it reads the shape from these keys, which a foreign recipe lacks.
    shape = {
        "rank": manifest.rank,
        "alpha": manifest.scaling * manifest.rank,
        "targets": list(manifest.targets),
    }
    revision = imported_revision(
        user,
        manifest.layer,
        digest,
        manifest.base,
        {**manifest.recipe, **shape},
        reason="imported by name, not judged",
        at=clock.now(),
        below=stack_below(store, user, live, manifest.layer).entries,
        seconds=clock.timer() - started,
    )
    store.catalog.add_revision(
        revision, blob, {"imported": revision.id}, promote=True, cause="import"
    )
    return revision
