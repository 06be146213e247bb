"""Interrupts a program at one of its system calls with strace, or at one of its writes without."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from write_seam import SETTING

# Calls that change files, their names or their durability. An open does if it creates a file.
WRITES = (
    "write,writev,pwrite64,pwritev,pwritev2,copy_file_range,sendfile,truncate,ftruncate,fallocate,"
    "openat,fsync,fdatasync,msync,sync_file_range,rename,renameat,renameat2,link,linkat,symlink,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,chmod,fchmod,fchmodat,utimensat"
)


@dataclass(frozen=True, slots=True)
class Interruption:
    """What to do to the ``number``-th call of a kind, and to all later ones where ``lasting``."""

    call: str
    number: int
    effect: str
    lasting: bool = False

    def __str__(self) -> str:
        return f"{self.effect} at {self.call} {self.number}{'+' if self.lasting else ''}"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: its status, its promises as (kind, id), and what it wrote to stderr."""

    status: int
    promises: tuple[tuple[str, str], ...]
    errors: str


def can_interrupt() -> bool:
    """Return whether strace is here and may trace."""
    strace = shutil.which("strace")
    if strace is None:
        return False
    tried = subprocess.run([strace, "-f", "-o", os.devnull, "true"], capture_output=True)
    return tried.returncode == 0


def perform(
    operation: str, folder: Path, trace: Path, interruption: Interruption | None = None
) -> Ended:
    """Perform an operation in a process, whose write-like calls go to the file ``trace``."""
    script = Path(__file__).with_name("crash_operations.py")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        # Without --seccomp-bpf: with it an injected SIGKILL is never delivered.
        command = [
            "strace",
            "-f",
            "-qq",
            "-e",
            f"trace={WRITES}",
            "-o",
            str(trace),
        ]
        if interruption is not None:
            effect, lasting = interruption.effect, "+" if interruption.lasting else ""
            when = f"when={interruption.number}{lasting}"
            command += ["-e", f"inject={interruption.call}:{effect}:{when}"]
        # -B: what the interpreter caches is none of the home's writes.
        command += [sys.executable, "-B", str(script), operation, str(folder), str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, text=True
        )
        theirs.close()
        _, errors = process.communicate(timeout=600)
        received = b"".join(iter(lambda: ours.recv(1 << 16), b""))
    return Ended(process.returncode, read_promises(received), errors)


def perform_without_strace(operation: str, folder: Path, seam: str = "") -> Ended:
    """Perform an operation in a process, interrupted as ``write_seam`` says."""
    script = Path(__file__).with_name("crash_operations.py")
    ended = subprocess.run(
        [sys.executable, "-B", str(script), operation, str(folder)],
        env={**os.environ, SETTING: seam},
        capture_output=True,
        timeout=600,
    )
    promises = read_promises(ended.stdout)
    return Ended(ended.returncode, promises, ended.stderr.decode(errors="replace"))


def read_promises(received: bytes) -> tuple[tuple[str, str], ...]:
    """Return the promises of an operation as (kind, id), without a last line that was cut off."""
    lines = [json.loads(line) for line in received.split(b"\n")[:-1]]
    return tuple((kind, what) for kind, what in lines)


def list_calls(trace: Path, folder: Path) -> list[tuple[str, int]]:
    """Return each write-like call of a traced program as (name, number).

    strace counts the calls of each thread apart, so the longest count of a name is taken. Of opens
    these are the ones of the main thread that create a file in ``folder``, or in an open folder.
    Other threads open far fewer files, so their opens of the same number do not exist.
    """
    counts: dict[str, Counter[str]] = {}
    creating: list[tuple[str, int]] = []
    lines = trace.read_text(errors="replace").splitlines()
    main = lines[0].partition(" ")[0] if lines else ""
    for line in lines:
        thread, _, rest = line.partition(" ")
        name, parenthesis, arguments = rest.strip().partition("(")
        if not (parenthesis and name.isidentifier()):
            continue
        counts.setdefault(name, Counter())[thread] += 1
        is_ours = f'"{folder}' in arguments or not arguments.startswith(("AT_FDCWD", '"'))
        if name == "openat" and thread == main and "O_CREAT" in arguments and is_ours:
            creating.append((name, counts[name][thread]))
    return creating + [
        (name, number + 1)
        for name, by_thread in sorted(counts.items())
        if name != "openat"
        for number in range(max(by_thread.values()))
    ]


def spread(items: Sequence[tuple[str, int]], count: int) -> list[tuple[str, int]]:
    """Return ``count`` of the items at even distances, with the first and the last."""
    if count >= len(items):
        return list(items)
    step = (len(items) - 1) / max(1, count - 1)
    return [items[round(step * number)] for number in range(count)]
