"""The operations as C++ for processors, compiled once on the machine that runs them and kept in the cache folder.

The general operators of the framework spend most of a decoding step on calls, copies and conversions: over 16 rows with
16 adapters they take four times as long as reading the adapters once (docs/benchmarks.md). A machine without a compiler
runs the plain version instead, and ``doctor`` says so.
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
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from personalpeft.adapters.types import Matrix
from personalpeft.backends.torch.ops.base import (
    AttentionMetadata,
    LoRAMapping,
    PrefillChunk,
    StackedLoRAWeights,
)
from personalpeft.backends.torch.processor import KERNELS, cpu_flags

_HEADER = "dtypes.h"
_COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: it would change how the whole process treats the smallest numbers.
_MARCH = {"native": "native", "avx2": "x86-64-v3", "avx512": "x86-64-v4"}
_OPTIONS = ("-O3", "-std=c++17", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_log = logging.getLogger(__name__)
SUFFIX = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_P, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "lora": (_P, _P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _P, _I),
    "remember": (_P, _P, _P, _P, _P, _I, _I, _I),
    "attend": (_P, _P, _P, _P, _P, _I, _P, _I, _I, _I, _I, _F, _F, _I),
    "norm": (_P, _P, _P, _I, _I, _F),
    "largest": (_P, _P, _I, _I),
}


class NoCompiler(OSError):
    """Why the operations could not be compiled or loaded here; a reason for ``doctor``, not an error for a user."""


class CpuOps:
    """See ``Kernels``. Raises ``NoCompiler`` where this machine cannot build or load them."""

    name = "native"
    batch_invariant = True

    def __init__(self, cache: Path, dtype: torch.dtype) -> None:
        if dtype not in SUFFIX:
            raise NoCompiler(f"there is none for {dtype}")
        # Not at the top: what is there is compiled by what is here.
        from personalpeft.backends.torch.ops.training_ops import TrainingOps

        library = load_library(cache, "decode.cpp")
        self.training = TrainingOps(cache, dtype)
        self._lora, self._remember, self._attend, self._norm, self._largest = (
            bind_function(library, f"{name}_{SUFFIX[dtype]}", signature)
            for name, signature in _SIGNATURES.items()
        )
        self._lay = {
            numpy: bind_function(
                library, f"lay_{numpy}_{SUFFIX[dtype]}", (_P, _P, _P, _P, _F), ctypes.c_int32
            )
            for numpy in ("float16", "float32")
        }
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def pack_weights(self, source: Matrix, place: Tensor, factor: float) -> bool:
        three = ctypes.c_int64 * 3
        source = np.ascontiguousarray(source)
        finite = self._lay[source.dtype.name](
            source.ctypes.data,
            place.data_ptr(),
            three(*source.shape),
            three(*place.stride()),
            factor,
        )
        return bool(finite)

    def apply_lora(
        self, x: Tensor, y: Tensor, pointers: LoRAMapping, shelf: StackedLoRAWeights, block: int
    ) -> None:
        size = x.element_size()
        ends = self._ends.get(shelf.ends)
        if ends is None:
            ends = self._ends[shelf.ends] = torch.tensor(shelf.ends, dtype=torch.int32)
        self._lora(
            x.data_ptr(),
            y.data_ptr(),
            len(x),
            pointers.slots.data_ptr(),
            pointers.ranks.data_ptr(),
            shelf.a.data_ptr() + block * shelf.a.stride(1) * size,
            shelf.a.stride(0),
            shelf.b.data_ptr() + block * shelf.b.stride(1) * size,
            shelf.b.stride(0),
            shelf.max_rank,
            x.shape[1],
            y.shape[1],
            ends.data_ptr(),
            len(shelf.ends),
        )

    def write_kv(
        self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, places: AttentionMetadata
    ) -> None:
        tokens, heads, dim = k.shape
        self._remember(
            k.data_ptr(),
            v.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            places.write_slots.data_ptr(),
            tokens,
            heads,
            dim,
        )

    def paged_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        places: AttentionMetadata,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        return self._over(
            q, keys, values, places.tiles, places.block_table, scaling, softcap, window
        )

    def prefill_attention(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        chunk: PrefillChunk,
        *,
        scaling: float,
        softcap: float,
        window: int,
    ) -> Tensor:
        return self._over(
            q, keys, values, chunk.tiles, chunk.blocks[None], scaling, softcap, window
        )

    def _over(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tiles: Tensor,
        table: Tensor,
        scale: float,
        cap: float,
        window: int,
    ) -> Tensor:
        said = torch.empty_like(q)
        self._attend(
            q.data_ptr(),
            said.data_ptr(),
            keys.data_ptr(),
            values.data_ptr(),
            tiles.data_ptr(),
            len(tiles),
            table.data_ptr(),
            table.shape[1],
            q.shape[1],
            keys.shape[1],
            q.shape[2],
            scale,
            cap,
            window,
        )
        return said

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        y = torch.empty_like(x)
        self._norm(
            x.data_ptr(),
            weight.data_ptr(),
            y.data_ptr(),
            x.numel() // x.shape[-1],
            x.shape[-1],
            epsilon,
        )
        return y

    def argmax(self, x: Tensor) -> Tensor:
        found = torch.empty(len(x), dtype=torch.int64)
        self._largest(x.data_ptr(), found.data_ptr(), len(x), x.shape[1])
        return found


def bind_function(
    library: ctypes.CDLL, name: str, signature: tuple[Any, ...], result: Any = None
) -> Any:
    function = library[name]
    function.argtypes, function.restype = signature, result
    return function


def load_library(cache: Path, name: str) -> ctypes.CDLL:
    """The operations of a source file beside this one, from the cache where they were built from it for this machine
    before. Raises ``NoCompiler``.
    """
    here = resources.files(__package__) / "csrc"
    source, header = here.joinpath(name).read_bytes(), here.joinpath(_HEADER).read_bytes()
    options = (*_OPTIONS, *_instruction_flags())
    about = f"{options}{platform.machine()}{cpu_flags()}{torch.__version__}".encode()
    try:
        # Resolved once, so that no link is followed again between the checks and the loading.
        folder = (
            cache.resolve() / "kernels" / hashlib.sha256(header + source + about).hexdigest()[:16]
        )
        place = folder / "native.so"
        unsafe = _make_private(folder)
        if not unsafe and _is_private(place):
            try:
                return ctypes.CDLL(str(place))
            except OSError:
                pass  # Damaged, or built with what is no longer there: it is built anew.
        if unsafe:
            _log.warning("%s The native kernels are built for this process alone.", unsafe)
        with tempfile.TemporaryDirectory(dir=None if unsafe else folder) as work:
            built = _compile(source, header, options, Path(work))
            if not unsafe:
                # In one step, so that two processes that start together never load half a file.
                built = built.replace(place)
            elif exposed := _first_world_writable(built.resolve()):
                raise NoCompiler(_unsafe_folder_message(exposed))
            return ctypes.CDLL(str(built))
    except OSError as error:
        raise error if isinstance(error, NoCompiler) else NoCompiler(str(error)) from error


def _make_private(folder: Path) -> str:
    """Make the folder of a library, and the cache around it. Return why another account can change what is in it, or "".

    An exposed folder of this account is closed, and every library that lay in it is removed.
    """
    ours = (folder.parent.parent, folder.parent, folder)
    for each in ours:
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not _is_private(each) and each.stat().st_uid == os.getuid():
            each.chmod(stat.S_IMODE(each.stat().st_mode) & ~_OTHERS_WRITE)
            for library in folder.parent.glob("*/native.so"):
                with suppress(
                    OSError
                ):  # In a folder of another account, which is refused for its owner.
                    library.unlink()
    exposed = next((each for each in ours if not _is_private(each)), None) or _first_world_writable(
        folder
    )
    return _unsafe_folder_message(exposed) if exposed else ""


def _is_private(path: Path) -> bool:
    """Return whether a file or a folder belongs to this account or to root, and no other account can write to it."""
    if not hasattr(os, "getuid"):
        return path.exists()
    try:
        about = path.lstat()
    except FileNotFoundError:
        return False
    return about.st_uid in (0, os.getuid()) and not about.st_mode & _OTHERS_WRITE


def _first_world_writable(path: Path) -> Path | None:
    """Return the nearest folder above a path in which every account can replace what is there."""
    if not hasattr(os, "getuid"):
        return None
    replaceable = (
        each
        for each in path.parents
        if each.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH
    )
    return next(replaceable, None)


def _unsafe_folder_message(path: Path) -> str:
    return (
        f"Another account can change {path}, so nothing is loaded from there; "
        "set PERSONALPEFT_CACHE to a folder that only you can write."
    )


def _compile(source: bytes, header: bytes, options: Sequence[str], work: Path) -> Path:
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoCompiler(f"there is no C++ compiler ({', '.join(_COMPILERS)})")
    (work / "decode.cpp").write_bytes(source)
    (work / _HEADER).write_bytes(header)
    steps = (
        [compiler, *options, "-fopenmp", "-c", "decode.cpp", "-o", "native.o"],
        # Linked without OpenMP's own library: the framework has loaded one already, and two of them would have two
        # teams of threads spin for the same cores.
        [compiler, "-shared", "native.o", "-o", "native.so"],
    )
    for step in steps:
        try:
            done = subprocess.run(
                step, cwd=work, capture_output=True, text=True, timeout=120, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"{compiler} does not run: {error}") from error
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["nothing"]
            raise NoCompiler(f"{compiler} says: {said[-1]}")
    return work / "native.so"


def _instruction_flags() -> tuple[str, ...]:
    """Return which instructions to compile for: the processor's own, or fewer where the environment says so.

    Raises:
        NoCompiler: The environment asks for no compiled kernels, or names no set of instructions.
    """
    wanted = os.environ.get(KERNELS, "native")
    if wanted == "plain":
        raise NoCompiler(f"{KERNELS} is set to plain")
    if wanted not in _MARCH:
        raise NoCompiler(f"{KERNELS} must be plain or one of {', '.join(_MARCH)}, got {wanted!r}")
    return (f"-march={_MARCH[wanted]}",)
