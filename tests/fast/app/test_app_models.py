"""``models add`` makes a card that --base can name, and leaves nothing where it fails."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
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


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


# A file with a change, by what is wrong with it.
DAMAGED_FILES: dict[str, Callable[[bytes], bytes]] = {
    "another magic": lambda content: b"FUGG" + content[4:],
    "cut off in its header": lambda content: content[:500],
    "cut off in its weights": lambda content: content[:-5000],
    "2**63 tensors": lambda content: content[:8] + bytes(7) + b"\x80" + content[16:],
    "2**63 keys": lambda content: content[:16] + bytes(7) + b"\x80" + content[24:],
    "a tensor's name that is not UTF-8": replaced(b"blk.0.attn_q.w", b"blk.0.attn_\xff.w"),
    "a key that is not UTF-8": replaced(b"general.name", b"general.\xff\xfe\xfd\xfc"),
    "half a surrogate in its name": replaced(b"Tiny qwen3", b"Ti\xed\xa0\x80qwen3"),
    "no tokenizer": replaced(b"tokenizer.ggml", b"tokenizer.gone"),
    "a merge of three tokens": replaced("Ġ 1".encode(), b"1 1 "),
    "the other order of bytes": lambda content: content[:4] + b"\0\0\0\3" + content[8:],
}


@pytest.mark.parametrize("what", DAMAGED_FILES)
def test_a_damaged_file_is_refused_and_leaves_no_card(
    what: str, shell: Shell, file: Path, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    content = DAMAGED_FILES[what](file.read_bytes())
    assert content != file.read_bytes()
    damaged.write_bytes(content)
    assert_refused(shell, damaged, "--no-try")


def config_with(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, **changes}), "utf-8")

    return change


def holding(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def with_index(content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(content, "utf-8")

    return change


def with_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def replace_weights(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return replace_weights


DAMAGED_FOLDERS: dict[str, Callable[[Path], None]] = {
    "no tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
    "an empty tokenizer": holding("tokenizer.json", b""),
    "a config of zeros": holding("config.json", bytes(4000)),
    "a config that is not UTF-8": holding("config.json", b'{"\xff": 1}'),
    "a config that is nested too deeply": holding("config.json", b"[" * 100_000),
    "rotary settings that are a number": config_with(rope_parameters=5),
    "text as a size": config_with(hidden_size="64"),
    "a size of its blocks that its weights have not": config_with(hidden_size=2**40),
    "a billion blocks": config_with(num_hidden_layers=10**9),
    "no blocks": config_with(num_hidden_layers=0),
    "no weights in their file": holding("model.safetensors", b""),
    "weights of zeros": holding("model.safetensors", bytes(4000)),
    "weights that are cut off": with_weights(lambda content: content[:-5000]),
    "a huge header of its weights": with_weights(lambda content: b"\xff" * 7 + content[7:]),
    "a weight's name that is not UTF-8": with_weights(replaced(b"embed_tok", b"embed_\xffok")),
    "an index of lists": with_index('{"weight_map": {"x": ["a.safetensors"]}}'),
    "an index that leads elsewhere": with_index('{"weight_map": {"x": "../a.safetensors"}}'),
    "an index with half a surrogate": with_index('{"weight_map": {"x": "\\ud800.safetensors"}}'),
    "a template that is not UTF-8": holding("chat_template.jinja", b"\xff\xfe"),
}


@pytest.fixture
def folder(tiny_base: Base, tmp_path: Path) -> Path:
    """A model in Hugging Face format."""
    path = tmp_path / "my model"
    shutil.copytree(tiny_base.folder, path)
    (path / "chat_template.jinja").write_text(TEMPLATE, "utf-8")
    return path


@pytest.mark.parametrize("what", DAMAGED_FOLDERS)
def test_a_damaged_folder_is_refused_and_leaves_no_card(
    what: str, shell: Shell, folder: Path
) -> None:
    DAMAGED_FOLDERS[what](folder)
    assert_refused(shell, folder, "--no-try")


# Only loading the model finds these.
UNLOADABLE_FOLDERS: dict[str, Callable[[Path], None]] = {
    "fewer tokens than embeddings": config_with(vocab_size=3),
    "more tokens than memory holds": config_with(vocab_size=2**50),
    "a weight of another name": with_weights(
        replaced(b"model.embed_tokens", b"model.embed_tokenx")
    ),
}


@pytest.mark.parametrize("what", UNLOADABLE_FOLDERS)
def test_a_folder_whose_weights_are_of_another_model_is_refused(
    what: str, shell: Shell, folder: Path
) -> None:
    UNLOADABLE_FOLDERS[what](folder)
    assert_refused(shell, folder)


def test_a_setting_that_a_folder_leaves_to_its_kind_of_model_is_that_of_the_kind(
    shell: Shell, folder: Path
) -> None:
    config = json.loads((folder / "config.json").read_text("utf-8"))
    # A Llama has 32 heads unless its configuration says otherwise.
    del config["num_attention_heads"], config["head_dim"]
    (folder / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 16}), "utf-8")
    added = shell.run("models", "add", str(folder), backend="torch")
    assert added.exit_code == 0, added.output


def test_a_path_that_the_system_refuses_is_named(shell: Shell) -> None:
    assert_refused(shell, Path("x" * 5000))


def assert_refused(shell: Shell, path: Path, *args: str) -> None:
    refused = shell.run("models", "add", str(path), *args, backend="torch")
    assert refused.exit_code in (2, 3, 9), refused.output
    assert "error: " in refused.stderr
    assert "hint: " in refused.stderr
    assert "Traceback" not in refused.output
    assert cards_of(shell) == []
