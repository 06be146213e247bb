"""Compile the C++ operations once on the machine that runs them, and load them from the cache.

Invariant: a library is loaded only from a file and folders that no other account can write.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from personalpeft import file_system, host
from personalpeft.backends.processor import KERNELS
from personalpeft.backends.torch.ops.base import NoKernels

_SOURCES = ("decode.cpp", "matmul.cpp", "training.cpp", "unpack.cpp")
_HEADER = "dtypes.h"
# No -ffast-math: it would flush subnormal numbers to zero in the whole process.
_MARCH = {"native": "native", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
# How long each run of the compiler may take.
_COMPILE_SECONDS = 120
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger(__name__)
# The C++ type of each dtype.
_NUMBERS = {torch.float32: "float", torch.bfloat16: "bfloat16"}


class _Numbers:
    """An argument that takes a tensor, or None, and passes the address of its numbers."""

    @staticmethod
    def from_param(tensor: Tensor | None) -> ctypes.c_void_p:
        return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


_T, _P, _I, _F = _Numbers, ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# The arguments of the operations. Those with a result return an int32.
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "apply_lora": (_T, _T, _I, _T, _T, _P, _I, _P, _I, _I, _I, _I, _T, _I),
    "write_kv": (_T, _T, _T, _T, _T, _I, _I, _I),
    "rotate_and_write_kv": (_T, _I, _T, _T, _T, _T, _T, _T, _I, _I, _I, _I),
    "paged_attention": (_T, _T, _T, _T, _T, _I, _T, _I, _I, _I, _I, _F, _F, _I),
    "rms_norm": (_T, _T, _T, _I, _I, _F),
    "rms_norm_backward": (_T, _T, _T, _T, _I, _I, _F),
    "argmax": (_T, _T, _I, _I),
    "pack_weights_float16": (_P, _T, _P, _P, _F),
    "pack_weights_float32": (_P, _T, _P, _P, _F),
    "unpack_blocks": (_I, _P, _I, _I, _I, _I, _I, _I, _T, _I),
    "supports_matmul": (),
    "matmul": (_T, _I, _T, _T, _T, _I, _I, _I, _I),
    "pack_tiles": (_T, _I, _I, _T, _I, _I),
    "attention": (_T, _T, _T, _T, _T, _P, _F, _T, _I, _T, _T, _T),
    "attention_backward": (_T, _T, _T, _T, _T, _P, _F, _T, _I, _T, _T, _T, _T, _I, _T, _T, _T),
    "silu_and_mul": (_T, _T, _I, _I),
    "silu_and_mul_backward": (_T, _T, _T, _I, _I),
    "logsumexp": (_T, _T, _I, _I),
    "token_logprob_backward": (_T, _T, _T, _T, _T, _I, _I),
    "kl_div": (_T, _T, _T, _T, _T, _I, _I),
    "kl_div_backward": (_T, _T, _T, _T, _T, _T, _I, _I),
}


def load_library(cache: Path, dtype: torch.dtype) -> ctypes.CDLL:
    """Load the operations for a dtype from a folder of compiled libraries, or compile them.

    Raises:
        NoKernels: There are none for the dtype, or they can be neither loaded nor compiled.
    """
    if dtype not in _NUMBERS:
        raise NoKernels(f"CPU operations need float32 or bfloat16, got {dtype}")
    folder = resources.files(__package__) / "csrc"
    files = {name: folder.joinpath(name).read_bytes() for name in (*_SOURCES, _HEADER)}
    options = (*_OPTIONS, f"-DDTYPE={_NUMBERS[dtype]}", *_instruction_flags())
    about = f"{options}{platform.machine()}{host.cpu_flags()}{torch.__version__}".encode()
    digest = hashlib.sha256(b"".join(files.values()) + about).hexdigest()[:16]
    try:
        # Resolved once: no link may change between the checks and the loading.
        path = cache.resolve() / "kernels" / digest / "native.so"
        if unsafe := _make_private(path.parent):
            _log.warning("%s The native kernels are built for this process alone.", unsafe)
            with tempfile.TemporaryDirectory() as work:
                built = _compile(files, options, Path(work))
                if exposed := _first_world_writable(built.resolve()):
                    raise NoKernels(_unsafe_folder_message(exposed))
                return _load(built)
        if library := _load_private(path):
            return library
        # Of processes that start together, one compiles and the others load what it built.
        with FileLock(path.with_name("compiling.lock"), timeout=2 * _COMPILE_SECONDS):
            if library := _load_private(path):
                return library
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                # In one step, so that no process loads half a file.
                file_system.replace(_compile(files, options, Path(work)), path)
            return _load(path)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(str(error)) from error


def _load(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


def _load_private(path: Path) -> ctypes.CDLL | None:
    """Load a library, or return None where it is missing, damaged or not private."""
    try:
        return _load(path) if _is_private(path) else None
    except OSError:
        return None  # Damaged, or a library it needs is gone.


def _make_private(folder: Path) -> str:
    """Create a library's folder. Return why another account can change it, or an empty string."""
    ours = (folder.parent.parent, folder.parent, folder)
    for each in ours:
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(each) and file_system.is_owner(each.stat()):
            each.chmod(stat.S_IMODE(each.stat().st_mode) & ~_OTHERS_WRITE)
            for library in folder.parent.glob("*/native.so"):
                # This fails in another account's folder, which is refused anyway.
                with suppress(OSError):
                    library.unlink()
    changeable = next((each for each in ours if not _is_private(each)), None)
    exposed = changeable or _first_world_writable(folder)
    return _unsafe_folder_message(exposed) if exposed else ""


def _is_private(path: Path) -> bool:
    """Return whether this account or root owns a path, and no other account can write to it."""
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    owned = file_system.is_owner(about) or about.st_uid == 0
    return owned and file_system.only_owner_writes(about)


def _first_world_writable(path: Path) -> Path | None:
    """Return the nearest folder above a path in which every account can replace what is there."""
    return next(
        (each for each in path.parents if file_system.all_can_replace_in(each.stat())), None
    )


def _unsafe_folder_message(path: Path) -> str:
    return (
        f"Another account can change {path}, so nothing is loaded from there; "
        "set PERSONALPEFT_CACHE to a folder that only you can write."
    )


def _compile(files: Mapping[str, bytes], options: Sequence[str], work: Path) -> Path:
    names = host.compilers()
    if not names:
        raise NoKernels("they are compiled on Linux only, with a compiler that has OpenMP")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise NoKernels(f"no C++ compiler found ({', '.join(names)})")
    for name, content in files.items():
        (work / name).write_bytes(content)
    objects = [Path(name).with_suffix(".o").name for name in _SOURCES]
    steps = (
        [compiler, *options, "-fopenmp", "-c", *_SOURCES],
        # Without -fopenmp: torch has loaded an OpenMP library, and teams of two would compete.
        [compiler, "-shared", *objects, "-o", "native.so"],
    )
    for step in steps:
        result = subprocess.run(
            step,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=_COMPILE_SECONDS,
            check=False,
        )
        if result.returncode:
            lines = result.stderr.strip().splitlines() or ["no message"]
            raise NoKernels(f"{compiler} failed: {lines[-1]}")
    return work / "native.so"


def _instruction_flags() -> tuple[str, ...]:
    """Return the compiler flags of the CPU's instruction set, or of the one the environment names.

    Raises:
        NoKernels: The environment disables compiled kernels, or names an unknown set.
    """
    target = os.environ.get(KERNELS, "native")
    if target == "plain":
        raise NoKernels(f"{KERNELS} is set to plain")
    if target not in _MARCH:
        raise NoKernels(f"{KERNELS} must be plain or one of {', '.join(_MARCH)}, got {target!r}")
    return (f"-march={_MARCH[target]}",)
