"""Cards are found by name, by path or by a folder with a model."""

import shutil
from pathlib import Path

import pytest

from personalpeft.base_models.registry import all_cards, find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base
from personalpeft.errors import CardError, NotFound

CARD = """\
name = "{name}"
title = "{title}"
licence = "MIT"
target_modules = ["q_proj"]
context_length = 128
[source]
kind = "hub"
repo = "owner/name"
"""


def write(folder: Path, file: str, name: str, title: str = "Mine") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(CARD.format(name=name, title=title))
    return folder


def test_each_included_card_can_be_read() -> None:
    names = [card.name for card in all_cards()]
    assert names == sorted(names)
    assert {
        "smollm2-135m-instruct",
        "tiny-random",
        "gemma3-270m",
        "qwen3-0.6b",
        "smollm2-1.7b-instruct",
    } <= set(names)
    assert all(card.licence and card.title for card in all_cards())


def test_users_card_overrides_an_included_one_of_the_same_name(tmp_path: Path) -> None:
    own = write(tmp_path / "models", "t.toml", "tiny-random", "My own")
    assert find_card("tiny-random", cards=[own]).title == "My own"
    assert find_card("tiny-random").title != "My own"


def test_missing_folder_of_cards_is_empty(tmp_path: Path) -> None:
    assert all_cards([tmp_path / "none"]) == all_cards()


def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(NotFound) as caught:
        find_card("smolm2-135m")
    assert "smollm2-135m-instruct" in caught.value.hint


def test_two_user_cards_of_one_name_are_refused(tmp_path: Path) -> None:
    own = write(tmp_path, "a.toml", "twin")
    write(tmp_path, "b.toml", "twin")
    with pytest.raises(CardError, match=r"b\.toml.*a\.toml"):
        find_card("twin", cards=[own])


def test_card_can_be_given_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "my.toml", "mine")
    monkeypatch.chdir(tmp_path)
    assert find_card("./my.toml").name == "mine"
    assert find_card("my.toml").name == "mine"
    assert find_card(tmp_path / "my.toml").name == "mine"
    with pytest.raises(NotFound):
        find_card("./other.toml")


def test_folder_with_a_model_gets_a_card(tiny: Base, tmp_path: Path) -> None:
    folder = tmp_path / "My Model"
    shutil.copytree(tiny.folder, folder)
    (folder / "chat_template.jinja").write_text(tiny.template)
    card = find_card(str(folder))
    assert (card.name, card.source.path, card.context) == ("my-model", folder, tiny.card.context)
    assert resolve_base(card, cache=tmp_path / "cache").architecture == tiny.architecture


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"config\.json"):
        find_card(tmp_path)


def test_error_in_one_card_does_not_affect_the_others(tmp_path: Path) -> None:
    (tmp_path / "broken.toml").write_text("name = ")
    assert find_card("tiny-random", cards=[tmp_path]).name == "tiny-random"
    for name in ("broken", "nowhere"):
        with pytest.raises(CardError, match=r"broken\.toml"):
            find_card(name, cards=[tmp_path])
