"""A manifest as JSON and back. What is read has exactly the fields of ``Manifest``, each of its type and within its bounds."""

from __future__ import annotations

import math
from typing import Any

from personalpeft.adapters.safe_io import DAMAGED, fault, parse_json, shown
from personalpeft.adapters.types import Manifest
from personalpeft.ids import LAYER_NAME
from personalpeft.types import canonical_json

FORMAT = 1
RANK_LIMIT = 1024
TEXT_LIMIT = 256
# Well below what readers take, since a manifest is written inside other JSON.
_DEPTH_LIMIT = 16
_FLOAT32_MAX = math.ldexp(2 - 2**-23, 127)

_FIELDS = frozenset(
    {"base", "layer", "rank", "scaling", "targets", "recipe", "signals", "below", "parent"}
)


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """The manifest as plain values."""
    return {
        "base": manifest.base,
        "layer": manifest.layer,
        "rank": manifest.rank,
        "scaling": float(manifest.scaling),
        "targets": list(manifest.targets),
        "recipe": dict(manifest.recipe),
        "signals": manifest.signals,
        "below": list(manifest.below),
        "parent": manifest.parent,
    }


def manifest_from_json(value: Any, *, source: str) -> Manifest:
    """The manifest that strictly parsed JSON describes. Raises ``AdapterError`` naming ``source`` and the field."""
    if not isinstance(value, dict):
        raise fault(source, "the manifest is not a JSON object.")
    if value.keys() != _FIELDS:
        wrong = sorted(value.keys() ^ _FIELDS)
        raise fault(source, f"the manifest lacks or does not know {shown(wrong)}.")

    def refuse(field: str, hint: str = DAMAGED) -> Exception:
        return fault(source, f"the manifest's {field} is {shown(value[field])}.", hint=hint)

    for field in ("base", "signals"):
        if not _is_text(value[field]):
            raise refuse(field)
    if value["parent"] is not None and not _is_text(value["parent"]):
        raise refuse("parent")
    for field in ("targets", "below"):
        if not isinstance(value[field], list) or not all(_is_text(item) for item in value[field]):
            raise refuse(field)
    if len(set(value["targets"])) != len(value["targets"]):
        raise refuse("targets")
    if not isinstance(value["layer"], str) or LAYER_NAME.fullmatch(value["layer"]) is None:
        raise refuse("layer", "Layers are called style, memory or skill.<name>.")
    if type(value["rank"]) is not int or not 1 <= value["rank"] <= RANK_LIMIT:
        raise refuse("rank", f"Ranks go from 1 to {RANK_LIMIT}.")
    if type(value["scaling"]) not in (int, float) or not 0 < value["scaling"] <= _FLOAT32_MAX:
        raise refuse("scaling", "A scaling is a number above 0.")
    if not isinstance(value["recipe"], dict):
        raise refuse("recipe")
    return Manifest(
        base=value["base"],
        layer=value["layer"],
        rank=value["rank"],
        scaling=float(value["scaling"]),
        targets=tuple(value["targets"]),
        recipe=value["recipe"],
        signals=value["signals"],
        below=tuple(value["below"]),
        parent=value["parent"],
    )


def check_format(value: Any, *, source: str, what: str) -> None:
    """Raises ``AdapterError`` unless ``value`` is the format version that this code reads; a newer one is called newer."""
    if type(value) is int and value > FORMAT:
        hint = "Update personalpeft to read it."
        raise fault(
            source,
            f"{what} has format {shown(value)}, newer than {FORMAT}, the newest known here.",
            hint=hint,
        )
    if type(value) is not int or value != FORMAT:
        raise fault(source, f"{what} has the format {shown(value)}; known is {FORMAT}.")


def canonical_manifest(manifest: Manifest, *, source: str) -> dict[str, Any]:
    """The manifest as plain values that can be read back; raises ``AdapterError`` where they could not."""
    try:
        text = canonical_json(manifest_to_json(manifest))
    except (TypeError, ValueError, RecursionError) as error:
        hint = "A recipe holds JSON values only: text, finite numbers, true, false, null, lists, objects."
        raise fault(
            source, f"the manifest cannot be written as JSON ({error}).", hint=hint
        ) from error
    value = parse_json(text, source=source, what="the manifest", depth=_DEPTH_LIMIT)
    manifest_from_json(value, source=source)
    return dict(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= TEXT_LIMIT and value.isprintable()
