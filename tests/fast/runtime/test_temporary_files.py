"""What a killed process leaves of a user's words in temporary files is gone at the next opening."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from backend_makers import random_stack
from runtime_makers import open_runtime

from personalpeft import file_system
from personalpeft.backends.base import Backend
from personalpeft.backends.llamacpp.backend import load_stack
from personalpeft.base_models.gguf.tensor_names import gguf_names

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills a forked process")


@pytest.fixture(params=["memory", "disk"])
def folder(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """The folder of temporary files, in memory where there is some. No other test uses it."""
    parent = file_system.shared_memory() if request.param == "memory" else None
    with tempfile.TemporaryDirectory(dir=parent or tmp_path) as own:
        folder = Path(own)
        monkeypatch.setattr(tempfile, "tempdir", own)
        monkeypatch.setattr(file_system, "shared_memory", lambda: folder if parent else None)
        yield folder


def temporary_folders(folder: Path) -> set[Path]:
    return set(folder.glob("personalpeft-*"))


def load_and_die(backend: Backend) -> None:
    """Attach a stack in a child that is killed while llama.cpp loads it."""

    class DyingModel:
        def load_adapter(self, path: Path) -> Any:
            assert path.read_bytes().startswith(b"GGUF")
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        model: Any = DyingModel()
        names = gguf_names(backend.base)
        load_stack(model, names, random_stack(backend, 1))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has files without a name")
def test_kill_while_llamacpp_loads_an_adapter_leaves_no_file(
    folder: Path, torch_tiny: Backend
) -> None:
    before = temporary_folders(folder)
    load_and_die(torch_tiny)
    assert temporary_folders(folder) == before


def test_leftover_of_a_killed_process_is_deleted_at_the_next_opening(
    folder: Path, torch_tiny: Backend, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    before = temporary_folders(folder)
    load_and_die(torch_tiny)
    (left,) = temporary_folders(folder) - before
    assert [path.name for path in left.iterdir()] == ["stack.gguf"]
    with file_system.temporary_folder() as own, open_runtime(home):
        assert own.parent == folder
        assert not left.exists()
        # That of a living process stays.
        assert own.exists()
    assert not own.exists()
