"""A base is resolved once into a cache that processes and versions share."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from base_makers import card, package, tiny_gguf
from filelock import FileLock
from tokenizers import Tokenizer

from personalpeft.backends.tokenizer import ChatTokenizer
from personalpeft.base_models.chat_template import render_chat
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base, Source
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
    assert again == replace(tiny, folder=again.folder)
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


DAY = 24 * 3600


def unused_for(entry: Path, days: float) -> None:
    at = entry.joinpath("base.json").stat().st_mtime - days * DAY
    os.utime(entry / "base.json", (at, at))


USE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from base_makers import card
from personalpeft.base_models.types import Source
from personalpeft.base_models.resolve import resolve_base

resolve_base(card(Source("folder", path=Path(sys.argv[2]))), cache=Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


def user_of(cache: Path, folder: Path) -> "subprocess.Popen[str]":
    """Start a process that has prepared a folder and uses it until its input ends."""
    arguments = [str(cache), str(folder), str(Path(__file__).parent)]
    user = subprocess.Popen(
        [sys.executable, "-c", USE, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert user.stdout is not None
    assert user.stdout.readline() == "ready\n"
    return user


def test_versions_of_an_older_format_are_deleted_after_a_week_without_use(
    tiny: Base, copied: Path
) -> None:
    key, _, _ = copied.name.partition("-")
    older, fresh, newer = (
        copied.with_name(f"{key}-{version}") for version in ("0.1", "0.2", "99.1")
    )
    other = copied.with_name(f"{'0' * 16}-0.1")
    for folder in (older, fresh, newer, other):
        shutil.copytree(copied, folder)
    for folder in (older, newer, other):
        unused_for(folder, days=8)
    unused_for(fresh, days=1)
    mine = copied.with_name("notes")
    mine.mkdir()
    assert resolve_base(tiny.card, cache=copied.parent.parent).digest == tiny.digest
    assert not older.exists()
    # Another process uses the second. The third has a newer format, and the fourth is of another
    # base.
    assert all(folder.exists() for folder in (fresh, newer, other, mine, copied))


def test_versions_of_changed_sources_are_deleted_after_a_week_without_use(
    tiny: Base, folder: Path, tmp_path: Path
) -> None:
    cache, mine = tmp_path / "cache", card(Source("folder", path=folder))
    elsewhere = card(Source("folder", path=tmp_path / "elsewhere"))
    shutil.copytree(folder, tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "chat_template.jinja").write_text("{# elsewhere #}" + tiny.template)
    kept = resolve_base(elsewhere, cache=cache)
    user_of(cache, folder).communicate()
    (folder / "chat_template.jinja").write_text("{# second #}" + tiny.template)
    resolve_base(mine, cache=cache)
    before = entries(cache)
    assert len(before) == 3
    for name in before:
        unused_for(cache / "bases" / name, days=8)
    # The second is the current content, and the other folder has no newer version.
    assert resolve_base(mine, cache=cache).template.startswith("{# second #}")
    assert len(entries(cache)) == 2
    assert resolve_base(elsewhere, cache=cache) == kept


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL there")
def test_version_in_use_by_a_process_stays_until_it_ends(
    tiny: Base, folder: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    user = user_of(cache, folder)
    (used,) = (cache / "bases" / name for name in entries(cache))
    (folder / "chat_template.jinja").write_text("{# another #}" + tiny.template)
    unused_for(used, days=8)
    mine = card(Source("folder", path=folder))
    resolve_base(mine, cache=cache)
    assert used.exists()
    user.kill()
    user.communicate()
    resolve_base(mine, cache=cache)
    assert not used.exists()
    assert len(entries(cache)) == 1


def test_leftovers_of_killed_processes_are_deleted_and_work_in_progress_stays(
    tiny: Base, copied: Path
) -> None:
    left, made = (copied.with_name(f"{letter * 16}-1.1.tmp-x") for letter in "ab")
    for folder in (left, made):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
    with FileLock(copied.with_name(f"{'b' * 16}-1.1.lock")):
        resolve_base(tiny.card, cache=copied.parent.parent)
        assert (left.exists(), made.exists()) == (False, True)
    resolve_base(tiny.card, cache=copied.parent.parent)
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


def test_split_gguf_is_unpacked_without_output_and_verified_each_time(
    tiny: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content = tiny_gguf(tiny, tmp_path / "tiny.gguf")
    package(tmp_path, "weights_part1", "a.part0", content[:50_000])
    package(tmp_path, "weights_part2", "a.part1", content[50_000:])
    monkeypatch.syspath_prepend(tmp_path)
    source = Source(
        "package",
        files=("weights_part1:a.part0", "weights_part2:a.part1"),
        digest="sha256:" + hashlib.sha256(content).hexdigest(),
    )
    stages: list[str] = []
    mine = card(source)
    base = resolve_base(
        mine, cache=tmp_path / "cache", progress=lambda stage, done: stages.append(stage)
    )
    assert capfd.readouterr() == ("", "")
    assert "Unpacking the weights" in stages
    assert base.template == tiny.template
    assert base.stop_tokens == ("<|im_end|>",)
    assert list(base.architecture.projections) == ["self_attn.q_proj", "self_attn.v_proj"]
    assert {path.suffix for path in base.folder.iterdir()} <= {".json", ".safetensors", ".jinja"}

    # SmolLM's tokenizer splits off each digit, so a space never joins one.
    tokenizer = Tokenizer.from_file(str(base.folder / "tokenizer.json"))
    assert tokenizer.encode(" 1", add_special_tokens=False).tokens == ["Ġ", "1"]

    assert resolve_base(mine, cache=tmp_path / "cache") == base
    (tmp_path / "weights_part2" / "a.part1").write_bytes(content[50_000:-1] + b"\xff")
    with pytest.raises(WeightsError):
        resolve_base(mine, cache=tmp_path / "cache")


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
    with pytest.raises(CardError, match="targets") as caught:
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
    with pytest.raises(WeightsError, match="HF_HUB_OFFLINE") as caught:
        resolve_base(card(Source("hub", repo="nobody/personalpeft-no-such-model")), cache=tmp_path)
    assert "folder" in caught.value.hint
