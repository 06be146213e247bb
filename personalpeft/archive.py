"""A ``.personal`` file: all of one user, to be taken to another machine or base.

It is a zip archive that any program can open: ``personal.json`` says what it is, whose, and the size and SHA-256 of every
other member; ``ledger.jsonl`` has the entries of the ledger in order, one JSON object a line; ``blobs/<digest>`` are the
packed adapters. docs/privacy.md has the format.

Invariants: the same user at the same moment gives the same bytes; whatever the bytes of a file are, reading it gives a
whole user whose every digest was derived again, or raises ``PersonalFileError``. No member is ever unpacked to a path, no
name in it is used as one, and nothing is read that is larger than was said and allowed.
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
from typing import IO, Any

from personalpeft.adapters.formats.packed import unpack
from personalpeft.adapters.safe_io import parse_json
from personalpeft.base_models.types import Base
from personalpeft.errors import AdapterError, InvalidInput, PersonalFileError, PersonalPeftError
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.learning.gate.eval_history import eval_history
from personalpeft.learning.report import from_json
from personalpeft.learning.train.config import Recipe
from personalpeft.store.base import Store
from personalpeft.store.user_export import Entry, Portable, check
from personalpeft.types import Revision, SignalKind, canonical_json

FORMAT, VERSION = "personalpeft.personal", 1
_ABOUT, _LEDGER, _BLOBS = "personal.json", "ledger.jsonl", "blobs/"
_LIMITS = {_ABOUT: 16 << 20, _LEDGER: 4 << 30}
_MOST_BLOB = 1 << 30
_MOST_BYTES = 16 << 30
_LONGEST_LINE = 64 << 20
_CHUNK = 1 << 20
_THEN = (1980, 1, 1, 0, 0, 0)
_HINT = (
    "The file is damaged, or was not written by personalpeft; export it again from where it came."
)
_MARK = "imported"


@dataclass(frozen=True, slots=True)
class Exported:
    """What a ``.personal`` file holds: where it is, its size, and how much of what."""

    path: Path
    user: str
    bytes: int
    turns: int
    signals: int
    revisions: int
    adapters: int


@dataclass(frozen=True, slots=True)
class Imported:
    """Who came in, under which name, and with how much. ``left_out`` revisions did not come along, for the reason ``why``; the
    next learn builds from the ledger then.
    """

    user: str
    original: str
    turns: int
    signals: int
    revisions: int
    left_out: int = 0
    why: str = ""


def write(store: Store, user: str, path: Path, *, adapters: bool) -> Exported:
    """Writes a user into a file that is not there yet. Raises ``InvalidInput``, ``NotFound``, ``Damaged``."""
    target = path.expanduser().absolute()
    if target.exists() or target.is_symlink():
        raise InvalidInput(
            f"There is something at {target} already.",
            hint="Choose another name, or move that away.",
        )
    portable = store.take_out(user)
    digests = sorted({each["digest"] for each in portable.contents("revision")}) if adapters else []
    try:
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=".personal-", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                _write(
                    file,
                    portable,
                    {digest: partial(store.blobs.read, digest) for digest in digests},
                )
                file.flush()
                os.fsync(file.fileno())
            Path(name).replace(target)
        finally:
            Path(name).unlink(missing_ok=True)
    except PersonalPeftError:
        raise
    except OSError as error:
        raise InvalidInput(
            f"{target} cannot be written: {error.strerror or error}.", hint="Choose another place."
        ) from error
    counts = {kind: len(portable.contents(kind)) for kind in ("turn", "signal", "revision")}
    return Exported(
        target,
        user,
        target.stat().st_size,
        counts["turn"],
        counts["signal"],
        counts["revision"],
        len(digests),
    )


def read_in(store: Store, base: Callable[[], Base], path: Path, as_user: str | None) -> Imported:
    """Takes the user of a file into the home. Raises ``PersonalFileError``, ``InvalidInput``, ``InvalidId``."""
    source = path.expanduser().absolute()
    with _hostile(source), _opened(source) as archive:
        about = _about(archive)
        portable, files = _read(archive, about)
        revisions = check(portable)
        _check_meaning(portable, revisions)
        why = _why_words_alone(portable, files, base)
        if revisions and not why:
            _check_adapters(revisions, files, base())
    user = check_user_id(portable.user if as_user is None else as_user)
    coming = portable.words_alone() if why else portable
    store.put_in(coming, user, {} if why else files, mark=_MARK)
    built = len(portable.contents("revision"))
    return Imported(
        user,
        portable.user,
        len(portable.contents("turn")),
        len(portable.contents("signal")),
        0 if why else built,
        built if why else 0,
        why if built else "",
    )


def _write(file: IO[bytes], portable: Portable, blobs: Mapping[str, Callable[[], bytes]]) -> None:
    ledger = "".join(canonical_json(_line(entry)) + "\n" for entry in portable.entries).encode()
    members = {_LEDGER: lambda: ledger, **{_BLOBS + digest: read for digest, read in blobs.items()}}
    said = {name: _said_of(read()) for name, read in members.items()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "user": portable.user,
        "since": portable.since,
        "chain": portable.chain,
        "entries": len(portable.entries),
        "layers": list(portable.layers),
        "files": said,
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, read in {_ABOUT: lambda: canonical_json(about).encode(), **members}.items():
            member = zipfile.ZipInfo(name, _THEN)
            member.external_attr = 0o600 << 16
            # Numbers of a network do not grow smaller.
            member.compress_type = (
                zipfile.ZIP_STORED if name.startswith(_BLOBS) else zipfile.ZIP_DEFLATED
            )
            archive.writestr(member, read())


def _said_of(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _line(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in Entry.__dataclass_fields__}


@contextmanager
def _hostile(source: Path) -> Iterator[None]:
    """Whatever a stranger's bytes do to a reader is the file's fault."""
    try:
        yield
    except PersonalFileError as error:
        raise PersonalFileError(f"{source.name}: {error.message}", hint=error.hint) from error
    except AdapterError as error:
        raise PersonalFileError(
            f"{source.name}: {error.message}", hint=error.hint or _HINT
        ) from error
    except PersonalPeftError:
        raise
    except OSError as error:
        raise PersonalFileError(
            f"{source} cannot be read: {error.strerror or error}.",
            hint="Check the path and who may read it.",
        ) from error
    except MemoryError as error:
        raise PersonalFileError(f"{source.name} does not fit into memory.", hint=_HINT) from error
    except Exception as error:
        raise PersonalFileError(
            f"{source.name} is no .personal file that can be read.", hint=_HINT
        ) from error


@contextmanager
def _opened(source: Path) -> Iterator[zipfile.ZipFile]:
    if not source.is_file():
        raise FileNotFoundError(errno.ENOENT, "it is not a file")
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
        names = [member.filename for member in members]
        if len(set(names)) < len(names):
            raise PersonalFileError("A name in it occurs twice.", hint=_HINT)
        if sum(member.file_size for member in members) > _MOST_BYTES:
            raise PersonalFileError("It is larger than anything that is read.", hint=_HINT)
        for member in members:
            if member.flag_bits & 0x41 or member.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise PersonalFileError(
                    "It is encrypted, or packed in a way that is not read.", hint=_HINT
                )
        yield archive


def _about(archive: zipfile.ZipFile) -> dict[str, Any]:
    if _ABOUT not in archive.namelist():
        raise PersonalFileError(f"It has no {_ABOUT}.", hint=_HINT)
    about = parse_json(_member(archive, _ABOUT, None), source=_ABOUT, what="what it says of itself")
    # The version first: a newer file may well have other keys, and should be called newer and not damaged.
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise PersonalFileError("It does not say that it is a .personal file.", hint=_HINT)
    if about.get("version") != VERSION or isinstance(about["version"], bool):
        raise PersonalFileError(
            f"It is of version {str(about.get('version'))[:20]!a}, and {VERSION} is what can be read.",
            hint="Update personalpeft.",
        )
    wanted = {
        "format": str,
        "version": int,
        "user": str,
        "since": str,
        "chain": str,
        "entries": int,
        "layers": list,
        "files": dict,
    }
    if about.keys() != wanted.keys() or any(
        not isinstance(about[key], kind) for key, kind in wanted.items()
    ):
        raise PersonalFileError("What it says of itself is not what it should.", hint=_HINT)
    check_user_id(about["user"])
    names = {_ABOUT, *about["files"]}
    if names != set(archive.namelist()) or _LEDGER not in names:
        raise PersonalFileError("It does not hold the files that it names.", hint=_HINT)
    return about


def _member(archive: zipfile.ZipFile, name: str, said: Any) -> bytes:
    """A member's bytes, of which no more are read than were said and allowed."""
    limit = min(_LIMITS.get(name, _MOST_BLOB), archive.getinfo(name).file_size)
    with archive.open(name) as file:
        data = file.read(limit + 1)
    if len(data) != archive.getinfo(name).file_size:
        raise PersonalFileError(
            f"{name[:80]!a} has another size than it says, or is too large.", hint=_HINT
        )
    if said is not None and _said_of(data) != said:
        raise PersonalFileError(f"{name[:80]!a} is not what its digest says.", hint=_HINT)
    return data


def _read(archive: zipfile.ZipFile, about: Mapping[str, Any]) -> tuple[Portable, dict[str, bytes]]:
    files = {}
    for name, said in about["files"].items():
        if name != _LEDGER:
            data = _member(archive, name, said)
            digest = hashlib.sha256(data).hexdigest()
            if name != _BLOBS + digest:
                raise PersonalFileError(f"{name[:80]!a} is no name of a file in it.", hint=_HINT)
            files[digest] = data
    found = []
    for line in _member(archive, _LEDGER, about["files"][_LEDGER]).splitlines():
        if len(line) > _LONGEST_LINE:
            raise PersonalFileError("A line of its ledger is too long.", hint=_HINT)
        said = parse_json(line, source=_LEDGER, what="a line")
        if not isinstance(said, dict) or said.keys() != Entry.__dataclass_fields__.keys():
            raise PersonalFileError("A line of its ledger is no entry.", hint=_HINT)
        if not (isinstance(said["content"], dict) and isinstance(said["forgotten"], bool)):
            raise PersonalFileError("A line of its ledger is no entry.", hint=_HINT)
        found.append(Entry(**said))
    if len(found) != about["entries"]:
        raise PersonalFileError("Its ledger is not as long as it says.", hint=_HINT)
    portable = Portable(
        about["user"], about["since"], about["chain"], tuple(found), tuple(about["layers"])
    )
    return portable, files


def _why_words_alone(
    portable: Portable, files: Mapping[str, bytes], base: Callable[[], Base]
) -> str:
    """Why what was built cannot come along; empty where it can."""
    built = portable.contents("revision")
    if files and {each["digest"] for each in built} != files.keys():
        raise PersonalFileError(
            "The adapters in it are not those that its revisions name.", hint=_HINT
        )
    if built and not files:
        return "the file was written without adapters"
    if built and any(each["base"] != base().digest for each in built):
        return "they were built on another base"
    return ""


def _check_adapters(revisions: Sequence[Revision], files: Mapping[str, bytes], base: Base) -> None:
    built = {revision.digest: revision.layer for revision in revisions}
    for digest, data in files.items():
        adapter = unpack(
            data, source=f"{_BLOBS}{digest}", architecture=base.architecture, base=base.digest
        )
        if adapter.manifest.layer != built[digest]:
            raise PersonalFileError(
                "An adapter in it is of another layer than its revision.", hint=_HINT
            )


def _check_meaning(portable: Portable, revisions: Sequence[Revision]) -> None:
    """Whether everything that reads a home can read this: the digests only say that it is as it was written."""
    for layer in portable.layers:
        if not isinstance(layer, dict) or layer.keys() != {
            "name",
            "born",
            "head",
            "weight",
            "scope",
        }:
            raise PersonalFileError("One of its layers is none.", hint=_HINT)
        check_layer_name(layer["name"])
        if (
            not isinstance(layer["born"], int)
            or not isinstance(layer["weight"], float)
            or abs(layer["weight"]) > 2
        ):
            raise PersonalFileError("One of its layers has no weight or no place.", hint=_HINT)
    heads: dict[str, str | None] = {}
    for move in portable.contents("move"):
        heads[move["layer"]] = move["after"]
    if any(heads.get(layer["name"]) != layer["head"] for layer in portable.layers):
        raise PersonalFileError("A layer's head is not where its last move went.", hint=_HINT)
    for signal in portable.contents("signal"):
        _check_payload(SignalKind(signal["kind"]), json.loads(signal["payload"]))
    for said in portable.contents("report"):
        body = json.loads(said["body"])
        if not isinstance(body, dict):
            raise PersonalFileError("A report in it is none.", hint=_HINT)
        # Of an adapter that was imported there is no report of a learn.
        if "verdict" in body:
            str(from_json(body))
    for revision in revisions:
        eval_history([revision], revision.layer)
        recipe = revision.recipe
        known = Recipe(rank=recipe["rank"], alpha=recipe["alpha"], targets=tuple(recipe["targets"]))
        if not (
            isinstance(known.rank, int)
            and 0 < known.scaling < 1e6
            and all(isinstance(t, str) for t in known.targets)
        ):
            raise PersonalFileError("A recipe in it is none.", hint=_HINT)


def _check_payload(kind: SignalKind, payload: Any) -> None:
    texts = {
        SignalKind.EDIT: ("text",),
        SignalKind.PREFERENCE: ("text",),
        SignalKind.COMMENT: ("text",),
        SignalKind.FACT: ("text",),
        SignalKind.DEMONSTRATION: ("prompt", "answer"),
    }
    fine = isinstance(payload, dict) and all(
        isinstance(payload.get(key), str) for key in texts.get(kind, ())
    )
    if fine and kind in (SignalKind.RATING, SignalKind.REWARD):
        value = payload.get("value")
        fine = isinstance(value, int | float) and not isinstance(value, bool) and -1 <= value <= 1
    if fine and kind is SignalKind.FACT:
        asked, answer = payload.get("questions") or [], payload.get("answer")
        fine = isinstance(asked, list) and all(isinstance(each, str) for each in asked)
        fine = fine and (answer is None or isinstance(answer, str))
    if fine and kind is SignalKind.DEMONSTRATION and payload.get("skill") is not None:
        check_layer_name(f"skill.{payload['skill']}")
    if not fine:
        raise PersonalFileError(f"What one {kind} in it says is nothing of the kind.", hint=_HINT)
