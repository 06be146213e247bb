"""A stack as other servers pull it by name: a folder in PEFT's form, called by a digest of what it holds.

``personalpeft:<digest>`` is its name there. The digest is the SHA-256 of what ``sha256sum adapter_config.json
adapter_model.safetensors`` prints, so that whoever fetched a copy can check it with nothing of ours:

    sha256sum adapter_config.json adapter_model.safetensors | sha256sum

Invariants: what a name stands for never changes; a folder is there complete or not at all; the same stack gives the same
name; what such a folder says of a person is the numbers alone.
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

from personalpeft.adapters.compose import as_single_lora, to_half
from personalpeft.adapters.formats.peft import CONFIG_FILE, TENSOR_FILE, peft_tensors
from personalpeft.adapters.formats.peft_config import build_config
from personalpeft.adapters.safe_io import format_error, safe_repr
from personalpeft.adapters.types import AdapterStack, LoRAWeights
from personalpeft.base_models.types import Base
from personalpeft.errors import NotFound

PREFIX = "personalpeft:"
FILES = (CONFIG_FILE, TENSOR_FILE)
"""What a folder holds, in the order in which its digest reads it."""

# The ranks that vLLM has room for, one of which its --max-lora-rank is.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """A folder's files, not yet written. ``rank`` is that of all its tensors."""

    digest: str
    rank: int
    files: Mapping[str, bytes]

    @property
    def name(self) -> str:
        """What it is called where it is served."""
        return PREFIX + self.digest

    @property
    def nbytes(self) -> int:
        """The size of its files."""
        return sum(map(len, self.files.values()))


def build_published_adapter(stack: AdapterStack, base: Base) -> PublishedAdapter:
    """A stack of rank 1 or more on a base as such a folder, in half precision where its numbers allow; a rank that other servers
    have no room for is filled up with zeros, which add nothing. Raises ``AdapterError`` where none is large enough, or where a
    weight makes its numbers too large.
    """
    rank = next((rank for rank in _RANKS if rank >= stack.rank), None)
    if rank is None:
        raise format_error(
            "the stack",
            f"has the rank {stack.rank}; other servers take up to {_RANKS[-1]}.",
            hint="Roll a layer back, or learn layers of a lower rank.",
        )
    pairs, scaling = as_single_lora(stack)
    halves = {name: LoRAWeights(to_half(pair.a), to_half(pair.b)) for name, pair in pairs.items()}
    base_name = f"{base.card.name}@{base.digest}"
    config = build_config(rank=rank, scaling=scaling, targets=list(pairs), base_name=base_name)
    files = {
        CONFIG_FILE: (json.dumps(config, indent=2, sort_keys=True) + "\n").encode(),
        TENSOR_FILE: save(peft_tensors(halves, rank, base.architecture), metadata={"format": "pt"}),
    }
    return PublishedAdapter(compute_digest(files), rank, files)


def compute_digest(files: Mapping[str, bytes]) -> str:
    """The digest that a folder with these files is called by."""
    listed = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in FILES)
    return hashlib.sha256(listed.encode()).hexdigest()


class PublishedAdapterFolder:
    """One program's folders below a place that any number of programs share, each with a part ``own`` of its own, which begins
    with the name of its machine and a dot. Programs that are gone leave theirs behind, for another on that machine to sweep: on
    another one their lock may not be seen. Raises ``OSError``.
    """

    def __init__(self, place: Path, own: str) -> None:
        self.place, self.own = place, own
        self._kept: set[str] = set()
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Whoever may look into the place may read what lies there: another server need not run as the same user.
        self._mode = place.stat().st_mode & 0o777
        # Held as long as this program is there, however it ends.
        self._lock = FileLock(self._lock_of(own))
        self._lock.acquire(timeout=0)
        self._part(own).mkdir()
        self._part(own).chmod(self._mode)

    def put(self, folder: PublishedAdapter) -> Path:
        """Has a folder there, and says where; one that is there already stays. Raises ``OSError``."""
        path = self._part(self.own) / folder.digest
        if not path.is_dir():
            new = Path(tempfile.mkdtemp(prefix=".", dir=self._part(self.own)))
            try:
                _write(folder, new, self._mode)
                new.rename(path)
            except OSError:
                # Where there is no room, half a folder would take what is left of it.
                shutil.rmtree(new, ignore_errors=True)
                if not path.is_dir():
                    raise
        return path

    def remove(self, digest: str) -> None:
        """Takes a folder away, which need not be there."""
        shutil.rmtree(self._part(self.own) / digest, ignore_errors=True)

    def incomplete(self) -> tuple[str, ...]:
        """Whose folders are there although their program, on this machine, is gone."""
        here = self.own.partition(".")[0]
        others = (lock.name.removesuffix(_LOCK) for lock in self.place.glob(f"{here}.*{_LOCK}"))
        return tuple(own for own in others if own != self.own and self._is_gone(own))

    def sweep(self, own: str) -> None:
        """Takes away all that a program has left behind."""
        shutil.rmtree(self._part(own), ignore_errors=True)
        self._lock_of(own).unlink(missing_ok=True)

    def keep(self, digest: str) -> None:
        """Has a folder stay after this program's end, since somebody may still read it; another program sweeps it."""
        self._kept.add(digest)

    def close(self) -> None:
        """Takes all of its own folders away but those that are kept. Closing twice is fine."""
        if not self._lock.is_locked:
            return
        # Somebody may have cleared the place.
        with suppress(FileNotFoundError):
            for path in self._part(self.own).iterdir():
                if path.name not in self._kept:
                    self.remove(path.name)
        if not self._kept:
            self.sweep(self.own)
        self._lock.release()

    def _is_gone(self, own: str) -> bool:
        try:
            with FileLock(self._lock_of(own)).acquire(timeout=0):
                return True
        except (Timeout, OSError):
            return False

    def _part(self, own: str) -> Path:
        return self.place / own

    def _lock_of(self, own: str) -> Path:
        return self.place / f"{own}{_LOCK}"


class PublishedSubfolder:
    """A part of a shared place that outlives the programs that write to it: no lock names it, and no machine's name begins as
    its does, so nobody sweeps it. One program at a time may put. Raises ``OSError``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Beside it, so that who copies the part to somewhere else finds whole folders alone.
        self._halves = path.with_name(f".{path.name}")

    @classmethod
    def below(cls, place: Path, key: str) -> PublishedSubfolder:
        """The part of whoever has this key, made where it is not there."""
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = cls(place / f"published_{key}")
        part.path.mkdir(exist_ok=True)
        part.path.chmod(place.stat().st_mode & 0o777)
        return part

    def put(self, folder: PublishedAdapter) -> bool:
        """Has a folder there with exactly these bytes; whether it had to be written."""
        path = self.path / folder.digest
        if _holds(path, folder):
            return False
        self.sweep()
        self._halves.mkdir(mode=0o700)
        try:
            _write(folder, new := self._halves / "new", self.path.stat().st_mode & 0o777)
            # Of what a power cut or somebody else has spoilt; a copy that is not sound nobody takes anyway.
            shutil.rmtree(path, ignore_errors=True)
            new.rename(path)
        finally:
            self.sweep()
        return True

    def take(self, digest: str) -> None:
        """Takes a folder away, which need not be there; the part itself must be."""
        self.path.stat()
        if (path := self.path / digest).exists():
            shutil.rmtree(path)

    def sweep(self) -> None:
        """Takes away what a program that was killed had half written."""
        if self._halves.exists():
            shutil.rmtree(self._halves)


def _write(folder: PublishedAdapter, new: Path, mode: int) -> None:
    new.mkdir(exist_ok=True)
    for name, data in folder.files.items():
        (new / name).write_bytes(data)
        (new / name).chmod(mode & 0o644)
    new.chmod(mode)


def _holds(path: Path, folder: PublishedAdapter) -> bool:
    try:
        return all((path / name).read_bytes() == data for name, data in folder.files.items())
    except OSError:
        return False


def read_published_adapter(place: Path, digest: str, name: str) -> bytes:
    """One file of the folder of that digest, whichever program put it there. Raises ``NotFound`` for a digest or a name that is
    not there.
    """
    if _DIGEST.fullmatch(digest) and name in FILES:
        for path in sorted(place.glob(f"*/{digest}/{name}")):
            # It may be taken away meanwhile.
            with suppress(FileNotFoundError):
                return path.read_bytes()
    raise NotFound(
        f"There is no stack {safe_repr(digest)} here.",
        hint="A stack is there while somebody may be answered with it, and as long as it is published: personalpeft publish.",
    )
