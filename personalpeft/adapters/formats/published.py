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
from personalpeft.adapters.formats.peft import CONFIG_FILE, TENSOR_FILE, peft_tensors
from personalpeft.adapters.formats.peft_config import build_config
from personalpeft.adapters.safe_io import safe_repr
from personalpeft.adapters.types import AdapterStack
from personalpeft.base_models.types import Base
from personalpeft.errors import AdapterError, NotFound

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
        raise AdapterError(
            f"the stack: has the rank {stack.rank}; other servers take up to {_RANKS[-1]}.",
            hint="Roll a layer back, or learn layers of a lower rank.",
        )
    weights, scaling = as_single_lora(stack)
    base_name = f"{base.card.name}@{base.digest}"
    config = build_config(rank=rank, scaling=scaling, targets=list(weights), base_name=base_name)
    files = {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        TENSOR_FILE: save(
            peft_tensors(in_half(weights), rank, base.architecture), metadata={"format": "pt"}
        ),
    }
    return PublishedAdapter(compute_digest(files), rank, files)


def compute_digest(files: Mapping[str, bytes]) -> str:
    """Return the digest of a folder with these files."""
    listed = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES)
    return hashlib.sha256(listed.encode()).hexdigest()


class PublishedSubfolder:
    """Writes and removes published adapters in one folder below a path that programs share.

    One process at a time may write, and one thread an adapter. Methods raise ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Beside the subfolder, so that a copy of it holds complete folders only.
        self._temporary = f".{path.name}"

    @classmethod
    def below(cls, root: Path, name: str) -> PublishedSubfolder:
        """Return the subfolder of a name, created if needed, with the root's permissions.

        A server that reads it may run as another system user.
        """
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        subfolder = cls(root / name)
        subfolder.path.mkdir(exist_ok=True)
        subfolder.path.chmod(root.stat().st_mode & 0o777)
        return subfolder

    def put(self, adapter: PublishedAdapter) -> bool:
        """Write an adapter unless it exists with these bytes; return whether it was written."""
        path = self.path / adapter.digest
        with suppress(OSError):
            if all((path / name).read_bytes() == data for name, data in adapter.files.items()):
                return False
        new = Path(tempfile.mkdtemp(prefix=self._temporary, dir=self.path.parent))
        try:
            mode = self.path.stat().st_mode & 0o777
            for name, data in adapter.files.items():
                (new / name).write_bytes(data)
                (new / name).chmod(mode & 0o644)
            new.chmod(mode)
            # A folder with other bytes is damaged: its name is the digest of its content.
            shutil.rmtree(path, ignore_errors=True)
            new.rename(path)
        except OSError:
            # On a full disk an incomplete folder would take the remaining space.
            shutil.rmtree(new, ignore_errors=True)
            raise
        return True

    def remove(self, digest: str) -> None:
        """Remove an adapter if it exists. The subfolder itself must exist."""
        self.path.stat()
        if (path := self.path / digest).exists():
            shutil.rmtree(path)

    def sweep(self) -> None:
        """Remove the incomplete folders that killed processes may have left."""
        for folder in self.path.parent.glob(f"{self._temporary}*"):
            shutil.rmtree(folder)


class PublishedAdapterFolder:
    """The subfolder of one process below a path that several processes share.

    Its name ``process`` begins with its host name and a dot. Processes on the same host remove the
    subfolder of a dead one, because other hosts may not see its lock. Methods raise ``OSError``.
    """

    def __init__(self, root: Path, process: str) -> None:
        self.root, self.process = root, process
        self._retained: set[str] = set()
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Released by the system when the process ends.
        self._lock = FileLock(self._lock_of(process))
        self._lock.acquire(timeout=0)
        self._subfolder = PublishedSubfolder.below(root, process)

    def put(self, adapter: PublishedAdapter) -> Path:
        """Write an adapter unless it exists, and return its path."""
        self._subfolder.put(adapter)
        return self._subfolder.path / adapter.digest

    def remove(self, digest: str) -> None:
        """Remove an adapter if it exists and can be removed."""
        with suppress(OSError):
            self._subfolder.remove(digest)

    def dead_processes(self) -> tuple[str, ...]:
        """Return the dead processes of this host that left a subfolder."""
        here = self.process.partition(".")[0]
        others = (lock.name.removesuffix(_LOCK) for lock in self.root.glob(f"{here}.*{_LOCK}"))
        return tuple(each for each in others if each != self.process and self._is_dead(each))

    def sweep(self, process: str) -> None:
        """Remove the subfolder of a dead process."""
        PublishedSubfolder(self.root / process).sweep()
        shutil.rmtree(self.root / process, ignore_errors=True)
        self._lock_of(process).unlink(missing_ok=True)

    def keep(self, digest: str) -> None:
        """Exclude an adapter from ``close``, because a server may still read it.

        Another process removes it after this one has ended.
        """
        self._retained.add(digest)

    def close(self) -> None:
        """Remove all adapters but those of ``keep``. Can be called twice."""
        if not self._lock.is_locked:
            return
        # The shared path may have been cleared.
        with suppress(FileNotFoundError):
            for path in self._subfolder.path.iterdir():
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

    def _lock_of(self, process: str) -> Path:
        return self.root / f"{process}{_LOCK}"


def read_published_adapter(root: Path, digest: str, name: str) -> bytes:
    """Return a file of a published adapter.

    Args:
        root: The folder with the subfolder of each process.
        digest: The digest of the adapter.
        name: One of ``FILES``.

    Raises:
        NotFound: There is no such adapter or file.
    """
    if _DIGEST.fullmatch(digest) and name in FILES:
        for path in sorted(root.glob(f"*/{digest}/{name}")):
            # Another process may remove it at any time.
            with suppress(FileNotFoundError):
                return path.read_bytes()
    raise NotFound(
        f"There is no stack {safe_repr(digest)} here.",
        hint="Publish the stack with: personalpeft publish",
    )
