"""A file of a stranger is refused with an error that says what to do, and nothing changes.

The kinds of damage below are applied to each kind of file that is read from others. The tests of
each format hold the damage that only that format can have.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from adapter_files import ARCHITECTURE, BASE, make_adapter
from example_counts import EXHAUSTIVE, all_cases
from gguf import GGUFWriter
from gguf_models import write_out
from hypothesis import settings
from runtime_makers import correct, open_runtime

from personalpeft import InvalidId, PersonalPeftError, Runtime, User
from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.gguf import import_gguf_lora, write_gguf_lora
from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.formats.peft import export_peft, import_peft
from personalpeft.adapters.types import Adapter
from personalpeft.base_models.gguf.tensor_names import GgufNames
from personalpeft.base_models.local_models import inspect_local_model
from personalpeft.base_models.model_card import read_card
from personalpeft.base_models.types import Base
from personalpeft.errors import AdapterError, CardError, PersonalFileError
from personalpeft.sandbox import Limits, run_reader
from personalpeft_app.peft_archive import unzip_adapter

NAMES = GgufNames("llama", {}, ARCHITECTURE.blocks, ARCHITECTURE.block_path, {})
CARD = (resources.files("personalpeft_models") / "tiny-random.toml").read_bytes()
# GLOBAL and REDUCE: os.system("exit 1").
PICKLE = b"\x80\x04cos\nsystem\n(S'exit 1'\ntR."
ENDLESS = (
    "{%- for message in messages %}{{ message.role + message.content }}{% endfor %}"
    "{%- for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)


@dataclass(frozen=True)
class Foreign:
    """A kind of file from others: a valid one, and what reads it."""

    good: bytes
    read: Callable[[Path], object]
    name: str = "file"


def model_file(path: Path, template: str = "{{ messages[0].content }}") -> Path:
    """Write the smallest GGUF model that can be a base."""
    writer = GGUFWriter(path, "llama")
    writer.add_name("Tiny")
    writer.add_block_count(1)
    for add in (writer.add_embedding_length, writer.add_feed_forward_length):
        add(8)
    writer.add_head_count(1)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "ab", "<|im_end|>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_chat_template(template)
    square = np.zeros((8, 8), np.float32)
    names = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    for name in names:
        writer.add_tensor(f"blk.0.{name}.weight", square)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", square[0])
    writer.add_tensor("token_embd.weight", square[:4])
    write_out(writer)
    return path


@dataclass(frozen=True)
class Homes:
    """Ada with something live, a bundle of hers, its result, and another home."""

    ada: User
    elsewhere: Runtime
    personal: bytes
    bundle: bytes
    result: bytes


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Homes]:
    folder = tmp_path_factory.mktemp("homes")
    with open_runtime(folder / "home") as runtime, open_runtime(folder / "elsewhere") as elsewhere:
        ada = runtime.user("ada")
        correct(ada)
        ada.learn()
        personal = ada.export(folder / "ada.personal").path.read_bytes()
        correct(ada, first=6)
        bundle = ada.bundle_learn()
        (result,) = elsewhere.learn_bundles([bundle])
        yield Homes(ada, elsewhere, personal, bundle, result)


def read_peft(folder: Path) -> Adapter:
    return import_peft(folder, ARCHITECTURE, layer="style", base=BASE)


def read_lora(path: Path) -> Adapter:
    return import_gguf_lora(path, ARCHITECTURE, NAMES, layer="style", base=BASE)


@pytest.fixture(scope="module")
def peft_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("peft") / "good"
    export_peft(make_adapter(), ARCHITECTURE, folder, base_name="tiny")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def foreign(
    homes: Homes, peft_files: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Foreign]:
    folder = tmp_path_factory.mktemp("foreign")
    lora = folder / "lora.gguf"
    write_gguf_lora(NAMES, compose([(make_adapter(), 1.0)]), lora)

    def read_base(path: Path) -> object:
        return inspect_local_model(path, cache=folder / "cache")

    def read_folder(path: Path) -> object:
        for name, data in peft_files.items():
            if name != path.name:
                (path.parent / name).write_bytes(data)
        return read_peft(path.parent)

    found = {f"PEFT {name}": Foreign(data, read_folder, name) for name, data in peft_files.items()}
    return found | {
        "packed": Foreign(pack(make_adapter()), lambda path: unpack(path.read_bytes(), source="x")),
        "GGUF adapter": Foreign(lora.read_bytes(), read_lora),
        "GGUF base": Foreign(model_file(folder / "base.gguf").read_bytes(), read_base),
        "card": Foreign(CARD, read_card, "card.toml"),
        "personal": Foreign(homes.personal, homes.elsewhere.import_user),
        "bundle": Foreign(
            homes.bundle, lambda path: homes.elsewhere.learn_bundles([path.read_bytes()])
        ),
        "result": Foreign(homes.result, lambda path: homes.ada.apply_learn(path.read_bytes())),
    }


KINDS = (
    *("PEFT adapter_model.safetensors", "PEFT adapter_config.json", "PEFT personalpeft.json"),
    *("packed", "GGUF adapter", "GGUF base", "card", "personal", "bundle", "result"),
)


@cache
def zip_bomb() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("personal.json", "bundle.json", "result.json", "ledger.jsonl"):
            archive.writestr(name, bytes(20 << 20))
    return file.getvalue()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "one byte": lambda data: data[:1],
    "first half": lambda data: data[: len(data) // 2],
    "second half": lambda data: data[len(data) // 2 :],
    "without its end": lambda data: data[:-40],
    "reversed": lambda data: data[::-1],
    "zeros": lambda data: bytes(len(data)),
    "ones": lambda data: b"\xff" * len(data),
    "noise": lambda data: random.Random(0).randbytes(len(data)),
    "huge lengths": lambda data: data[:4] + b"\xff" * 12 + data[16:-14] + b"\xff" * 12 + data[-2:],
    "pickle": lambda data: PICKLE,
    "web page": lambda data: b"<!DOCTYPE html><title>404</title>",
    "compressed": gzip.compress,
    "deep JSON": lambda data: b'{"a":' * 100_000,
    "long number": lambda data: b'{"a":' + b"9" * 100_000 + b"}",
    "zip bomb": lambda data: zip_bomb(),
    "program": lambda data: b"\x7fELF\x02\x01\x01" + bytes(200),
}


# Damage that readers refuse as they refuse other damage of this list.
LIKE_OTHERS = ("one byte", "second half", "reversed", "ones", "web page", "program", "compressed")


@pytest.mark.parametrize("damage", all_cases(DAMAGE, usual=DAMAGE.keys() - set(LIKE_OTHERS)))
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_file_of_a_stranger_is_refused(
    kind: str, damage: str, foreign: dict[str, Foreign], homes: Homes, tmp_path: Path
) -> None:
    file = tmp_path / foreign[kind].name
    file.write_bytes(DAMAGE[damage](foreign[kind].good))
    before = homes.ada.stack(), homes.elsewhere.users()
    with pytest.raises(PersonalPeftError) as caught:
        foreign[kind].read(file)
    assert caught.value.message
    assert caught.value.hint
    assert isinstance(caught.value, ValueError | OSError | LookupError)
    assert (homes.ada.stack(), homes.elsewhere.users()) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are a POSIX thing")
@pytest.mark.parametrize("place", ["missing", "folder", "pipe", "endless"])
@pytest.mark.parametrize(
    "kind", [each for each in KINDS if each not in ("packed", "bundle", "result")]
)
def test_what_is_no_plain_file_is_refused_at_once(
    kind: str, place: str, foreign: dict[str, Foreign], tmp_path: Path
) -> None:
    file = tmp_path / foreign[kind].name
    if place == "folder":
        file.mkdir()
    elif place == "pipe":
        os.mkfifo(file)
    elif place == "endless":
        file.symlink_to("/dev/zero")
    if (kind, place) == ("PEFT personalpeft.json", "missing"):
        return  # A folder of another program has none.
    with pytest.raises(PersonalPeftError):
        foreign[kind].read(file)


def test_template_that_never_ends_is_refused() -> None:
    # ``inspect_local_model`` allows more processor time.
    with pytest.raises(CardError, match="limit"):
        run_reader(
            "personalpeft.base_models.local_models:check_template",
            {"template": ENDLESS, "control": [], "bos": "", "eos": ""},
            Limits(memory=2 << 30, seconds=1),
            source="model",
            error=CardError,
        )


@pytest.mark.exhaustive
def test_model_with_a_template_that_never_ends_is_not_added(
    tmp_path: Path, tiny_base: Base
) -> None:
    with pytest.raises(CardError, match="chat template"):
        inspect_local_model(model_file(tmp_path / "model.gguf", ENDLESS), cache=tmp_path)
    folder = shutil.copytree(tiny_base.folder, tmp_path / "model")
    with pytest.raises(CardError, match="chat template"):
        inspect_local_model(folder, cache=tmp_path, template=ENDLESS)


def test_folder_with_a_template_that_takes_all_memory_is_not_added(
    tmp_path: Path, tiny_base: Base
) -> None:
    folder = shutil.copytree(tiny_base.folder, tmp_path / "model")
    with pytest.raises(CardError, match="chat template"):
        inspect_local_model(folder, cache=tmp_path, template="{{ 'a' * 10 ** 17 }}")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="uses a forked process")
@pytest.mark.parametrize("kind", ["personal", "bundle", "result", "zip"])
def test_file_of_a_stranger_is_not_read_where_no_child_can_be_started(
    kind: str, homes: Homes, peft_files: dict[str, bytes], tmp_path: Path
) -> None:
    def read() -> object:
        file, folder = tmp_path / "file", tmp_path / "folder"
        folder.mkdir()
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in peft_files.items():
                archive.writestr(name, data)
        match kind:
            case "personal":
                file.write_bytes(homes.personal)
                return homes.elsewhere.import_user(file, as_user="other")
            case "bundle":
                return homes.elsewhere.learn_bundles([homes.bundle])
            case "result":
                return homes.ada.apply_learn(homes.result)
        return unzip_adapter(file, folder)

    # The server of children belongs to the process that started it, so a fork needs another.
    child = os.fork()
    if child == 0:
        sys.executable = shutil.which("false") or ""
        try:
            read()
        except PersonalPeftError as error:
            os._exit(0 if "ended without a result" in error.message else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_card_of_many_bytes_is_not_read(tmp_path: Path) -> None:
    card = tmp_path / "card.toml"
    card.write_bytes(CARD + b"# " + b"x" * (2 << 20))
    with pytest.raises(PersonalPeftError):
        read_card(card)


# Every byte


def positions(size: int, some: int) -> range:
    """Every position of a file in the exhaustive profile, and some otherwise."""
    every = settings().max_examples >= EXHAUSTIVE
    return range(0, size, 1 if every else max(1, size // some))


def test_every_changed_byte_of_an_exported_adapter_is_refused(
    peft_files: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in peft_files.items():
        (tmp_path / name).write_bytes(data)
    name = "adapter_model.safetensors"
    good = peft_files[name]
    for position in positions(len(good), 25):
        changed = bytearray(good)
        changed[position] ^= 0xFF
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(AdapterError):
            read_peft(tmp_path)


@pytest.mark.parametrize("name", ["adapter_config.json", "personalpeft.json"])
def test_every_changed_byte_beside_an_exported_adapter_is_found(
    name: str, peft_files: dict[str, bytes], tmp_path: Path
) -> None:
    for each, data in peft_files.items():
        (tmp_path / each).write_bytes(data)
    assert read_peft(tmp_path)
    good = peft_files[name]
    for position in positions(len(good), 25):
        changed = bytearray(good)
        changed[position] ^= 1
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(AdapterError):
            read_peft(tmp_path)


def test_exported_folder_of_an_earlier_version_is_read(
    peft_files: dict[str, bytes], tmp_path: Path
) -> None:
    for each, data in peft_files.items():
        (tmp_path / each).write_bytes(data)
    about = json.loads(peft_files["personalpeft.json"])
    del about["config"], about["digest"]
    (tmp_path / "personalpeft.json").write_text(json.dumps(about), "utf-8")
    assert read_peft(tmp_path)


def test_every_changed_byte_of_an_exported_gguf_adapter_is_found(tmp_path: Path) -> None:
    path = tmp_path / "lora.gguf"
    stack = compose([(make_adapter(), 1.0)])
    write_gguf_lora(NAMES, stack, path, title="tiny", digest=True)
    good = path.read_bytes()
    assert read_lora(path)
    for position in {*positions(len(good), 50), *name_positions(good, b"personalpeft.sha256")}:
        changed = bytearray(good)
        changed[position] ^= 1
        path.write_bytes(changed)
        with pytest.raises(AdapterError):
            read_lora(path)
    # A file of another program has no digest.
    write_gguf_lora(NAMES, stack, path, title="tiny")
    assert read_lora(path)


def name_positions(data: bytes, name: bytes) -> range:
    at = data.index(name)
    return range(at, at + len(name))


def test_every_changed_byte_of_a_personal_file_gives_the_same_user_or_none(
    homes: Homes, tmp_path: Path
) -> None:
    good, file = homes.personal, tmp_path / "ada.personal"

    def imported(data: bytes) -> list[tuple[object, ...]]:
        """Import a user, and erase them again."""
        file.write_bytes(data)
        homes.elsewhere.import_user(file, as_user="copy")
        copy = homes.elsewhere.user("copy")
        found: list[tuple[object, ...]] = [
            *((turn.messages, turn.reply, turn.at) for turn in copy.turns()),
            *((each.digest, each.recipe) for each in copy.revisions()),
        ]
        homes.elsewhere.forget_user("copy")
        return found

    wanted = imported(good)
    for position in positions(len(good), 25):
        changed = bytearray(good)
        changed[position] ^= 0xFF
        try:
            found = imported(bytes(changed))
        except (PersonalFileError, InvalidId):
            assert homes.elsewhere.users() == ()
        else:
            assert found == wanted
