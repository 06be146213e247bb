"""Publish stacks as PEFT folders that other servers load by name.

The name is ``personalpeft:<digest>``. A copy can be checked without this package:

    sha256sum adapter_config.json adapter_model.safetensors | sha256sum

Invariants: the same stack has the same name, and a name never changes its content. A folder exists
completely or not at all. It holds no personal data but the weights.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from safetensors.numpy import save

from personalpeft.adapters.compose import as_single_lora, in_half
from personalpeft.adapters.formats.peft import (
    CONFIG_FILE,
    TENSOR_FILE,
    build_config,
    peft_tensors,
)
from personalpeft.adapters.safe_io import format_error, safe_repr
from personalpeft.adapters.types import AdapterStack
from personalpeft.base_models.types import Base
from personalpeft.errors import NotFound

PREFIX = "personalpeft:"
FILES = (CONFIG_FILE, TENSOR_FILE)
"""The files of a folder, in the order of its digest."""

# The values that vLLM accepts for --max-lora-rank.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """The files of a folder. All its tensors have the rank ``rank``."""

    digest: str
    rank: int
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """The name on the server."""
        return PREFIX + self.digest

    @property
    def nbytes(self) -> int:
        """The size of all files in bytes."""
        return sum(map(len, self.files.values()))


def build_published_adapter(stack: AdapterStack, base: Base) -> PublishedAdapter:
    """Return the files of a stack of rank 1 or more, padded to a rank that vLLM accepts."""
    rank = next((rank for rank in _RANKS if rank >= stack.rank), None)
    if rank is None:
        raise format_error(
            "the stack",
            f"has the rank {stack.rank}; other servers take up to {_RANKS[-1]}.",
            hint="Roll a layer back, or learn layers of a lower rank.",
        )
    pairs, scaling = as_single_lora(stack)
    base_name = f"{base.card.name}@{base.digest}"
    config = build_config(rank=rank, scaling=scaling, targets=list(pairs), base_name=base_name)
    files = {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        TENSOR_FILE: save(
            peft_tensors(in_half(pairs), rank, base.architecture), metadata={"format": "pt"}
        ),
    }
    return PublishedAdapter(compute_digest(files), rank, files)


def compute_digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of a folder with these files."""
    listed = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES)
    return hashlib.sha256(listed.encode()).hexdigest()


class PublishedAdapterFolder:
    """The folders of one process below a path that several processes share.

    Each process has a subfolder ``process``, whose name begins with its host name and a dot.
    Processes on the same host remove the subfolder of a dead one, since other hosts may not see its
    lock. Methods raise ``OSError``.
    """

    def __init__(self, root: Path, process: str) -> None:
        self.root, self.process = root, process
        self._retained: set[str] = set()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Use the mode of the shared path: a server may run as another system user.
        self._mode = root.stat().st_mode & 0o777
        # Released by the system when the process ends.
        self._lock = FileLock(self._lock_of(process))
        self._lock.acquire(timeout=0)
        self._subfolder(process).mkdir()
        self._subfolder(process).chmod(self._mode)

    def put(self, folder: PublishedAdapter) -> Path:
        """Write a folder unless it exists, and return its path."""
        path = self._subfolder(self.process) / folder.digest
        if not path.is_dir():
            new = Path(tempfile.mkdtemp(prefix=".", dir=self._subfolder(self.process)))
            try:
                _write(folder, new, self._mode)
                new.rename(path)
            except OSError:
                # On a full disk an incomplete folder would take the remaining space.
                shutil.rmtree(new, ignore_errors=True)
                if not path.is_dir():
                    raise
        return path

    def remove(self, digest: str) -> None:
        """Remove a folder if it exists."""
        shutil.rmtree(self._subfolder(self.process) / digest, ignore_errors=True)

    def incomplete(self) -> tuple[str, ...]:
        """Return the subfolders of dead processes of this host."""
        here = self.process.partition(".")[0]
        others = (lock.name.removesuffix(_LOCK) for lock in self.root.glob(f"{here}.*{_LOCK}"))
        return tuple(each for each in others if each != self.process and self._is_dead(each))

    def sweep(self, process: str) -> None:
        """Remove the subfolder of a dead process."""
        shutil.rmtree(self._subfolder(process), ignore_errors=True)
        self._lock_of(process).unlink(missing_ok=True)

    def keep(self, digest: str) -> None:
        """Leave a folder for another process to remove, since a server may still read it."""
        self._retained.add(digest)

    def close(self) -> None:
        """Remove all folders but those of ``keep``. Can be called twice."""
        if not self._lock.is_locked:
            return
        # The shared path may have been cleared.
        with suppress(FileNotFoundError):
            for path in self._subfolder(self.process).iterdir():
                if path.name not in self._retained:
                    self.remove(path.name)
        if not self._retained:
            self.sweep(self.process)
        self._lock.release()

    def _is_dead(self, process: str) -> bool:
        try:
            with FileLock(self._lock_of(process)).acquire(timeout=0):
                return True
        except (Timeout, OSError):
            return False

    def _subfolder(self, process: str) -> Path:
        return self.root / process

    def _lock_of(self, process: str) -> Path:
        return self.root / f"{process}{_LOCK}"


class PublishedSubfolder:
    """A subfolder of the shared path that outlives the processes that write to it.

    Its name cannot begin with a host name, so ``sweep`` of other processes skips it. One process
    at a time may write. Methods raise ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Beside the subfolder, so that a copy of it holds complete folders only.
        self._temporary = path.with_name(f".{path.name}")

    @classmethod
    def below(cls, root: Path, key: str) -> PublishedSubfolder:
        """Return the subfolder of a key, creating it if needed."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        subfolder = cls(root / f"published_{key}")
        subfolder.path.mkdir(exist_ok=True)
        subfolder.path.chmod(root.stat().st_mode & 0o777)
        return subfolder

    def put(self, folder: PublishedAdapter) -> bool:
        """Write a folder unless it exists with these bytes; return whether it was written."""
        path = self.path / folder.digest
        if _is_copy(path, folder):
            return False
        self.sweep()
        self._temporary.mkdir(mode=0o700)
        try:
            _write(folder, new := self._temporary / "new", self.path.stat().st_mode & 0o777)
            # A folder with other bytes is damaged: its name is the digest of its content.
            shutil.rmtree(path, ignore_errors=True)
            new.rename(path)
        finally:
            self.sweep()
        return True

    def remove(self, digest: str) -> None:
        """Remove a folder if it exists. The subfolder itself must exist."""
        self.path.stat()
        if (path := self.path / digest).exists():
            shutil.rmtree(path)

    def sweep(self) -> None:
        """Remove what a killed process left incomplete."""
        if self._temporary.exists():
            shutil.rmtree(self._temporary)


def _write(folder: PublishedAdapter, new: Path, mode: int) -> None:
    new.mkdir(exist_ok=True)
    for name, data in folder.files.items():
        (new / name).write_bytes(data)
        (new / name).chmod(mode & 0o644)
    new.chmod(mode)


def _is_copy(path: Path, folder: PublishedAdapter) -> bool:
    try:
        return all((path / name).read_bytes() == data for name, data in folder.files.items())
    except OSError:
        return False


def read_published_adapter(root: Path, digest: str, name: str) -> bytes:
    """Return a file of the folder with this digest, in the subfolder of any process."""
    if _DIGEST.fullmatch(digest) and name in FILES:
        for path in sorted(root.glob(f"*/{digest}/{name}")):
            # Another process may remove it at any time.
            with suppress(FileNotFoundError):
                return path.read_bytes()
    raise NotFound(
        f"There is no stack {safe_repr(digest)} here.",
        hint="Publish the stack with: personalpeft publish",
    )
