"""A digest is cached under a seal. A changed file is read again."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from personalpeft.base_models.cache import find_changed_files
from personalpeft.base_models.digest_cache import sealed_digest
from personalpeft.base_models.files import hash_files
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base

pytestmark = pytest.mark.skipif(os.name != "posix", reason="seals need a time of change")


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file whose last change was a minute ago."""
    path = tmp_path / "weights"
    path.write_bytes(b"0123456789")
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)
    return path


def needs_read(path: Path, cache: Path) -> bool:
    """Return whether computing the digest read the file, after a check of the digest."""
    shares: list[float] = []
    assert sealed_digest([path], cache, shares.append) == hash_files([path])
    return bool(shares)


def write_in_place(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"9876543210")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_file(path: Path) -> None:
    before = path.stat()
    fresh = path.with_name("fresh")
    fresh.write_bytes(path.read_bytes())
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path)


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def test_sealed_file_is_not_read_again(weights: Path, tmp_path: Path) -> None:
    assert needs_read(weights, tmp_path / "cache")
    assert not needs_read(weights, tmp_path / "cache")


@pytest.mark.parametrize("change", [write_in_place, replace_file, touch, append])
def test_changed_file_is_read_again(
    weights: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    needs_read(weights, tmp_path / "cache")
    change(weights)
    assert needs_read(weights, tmp_path / "cache")


def test_file_that_just_changed_is_not_sealed(tmp_path: Path) -> None:
    fresh = tmp_path / "fresh"
    fresh.write_bytes(b"0")
    assert needs_read(fresh, tmp_path / "cache")
    assert needs_read(fresh, tmp_path / "cache")


@pytest.mark.parametrize("text", ["", "[]", '{"paths": 1}', "[" * 100_000])
def test_damaged_seal_is_ignored(weights: Path, tmp_path: Path, text: str) -> None:
    needs_read(weights, tmp_path / "cache")
    (seal,) = (tmp_path / "cache" / "seals").iterdir()
    seal.write_text(text)
    assert needs_read(weights, tmp_path / "cache")


def test_seals_are_private_and_writable_ones_are_ignored(weights: Path, tmp_path: Path) -> None:
    needs_read(weights, tmp_path / "cache")
    (seal,) = (tmp_path / "cache" / "seals").iterdir()
    assert not seal.stat().st_mode & 0o077
    assert not seal.parent.stat().st_mode & 0o077
    seal.chmod(0o666)
    assert needs_read(weights, tmp_path / "cache")


def test_changed_base_is_found_and_prepared_again(tiny_copy: tuple[Base, Path]) -> None:
    base, cache = tiny_copy
    assert find_changed_files(cache) == []
    file = base.folder / "model.safetensors"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert find_changed_files(cache) == [file]
    assert resolve_base(base.card, cache=cache).digest == base.digest
    assert find_changed_files(cache) == []


@pytest.fixture
def tiny_copy(tiny: Base, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Base, Path]:
    """Return the tiny base, sealed in a cache of its own."""
    cache = tmp_path / "cache"
    resolve_base(tiny.card, cache=cache)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)
    base = resolve_base(tiny.card, cache=cache)
    assert any((cache / "seals").iterdir())
    return base, cache
