"""After a power cut a home has all that it promised.

A file system in a file takes the place of a disk. What its image holds at a moment is what a disk
would hold after a power cut. The same program whose calls of ``fsync`` do nothing is the control:
it must lose something.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from crash_makers import check_heads, find_problems, points
from crash_operations import contents, head_of, open_home
from interruption import can_interrupt, read_promises
from mounts import mounted

from personalpeft.errors import PersonalPeftError

_IMAGE_MB = 96
# Neither the file system nor the kernel writes by itself before the cut.
_MOUNT = ("-o", "loop,commit=600,noatime")


def _can_mount(folder: Path) -> bool:
    try:
        with mounted(_make_image(folder / "probe.img"), folder / "probe", *_MOUNT):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _make_image(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(_IMAGE_MB << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", path], check=True, capture_output=True)
    return path


@contextmanager
def _living(folder: Path, *, durable: bool) -> Iterator[tuple[int, socket.socket]]:
    """Run the operation without end; yield its process group and the socket of its promises."""
    script = Path(__file__).with_name("crash_operations.py")
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-B", str(script), "live", str(folder), str(theirs.fileno())]
    if not durable:
        syncs = "fsync,fdatasync,sync_file_range,msync"
        idle = ["-e", f"trace={syncs}", "-e", f"inject={syncs}:retval=0"]
        command = ["strace", "-f", "-qq", "--seccomp-bpf", "-o", os.devnull, *idle, *command]
    with ours, theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        try:
            yield process.pid, ours
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _cut(folder: Path, image: Path, count: int, *, durable: bool) -> Iterator[Sequence[str]]:
    """Cut the power ``count`` times, and yield each time what is wrong with the home."""
    chance, received, copy = random.Random(count), b"", folder / "after.img"
    with (
        mounted(image, folder / "disk", *_MOUNT) as disk,
        _living(disk, durable=durable) as (group, promises),
    ):
        while b"revision" not in received:
            received += promises.recv(1 << 16)
        for _ in range(count):
            time.sleep(chance.uniform(0.0, 0.5))
            os.killpg(group, signal.SIGSTOP)
            promises.setblocking(False)
            with suppress(BlockingIOError):
                received += promises.recv(1 << 20)
            shutil.copyfile(image, copy)
            os.killpg(group, signal.SIGCONT)
            with mounted(copy, folder / "after", *_MOUNT) as after:
                yield _find_losses(after, received)


def _find_losses(folder: Path, received: bytes) -> list[str]:
    if not (folder / "home" / "personalpeft.db").exists():
        return ["the database"]
    promises = read_promises(received)
    started = {what for kind, what in promises if kind == "started"}
    # An act that is under way may have replaced the state that an earlier one promised.
    state = dict[str, str | None]()
    for kind, what in promises:
        state |= {what: None} if kind == "started" else {kind: what}
    forgotten = [what for kind, what in promises if kind == "forgotten"]
    wrong = [f"{word} came back" for word in _words_in(folder / "home", forgotten)]
    try:
        kept = contents(folder)
        with open_home(folder) as runtime:
            check_heads(runtime)
            wrong += find_problems(runtime)
            head = head_of(runtime.user("ada"))
    except (PersonalPeftError, KeyError) as error:
        return [repr(error)]
    wrong += [
        what
        for kind, what in promises
        if kind in ("turn", "signal", "revision")
        and what not in started
        and what not in kept.get(f"ada {kind}", ())
    ]
    has_state = {
        "head": lambda revision: head == revision,
        "published": lambda name: not name or any((folder / "published").rglob(name)),
        "backup": lambda path: (folder / path / "personalpeft.db").is_file(),
        "user": lambda user: f"{user} turn" in kept,
    }
    return wrong + [
        f"{kind} {what}"
        for kind, what in state.items()
        if kind in has_state and what is not None and not has_state[kind](what)
    ]


def _words_in(folder: Path, words: Sequence[str]) -> list[str]:
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return [word for word in words if word.encode() in data]


@pytest.mark.exhaustive
@pytest.mark.skipif(not can_interrupt(), reason="needs strace")
def test_a_power_cut_loses_nothing_promised_and_loses_it_without_fsync(tmp_path: Path) -> None:
    if not _can_mount(tmp_path):
        pytest.skip("needs the right to mount a file system")
    image = _make_image(tmp_path / "disk.img")
    losses = list(_cut(tmp_path, image, 5 * points(), durable=True))
    assert [each for each in losses if each] == []
    control = _make_image(tmp_path / "control.img")
    assert any(list(_cut(tmp_path, control, 3, durable=False)))
