"""Find out whether llama.cpp may use all features of this processor.

The probe runs in a child process, because a failure kills the process. On processors with AMX,
``llama_decode`` of some quantised files ends in a general protection fault.

Invariant: weights are repacked for the processor only after a probe succeeded. The probe must have
used this machine, library version and file.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from personalpeft import host
from personalpeft.file_system import write_file_atomically
from personalpeft.types import canonical_digest

log = logging.getLogger(__name__)

# A small model takes a second. A large one is first read from the disk.
_TIMEOUT = 300


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether weights may be repacked, and why. Another probe may differ unless ``conclusive``."""

    repack: bool
    reason: str
    conclusive: bool = True


_RESULT = TypeAdapter(ProbeResult)


def probe_cpu(file: Path, cache: Path) -> ProbeResult:
    """Return the cached result for a GGUF file, or run a probe and cache a conclusive result."""
    result = read_cached_result(file, cache)
    if result is None:
        result = _run_probe(file)
        # Without a cache the next start runs the probe again for a second.
        with suppress(OSError):
            if result.conclusive:
                write_file_atomically(_cache_path(file, cache), _RESULT.dump_json(result))
    return result


def read_cached_result(file: Path, cache: Path) -> ProbeResult | None:
    """Return the result of an earlier probe of this file on this machine, None if there is none."""
    try:
        return _RESULT.validate_json(_cache_path(file, cache).read_bytes())
    except (OSError, ValidationError):
        return None


def run_in_child(path: str) -> None:
    """Load the model with all features, and decode many tokens at once and then one."""
    from personalpeft.backends.llamacpp.binding import ContextParams, Model

    model = Model(Path(path), repack=True, threads=host.usable_cores)
    context = model.new_context(ContextParams(256, 64, 1), None)
    tokens = [number % model.vocab_size for number in range(32)]
    context.decode(tokens, 0, 0)
    context.decode([1], len(tokens), 1)
    context.close()
    model.close()


def _run_probe(file: Path) -> ProbeResult:
    plain = "plain weights: the probe of repacked weights "
    code = f"from {__name__} import run_in_child; run_in_child({str(file)!r})"
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(False, f"{plain}took over {_TIMEOUT} s", conclusive=False)
    except (OSError, TypeError) as error:
        # Where Python is embedded, ``sys.executable`` may be None or another program.
        return ProbeResult(False, f"{plain}could not start: {error}", conclusive=False)
    if child.returncode == 0:
        return ProbeResult(True, "repacked weights where the processor has its own order")
    # Only a crash is about the processor. A kill may be for memory, an error may be temporary.
    crashed = host.is_crash(child.returncode)
    if not crashed:
        lines = child.stderr.decode(errors="replace").split("\n")
        last = next((each.strip() for each in reversed(lines) if each.strip()), "no message")
        log.warning("the processor probe ended with %s: %s", child.returncode, last[:300])
    return ProbeResult(False, f"{plain}ended with status {child.returncode}", conclusive=crashed)


def _cache_path(file: Path, cache: Path) -> Path:
    """Return the cache file for this processor, GGUF file and library version."""
    status = file.stat()
    key = [
        version("llama-cpp-python"),
        host.cpu_flags(),
        str(file),
        status.st_size,
        status.st_mtime_ns,
    ]
    return cache / "llamacpp" / f"{canonical_digest(key)[:16]}.json"
