"""Write a card as TOML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from personalpeft import host
from personalpeft.base_models.types import ModelCard
from personalpeft.errors import CardError


def write_card(card: ModelCard, folder: Path) -> Path:
    """Write a card into a folder of cards, and return its file. Replaces none.

    Raises:
        CardError: There is such a file, or the folder cannot be written.
    """
    target = folder / f"{card.name}.toml"
    try:
        if target.exists():
            raise CardError(f"{target} exists already.", hint="Choose another name: --name NAME")
        host.write_file_atomically(target, card_text(card).encode())
    except OSError as error:
        raise CardError(
            f"{target} cannot be written: {error.strerror}.", hint="Check the folder's permissions."
        ) from error
    return target


def card_text(card: ModelCard) -> str:
    """Return a card of kind ``gguf`` or ``folder`` as TOML."""
    source, sampling = card.source, card.sampling
    tables: list[tuple[str, Mapping[str, Any]]] = [
        (
            "",
            {
                "name": card.name,
                "title": card.title,
                "licence": card.licence,
                "note": card.note,
                "target_modules": list(card.targets),
                "context_length": card.context,
                "system_prompt": card.system,
                "stop_tokens": list(card.stop_tokens),
                "chat_template": card.template,
                "tool_format": card.tool_format,
            },
        ),
        ("source", {"kind": source.kind, "path": str(source.path), "digest": source.digest}),
        (
            "sampling",
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_tokens,
            },
        ),
    ]
    plain = {key: value for key, value in card.learning.items() if not isinstance(value, Mapping)}
    if plain:
        tables.append(("learning", plain))
    tables += [
        (f"learning.{key}", value)
        for key, value in card.learning.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join(
        (f"[{name}]\n" if name else "")
        + "".join(f"{key} = {_toml(value)}\n" for key, value in table.items() if value)
        for name, table in tables
    )


def _toml(value: Any) -> str:
    if isinstance(value, bool | int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # TOML has JSON's texts, but no surrogate pairs, and wants DEL escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
