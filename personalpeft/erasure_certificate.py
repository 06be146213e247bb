"""Make the certificate of one erasure: describe it before, measure before and after, and sign.

Invariants: the statement has no text of an item, no user id and no name of a skill. They are named
by HMACs with a key that only the home has. It claims only what was checked here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from personalpeft.certificate import (
    FORMAT,
    VERSION,
    Certificate,
    public_key_of,
    require_signing,
    sign_statement,
)
from personalpeft.erasure_exposure import ExposureMeasure
from personalpeft.errors import Forgotten, InvalidInput, NotFound, PersonalPeftError
from personalpeft.ids import new_id
from personalpeft.learning.candidate import describe_installation, imported_inputs
from personalpeft.learning.erasure_plan import ErasurePlan, texts_beside, texts_of
from personalpeft.learning.report import LearnReport
from personalpeft.services import Services
from personalpeft.store.backup import COPY_NAME
from personalpeft.store.certificate_keys import has_certificate_keys, load_certificate_keys
from personalpeft.store.hash_chain import read_chain_head
from personalpeft.store.maintenance import RESTORED
from personalpeft.store.plugin_data import PluginData
from personalpeft.store.replacement import other_copies
from personalpeft.store.store import Store
from personalpeft.store.types import Erasure, ErasureResult
from personalpeft.types import Json, Progress, Revision, Signal, Stack, Turn, canonical_digest

ErasureKind: TypeAlias = Literal["item", "conversation", "layer", "user"]


class CertificateDraft:
    """The certificate of one erasure while it is made. Nothing of it is stored."""

    def __init__(
        self,
        services: Services,
        user: str,
        kind: ErasureKind,
        progress: Progress,
        cancelled: Callable[[], bool],
    ) -> None:
        """Read the keys of the home, and the digest of the base.

        Raises ``MissingPackage``, ``HomeError``, ``Damaged``, and ``WeightsError`` where the base is
        not there: before anything is erased.

        Args:
            services: The wired parts.
            user: The user.
            kind: What is erased.
            progress: Called with a stage of measuring and the share of it that is done, 0 to 1.
            cancelled: Returns whether to stop measuring.
        """
        require_signing()
        store = services.store
        self._base = services.base.digest
        self._services, self._user = services, user
        self._keys = load_certificate_keys(store)
        at = services.clock.now()
        self._statement: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "request": {
                "id": new_id("c", at, store.entropy),
                "at": at.isoformat(),
                "kind": kind,
                "user": self._keys.name("user", user),
            },
        }
        self._exposure = ExposureMeasure(services, user, progress, cancelled)

    def measure_before(self, plan: ErasurePlan) -> None:
        """Measure how far the live stack has memorized the items. Raises ``Cancelled``."""
        self._exposure.measure_before(
            plan.items, plan.erasure.revisions, lambda item: plan.elsewhere
        )

    def measure_user_before(self) -> None:
        """Measure how far the live stack has memorized what a whole user gave."""
        store, user = self._services.store, self._user
        items: list[Turn | Signal] = [*store.ledger.turns(user), *store.ledger.signals(user)]
        revisions = [revision.id for revision in store.catalog.revisions(user)]
        self._exposure.measure_before(items, revisions, partial(texts_beside, items))

    def describe(self, plan: ErasurePlan) -> None:
        """Describe what is about to be erased. Call it under the write lock."""
        erasure = plan.erasure
        revisions = self._services.store.catalog.revisions(self._user)
        self._statement["items"] = [
            {
                "id": item.id,
                "kind": "turn" if isinstance(item, Turn) else str(item.kind),
                "names": [self._keys.name("item", item.id, text) for text in _texts(item)],
            }
            for item in plan.items
        ]
        self._statement["closure"] = {
            "turns": sorted(erasure.turns),
            "signals": sorted(erasure.signals),
            "emptied": sorted(erasure.emptied),
            "revisions": sorted(r.digest for r in revisions if r.id in erasure.revisions),
        }
        self._statement["revisions"] = {"before": self._heads()}
        self._statement["remains"] = self._remains([each.id for each in plan.remaining])

    def finish(
        self,
        plan: ErasurePlan,
        erased: ErasureResult,
        rebuilt: Sequence[LearnReport],
        not_rebuilt: Mapping[str, str],
        reproduce: Callable[[str], Json] | None,
    ) -> Certificate:
        """Describe the outcome, measure again, and sign.

        Args:
            plan: What was to be erased.
            erased: What was.
            rebuilt: The learns that followed.
            not_rebuilt: Why layers were not rebuilt, by layer.
            reproduce: Builds a live revision again, and returns how that ended.
                None skips the check.
        """
        statement, store = self._statement, self._services.store
        statement["keys_destroyed"] = list(erased.keys_destroyed)
        statement["exposure"] = self._exposure.measure_after()
        for count in ("reports", "vectors", "files", "complete"):
            statement["closure"][count] = getattr(erased, count)
        statement["revisions"]["after"] = self._heads()
        statement["rebuilt"] = [
            {"layer": self._layer(report.layer), "outcome": str(report.outcome.value)}
            for report in rebuilt
        ]
        statement["not_rebuilt"] = [self._layer(layer) for layer in sorted(not_rebuilt)]
        statement["equality"] = self._check_inputs(plan)
        if reproduce is not None:
            statement["equality"]["rebuilds"] = self._reproduce_heads(reproduce)
        entries, head = read_chain_head(store.database, self._user)
        statement["chain"] = {"entries": entries, "head": head}
        return self._sign()

    def describe_user(self) -> None:
        """Describe the whole user who is about to be erased. Call it under the write lock."""
        store, user = self._services.store, self._user
        turns, signals = store.ledger.turns(user), store.ledger.signals(user, current=False)
        erasure = Erasure(
            frozenset(turn.id for turn in turns),
            frozenset(signal.id for signal in signals),
            frozenset(revision.id for revision in store.catalog.revisions(user)),
        )
        self.describe(ErasurePlan(erasure, (), (*turns, *signals)))
        # Of an encrypted home: the key of the user's files goes with the user's rows.
        self._statement["keys_destroyed"] = store.cipher.user_key_ids(user)

    def finish_user(self, complete: bool) -> Certificate:
        """Measure again on the bare base, and sign the certificate of a whole user."""
        self._statement["closure"]["complete"] = complete
        self._statement["revisions"]["after"] = []
        self._statement |= {
            "rebuilt": [],
            "not_rebuilt": [],
            "equality": {"check": "none", "holds": None, "revisions": []},
            "exposure": self._exposure.measure_after(Stack(self._base)),
            "chain": None,
        }
        return self._sign()

    # What is erased

    def _live(self) -> list[Revision]:
        catalog, user = self._services.store.catalog, self._user
        return [catalog.revision(user, each.head) for each in catalog.layers(user) if each.head]

    def _heads(self) -> list[Json]:
        return [
            {
                "layer": self._layer(revision.layer),
                "digest": revision.digest,
                "inputs": revision.inputs,
                "recipe": canonical_digest(revision.recipe),
                "base": revision.base,
            }
            for revision in self._live()
        ]

    def _layer(self, name: str) -> str:
        """Return the name of a layer. A skill's own name is the user's word."""
        if name in ("style", "memory"):
            return name
        return f"skill {self._keys.name('layer', name)[:16]}"

    def _remains(self, mentions: Sequence[str]) -> Json:
        """Return what the home knows of that may hold the items."""
        store = self._services.store
        closure = self._statement["closure"]
        concerned = {*closure["turns"], *closure["emptied"]}
        signals = store.ledger.signals(self._user, current=False)
        concerned |= {each.turn for each in signals if each.id in closure["signals"]}
        turns = store.ledger.turns(self._user)
        backends = {turn.backend for turn in turns if turn.id in concerned}
        return {
            "backups": [
                {"folder": str(folder), "copies": _count_copies(folder)}
                for folder in store.erasures.folders()
            ],
            "former_homes": [str(path) for path in other_copies(store.home)],
            "published": list(store.publications.folders(self._user)),
            "remote_engines": sorted(each for each in backends if each == "vllm"),
            # What the home before it published, exported and backed up may not be known to this one.
            "restored": self._services.maintenance.read_note(RESTORED),
            "mentions": sorted(mentions),
            "exports": [
                {
                    "at": each.at.isoformat(),
                    "kind": str(each.kind),
                    "name": self._keys.name("export", each.digest) if each.digest else None,
                }
                # Also those before the items: a clock may have been set back.
                for each in store.exports.of_user(self._user)
            ],
            "plugins": self._services.plugins.count_user_data(
                lambda name: PluginData(store.home, name, store.cipher), self._user
            ),
            "logs": "the home logs no texts; other programs' logs are not known to it",
        }

    # What is checked

    def _check_inputs(self, plan: ErasurePlan) -> Json:
        """Check that no live revision has an erased input, at any depth.

        A revision's bytes depend on its ``inputs`` alone: lessons by content, recipe, base, parent
        and the revisions below. So without an erased input it is a build that never saw the items.
        """
        erasure, checked = plan.erasure, []
        for head in self._live():
            lineage, is_whole = _all_inputs(self._services.store, head)
            imported = any(each.inputs == imported_inputs(each.digest) for each in lineage)
            signals = {signal for each in lineage for signal in each.signals}
            ids = {each.id for each in lineage}
            holds = is_whole and not signals & erasure.signals and not ids & erasure.revisions
            # What an imported adapter was built from is not known here.
            checked.append(
                {"digest": head.digest, "inputs": head.inputs, "holds": holds and not imported}
            )
        holds_all = all(each["holds"] for each in checked) if checked else None
        return {"check": "inputs", "holds": holds_all, "revisions": checked}

    def _reproduce_heads(self, build: Callable[[str], Json]) -> list[Json]:
        """Return how a second build of each live revision ended."""
        ended: list[Json] = []
        for head in self._live():
            try:
                how = build(head.id)
            except PersonalPeftError as error:
                how = {"outcome": type(error).__name__, "rebuilt": None}
            ended.append({"digest": head.digest, **how})
        return ended

    def _sign(self) -> Certificate:
        system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}"
        environment = {"system": system, **describe_installation()}
        self._statement |= {
            "method": "exact: rows erased, revisions built from them erased, layers built again "
            "from the remaining ledger",
            "base": self._base,
            "environment": environment,
            "environment_digest": canonical_digest(environment),
        }
        return sign_statement(self._statement, self._keys.signing)


def items_with_text(store: Store, certificate: Certificate, text: str) -> tuple[str, ...]:
    """Implement ``Runtime.items_with_text``."""
    keys = load_certificate_keys(store) if has_certificate_keys(store) else None
    if keys is None or public_key_of(keys.signing) != certificate.public_key:
        raise InvalidInput(
            f"The home {store.home} did not make this certificate, so it cannot tell.",
            hint="Ask the home that made it: --home",
        )
    return tuple(
        item["id"]
        for item in certificate.statement["items"]
        if keys.name("item", item["id"], text) in item["names"]
    )


def _texts(item: Turn | Signal) -> list[str]:
    if isinstance(item, Turn):
        return [*(message.content for message in item.messages), item.reply]
    return texts_of(item)


def _all_inputs(store: Store, revision: Revision) -> tuple[list[Revision], bool]:
    """Return a revision with its ancestors and those that they were built on, and whether the home
    has them all.
    """
    found: dict[str, Revision] = {}
    waiting, is_whole = [revision], True
    while waiting:
        each = waiting.pop()
        if each.id in found:
            continue
        found[each.id] = each
        for name in (each.parent, *(entry.revision for entry in each.below)):
            try:
                waiting += [store.catalog.revision(each.user, name)] if name else []
            except (Forgotten, NotFound):
                # An imported one may stand on what was erased since.
                is_whole = False
    return list(found.values()), is_whole


def _count_copies(folder: Path) -> int | None:
    """Return how many copies lie in a folder, or None if it cannot be reached."""
    try:
        return sum(bool(COPY_NAME.fullmatch(each.name)) for each in folder.iterdir())
    except OSError:
        return None
