"""Read and write an adapter's manifest as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from personalpeft.adapters.safe_io import DAMAGED, format_error, parse_json, safe_repr
from personalpeft.adapters.types import Manifest
from personalpeft.ids import LAYER_NAME
from personalpeft.types import canonical_json

FORMAT = 1
RANK_LIMIT = 1024
TEXT_LIMIT = 256
# Well below what readers take, since a manifest is written inside other JSON.
_DEPTH_LIMIT = 16
_FLOAT32_MAX = math.ldexp(2 - 2**-23, 127)
_HINTS = {
    "layer": "Layers are called style, memory or skill.<name>.",
    "rank": f"Ranks go from 1 to {RANK_LIMIT}.",
    "scaling": "A scaling is a number above 0.",
}


def _require(holds: Callable[[Any], object]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not holds(value):
            raise ValueError("out of bounds")
        return value

    return AfterValidator(check)


_Text = Annotated[str, Field(min_length=1, max_length=TEXT_LIMIT), _require(str.isprintable)]


class _ManifestFields(BaseModel):
    """The fields of ``Manifest`` as strictly parsed JSON has them."""

    model_config = ConfigDict(strict=True, extra="forbid", defer_build=True)

    base: _Text
    layer: Annotated[str, _require(LAYER_NAME.fullmatch)]
    rank: Annotated[int, Field(ge=1, le=RANK_LIMIT)]
    scaling: Annotated[float, Field(gt=0, le=_FLOAT32_MAX)]
    targets: Annotated[list[_Text], _require(lambda names: len(set(names)) == len(names))]
    recipe: dict[str, Any]
    signals: _Text
    below: list[_Text]
    parent: _Text | None


def manifest_from_json(value: Any, *, source: str) -> Manifest:
    """Return the manifest that strictly parsed JSON describes."""
    if not isinstance(value, dict):
        raise format_error(source, "the manifest is not a JSON object.")
    if wrong := sorted(value.keys() ^ _ManifestFields.model_fields.keys()):
        raise format_error(source, f"the manifest lacks or does not know {safe_repr(wrong)}.")
    try:
        fields = _ManifestFields.model_validate(value)
    except ValidationError as error:
        name = str(error.errors()[0]["loc"][0])
        raise format_error(
            source,
            f"the manifest's {name} is {safe_repr(value[name])}.",
            hint=_HINTS.get(name, DAMAGED),
        ) from None
    return Manifest(
        **{**dict(fields), "targets": tuple(fields.targets), "below": tuple(fields.below)}
    )


def check_format(value: Any, *, source: str, what: str) -> None:
    """Check that a format version is the one that this code reads.

    Args:
        value: The version.
        source: The file, for errors.
        what: The part of the file that has the version, for errors.
    """
    if type(value) is int and value > FORMAT:
        raise format_error(
            source,
            f"{what} has format {safe_repr(value)}; this version reads up to {FORMAT}.",
            hint="Update personalpeft to read it.",
        )
    if type(value) is not int or value != FORMAT:
        raise format_error(source, f"{what} must have format {FORMAT}, got {safe_repr(value)}.")


def canonical_manifest(manifest: Manifest, *, source: str) -> dict[str, Any]:
    """Return the manifest as plain values that can be read back."""
    try:
        text = canonical_json({**asdict(manifest), "scaling": float(manifest.scaling)})
    except (TypeError, ValueError, RecursionError) as error:
        raise format_error(
            source,
            f"the manifest cannot be written as JSON ({error}).",
            hint="A recipe holds JSON values only: text, finite numbers, booleans, lists, objects.",
        ) from error
    value = parse_json(text, source=source, what="the manifest", depth=_DEPTH_LIMIT)
    manifest_from_json(value, source=source)
    return dict(value)
