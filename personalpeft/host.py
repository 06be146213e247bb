"""Facts about the machine, and its processes, where Linux, macOS and Windows differ.

Each function has a plain fallback for a feature that a system lacks.
"""

from __future__ import annotations

import ctypes
import os
import platform
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import IO, Any

# Windows has no SIGBUS. There a crash ends with one of the statuses instead of a signal.
_CRASHES = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGABRT")
_CRASH_STATUSES = (0xC0000005, 0xC000001D, 0xC0000096)
# Of version 2 and 1 of control groups: the root, files with a limit and the use, and the counts of
# pages of files. Without a limit the first file has "max", or a number that no machine reaches.
_MEMORY_GROUPS = {
    "": ("/sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    "memory": (
        *("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_active_file", "total_inactive_file"),
    ),
}
_MMAP_THRESHOLD, _LARGE_BLOCK = -3, 1 << 20  # M_MMAP_THRESHOLD of glibc, bytes


@cache
def cpu_flags() -> str:
    """Return a text that differs between CPUs with different instruction sets."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((each for each in lines if each.startswith(("flags", "Features"))), "")
    if sys.platform == "darwin":
        with suppress(OSError, subprocess.SubprocessError):
            # The kind of processor is "arm" on all of them.
            query = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(
                query, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
    return f"{platform.machine()} {platform.processor()}"


def cpu_affinity() -> frozenset[int]:
    """Return the cores that this process is bound to. Empty means all."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def usable_cores() -> int:
    """Return the number of cores this process may use, by affinity and cgroup quota."""
    cores = len(cpu_affinity()) or os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        return max(1, min(cores, round(int(quota) / int(period))))
    except (OSError, ValueError):
        return cores  # No control group, or one without a quota ("max").


def has_low_priority() -> bool:
    """Return whether this process yields to others. False on a system without nice values."""
    return hasattr(os, "nice") and os.nice(0) > 0


def low_priority_yields() -> bool:
    """Return whether all programs of low priority leave the cores to others.

    Linux with autogroups shares the cores among sessions first. There a priority counts only among
    the programs of one session.
    """
    with suppress(OSError):
        autogroup = Path("/proc/sys/kernel/sched_autogroup_enabled").read_text(encoding="ascii")
        return autogroup.strip() == "0"
    return True


def service_manager() -> str:
    """Return what starts programs with a session here: systemd, launchd, or "" for another."""
    return {"darwin": "launchd", "win32": ""}.get(sys.platform, "systemd")


def compilers() -> tuple[str, ...]:
    """Return the C++ compilers to look for. Those of macOS and Windows do not fit our options."""
    return () if sys.platform in ("darwin", "win32") else ("c++", "g++", "clang++")


def loaded_function(name: str, library: str | None = None) -> Any:
    """Return a function of a library that this process has loaded so far, or None.

    Args:
        name: The function.
        library: A library of Linux to ask if no public one has it. A library that another one loaded
            for itself is not public.
    """
    found = getattr(loaded_libraries(), name, None)
    if found is None and library is not None and sys.platform == "linux":
        with suppress(OSError):
            found = getattr(ctypes.CDLL(library, os.RTLD_NOLOAD), name, None)
    return found


@cache
def loaded_libraries() -> Any:
    """Return what finds functions in all loaded libraries, or None on a system without it."""
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):
        return None


def return_large_blocks() -> None:
    """Have every freed block of 1 MB or more returned to the system, where glibc is in use.

    By default glibc keeps blocks of up to 32 MB in its heap once such a block was freed. Activations
    then leave holes: a learn of the default base had 400 MB of them.
    """
    if set_option := loaded_function("mallopt"):
        set_option(_MMAP_THRESHOLD, _LARGE_BLOCK)


def return_free_memory() -> None:
    """Return freed memory to the system, where glibc is in use. By default it keeps most of it."""
    if trim := loaded_function("malloc_trim"):
        trim(0)


def has_gpu() -> bool:
    """Return whether torch can use an NVIDIA GPU here, without importing torch."""
    return 0 < cuda_of_torch() <= cuda_of_driver()


@cache
def cuda_of_driver() -> int:
    """Return the newest major version of CUDA that an NVIDIA GPU runs here, 0 without a GPU."""
    for library in ("libcuda.so.1", "nvcuda.dll"):
        with suppress(OSError, AttributeError):
            driver, count, newest = ctypes.CDLL(library), ctypes.c_int(), ctypes.c_int()
            if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
                driver.cuDriverGetVersion(ctypes.byref(newest))
                return newest.value // 1000 if count.value else 0
    return 0


@cache
def cuda_of_torch() -> int:
    """Return the major version of CUDA that the installed torch is built for, 0 for none."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return 0
    with suppress(OSError):
        cuda = runpy.run_path(str(Path(torch.origin).with_name("version.py"))).get("cuda")
        return int(cuda.partition(".")[0]) if cuda else 0
    return 0


def total_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its group's limit."""
    import psutil

    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _limits_of_groups())])


def free_memory() -> int:
    """Return the bytes of memory that are free for this process, in the machine and its group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    return min([free, *(max(0, limit - used) for limit, used in _limits_of_groups())])


def _limits_of_groups() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group of this process that limits memory.

    Pages of files do not count as used, since the system takes them back at once.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:
        return
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers in _MEMORY_GROUPS:
            root, limit, usage, pages = _MEMORY_GROUPS[controllers]
            # In a container the name may be the host's, while the root is the container's group.
            for each in (group, *map(str, PurePosixPath(group).parents)):
                folder = Path(root) / each.lstrip("/")
                with suppress(OSError, ValueError, KeyError):
                    most = int((folder / limit).read_text("ascii"))
                    used = int((folder / usage).read_text("ascii"))
                    counts = (folder / "memory.stat").read_text("ascii").splitlines()
                    stat = dict(count.split() for count in counts)
                    yield most, used - sum(int(stat[name]) for name in pages)


def is_crash(exit_status: int) -> bool:
    """Return whether a child's exit status means a crash, and not an error or a kill."""
    signals = [getattr(signal, name) for name in _CRASHES if hasattr(signal, name)]
    return -exit_status in signals or exit_status in _CRASH_STATUSES


def is_alive(pid: int) -> bool:
    """Return whether a process exists."""
    import psutil

    with suppress(OverflowError):
        return bool(psutil.pid_exists(pid))
    return False


def can_fork() -> bool:
    """Return whether a process can copy itself. One of Windows cannot."""
    return hasattr(os, "fork")


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a session of its own, with its children.

    Windows has no sessions, so children live on there.
    """
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def wait_for_input(pipe: IO[bytes], seconds: float) -> bool:
    """Return whether a pipe has input, or has ended, within a time. True at once on Windows."""
    if not can_fork():
        return True
    from select import select

    return bool(select([pipe], [], [], seconds)[0])


def run_confined(compute: Callable[[], bytes], memory: int, seconds: int, most: int) -> bytes:
    """Run a function in a child with limits, and return its result. Empty if there is none.

    The child inherits no descriptor, and writes no file. A system without ``fork`` runs the
    function in this process.

    Args:
        compute: The function.
        memory: Bytes of address space that the child may use.
        seconds: Seconds of processor time that it may use.
        most: Bytes of the result that are read.
    """
    if not can_fork():
        return compute()
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _confine(sending, memory, seconds)
            with os.fdopen(sending, "wb") as pipe:
                pipe.write(compute())
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as pipe:
        answer = pipe.read(most)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer


def _confine(sending: int, memory: int, seconds: int) -> None:
    """Take from this process all descriptors but one, and all but its share of the machine."""
    import resource

    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(nothing, standard)
    os.closerange(3, sending)
    os.closerange(sending + 1, 1 << 16)
    for name, limit in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        # A system may allow less than that already.
        with suppress(OSError, ValueError):
            resource.setrlimit(name, (limit, limit))


def start_mark(pid: int) -> str:
    """Return a text about a process that differs from one with the same id before or after it.

    It is the start time, in ticks since boot where /proc exists. Empty if it cannot be read.
    """
    with suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        # The process name may hold any text, also parentheses.
        return text.rpartition(")")[2].split()[19]
    import psutil

    with suppress(psutil.Error, OSError):
        return str(psutil.Process(pid).create_time())
    return ""


def model_folders(environment: Mapping[str, str], home: Path) -> dict[str, tuple[Path, ...]]:
    """Return the folders in which programs for local models keep their files.

    ``environment`` has the environment variables, some of which move a folder. ``home`` is the
    account's folder.
    """
    caches = {
        "darwin": home / "Library" / "Caches",
        "win32": Path(environment.get("LOCALAPPDATA") or home / "AppData" / "Local"),
    }.get(sys.platform, Path(environment.get("XDG_CACHE_HOME") or home / ".cache"))
    # On Linux its service has an account of its own.
    service = (Path("/usr/share/ollama/.ollama/models"),) if sys.platform == "linux" else ()
    hub = environment.get("HF_HUB_CACHE") or (
        Path(environment.get("HF_HOME") or home / ".cache" / "huggingface") / "hub"
    )
    ollama = environment.get("OLLAMA_MODELS")
    return {
        "Ollama": (Path(ollama),) if ollama else (home / ".ollama" / "models", *service),
        "LM Studio": (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"),
        "llama.cpp": (Path(environment.get("LLAMA_CACHE") or caches / "llama.cpp"),),
        "Hugging Face": (Path(hub),),
    }
