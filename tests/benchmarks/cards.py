"""Cards for a benchmark: an unchanged base with other learning numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from personalpeft.base_models.types import ModelCard
from personalpeft.types import Json


def write_card(card: ModelCard, path: Path, *, learning: Json) -> Path:
    """Write the card with another ``[learning]`` table; base and digest stay the same."""
    # A source accepts only the keys of its kind, and a missing key means the empty value.
    source = {key: value for key, value in asdict(card.source).items() if value}
    content: dict[str, Any] = {**asdict(card), "source": source, "learning": learning}
    path.write_text("\n".join(_toml(content, ())) + "\n", "utf-8")
    return path


def _toml(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    said = {key: value for key, value in table.items() if value not in (None, "", (), [], {})}
    tables = {key: value for key, value in said.items() if isinstance(value, Mapping)}
    if path:
        yield f"[{'.'.join(path)}]"
    for key, value in said.items():
        if key not in tables:
            yield f"{key} = {_value(value)}"
    for key, value in tables.items():
        yield from _toml(value, (*path, key))


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
