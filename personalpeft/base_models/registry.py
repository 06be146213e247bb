"""The cards there are: those that ship with the package, and a user's own, which win over a shipped card of the same name."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from personalpeft.base_models.files import read_json
from personalpeft.base_models.model_card import parse_card, read_card
from personalpeft.base_models.types import ModelCard, Source
from personalpeft.errors import CardError, NotFound, suggest_nearest

_SHIPPED = "personalpeft_models"
# What most decoders call their linear layers. A model with other names gets an error that lists them, and needs a card.
_USUAL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def find_card(name: str | Path, *, cards: Sequence[Path] = ()) -> ModelCard:
    """The card of that name; or the one in a .toml file; or one made for a folder with a model in it.

    A ``Path``, or a name with a slash in it, that ends in ``.toml`` or begins with ``.`` or ``~``, is a path; anything else is looked up
    among ``all_cards(cards)``. Raises ``NotFound`` with the nearest name, ``CardError`` for a card with a mistake.
    """
    if isinstance(name, Path) or _is_path(name):
        path = Path(name).expanduser()
        return _card_of_folder(path.absolute()) if path.is_dir() else read_card(path.absolute())
    try:
        known = {card.name: card for card in all_cards(cards)}
    except CardError:
        # A mistake in a card that is not asked for must not keep the others from being opened.
        if any(folder.joinpath(f"{name}.toml").exists() for folder in cards) or name not in (
            known := _shipped()
        ):
            raise
    if name not in known:
        raise NotFound(
            f"There is no base called {name!r}.", hint=suggest_nearest(name, known, what="base")
        )
    return known[name]


def all_cards(folders: Sequence[Path] = ()) -> tuple[ModelCard, ...]:
    """Every card that ships and every ``*.toml`` of these folders, sorted by name. A folder that is not there holds none.

    Raises ``CardError`` for a card with a mistake, and for two cards of one name in the user's own folders.
    """
    known = _shipped()
    own: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            card = read_card(path)
            if card.name in own:
                raise CardError(
                    f"{path}: name {card.name!r} is also that of {own[card.name]}.",
                    hint="Rename one of the two.",
                )
            own[card.name] = path
            known[card.name] = card
    return tuple(known[name] for name in sorted(known))


def _shipped() -> dict[str, ModelCard]:
    shipped = resources.files(_SHIPPED)
    cards = (
        parse_card(entry.read_text("utf-8"), where=str(entry), folder=Path(str(shipped)))
        for entry in shipped.iterdir()
        if entry.name.endswith(".toml")
    )
    return {card.name: card for card in cards}


def _is_path(name: str) -> bool:
    separators = {"/", os.sep, os.altsep or "/"}
    return (
        name.endswith(".toml")
        or name.startswith((".", "~"))
        or any(separator in name for separator in separators)
    )


def _card_of_folder(folder: Path) -> ModelCard:
    if not (folder / "config.json").is_file():
        raise NotFound(
            f"There is no model in {folder}: it has no config.json.",
            hint="Give a folder with config.json, tokenizer.json and safetensors weights, or a card.",
        )
    config = read_json(folder / "config.json")
    context = config.get("max_position_embeddings")
    name = re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip("._-")[:64] or "folder"
    return ModelCard(
        name=name,
        title=folder.name or str(folder),
        licence="unknown",
        source=Source("folder", path=folder),
        targets=_USUAL_TARGETS,
        context=context if isinstance(context, int) and context > 0 else 2048,
    )
