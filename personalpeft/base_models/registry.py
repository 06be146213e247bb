"""Find cards. A user's own card replaces a shipped one of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from personalpeft.arguments import check_path
from personalpeft.base_models.files import max_positions, read_json
from personalpeft.base_models.model_card import parse_card, read_card
from personalpeft.base_models.types import ModelCard, Source
from personalpeft.errors import CardError, NotFound, suggest_nearest

_SHIPPED = "personalpeft_models"
# The linear layers of most decoders. A model with other names needs a card; the error lists them.
USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def find_card(name: str | Path, *, cards: Sequence[Path] = ()) -> ModelCard:
    """Return the card of a name, of a .toml file or of a folder with a model."""
    if isinstance(name, Path) or is_path(name):
        path = check_path("base", name)
        return _card_of_folder(path) if path.is_dir() else read_card(path)
    found, faults = read_cards(cards)
    known = {card.name: card for card in found}
    # A mistake in one card does not keep the others from being opened.
    if faults and (name not in known or any((each / f"{name}.toml").exists() for each in cards)):
        raise faults[0]
    if name not in known:
        raise NotFound(
            f"There is no base called {name!r}.", hint=suggest_nearest(name, known, what="base")
        )
    return known[name]


def all_cards(folders: Sequence[Path] = ()) -> tuple[ModelCard, ...]:
    """Return the shipped cards and every ``*.toml`` of these folders, sorted by name.

    Raises ``CardError`` where one of them is invalid.
    """
    cards, faults = read_cards(folders)
    if faults:
        raise faults[0]
    return cards


def read_cards(
    folders: Sequence[Path] = (),
) -> tuple[tuple[ModelCard, ...], tuple[CardError, ...]]:
    """Return the cards as ``all_cards`` does, without those that are invalid, and their errors."""
    known = _shipped()
    paths: dict[str, Path] = {}
    faults: list[CardError] = []
    for path in (path for folder in folders for path in sorted(folder.glob("*.toml"))):
        try:
            card = read_card(path)
        except CardError as error:
            faults.append(error)
            continue
        if card.name in paths:
            fault = f"{path}: name {card.name!r} is also that of {paths[card.name]}."
            faults.append(CardError(fault, hint="Rename one of the two."))
            known.pop(card.name, None)  # Neither is meant more than the other.
            continue
        paths[card.name] = path
        known[card.name] = card
    return tuple(known[name] for name in sorted(known)), tuple(faults)


def _shipped() -> dict[str, ModelCard]:
    folder = resources.files(_SHIPPED)
    cards = (
        parse_card(entry.read_text("utf-8"), where=str(entry), folder=Path(str(folder)))
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    )
    return {card.name: card for card in cards}


def is_path(name: str) -> bool:
    """Return whether a base is named by a path: with a slash, ``.toml``, or ``.`` or ``~`` first."""
    separators = {"/", os.sep, os.altsep or "/"}
    return name.endswith(".toml") or name.startswith((".", "~")) or not separators.isdisjoint(name)


def card_name(text: str) -> str:
    """Return a text in the characters of a card's name; empty if it has none of them."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("._-")[:64].rstrip("._-")


def _card_of_folder(folder: Path) -> ModelCard:
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model in {folder}: it has no config.json.",
            hint="Give a folder with config.json, tokenizer.json and safetensors, or a card.",
        )
    context = max_positions(read_json(folder / "config.json"))
    return ModelCard(
        name=card_name(folder.name) or "folder",
        title=folder.name or str(folder),
        licence="unknown",
        source=Source("folder", path=folder),
        targets=USUAL_TARGETS,
        context=context or 2048,
    )
