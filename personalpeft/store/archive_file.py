"""Write and read the zip archives that carry a user's entries and adapters between homes.

An index names the format, and the size and SHA-256 of every other member. ``ledger.jsonl`` holds
entries in order, one JSON object a line. ``blobs/<digest>`` are packed adapters.

Invariants: the same content gives the same bytes. Reading recomputes all digests. It gives all
members or raises ``PersonalFileError``. No member is unpacked to a path, and no more is read than
declared and allowed.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any

from personalpeft.adapters.safe_io import naming, parse_json
from personalpeft.errors import AdapterError, InvalidInput, PersonalFileError, PersonalPeftError
from personalpeft.formatting import to_json
from personalpeft.store.user_export import Entry
from personalpeft.types import canonical_json

LEDGER, BLOBS = "ledger.jsonl", "blobs/"
_MAX_INDEX_BYTES = 16 << 20
_MAX_LEDGER_BYTES = 4 << 30
_MAX_BLOB_BYTES = 1 << 30
_MAX_TOTAL_BYTES = 16 << 30
_MAX_LINE_BYTES = 64 << 20
# The same for every member, so that the same content gives the same bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class ArchiveContent:
    """What an archive holds: the index, the entries, and the packed adapters by digest."""

    index: Mapping[str, Any]
    entries: tuple[Entry, ...]
    blobs: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class ArchiveFormat:
    """A kind of archive.

    Attributes:
        name: What the index says under "format".
        index: The name of the index.
        keys: The further keys of the index with their types, without "files".
        hint: What to do about a damaged archive.
        defaults: Values of keys that archives of earlier versions do not have.
        hint_too_large: What to do about too much content.
        title: What messages call an archive that lies in no file.
        version: What the index says under "version".
    """

    name: str
    index: str
    keys: Mapping[str, type]
    hint: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    hint_too_large: str = "Forget the largest turns."
    title: str = "The archive"
    version: int = 1

    def invalid(self, message: str) -> PersonalFileError:
        """Return the error of a damaged archive."""
        return PersonalFileError(message, hint=self.hint)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turn whatever untrusted bytes do to a reader into ``PersonalFileError``.

        Errors of the operating system and of this package's other kinds pass. ``name`` is the
        archive's name in messages.
        """
        try:
            yield
        except (PersonalFileError, AdapterError) as error:
            hint = error.hint or self.hint
            raise PersonalFileError(f"{name}: {error.message}", hint=hint) from error
        except (PersonalPeftError, OSError):
            raise
        except zipfile.BadZipFile as error:
            raise self.invalid(f"{name} is damaged, or no archive of {self.name}.") from error
        except MemoryError as error:
            raise self.invalid(f"{name} does not fit into memory.") from error
        except Exception as error:
            raise self.invalid(f"{name} is not readable.") from error

    def write(
        self,
        file: IO[bytes],
        index: Mapping[str, Any],
        entries: Iterable[Entry],
        blobs: Iterable[str],
        read: Callable[[str], bytes],
    ) -> None:
        """Write an archive.

        Args:
            file: Where to.
            index: The values of its keys.
            entries: The entries in order.
            blobs: The digests of the packed adapters.
            read: Returns a packed adapter by its digest.

        Raises:
            InvalidInput: It would be too large to be read again.
        """
        ledger = "".join(canonical_json(to_json(entry)) + "\n" for entry in entries).encode()
        members = {LEDGER: ledger}

        def content(name: str) -> bytes:
            return members[name] if name in members else read(name.removeprefix(BLOBS))

        names = [LEDGER, *(BLOBS + digest for digest in sorted(set(blobs)))]
        files = {name: _size_and_digest(content(name)) for name in names}
        full_index = {"format": self.name, "version": self.version, **index, "files": files}
        members[self.index] = canonical_json(full_index).encode()
        sizes = {name: entry["bytes"] for name, entry in files.items()}
        self._check_sizes({**sizes, self.index: len(members[self.index])}, ledger)
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in (self.index, *names):
                member = zipfile.ZipInfo(name, _TIMESTAMP)
                member.external_attr = 0o600 << 16
                # Weights do not compress.
                is_blob = name.startswith(BLOBS)
                member.compress_type = zipfile.ZIP_STORED if is_blob else zipfile.ZIP_DEFLATED
                archive.writestr(member, content(name))

    def read(self, file: IO[bytes]) -> ArchiveContent:
        """Read an archive. Call it inside ``reading``. Raises ``PersonalFileError``."""
        with zipfile.ZipFile(file) as archive:
            self._check_members(archive)
            index = self._read_index(archive)
            members = {
                name: self._read_member(archive, name, declared)
                for name, declared in index["files"].items()
            }
        ledger = self._decode_entries(members.pop(LEDGER))
        blobs = {}
        for name, data in members.items():
            digest = hashlib.sha256(data).hexdigest()
            if name != BLOBS + digest:
                raise self.invalid(f"{name[:80]!a} is not a valid member name.")
            blobs[digest] = data
        return ArchiveContent(index, ledger, blobs)

    def _limit(self, name: str) -> int:
        """Return the most bytes that are read of a member."""
        limits = {self.index: _MAX_INDEX_BYTES, LEDGER: _MAX_LEDGER_BYTES}
        return limits.get(name, _MAX_BLOB_BYTES)

    def _check_sizes(self, sizes: Mapping[str, int], ledger: bytes) -> None:
        """Raise ``InvalidInput`` if an archive with members of these sizes would not be read."""
        found = [(name, size, self._limit(name)) for name, size in sizes.items()]
        line = max(map(len, ledger.splitlines()), default=0)
        found += [
            ("a line of its ledger", line, _MAX_LINE_BYTES),
            ("the file", sum(sizes.values()), _MAX_TOTAL_BYTES),
        ]
        for what, size, limit in found:
            if size > limit:
                raise InvalidInput(
                    f"An import would refuse the file: {what} has {size:,} bytes, at most "
                    f"{limit:,} are read.",
                    hint=self.hint_too_large,
                )

    def _check_members(self, archive: zipfile.ZipFile) -> None:
        members = archive.infolist()
        if len({member.filename for member in members}) < len(members):
            raise self.invalid("Two members have the same name.")
        if sum(member.file_size for member in members) > _MAX_TOTAL_BYTES:
            raise self.invalid(f"It has more than {_MAX_TOTAL_BYTES} bytes.")
        for member in members:
            is_encrypted = member.flag_bits & 0x41
            is_known = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
            if is_encrypted or not is_known:
                raise self.invalid("It is encrypted, or compressed in an unsupported way.")

    def _read_index(self, archive: zipfile.ZipFile) -> dict[str, Any]:
        if self.index not in archive.namelist():
            raise self.invalid(f"It has no {self.index}.")
        data = self._read_member(archive, self.index, None)
        with naming(self.index):
            index = parse_json(data, what="index")
        # The version first: a newer file may have other keys, and must be called newer, not
        # damaged.
        if not isinstance(index, dict) or index.get("format") != self.name:
            raise self.invalid(f"Its index does not name the format {self.name}.")
        version = index.get("version")
        if version != self.version or isinstance(version, bool):
            raise PersonalFileError(
                f"Its version must be {self.version}, got {str(version)[:20]!a}.",
                hint="Update personalpeft.",
            )
        types = {"format": str, "version": int, **self.keys, "files": dict}
        index = {**self.defaults, **index}
        if index.keys() != types.keys() or any(
            not isinstance(index[key], each) for key, each in types.items()
        ):
            raise self.invalid("Its index has wrong keys or values.")
        names = {self.index, *index["files"]}
        if names != set(archive.namelist()) or LEDGER not in names:
            raise self.invalid("Its members are not those of its index.")
        return index

    def _read_member(self, archive: zipfile.ZipFile, name: str, declared: Any) -> bytes:
        """Return a member's bytes, reading no more than declared and allowed."""
        size = archive.getinfo(name).file_size
        with archive.open(name) as file:
            data = file.read(min(self._limit(name), size) + 1)
        if len(data) != size:
            raise self.invalid(f"{name[:80]!a} is too large, or not of the size it declares.")
        if declared is not None and _size_and_digest(data) != declared:
            raise self.invalid(f"{name[:80]!a} does not match its digest.")
        return data

    def _decode_entries(self, ledger: bytes) -> tuple[Entry, ...]:
        entries = []
        for line in ledger.splitlines():
            if len(line) > _MAX_LINE_BYTES:
                raise self.invalid("A line of its ledger is too long.")
            with naming(LEDGER):
                entry = parse_json(line, what="a line")
            if (
                not isinstance(entry, dict)
                or entry.keys() != Entry.__dataclass_fields__.keys()
                or not isinstance(entry["content"], dict)
                or not isinstance(entry["forgotten"], bool)
            ):
                raise self.invalid("A line of its ledger is not an entry.")
            entries.append(Entry(**entry))
        return tuple(entries)


def _size_and_digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
