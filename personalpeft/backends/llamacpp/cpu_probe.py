"""Which of the processor's features llama.cpp may use: tried in a process of its own, since what goes wrong there ends the
process (on processors with AMX, ``llama_decode`` of some quantised files ends in a general protection fault).

Invariant: the processor's own order of weights is never used here where a trial did not get through with it, on this
machine, with this version of the library and this file.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from personalpeft.types import canonical_digest

log = logging.getLogger(__name__)

# A small model is loaded and asked in a second; a large one is first read from the disk.
_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Choice:
    """Whether weights may be kept in the processor's own order, and why; not ``certain`` where another trial may end otherwise."""

    extra: bool
    why: str
    certain: bool = True


def choose(file: Path, cache: Path) -> Choice:
    """What a child process found, or what one found before and left in the cache."""
    found = kept(file, cache)
    if found is not None:
        return found
    choice = _tried(file)
    if choice.certain:
        _keep(choice, _note(file, cache))
    return choice


def kept(file: Path, cache: Path) -> Choice | None:
    """What was found before for this file, here; None where nothing is known."""
    try:
        found = json.loads(_note(file, cache).read_text("utf-8"))
        return Choice(bool(found["extra"]), str(found["why"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def main(path: str) -> None:
    """In the child: loads the model with all features and computes both ways, many tokens at once and one."""
    from personalpeft.backends.llamacpp.binding import Model, Place, Shape

    model = Model(Path(path), extra=True)
    context = model.context(Shape(256, 64, 1, max(1, (os.cpu_count() or 1))), None)
    tokens = [number % model.vocabulary for number in range(32)]
    context.compute([Place(token, position) for position, token in enumerate(tokens)])
    context.compute([Place(1, len(tokens), asked=True)])
    context.close()
    model.close()


def _tried(file: Path) -> Choice:
    command = [sys.executable, "-c", f"from {__name__} import main; main({str(file)!r})"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Choice(
            False,
            f"plain weights, since a trial with the processor's own order took over {_SECONDS} s",
            certain=False,
        )
    except (OSError, TypeError) as error:
        # Programs that Python is built into may name no Python, or one that is none.
        return Choice(
            False,
            f"plain weights, since no trial of the processor's own order began: {error}",
            certain=False,
        )
    if done.returncode == 0:
        return Choice(
            True, "weights in the processor's own order where it has one, which a trial got through"
        )
    # Only that very crash says something of the processor: what ran out of memory is killed, and an error may be of the moment.
    crashed = -done.returncode in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT)
    if not crashed:
        log.warning(
            "the trial ended with %s: %s",
            done.returncode,
            done.stderr.decode(errors="replace")[-2000:],
        )
    how = (
        f"ended by signal {-done.returncode}"
        if done.returncode < 0
        else f"ended with {done.returncode}"
    )
    return Choice(
        False, f"plain weights, since a trial with the processor's own order {how}", certain=crashed
    )


def _note(file: Path, cache: Path) -> Path:
    """Where it is written what this processor, file and version of the library can do together. Raises ``OSError``."""
    status = file.stat()
    asked = [
        version("llama-cpp-python"),
        _processor(),
        str(file),
        status.st_size,
        status.st_mtime_ns,
    ]
    return cache / "llamacpp" / f"{canonical_digest(asked)[:16]}.json"


def _keep(choice: Choice, note: Path) -> None:
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=note.parent, delete=False, encoding="utf-8"
        ) as file:
            json.dump(asdict(choice), file)
        Path(file.name).replace(note)
    except OSError:
        # It is tried again the next time, which takes a second.
        return


def _processor() -> str:
    """What tells one kind of processor from another."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    return next(
        (line for line in lines if line.startswith(("flags", "Features"))), platform.machine()
    )
