"""What Linux has and other systems lack is missed by nothing: a plain way takes its place.

The tests take it away. They show that its absence is handled, not that another system works.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from runtime_makers import correct, greedy, open_runtime, quick_card

from personalpeft import file_system, host
from personalpeft.diagnostics import run_checks
from personalpeft.errors import Busy
from personalpeft.memory.languages import find_language
from personalpeft_app.cli import cli


@pytest.fixture(params=["darwin", "win32"])
def other_system(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """Take away what the system of that name lacks, and no other part of the process sees it."""
    name = str(request.param)
    # Its model is read through a temporary file, for which Python looked for O_TMPFILE long ago.
    find_language("What is this?")
    monkeypatch.setattr(host, "sys", SimpleNamespace(platform=name))
    for module in (host, file_system):
        monkeypatch.setattr(module, "Path", lambda path: Path(f"{tmp_path}/absent{path}"))
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.delattr(os, "O_TMPFILE")
    if name == "win32":
        for missing in ("getuid", "geteuid", "nice", "O_DIRECTORY"):
            monkeypatch.delattr(os, missing)
        monkeypatch.setenv("USERNAME", "somebody")  # Windows sets it.
        monkeypatch.delattr(signal, "SIGBUS")
        monkeypatch.setitem(sys.modules, "fcntl", None)
        monkeypatch.setattr(host, "ctypes", SimpleNamespace(CDLL=_no_global_names))
    cached = (host.cpu_flags, host.cuda_of_driver, host.cuda_of_torch, host.loaded_libraries)
    for function in cached:
        function.cache_clear()
    yield name
    for function in cached:
        function.cache_clear()


def _no_global_names(name: str | None) -> ctypes.CDLL:
    if name is None:
        raise TypeError("expected a path")
    raise OSError(f"could not find {name}")


# Windows lacks all that macOS lacks.
@pytest.mark.parametrize("other_system", ["win32"], indirect=True)
@pytest.mark.usefixtures("other_system")
def test_a_home_learns_chats_and_is_opened_again(home: Path, tmp_path: Path) -> None:
    card = quick_card(tmp_path)
    with open_runtime(home, card) as runtime:
        ada = runtime.user("ada")
        correct(ada)
        assert ada.learn().outcome == "promoted"
        replies = greedy(ada)
        runtime.maintenance.back_up(tmp_path / "copies")
    with open_runtime(home, card) as runtime:
        assert greedy(runtime.user("ada")) == replies
        assert runtime.verify() == ()


@pytest.mark.parametrize("other_system", ["win32"], indirect=True)
@pytest.mark.usefixtures("other_system")
def test_checkpoints_of_any_user_have_a_folder_that_windows_takes(home: Path) -> None:
    # Devices, and "ada" with the final dot that Windows drops.
    users = ["ada", "ada.", "con", "aux.x", "com1"]
    with open_runtime(home) as runtime:
        store = runtime._services.store
        for user in users:
            runtime.user(user)
            store.save_checkpoint(user, "style", user.encode())
        folders = {path.name for path in (home / "sessions").iterdir()}
        assert folders == {"ada", "_ada._", "_con_", "_aux.x_", "_com1_"}
        runtime.forget_user("ada.")
        assert store.load_checkpoint("ada", "style") == b"ada"
        assert not store.has_sessions("ada.")


@pytest.mark.usefixtures("other_system")
def test_doctor_says_what_the_processor_does_without(home: Path, tmp_path: Path) -> None:
    checks = run_checks(home, str(quick_card(tmp_path)), load=True)
    assert [check for check in checks if not check.ok] == []
    said = " ".join(check.message for check in checks)
    assert "does not multiply bfloat16" in said
    assert "plain kernels, slower: they are compiled on Linux only" in said


@pytest.mark.usefixtures("other_system")
def test_a_process_is_known_by_its_start(home: Path) -> None:
    with open_runtime(home) as runtime, runtime.maintenance.exclusive("daemon"):
        assert f"process {os.getpid()}" in (runtime.maintenance.holder("daemon") or "")
        (file,) = (home / "locks").glob("*.holder")
        file.write_text(file.read_text().replace(host.start_mark(os.getpid()), "1"))
        assert runtime.maintenance.holder("daemon") is None


def test_the_daemon_has_a_file_for_its_system_or_says_what_to_do(other_system: str) -> None:
    done = CliRunner().invoke(cli, ["daemon", "install"])
    if other_system == "darwin":
        assert "<plist" in done.output
    else:
        assert "run-once" in getattr(done.exception, "hint", done.output)


def test_the_file_of_the_daemon_finds_the_keys_of_the_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PERSONALPEFT_KEYS", str(tmp_path / "keys"))
    monkeypatch.setenv("PERSONALPEFT_PASSPHRASE", "correct horse")
    done = CliRunner().invoke(cli, ["daemon", "install", "--as", "systemd"])
    assert f"PERSONALPEFT_KEYS={tmp_path / 'keys'}" in done.stdout
    assert "correct horse" not in done.output


def _refuse(times: int) -> Callable[[Path, Path], None]:
    """Return a rename that Windows refuses so often, since a program has the target open."""
    rename, refused = os.replace, 0

    def replace(source: Path, target: Path) -> None:
        nonlocal refused
        if refused == times:
            return rename(source, target)
        refused += 1
        error = PermissionError(errno.EACCES, "Access is denied", str(source), None, str(target))
        error.winerror = 5  # type: ignore[attr-defined]
        raise error

    return replace


def test_a_file_that_is_open_for_a_moment_is_replaced(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home) as runtime:
        monkeypatch.setattr(os, "replace", _refuse(3))
        key, _ = runtime.api_keys.create("ada")
        assert key in runtime.api_keys.list_keys()


def test_a_file_that_stays_open_is_named_and_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_runtime(home) as runtime:
        key, _ = runtime.api_keys.create("ada")
        monkeypatch.setattr(os, "replace", _refuse(10**6))
        with pytest.raises(Busy, match="is open in another program") as error:
            runtime.api_keys.create("bob")
        assert ".part" not in str(error.value)
        assert runtime.api_keys.list_keys() == (key,)


def test_a_drive_that_cannot_flush_its_own_cache_is_synced_plainly(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    flushed, synced = [], []

    def control(handle: int, command: int) -> None:
        flushed.append(command)
        raise OSError(errno.ENOTSUP, "not supported")

    fsync = os.fsync
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", control)
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(handle) or fsync(handle))
    with open_runtime(home) as runtime:
        runtime.api_keys.create("ada")
    assert set(flushed) == {51}
    assert synced
