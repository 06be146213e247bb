"""``models add`` makes a card that --base can name, and leaves nothing where it fails."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from app_makers import Shell
from gguf_models import TEMPLATE, write_model

from personalpeft.base_models.types import Base


@pytest.fixture
def file(tiny_base: Base, tmp_path: Path) -> Path:
    path = tmp_path / "my model.gguf"
    write_model("qwen3", tiny_base, path)
    return path


def cards_of(shell: Shell) -> list[str]:
    return sorted(each.name for each in (shell.home / "models").glob("*"))


def test_an_added_model_was_tried_and_answers_under_its_name(
    shell: Shell, file: Path, shared_cache: Path
) -> None:
    # Kernels are compiled there once for all tests.
    cache = {"PERSONALPEFT_CACHE": str(shared_cache)}
    words = ("models", "add", str(file), "--name", "mine", "--json")
    added = shell.run(*words, backend="torch", **cache)
    assert added.exit_code == 0, added.output
    data = json.loads(added.stdout)
    model = data["model"]
    assert (model["architecture"], model["quantisation"]) == ("qwen3", "F32")
    assert model["has_template"]
    assert data["reply"] is not None
    assert cards_of(shell) == ["mine.toml"]
    listed = json.loads(shell.run("models", "--json", **cache).stdout)["models"]
    assert [each["weights"] for each in listed if each["name"] == "mine"] == ["here"]
    args = ("ask", "Hello", "--base", "mine", "--max-tokens", "3")
    asked = shell.run(*args, backend="torch", **cache)
    assert asked.exit_code == 0, asked.output


def test_adding_without_a_try_loads_nothing(shell: Shell, file: Path) -> None:
    added = shell.run("models", "add", str(file), "--no-try", "--json", backend="torch")
    assert added.exit_code == 0, added.output
    data = json.loads(added.stdout)
    assert (data["name"], data["reply"]) == ("tiny-qwen3", None)
    assert data["model"]["parameters"] > 0
    assert Path(data["card"]).is_file()
    assert not (shell.cache / "bases").exists()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"\x00" * 4000, b"GGUF" + b"\xff" * 4000])
def test_a_file_that_is_no_model_leaves_no_card(
    content: bytes, shell: Shell, tmp_path: Path
) -> None:
    path = tmp_path / "no.gguf"
    path.write_bytes(content)
    refused = shell.run("models", "add", str(path))
    assert refused.exit_code not in (0, 1)
    assert "error: " in refused.stderr
    assert "hint: " in refused.stderr
    assert not shell.home.exists()


def test_a_model_that_does_not_load_leaves_no_card(
    shell: Shell, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shell.cache / "bases").parent.mkdir(parents=True, exist_ok=True)
    (shell.cache / "bases").write_text("in the way")
    refused = shell.run("models", "add", str(file), backend="torch")
    assert refused.exit_code != 0
    assert cards_of(shell) == []


def test_a_model_larger_than_the_free_memory_is_added_untried(
    shell: Shell, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("personalpeft.host.free_memory", lambda: 1000)
    added = shell.run("models", "add", str(file), "--json", backend="torch")
    assert added.exit_code == 0, added.output
    assert json.loads(added.stdout)["reply"] is None
    assert cards_of(shell) == ["tiny-qwen3.toml"]


def test_a_given_template_is_used(shell: Shell, tiny_base: Base, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model("qwen3", tiny_base, path, template=None)
    refused = shell.run("models", "add", str(path), "--json")
    assert json.loads(refused.stderr)["error"]["kind"] == "CardError"
    assert "--chat-template" in refused.stderr
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    args = ("models", "add", str(path), "--no-try", "--json", "--chat-template", str(template))
    added = shell.run(*args)
    assert added.exit_code == 0, added.output
    assert json.loads(added.stdout)["model"]["has_template"] is False
    assert shell.run(*args[:-1], str(tmp_path / "none")).exit_code != 0


def test_models_of_other_programs_are_listed_with_what_to_type(
    shell: Shell, file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "llama's cache"
    folder.mkdir()
    (folder / "some $HOME(1).gguf").write_bytes(file.read_bytes())
    elsewhere = {"HOME": str(tmp_path), "LLAMA_CACHE": str(folder)}
    listed = shell.run("models", "add", **elsewhere)
    assert listed.exit_code == 0, listed.output
    (line,) = (each for each in listed.stdout.splitlines() if "models add" in each)
    typed = line[line.index("personalpeft models add") :]
    words = subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {typed}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words == ["personalpeft", "models", "add", str(folder / "some $HOME(1).gguf")]
    nowhere = {"HOME": str(tmp_path / "none"), "LLAMA_CACHE": str(tmp_path / "no")}
    none = shell.run("models", "add", "--json", **nowhere)
    assert json.loads(none.stdout)["found"] == []
