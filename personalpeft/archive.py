"""Export a user to a ``.personal`` file, and import one.

The file is a zip archive. ``personal.json`` names the format, the user, and the size and SHA-256 of
every other member. ``ledger.jsonl`` holds the ledger's entries in order, one JSON object a line.
``blobs/<digest>`` are the packed adapters. docs/explanation/privacy.md describes the format.

Invariants: the same user at the same moment gives the same bytes. Reading recomputes all digests.
It gives a whole user or raises ``PersonalFileError``. No member is unpacked to a path, and no more
is read than declared and allowed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, get_args

from personalpeft import host
from personalpeft.adapters.formats.packed import unpack
from personalpeft.adapters.safe_io import parse_json
from personalpeft.base_models.types import Base
from personalpeft.errors import AdapterError, InvalidInput, PersonalFileError, PersonalPeftError
from personalpeft.formatting import to_json
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.learning.gate.evidence import eval_history
from personalpeft.learning.report import from_json
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.store.store import Store
from personalpeft.store.user_export import Entry, UserExport, check_export, insert_user, read_user
from personalpeft.types import (
    TRAINS,
    Message,
    Revision,
    Role,
    SignalKind,
    canonical_json,
    is_number,
)

FORMAT, VERSION = "personalpeft.personal", 1
_INDEX, _LEDGER, _BLOBS = "personal.json", "ledger.jsonl", "blobs/"
_MAX_BYTES = {_INDEX: 16 << 20, _LEDGER: 4 << 30}
_MAX_BLOB_BYTES = 1 << 30
_MAX_TOTAL_BYTES = 16 << 30
_MAX_LINE_BYTES = 64 << 20
# The same for every member, so that the same user gives the same bytes.
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
_IMPORTED = "imported"
_INDEX_TYPES: Mapping[str, type] = {
    "format": str,
    "version": int,
    "user": str,
    "since": str,
    "chain": str,
    "entries": int,
    "layers": list,
    "trains": bool,
    "files": dict,
}
# What files of earlier versions do not have.
_INDEX_DEFAULTS = {"trains": True}
_LAYER_KEYS = {"name", "born", "head", "weight", "scope"}


@dataclass(frozen=True, slots=True)
class ExportSummary:
    """Where a ``.personal`` file was written, its size in bytes, and what it holds."""

    path: Path
    user: str
    bytes: int
    turns: int
    signals: int
    revisions: int
    adapters: int


@dataclass(frozen=True, slots=True)
class ImportSummary:
    """What was imported as ``user`` from the file of ``original``.

    ``left_out`` revisions were not imported, for the reason ``why``; the next learn builds new ones
    from the ledger.
    """

    user: str
    original: str
    turns: int
    signals: int
    revisions: int
    left_out: int = 0
    why: str = ""


def export_user(store: Store, user: str, path: Path, *, adapters: bool) -> ExportSummary:
    """Implement ``User.export``, which documents the arguments."""
    target = path.expanduser().absolute()
    portable = read_user(store, user)
    digests = sorted({each["digest"] for each in portable.contents("revision")}) if adapters else []
    blobs = {digest: partial(store.blobs.read, digest) for digest in digests}
    with new_file(target) as file:
        _write(file, portable, blobs)
    turns, signals, revisions = (
        len(portable.contents(kind)) for kind in ("turn", "signal", "revision")
    )
    size = target.stat().st_size
    return ExportSummary(target, user, size, turns, signals, revisions, len(digests))


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its owner can read. It exists from the end of the context on.

    Raises ``InvalidInput`` if the target exists or cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise InvalidInput(
            f"{target} already exists.", hint="Choose another name, or move it away."
        )
    with write_errors(target):
        # The mode of a file made by mkstemp is 0600 from the start.
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".personal-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                host.sync_file(file.fileno())
            host.replace(Path(name), target)
        finally:
            Path(name).unlink(missing_ok=True)


@contextmanager
def write_errors(target: Path) -> Iterator[None]:
    """Raise ``InvalidInput`` for an ``OSError`` inside."""
    try:
        yield
    except PersonalPeftError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{target} cannot be written: {error.strerror or error}.", hint="Choose another place."
        ) from error


def import_user(
    store: Store, base: Callable[[], Base], path: Path, as_user: str | None
) -> ImportSummary:
    """Implement ``Runtime.import_user``, which documents the arguments.

    ``base`` returns the open base. It is called only if the file has revisions.
    """
    source = path.expanduser().absolute()
    with _reading(source), _open(source) as archive:
        index = _read_index(archive)
        portable, blobs = _read_members(archive, index)
        revisions = check_export(portable)
        _check_contents(portable, revisions)
        why = _why_without_revisions(portable, blobs, base)
        if revisions and not why:
            _check_adapters(revisions, blobs, base())
    user = check_user_id(portable.user if as_user is None else as_user)
    insert_user(
        store,
        portable.without_revisions() if why else portable,
        user,
        {} if why else blobs,
        reason_prefix=_IMPORTED,
    )
    return ImportSummary(
        user,
        portable.user,
        len(portable.contents("turn")),
        len(portable.contents("signal")),
        revisions=0 if why else len(revisions),
        left_out=len(revisions) if why else 0,
        why=why if revisions else "",
    )


def _write(file: IO[bytes], portable: UserExport, blobs: Mapping[str, Callable[[], bytes]]) -> None:
    ledger = "".join(canonical_json(to_json(entry)) + "\n" for entry in portable.entries).encode()
    members = {_LEDGER: lambda: ledger, **{_BLOBS + digest: read for digest, read in blobs.items()}}
    index = {
        "format": FORMAT,
        "version": VERSION,
        "user": portable.user,
        "since": portable.since,
        "chain": portable.chain,
        "entries": len(portable.entries),
        "layers": list(portable.layers),
        "trains": portable.trains,
        "files": {name: _size_and_digest(read()) for name, read in members.items()},
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, read in {_INDEX: lambda: canonical_json(index).encode(), **members}.items():
            member = zipfile.ZipInfo(name, _TIMESTAMP)
            member.external_attr = 0o600 << 16
            # Weights do not compress.
            is_blob = name.startswith(_BLOBS)
            member.compress_type = zipfile.ZIP_STORED if is_blob else zipfile.ZIP_DEFLATED
            archive.writestr(member, read())


def _size_and_digest(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _invalid(message: str) -> PersonalFileError:
    return PersonalFileError(
        message, hint="The file is damaged or not from personalpeft. Export it again."
    )


@contextmanager
def _reading(source: Path) -> Iterator[None]:
    """Turn whatever untrusted bytes do to a reader into ``PersonalFileError``."""
    try:
        yield
    except PersonalFileError as error:
        raise PersonalFileError(f"{source.name}: {error.message}", hint=error.hint) from error
    except AdapterError as error:
        hint = error.hint or _invalid("").hint
        raise PersonalFileError(f"{source.name}: {error.message}", hint=hint) from error
    except PersonalPeftError:
        raise
    except OSError as error:
        raise PersonalFileError(
            f"{source} cannot be read: {error.strerror or error}.",
            hint="Check the path and its permissions.",
        ) from error
    except MemoryError as error:
        raise _invalid(f"{source.name} does not fit into memory.") from error
    except Exception as error:
        raise _invalid(f"{source.name} is not a readable .personal file.") from error


@contextmanager
def _open(source: Path) -> Iterator[zipfile.ZipFile]:
    if not source.is_file():
        raise FileNotFoundError(errno.ENOENT, "it is not a file")
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        if len({member.filename for member in members}) < len(members):
            raise _invalid("Two members have the same name.")
        if sum(member.file_size for member in members) > _MAX_TOTAL_BYTES:
            raise _invalid(f"It has more than {_MAX_TOTAL_BYTES} bytes.")
        for member in members:
            is_encrypted = member.flag_bits & 0x41
            if is_encrypted or member.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise _invalid("It is encrypted, or compressed in an unsupported way.")
        yield archive


def _read_index(archive: zipfile.ZipFile) -> dict[str, Any]:
    if _INDEX not in archive.namelist():
        raise _invalid(f"It has no {_INDEX}.")
    index = parse_json(_read_member(archive, _INDEX, None), source=_INDEX, what="index")
    # The version first: a newer file may have other keys, and must be called newer, not damaged.
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise _invalid("Its index does not name the .personal format.")
    version = index.get("version")
    if version != VERSION or isinstance(version, bool):
        raise PersonalFileError(
            f"Its version must be {VERSION}, got {str(version)[:20]!a}.",
            hint="Update personalpeft.",
        )
    index = {**_INDEX_DEFAULTS, **index}
    if index.keys() != _INDEX_TYPES.keys() or any(
        not isinstance(index[key], kind) for key, kind in _INDEX_TYPES.items()
    ):
        raise _invalid("Its index has wrong keys or values.")
    check_user_id(index["user"])
    names = {_INDEX, *index["files"]}
    if names != set(archive.namelist()) or _LEDGER not in names:
        raise _invalid("Its members are not those of its index.")
    return index


def _read_member(archive: zipfile.ZipFile, name: str, declared: Any) -> bytes:
    """Return a member's bytes, reading no more than declared and allowed."""
    size = archive.getinfo(name).file_size
    with archive.open(name) as file:
        data = file.read(min(_MAX_BYTES.get(name, _MAX_BLOB_BYTES), size) + 1)
    if len(data) != size:
        raise _invalid(f"{name[:80]!a} is too large, or not of the size it declares.")
    if declared is not None and _size_and_digest(data) != declared:
        raise _invalid(f"{name[:80]!a} does not match its digest.")
    return data


def _read_members(
    archive: zipfile.ZipFile, index: Mapping[str, Any]
) -> tuple[UserExport, dict[str, bytes]]:
    blobs = {}
    for name, declared in index["files"].items():
        if name != _LEDGER:
            data = _read_member(archive, name, declared)
            digest = hashlib.sha256(data).hexdigest()
            if name != _BLOBS + digest:
                raise _invalid(f"{name[:80]!a} is not a valid member name.")
            blobs[digest] = data
    entries = []
    for line in _read_member(archive, _LEDGER, index["files"][_LEDGER]).splitlines():
        if len(line) > _MAX_LINE_BYTES:
            raise _invalid("A line of its ledger is too long.")
        entry = parse_json(line, source=_LEDGER, what="a line")
        if (
            not isinstance(entry, dict)
            or entry.keys() != Entry.__dataclass_fields__.keys()
            or not isinstance(entry["content"], dict)
            or not isinstance(entry["forgotten"], bool)
        ):
            raise _invalid("A line of its ledger is not an entry.")
        entries.append(Entry(**entry))
    if len(entries) != index["entries"]:
        raise _invalid("Its ledger does not have the declared number of entries.")
    portable = UserExport(
        index["user"],
        index["since"],
        index["chain"],
        tuple(entries),
        tuple(index["layers"]),
        index["trains"],
    )
    return portable, blobs


def _why_without_revisions(
    portable: UserExport, blobs: Mapping[str, bytes], base: Callable[[], Base]
) -> str:
    """Return why the revisions cannot be imported; empty if they can."""
    revisions = portable.contents("revision")
    if blobs and {each["digest"] for each in revisions} != blobs.keys():
        raise _invalid("Its adapters are not those of its revisions.")
    if revisions and not blobs:
        return "the file was written without adapters"
    heads = {layer["head"] for layer in portable.layers} - {None}
    live = [each for each in revisions if each["id"] in heads] or revisions
    if live and any(each["base"] != base().digest for each in live):
        return "they were built on another base"
    return ""


def _check_adapters(revisions: Sequence[Revision], blobs: Mapping[str, bytes], base: Base) -> None:
    by_digest = {revision.digest: revision for revision in revisions}
    for digest, data in blobs.items():
        revision = by_digest[digest]
        # Of former bases the shapes are not known. They are checked when such a revision is loaded.
        architecture = base.architecture if revision.base == base.digest else None
        adapter = unpack(
            data, source=f"{_BLOBS}{digest}", architecture=architecture, base=revision.base
        )
        if adapter.manifest.layer != revision.layer:
            raise _invalid("An adapter belongs to another layer than its revision.")


def _check_contents(portable: UserExport, revisions: Sequence[Revision]) -> None:
    """Check that every reader of a home can read this: digests only prove it unchanged."""
    for layer in portable.layers:
        if not isinstance(layer, dict) or layer.keys() != _LAYER_KEYS:
            raise _invalid("A layer has wrong keys.")
        check_layer_name(layer["name"])
        born, weight = layer["born"], layer["weight"]
        if not isinstance(born, int) or not isinstance(weight, float) or abs(weight) > 2:
            raise _invalid("A layer has an invalid weight or position.")
    heads = {move["layer"]: move["after"] for move in portable.contents("move")}
    if any(heads.get(layer["name"]) != layer["head"] for layer in portable.layers):
        raise _invalid("A layer's head is not the end of its history.")
    turns = [turn["id"] for turn in portable.contents("turn")]
    for number, turn in enumerate(portable.contents("turn")):
        if turn.get("previous") in turns[number:]:
            raise _invalid("A turn continues itself or a later turn.")
    for signal in portable.contents("signal"):
        if not _is_payload(SignalKind(signal["kind"]), json.loads(signal["payload"])):
            raise _invalid(f"A signal has an invalid payload for {SignalKind(signal['kind'])}.")
    for report in portable.contents("report"):
        body = json.loads(report["body"])
        if not isinstance(body, dict):
            raise _invalid("A report is not an object.")
        # An imported adapter has a report without a verdict.
        if "verdict" in body:
            str(from_json(body))
    for revision in revisions:
        eval_history([revision], revision.layer)
        config = TrainingConfig().with_shape_of(revision.recipe)
        if not (
            isinstance(config.rank, int)
            and 0 < config.scaling < 1e6
            and all(isinstance(module, str) for module in config.target_modules)
        ):
            raise _invalid("A revision has an invalid recipe.")


def _is_message(value: Any) -> bool:
    message = Message.from_list(value)
    return isinstance(message.content, str) and message.role in get_args(Role)


def _is_payload(kind: SignalKind, payload: Any) -> bool:
    if not isinstance(payload, dict) or not isinstance(payload.get(TRAINS, False), bool):
        return False
    match kind:
        case SignalKind.RATING | SignalKind.REWARD:
            value = payload.get("value")
            return is_number(value) and -1 <= value <= 1
        case SignalKind.DEMONSTRATION:
            if payload.get("skill") is not None:
                check_layer_name(f"skill.{payload['skill']}")
            before, texts = payload.get("before", []), ("prompt", "answer")
            return (
                isinstance(before, list)
                and all(_is_message(each) for each in before)
                and isinstance(payload.get("group", ""), str)
                and all(isinstance(payload.get(key), str) for key in texts)
            )
        case SignalKind.FACT:
            questions, answer = payload.get("questions") or [], payload.get("answer")
            if not isinstance(questions, list) or not isinstance(answer, str | None):
                return False
            if not all(isinstance(each, str) for each in questions):
                return False
    return isinstance(payload.get("text"), str)
