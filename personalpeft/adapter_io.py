"""Implement the export of a user's stack for other programs, and the import of their adapters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias

from personalpeft import file_system, stacks
from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats import peft
from personalpeft.adapters.formats.gguf import import_gguf_lora, write_gguf_lora
from personalpeft.adapters.formats.packed import pack
from personalpeft.adapters.merge import write_merged_folder, write_merged_gguf
from personalpeft.adapters.types import Adapter
from personalpeft.adapters.validate import check_change
from personalpeft.arguments import check_choice
from personalpeft.backends.llamacpp.tokenizer_check import check_tokenizer
from personalpeft.base_models.files import hash_files
from personalpeft.base_models.gguf.tensor_names import GgufNames, gguf_names
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, NotFound, WeightsError, map_write_errors
from personalpeft.ids import check_layer_name
from personalpeft.learning.candidate import copied_recipe, imported_revision
from personalpeft.learning.gate.evidence import TRAINED_ELSEWHERE, Leakage
from personalpeft.learning.layers import stack_below
from personalpeft.services import Services
from personalpeft.store.exports import ExportKind
from personalpeft.types import Revision, StackEntry

MergedForm: TypeAlias = Literal["safetensors", "gguf"]
"""The format of a merged model: for transformers, or for llama.cpp and Ollama."""


def export_peft_folder(services: Services, user: str, folder: Path, layer: str | None) -> Path:
    """Implement ``User.export_peft``, which documents the arguments."""
    architecture, name = services.base.architecture, services.base.card.name
    with services.store.exports.recording(user, ExportKind.PEFT) as set_digest:
        parts = _live_adapters(services, user, layer)
        if layer is None:
            peft.export_stack_peft(parts, architecture, folder, base_name=name)
        else:
            peft.export_peft(parts[0][0], architecture, folder, base_name=name)
        set_digest(hash_files([folder / peft.TENSOR_FILE]))
    return folder


def export_gguf(services: Services, user: str, file: Path, layer: str | None) -> Path:
    """Implement ``User.export_gguf``, which documents the arguments."""
    names = _names(services.base)
    if file.exists():
        raise InvalidInput(f"{file} already exists.", hint="Name a file that does not exist yet.")
    with (
        map_write_errors(file),
        services.store.exports.recording(user, ExportKind.GGUF) as set_digest,
        TemporaryDirectory(prefix=".personalpeft-", dir=file.parent) as folder,
    ):
        part = Path(folder, file.name)
        title = f"personalpeft for {services.base.card.title}"
        stack = compose(_live_adapters(services, user, layer))
        write_gguf_lora(names, stack, part, title=title, digest=True)
        set_digest(hash_files([part]))
        file_system.replace(part, file)
    return file


def export_merged(services: Services, user: str, folder: Path, form: MergedForm) -> Path:
    """Implement ``User.export_merged``, which documents the arguments."""
    check_choice("form", form, MergedForm)
    base = services.base
    with services.store.exports.recording(user, ExportKind.MERGED):
        stack = compose(_live_adapters(services, user, None))
        if form == "gguf":
            write_merged_gguf(base, stack, folder, partial(check_tokenizer, base))
        else:
            write_merged_folder(base, stack, folder)
    return folder


def import_peft_folder(services: Services, user: str, folder: Path, layer: str) -> Revision:
    """Implement ``User.import_peft``, which documents the arguments."""
    started = services.clock.timer()
    return _record(services, user, read_peft_folder(services, folder, layer), started)


def copy_layer(services: Services, user: str, layer: str, new_layer: str) -> Revision:
    """Implement ``User.copy_layer``, which documents the arguments."""
    check_layer_name(new_layer)
    started = services.clock.timer()
    (entry,) = _live_entries(services, user, layer)
    adapter = services.engine.read_adapter(entry.digest)
    recipe = copied_recipe(adapter.manifest.recipe, entry.revision)
    manifest = replace(adapter.manifest, layer=new_layer, recipe=recipe)
    copy = replace(adapter, manifest=manifest)
    reason = f"copied from {entry.revision}, not judged"
    scores = services.store.catalog.revision(user, entry.revision).scores
    leakage = Leakage(**scores.get("leakage", {}))
    return _record(services, user, copy, started, reason, leakage)


def read_peft_folder(services: Services, folder: Path, layer: str) -> Adapter:
    """Return the adapter in a PEFT folder, for a layer. Raises ``AdapterError``, ``InvalidId``."""
    base = services.base
    adapter = peft.import_peft(folder, base.architecture, layer=layer, base=base.digest)
    check_change(adapter, str(folder))
    return adapter


def import_gguf(services: Services, user: str, file: Path, layer: str) -> Revision:
    """Implement ``User.import_gguf``, which documents the arguments."""
    started, base = services.clock.timer(), services.base
    names = _names(base)
    adapter = import_gguf_lora(file, base.architecture, names, layer=layer, base=base.digest)
    check_change(adapter, str(file))
    return _record(services, user, adapter, started)


def _live_adapters(services: Services, user: str, layer: str | None) -> list[tuple[Adapter, float]]:
    """Return the adapters of ``_live_entries`` with their weights."""
    read = services.engine.read_adapter
    entries = _live_entries(services, user, layer)
    return [(read(entry.digest), entry.weight) for entry in entries]


def _live_entries(services: Services, user: str, layer: str | None) -> tuple[StackEntry, ...]:
    """Return what is live of one layer, or of all enabled ones. Raises ``NotFound`` if nothing."""
    stack = (
        stacks.enabled_stack(services, user)
        if layer is None
        else stacks.select_layers(services, user, [layer])
    )
    if not stack.entries:
        what = layer or user
        raise NotFound(f"{what} has nothing live.", hint="Learn first, or roll back to a revision.")
    return stack.entries


def _names(base: Base) -> GgufNames:
    """Return the base's tensor names in GGUF. A base without them is invalid input here."""
    try:
        return gguf_names(base)
    except WeightsError as error:
        raise InvalidInput(error.message, hint=error.hint) from error


def _record(
    services: Services,
    user: str,
    adapter: Adapter,
    started: float,
    reason: str = "imported by name, not judged",
    leakage: Leakage = TRAINED_ELSEWHERE,
) -> Revision:
    """Record an adapter as a revision of its layer and make it live, without a judgement."""
    store, clock, manifest = services.store, services.clock, adapter.manifest
    live = stacks.live_stack(services, user)
    blob = pack(adapter)
    digest = store.blobs.put(user, blob)
    revision = imported_revision(
        user,
        manifest.layer,
        digest,
        manifest.base,
        manifest.stored_recipe,
        reason=reason,
        at=clock.now(),
        below=stack_below(store, user, live, manifest.layer).entries,
        seconds=clock.timer() - started,
        leakage=leakage,
    )
    store.catalog.add_revision(
        revision, blob, {"imported": revision.id}, promote=True, cause="import"
    )
    return revision
