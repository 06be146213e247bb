"""Export a user to a ``.personal`` file, and import one.

The file is a zip archive (``store.archive_file``). Its index ``personal.json`` also names the user,
the chain and the layers. docs/explanation/privacy.md describes the format.

Invariants: the same user at the same moment gives the same bytes. Reading recomputes all digests.
It gives a whole user or raises ``PersonalFileError``.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, get_args

from personalpeft import file_system
from personalpeft.adapters.formats.packed import unpack
from personalpeft.base_models.files import hash_files
from personalpeft.base_models.types import Base
from personalpeft.errors import InvalidInput, PersonalFileError, PersonalPeftError, map_write_errors
from personalpeft.former_names import rename_report
from personalpeft.ids import check_layer_name, check_user_id
from personalpeft.learning.gate.evidence import eval_history
from personalpeft.learning.report import format_leakage, from_json
from personalpeft.learning.train.config import TrainingConfig
from personalpeft.sandbox import Limits, run_reader
from personalpeft.store.archive_file import BLOBS, ArchiveContent, ArchiveFormat
from personalpeft.store.database import Row
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.exports import ExportKind
from personalpeft.store.rows import format_time
from personalpeft.store.store import Store
from personalpeft.store.user_export import UserExport, check_export, insert_user, read_user
from personalpeft.types import TRAINS, Message, Revision, Role, SignalKind, is_number

USER_KEYS: Mapping[str, type] = {
    "user": str,
    "since": str,
    "chain": str,
    "entries": int,
    "layers": list,
    "trains": bool,
}
"""The keys of an index that describe a user."""

_PERSONAL = ArchiveFormat(
    name="personalpeft.personal",
    index="personal.json",
    keys=USER_KEYS,
    hint="The file is damaged or not from personalpeft. Export it again.",
    hint_too_large="Leave the adapters out: --no-adapters. The next learn builds them again.",
    # What files of earlier versions do not have.
    defaults={"trains": True},
)
_IMPORTED = "imported"
# Objects of a ledger take so many times the bytes of the compressed text.
_MEMORY_FACTOR, _BYTES_A_SECOND = 64, 1 << 20
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
    with store.exports.recording(user, ExportKind.PERSONAL) as set_digest:
        portable = read_user(store, user)
        digests = {each["digest"] for each in portable.contents("revision")} if adapters else set()
        with new_file(path) as file:
            index = user_index(portable)
            _PERSONAL.write(file, index, portable.entries, digests, store.blobs.read)
        set_digest(hash_files([path]))
    turns, signals, revisions = (
        len(portable.contents(kind)) for kind in ("turn", "signal", "revision")
    )
    size = path.stat().st_size
    return ExportSummary(path, user, size, turns, signals, revisions, len(digests))


@contextmanager
def new_file(target: Path) -> Iterator[IO[bytes]]:
    """Open a new file that only its owner can read. It exists from the end of the context on.

    Raises ``InvalidInput`` if the target exists or cannot be written.
    """
    # A name that is too long fails here already.
    with map_write_errors(target):
        is_taken = target.exists() or target.is_symlink()
    if is_taken:
        raise InvalidInput(f"{target} already exists.", hint="Name a new file in a folder.")
    with map_write_errors(target), file_system.create_file(target) as file:
        yield file


def import_user(
    store: Store, base: Callable[[], Base], path: Path, as_user: str | None
) -> ImportSummary:
    """Implement ``Runtime.import_user``, which documents the arguments.

    ``base`` returns the open base. It is called only if the file has revisions.
    """
    digests = _check_in_child(path)
    with _open(path) as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digests.get(str(path)):
            raise _PERSONAL.invalid("It changed while it was read.")
        portable, blobs, revisions = _read(file)
        why = _why_without_revisions(portable, blobs, base)
        if revisions and not why:
            check_adapters(revisions, blobs, base(), _PERSONAL)
    user = check_user_id(portable.user if as_user is None else as_user)
    portable = portable.without_revisions() if why else portable
    with map_home_errors(store.home):
        if store.erasures.has_user(user, portable.since):
            # Another user from now on, whom no restore forgets again.
            portable = replace(portable, since=format_time(store.now()))
    insert_user(store, portable, user, {} if why else blobs, reason_prefix=_IMPORTED)
    turns, signals = len(portable.contents("turn")), len(portable.contents("signal"))
    found, imported = len(revisions), 0 if why else len(revisions)
    why = why if revisions else ""
    return ImportSummary(
        user, portable.user, turns, signals, imported, left_out=found - imported, why=why
    )


def _check_in_child(source: Path) -> Mapping[str, str]:
    """Have a child with limits read a file first. Raises ``PersonalFileError``."""
    with suppress(OSError):
        return run_reader(
            f"{__name__}:check_personal_file",
            {"path": str(source)},
            _limits(source.stat().st_size),
            source=source.name,
            error=PersonalFileError,
        )
    return {}  # The file cannot be opened. Reading it says why.


def check_bytes(reader: Callable[[bytes], object], data: bytes, what: str) -> None:
    """Have a child with limits read an archive first that lies in no file.

    ``reader`` is a function of a module with the argument ``data``. It runs in a child of
    ``sandbox``. ``what`` is what messages call the archive. Raises what the reader raises, or
    ``PersonalFileError``.
    """
    name = f"{reader.__module__}:{reader.__name__}"
    limits = _limits(len(data))
    run_reader(name, {}, limits, source=what, error=PersonalFileError, data=data)


def _limits(size: int) -> Limits:
    return Limits.for_files(size, memory_factor=_MEMORY_FACTOR, bytes_a_second=_BYTES_A_SECOND)


def check_personal_file(path: str) -> Mapping[str, str]:
    """Read a ``.personal`` file in a child of ``sandbox``, and return its digest."""
    source = Path(path)
    with _open(source) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        _, blobs, revisions = _read(file)
        for name in blobs.keys() & {revision.digest for revision in revisions}:
            unpack(blobs[name], source=f"{BLOBS}{name}")
    return {path: digest}


def _read(file: IO[bytes]) -> tuple[UserExport, Mapping[str, bytes], tuple[Revision, ...]]:
    """Return the user of a file, the packed adapters by digest, and the checked revisions."""
    content = _PERSONAL.read(file)
    portable = user_of(content, _PERSONAL)
    return portable, content.blobs, check_user(portable, _PERSONAL)


@contextmanager
def _open(source: Path) -> Iterator[BufferedReader]:
    """Open a file, and turn what its bytes do to a reader into ``PersonalFileError``."""
    try:
        with _PERSONAL.reading(source.name):
            if not source.is_file():
                raise FileNotFoundError(errno.ENOENT, "it is not a file")
            with source.open("rb") as file:
                yield file
    except PersonalPeftError:
        raise
    except OSError as error:
        raise PersonalFileError(
            f"{source} cannot be read: {error.strerror or error}.",
            hint="Check the path and its permissions.",
        ) from error


def user_index(portable: UserExport) -> dict[str, Any]:
    """Return the values of ``USER_KEYS`` for a user."""
    return {
        "user": portable.user,
        "since": portable.since,
        "chain": portable.chain,
        "entries": len(portable.entries),
        "layers": list(portable.layers),
        "trains": portable.trains,
    }


def user_of(content: ArchiveContent, kind: ArchiveFormat) -> UserExport:
    """Return the user of an archive whose index has ``USER_KEYS``, unchecked but for its size.

    Raises ``PersonalFileError``.
    """
    index = content.index
    check_user_id(index["user"])
    if len(content.entries) != index["entries"]:
        raise kind.invalid("Its ledger does not have the declared number of entries.")
    return UserExport(
        index["user"],
        index["since"],
        index["chain"],
        content.entries,
        tuple(index["layers"]),
        index["trains"],
    )


def _why_without_revisions(
    portable: UserExport, blobs: Mapping[str, bytes], base: Callable[[], Base]
) -> str:
    """Return why the revisions cannot be imported; empty if they can."""
    revisions = portable.contents("revision")
    if blobs and {each["digest"] for each in revisions} != blobs.keys():
        raise _PERSONAL.invalid("Its adapters are not those of its revisions.")
    if revisions and not blobs:
        return "the file was written without adapters"
    heads = {layer["head"] for layer in portable.layers} - {None}
    live = [each for each in revisions if each["id"] in heads] or revisions
    if live and any(each["base"] != base().digest for each in live):
        return "they were built on another base"
    return ""


def check_adapters(
    revisions: Iterable[Revision], blobs: Mapping[str, bytes], base: Base, kind: ArchiveFormat
) -> None:
    """Check that packed adapters are valid, and of the bases and layers of their revisions.

    ``revisions`` are all that name one of them, and ``kind`` is the archive that they came in.
    Raises ``AdapterError``, ``PersonalFileError``.
    """
    by_digest = {revision.digest: revision for revision in revisions}
    for digest, data in blobs.items():
        revision = by_digest[digest]
        # Of former bases the shapes are not known. They are checked when such a revision is loaded.
        architecture = base.architecture if revision.base == base.digest else None
        adapter = unpack(
            data, source=f"{BLOBS}{digest}", architecture=architecture, base=revision.base
        )
        if adapter.manifest.layer != revision.layer:
            raise kind.invalid("An adapter belongs to another layer than its revision.")


def check_user(portable: UserExport, kind: ArchiveFormat) -> tuple[Revision, ...]:
    """Check all of a user, and return the revisions. Raises ``PersonalFileError``.

    Digests only prove it unchanged. This also checks that every reader of a home can read it.
    """
    revisions = check_export(portable)
    for layer in portable.layers:
        if not isinstance(layer, dict) or layer.keys() != _LAYER_KEYS:
            raise kind.invalid("A layer has wrong keys.")
        check_layer_name(layer["name"])
        born, weight = layer["born"], layer["weight"]
        if not isinstance(born, int) or not isinstance(weight, float) or abs(weight) > 2:
            raise kind.invalid("A layer has an invalid weight or position.")
    heads = {move["layer"]: move["after"] for move in portable.contents("move")}
    if any(heads.get(layer["name"]) != layer["head"] for layer in portable.layers):
        raise kind.invalid("A layer's head is not the end of its history.")
    numbers = {turn["id"]: number for number, turn in enumerate(portable.contents("turn"))}
    for number, turn in enumerate(portable.contents("turn")):
        if numbers.get(turn.get("previous"), -1) >= number:
            raise kind.invalid("A turn continues itself or a later turn.")
    for signal in portable.contents("signal"):
        if not _is_payload(SignalKind(signal["kind"]), json.loads(signal["payload"])):
            raise kind.invalid(f"A signal has an invalid payload for {SignalKind(signal['kind'])}.")
    check_reports(portable.contents("report"), kind)
    check_revisions(revisions, kind)
    return revisions


def check_reports(reports: Iterable[Row], kind: ArchiveFormat) -> None:
    """Check the bodies of reports. Raises ``PersonalFileError``, or what reading them raises."""
    for report in reports:
        body = json.loads(report["body"])
        if not isinstance(body, dict):
            raise kind.invalid("A report is not an object.")
        renamed = rename_report(body)
        # An imported adapter has a report without a verdict.
        if "verdict" in body:
            str(from_json(renamed))


def check_revisions(revisions: Iterable[Revision], kind: ArchiveFormat) -> None:
    """Check the evidence and recipes of revisions. Raises as ``check_reports``."""
    for revision in revisions:
        eval_history([revision], revision.layer)
        format_leakage(revision.scores)
        TrainingConfig(scrub=revision.recipe.get("scrub", ()))
        config = TrainingConfig().with_shape_of(revision.recipe)
        if not (
            isinstance(config.rank, int)
            and 0 < config.scaling < 1e6
            and all(isinstance(module, str) for module in config.target_modules)
        ):
            raise kind.invalid("A revision has an invalid recipe.")


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
