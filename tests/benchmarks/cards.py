"""Cards for a benchmark: an unchanged base with other learning numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from personalpeft.base_models.model_card import card_text
from personalpeft.base_models.types import ModelCard
from personalpeft.types import Json


def write_card(card: ModelCard, path: Path, *, learning: Json) -> Path:
    """Write the card with another ``[learning]`` table; base and digest stay the same."""
    path.write_text(card_text(replace(card, learning=learning)), "utf-8")
    return path
