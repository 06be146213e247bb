"""Compiled kernels are loaded only from paths that no other account can write."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from personalpeft import host
from personalpeft.backends.torch.ops.base import NoKernels
from personalpeft.backends.torch.ops.cpu_ops import CpuOps
from personalpeft.backends.torch.ops.native_library import load_library

pytestmark = pytest.mark.skipif(
    not hasattr(os, "getuid"), reason="files here have no owner by number"
)

# Runs when the library is loaded, as another account's library would.
_FOREIGN = """
#include <stdlib.h>
__attribute__((constructor)) static void run(void) { system("touch \\"$FOREIGN_MARK\\""); }
"""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that writes a marker file when it is loaded."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.c").write_text(_FOREIGN)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "foreign.c", "-o", "foreign.so"], cwd=folder, check=True
    )
    return folder / "foreign.so"


@pytest.fixture(scope="module")
def built(shared_cache: Path) -> Path:
    """A cache that holds built kernels."""
    try:
        CpuOps(shared_cache, torch.float32)
    except NoKernels as why:
        pytest.skip(str(why))
    return shared_cache / "kernels"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    mark = tmp_path / "mark"
    monkeypatch.setenv("FOREIGN_MARK", str(mark))
    return mark


@pytest.fixture
def no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables the compiler, so that a refusal takes no time."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "touch"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program) or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


@pytest.fixture
def planted(tmp_path: Path, built: Path, foreign: Path, mark: Path) -> Path:
    """A cache whose libraries another account has replaced."""
    cache = tmp_path / "cache"
    shutil.copytree(built, cache / "kernels")
    for folder in (cache, cache / "kernels", *(cache / "kernels").iterdir()):
        folder.chmod(0o700)
    for library in (cache / "kernels").glob("*/native.so"):
        library.unlink()
        shutil.copyfile(foreign, library)
        library.chmod(0o700)
    return cache


def _libraries(cache: Path) -> list[Path]:
    return list((cache / "kernels").glob("*/native.so"))


@pytest.mark.parametrize(
    ("place", "mode"),
    [
        ("cache/kernels/*/native.so", 0o722),
        ("cache/kernels/*", 0o777),
        ("cache/kernels", 0o770),
        ("cache", 0o777),
        ("", 0o777),
        pytest.param("cache/kernels/*/native.so", None, id="library of another"),
        pytest.param("cache/kernels/*", None, id="folder of another"),
    ],
)
@pytest.mark.usefixtures("no_compiler")
def test_a_library_that_another_account_could_have_written_is_never_loaded(
    planted: Path, mark: Path, place: str, mode: int | None
) -> None:
    if mode is None and os.getuid() != 0:
        pytest.skip("only root can give a file away")
    above = planted.parent
    for path in above.glob(place) if place else [above]:
        if mode is None:
            os.chown(path, 12345, -1)
        else:
            path.chmod(mode)
    with pytest.raises(NoKernels):
        CpuOps(planted, torch.float32)
    assert not mark.exists()


@pytest.mark.usefixtures("no_compiler")
def test_a_private_library_is_loaded_without_a_compiler(tmp_path: Path, built: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(built, cache / "kernels")
    CpuOps(cache, torch.float32)


# Stands in for a compiler: writes a line for each run, and links the library that was built before.
_COMPILER = """#!/bin/sh
echo "$*" >> "$COMPILER_LOG"
sleep 0.1
case "$*" in *-shared*) cp "$COMPILER_RESULT" native.so ;; esac
"""


def test_of_callers_that_start_together_one_compiles(
    tmp_path: Path, built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in host.compilers():
        (folder / name).write_text(_COMPILER)
        (folder / name).chmod(0o700)
    log = tmp_path / "log"
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("COMPILER_LOG", str(log))
    monkeypatch.setenv("COMPILER_RESULT", str(next(built.glob("*/native.so"))))
    with ThreadPoolExecutor(3) as threads:
        calls = [threads.submit(load_library, tmp_path / "cache", torch.float32) for _ in range(3)]
    assert all(call.result() for call in calls)
    assert len(log.read_text().splitlines()) == 2, "one run compiles and one links"


@pytest.mark.exhaustive
@pytest.mark.parametrize("mendable", [True, False])
def test_an_untrusted_library_is_rebuilt(planted: Path, mark: Path, mendable: bool) -> None:
    if not mendable and os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    for library in _libraries(planted):
        if mendable:
            library.chmod(0o722)
        else:
            # Built beside the cache, because its folder cannot be repaired here.
            os.chown(library.parent, 12345, -1)
    kernels = CpuOps(planted, torch.float32)
    assert kernels.argmax(torch.tensor([[1.0, 3.0, 2.0]])).tolist() == [1]
    assert not mark.exists()


def test_new_folders_are_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    before = os.umask(0o002)
    try:
        with pytest.raises(NoKernels):
            CpuOps(tmp_path / "cache", torch.float32)
    finally:
        os.umask(before)
    made = [
        tmp_path / "cache",
        tmp_path / "cache" / "kernels",
        *(tmp_path / "cache" / "kernels").iterdir(),
    ]
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in made] == [0o700] * 3
