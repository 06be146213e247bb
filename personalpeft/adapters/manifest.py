"""Read and write an adapter's manifest as JSON."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from personalpeft.adapters.safe_io import Fault, parse_json, safe_repr
from personalpeft.adapters.types import Manifest
from personalpeft.types import canonical_json

FORMAT = 1
# Well below what readers take, since a manifest is written inside other JSON.
_DEPTH_LIMIT = 16
_MANIFEST = TypeAdapter(Manifest)


def manifest_from_json(value: Any) -> Manifest:
    """Return the manifest that strictly parsed JSON describes. Raises ``Fault``."""
    if not isinstance(value, dict):
        raise Fault("the manifest is not a JSON object.")
    if wrong := sorted(value.keys() ^ {field.name for field in fields(Manifest)}):
        raise Fault(f"the manifest lacks or does not know {safe_repr(wrong)}.")
    try:
        # JSON, since in Python pydantic's strict mode takes no list for a tuple.
        return _MANIFEST.validate_json(canonical_json(value))
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise Fault(f"the manifest's {name} is {safe_repr(value[name])}.") from None


def check_format(value: Any, *, what: str) -> None:
    """Check that a format version is the one that this code reads.

    Args:
        value: The version.
        what: The part of the file that has the version, for errors.
    """
    if type(value) is not int or value != FORMAT:
        raise Fault(
            f"{what} has format {safe_repr(value)}; this version reads {FORMAT}.",
            hint="Update personalpeft to read a newer file. Otherwise it is damaged.",
        )


def canonical_manifest(manifest: Manifest) -> dict[str, Any]:
    """Return the manifest as plain values that can be read back. Raises ``Fault``."""
    try:
        text = canonical_json({**asdict(manifest), "scaling": float(manifest.scaling)})
    except (TypeError, ValueError, RecursionError) as error:
        raise Fault(
            f"the manifest cannot be written as JSON ({error}).",
            hint="A recipe holds JSON values only: text, finite numbers, booleans, lists, objects.",
        ) from error
    value = parse_json(text, what="the manifest", depth=_DEPTH_LIMIT)
    manifest_from_json(value)
    return dict(value)
