"""Learn for a user in another home, on another machine: the learn's inputs and its result as bytes.

``make_bundle`` packs a user's ledger, the adapters that a learn reads, and the options of the learn.
``learn_bundles`` copies users into a home of its own, runs the same learn there, and packs
what it appended to the ledgers. ``apply_result`` appends that in the user's own home. Both archives
are zip files (``store.archive_file``).

Invariants: nothing in an archive is trusted. A bundle is learned only on its base, in its build
format and by its recipe. A result is recorded whole or dropped, and at most once. After a learn
the other home holds nothing of its user.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any

from personalpeft import archive
from personalpeft.adapters.formats.packed import unpack
from personalpeft.errors import BaseMismatch, BuildMismatch, InvalidInput, NotFound
from personalpeft.former_names import START, rename_report
from personalpeft.ids import check_layer_name
from personalpeft.learning.data.general_prompts import load_general_prompts, prompt_languages
from personalpeft.learning.data.style import drop_cached_texts
from personalpeft.learning.layers import replace_layer
from personalpeft.learning.learner import Learner
from personalpeft.learning.options import LearnOptions
from personalpeft.learning.report import LearnReport, from_json
from personalpeft.learning.train.config import BUILD_FORMAT
from personalpeft.services import Services
from personalpeft.store import remote_learn, rows, user_export
from personalpeft.store.archive_file import BLOBS, ArchiveContent, ArchiveFormat
from personalpeft.store.erasure import delete_pending_files, erase_user
from personalpeft.store.exports import ExportKind
from personalpeft.store.locks import learn_lease
from personalpeft.store.remote_learn import LedgerPosition
from personalpeft.store.user_export import Entry, UserExport
from personalpeft.types import Json, Revision, Stack, StackEntry, Verdict, canonical_digest

_COMMON_KEYS: Mapping[str, type] = {"base": str, "build": dict, "at": str}
_BUNDLE = ArchiveFormat(
    name="personalpeft.learn-bundle",
    index="bundle.json",
    keys={**archive.USER_KEYS, **_COMMON_KEYS, "options": dict},
    hint="The bundle is damaged or not from personalpeft. Make it again.",
    title="The learn bundle",
)
_RESULT = ArchiveFormat(
    name="personalpeft.learn-result",
    index="result.json",
    keys={"user": str, "since": str, "seq": int, "chain": str, **_COMMON_KEYS, "report": dict},
    hint="The result is damaged or not from personalpeft. Learn again.",
    title="The result of a learn",
)
# How far the clocks of two machines may differ. Heads are ordered by their times.
_MAX_CLOCK_SKEW = timedelta(minutes=5)
_BUILD_HINT = (
    "Install the same version of personalpeft, the same card and the same extras on both machines."
)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """A checked bundle."""

    export: UserExport
    blobs: Mapping[str, bytes]
    layer: str | None
    options: LearnOptions
    common: Mapping[str, Any]

    @property
    def user(self) -> str:
        return self.export.user

    @property
    def position(self) -> LedgerPosition:
        return LedgerPosition(self.export.since, len(self.export.entries), self.export.chain)


def make_bundle(services: Services, user: str, layer: str | None, options: LearnOptions) -> bytes:
    """Implement ``User.bundle_learn``, which documents the arguments."""
    store = services.store
    # Checked by ``LearnOptions`` here, and again where it is learned.
    chosen = {"start": options.start, "accept": options.accept, "recipe": options.recipe}
    with store.exports.recording(user, ExportKind.LEARN_BUNDLE) as set_digest:
        export = user_export.read_user(store, user)
        index = {
            **archive.user_index(export),
            "base": services.base.digest,
            "build": _build_settings(services),
            "at": services.clock.now().isoformat(),
            "options": {"layer": layer, **chosen},
        }
        bundle = _pack(services, _BUNDLE, index, export.entries, _once_live(export))
        set_digest(hashlib.sha256(bundle).hexdigest())
    return bundle


def learn_bundles(
    services: Services, bundles: Sequence[bytes], options: LearnOptions
) -> tuple[bytes, ...]:
    """Implement ``Runtime.learn_bundles``, which documents the arguments.

    ``options`` are those of this machine: memory and callbacks.
    """
    opened = [_open_bundle(services, data) for data in bundles]
    users = [bundle.user for bundle in opened]
    if len(set(users)) < len(users):
        raise InvalidInput("A user is in two bundles.", hint="Give one bundle of each user.")
    for user in users:
        _check_absent(services, user)
    with ExitStack() as copies:
        for bundle in opened:
            user_export.insert_user(
                services.store, bundle.export, bundle.user, bundle.blobs, reason_prefix=None
            )
            # Only now: of a user who was here before, nothing is erased.
            copies.callback(_erase_copy, services, bundle.user)
        reports = _learn(services, opened, options)
        return tuple(_pack_result(services, each, reports[each.user]) for each in opened)


def apply_result(services: Services, user: str, result: bytes) -> LearnReport:
    """Implement ``User.apply_learn``, which documents the arguments."""
    store = services.store
    archive.check_bytes(check_result, result, _RESULT.title)
    with _reading(_RESULT, result) as content:
        index, entries = content.index, content.entries
        if index["user"] != user:
            raise InvalidInput(
                f"The result is of {index['user']!a}, not of {user}.", hint="Give it to its user."
            )
        _check_machine(services, index, "The result was built")
        position = LedgerPosition(index["since"], index["seq"], index["chain"])
        remote_learn.check_remote_entries(user, position, entries)
        report = from_json(rename_report(index["report"]))
        str(report)
    with store.leases.acquire(learn_lease(user)):
        # Before what it refers to is looked up, which may be gone.
        with store.database.read_transaction() as db:
            remote_learn.check_unmoved(db, user, position)
        with _RESULT.reading(_RESULT.title):
            revisions = _check_result(services, user, content)
        if not entries:
            return report
        # Durable and pinned before the head moves, so that the first reply does not load it.
        store.blobs.put_many((user, data) for data in content.blobs.values())
        with services.model.preloaded(_next_stack(services, user, content, revisions)):
            remote_learn.append_remote_entries(store, user, position, entries)
        for revision in revisions:
            store.delete_checkpoint(user, revision.layer)
    return report


def _build_settings(services: Services) -> dict[str, Any]:
    """Return what decides a revision's bytes and verdict beside the ledger and the base."""
    learner, card = Learner.from_services(services), services.base.card
    recipes = (learner.recipes.style, learner.recipes.skill, learner.recipes.memory)
    settings = [
        [recipe.to_stored() for recipe in recipes],
        learner.margins.to_stored(),
        load_general_prompts(prompt_languages()).digest,
        services.memory.embedder.name,
        card.system,
    ]
    return {"format": BUILD_FORMAT, "settings": canonical_digest(settings)}


def _check_base(wanted: object, digest: str, what: str) -> None:
    if wanted != digest:
        raise BaseMismatch(
            f"{what} on the base {str(wanted)[:64]}, and this machine has {digest}.",
            hint="Open the same base on both machines.",
        )


def _check_machine(services: Services, index: Mapping[str, Any], what: str) -> None:
    """Check that an archive was made on the open base, and with the settings of this machine."""
    _check_base(index["base"], services.base.digest, what)
    if index["build"] != _build_settings(services):
        raise BuildMismatch(
            "The recipe, the gate or the retrieval model differs between the machines.",
            hint=_BUILD_HINT,
        )


def _once_live(export: UserExport) -> Iterator[Mapping[str, Any]]:
    """Yield the revisions that were live once, and their ancestors. Others play no part in a learn."""
    revisions = {row["id"]: row for row in export.contents("revision")}
    moves = export.contents("move")
    waiting = [row[end] for row in moves for end in ("before", "after")]
    while waiting:
        row = revisions.pop(waiting.pop(), None)
        if row is not None:
            yield row
            waiting.append(row["parent"])


def check_bundle(data: bytes) -> Json:
    """Read a bundle in a child of ``sandbox``."""
    with _reading(_BUNDLE, data) as content:
        archive.check_user(archive.user_of(content, _BUNDLE), _BUNDLE)
        _unpack_all(content)
    return {}


def check_result(data: bytes) -> Json:
    """Read a result in a child of ``sandbox``."""
    with _reading(_RESULT, data) as content:
        index = content.index
        position = LedgerPosition(index["since"], index["seq"], index["chain"])
        remote_learn.check_remote_entries(index["user"], position, content.entries)
        from_json(rename_report(index["report"]))
        _unpack_all(content)
    return {}


def _unpack_all(content: ArchiveContent) -> None:
    for digest, data in content.blobs.items():
        unpack(data, source=f"{BLOBS}{digest}")


def _open_bundle(services: Services, data: bytes) -> _Bundle:
    archive.check_bytes(check_bundle, data, _BUNDLE.title)
    with _reading(_BUNDLE, data) as content:
        index = content.index
        _check_machine(services, index, "The learn is")
        export = archive.user_of(content, _BUNDLE)
        revisions = archive.check_user(export, _BUNDLE)
        by_digest = [each for each in revisions if each.digest in content.blobs]
        if {each.digest for each in by_digest} != content.blobs.keys():
            raise _BUNDLE.invalid("It has an adapter that no revision names.")
        archive.check_adapters(by_digest, content.blobs, services.base, _BUNDLE)
        started = datetime.fromisoformat(index["at"])
        layer, options = _read_options(index["options"])
    if started > services.clock.now() + _MAX_CLOCK_SKEW:
        raise BuildMismatch(
            f"The bundle is from {started.isoformat(timespec='seconds')}, the future here.",
            hint="Set the clocks of both machines.",
        )
    common = {key: index[key] for key in _COMMON_KEYS}
    return _Bundle(export, content.blobs, layer, options, common)


def _read_options(values: Mapping[str, Any]) -> tuple[str | None, LearnOptions]:
    layer, accept, recipe = (values[key] for key in ("layer", "accept", "recipe"))
    if not isinstance(accept, bool) or not isinstance(recipe, dict | None):
        raise _BUNDLE.invalid("Its options are invalid.")
    if layer is not None:
        check_layer_name(layer)
    start = START.get(str(values["start"]), values["start"])
    return layer, LearnOptions(start=start, accept=accept, recipe=recipe)


def _check_absent(services: Services, user: str) -> None:
    try:
        services.store.catalog.user(user)
    except NotFound:
        return
    raise InvalidInput(
        f"This home has a user {user}, who would be mixed up with the bundle's.",
        hint="Open an empty home for bundles.",
    )


def _learn(
    services: Services, bundles: Sequence[_Bundle], options: LearnOptions
) -> dict[str, LearnReport]:
    """Learn for all, and for those with equal options in one pass."""
    reports: dict[str, LearnReport] = {}
    learner = Learner.from_services(services)

    for (layer, wanted), group in groupby(bundles, lambda each: (each.layer, each.options)):
        users = [bundle.user for bundle in group]
        combined = replace(options, start=wanted.start, accept=wanted.accept, recipe=wanted.recipe)
        reports |= zip(users, learner.learn_many(users, layer, combined), strict=True)
    return reports


def _pack_result(services: Services, bundle: _Bundle, report: LearnReport) -> bytes:
    position = bundle.position
    with services.store.database.read_transaction() as db:
        entries = user_export.read_entries(db, bundle.user, position.seq)
    index = {
        "user": bundle.user,
        **asdict(position),
        **bundle.common,
        "report": report.as_json(),
    }
    return _pack(services, _RESULT, index, entries, remote_learn.contents(entries, "revision"))


def _pack(
    services: Services,
    kind: ArchiveFormat,
    index: Mapping[str, Any],
    entries: Sequence[Entry],
    revisions: Iterable[Mapping[str, Any]],
) -> bytes:
    """Return an archive of entries, and of the adapters of these revisions."""
    file = io.BytesIO()
    digests = (row["digest"] for row in revisions)
    kind.write(file, index, entries, digests, services.store.blobs.read)
    return file.getvalue()


@contextmanager
def _reading(kind: ArchiveFormat, data: bytes) -> Iterator[ArchiveContent]:
    """Yield the content of an archive. What it does to a reader is ``PersonalFileError``."""
    with kind.reading(kind.title):
        content = kind.read(io.BytesIO(data))
        form = content.index["build"].get("format")
        if form != BUILD_FORMAT:
            raise BuildMismatch(
                f"The learn is of build format {str(form)[:20]}, and this machine has "
                f"{BUILD_FORMAT}.",
                hint=_BUILD_HINT,
            )
        yield content


def _erase_copy(services: Services, user: str) -> None:
    """Erase the copy of a user, of which nothing may stay in this home."""
    store = services.store
    erase_user(store, user)
    services.drop_user_caches(user)
    drop_cached_texts()
    delete_pending_files(store, user)


def _check_result(services: Services, user: str, content: ArchiveContent) -> tuple[Revision, ...]:
    """Check that every reader of a home can read a result, and return its new revisions."""
    store, base, entries = services.store, services.base, content.entries
    judgements = remote_learn.contents(entries, "judgement")
    new = user_export.decode_revisions(user, remote_learn.contents(entries, "revision"), judgements)
    ids = {revision.id for revision in new}
    judged = [
        replace(
            store.catalog.revision(user, row["revision"]),
            verdict=Verdict(row["verdict"]),
            scores=rows.from_json(row["scores"]),
        )
        for row in judgements
        if row["revision"] not in ids
    ]
    archive.check_revisions((*new, *judged), _RESULT)
    archive.check_reports(remote_learn.contents(entries, "report"), _RESULT)
    for revision in new:
        _check_base(revision.base, base.digest, f"{revision.id} was built")
    if {revision.digest for revision in new} != content.blobs.keys():
        raise _RESULT.invalid("Its adapters are not those of its revisions.")
    archive.check_adapters(new, content.blobs, base, _RESULT)
    earliest = datetime.fromisoformat(content.index["at"]) - _MAX_CLOCK_SKEW
    latest = services.clock.now() + _MAX_CLOCK_SKEW
    times = (datetime.fromisoformat(entry.content["at"]) for entry in entries)
    if not all(earliest <= each <= latest for each in times):
        raise _RESULT.invalid("The clock of the machine that learned it is wrong.")
    return new


def _next_stack(
    services: Services, user: str, content: ArchiveContent, new: Sequence[Revision]
) -> Stack:
    """Return the live stack as the moves of a result leave it."""
    catalog = services.store.catalog
    stack = catalog.stack(user, services.base.digest)
    digests = {revision.id: revision.digest for revision in new}
    weights = {layer.name: layer.weight for layer in catalog.layers(user)}
    for move in remote_learn.contents(content.entries, "move"):
        layer, head = move["layer"], move["after"]
        if head is None:
            rest = tuple(entry for entry in stack.entries if entry.layer != layer)
            stack = replace(stack, entries=rest)
            continue
        digest = digests.get(head) or catalog.revision(user, head).digest
        stack = replace_layer(stack, StackEntry(layer, head, digest, weights.get(layer, 1.0)))
    return stack
