"""Make the certificate of one erasure: describe it before, measure before and after, and sign.

Invariants: the statement has no text of an item, no user id and no name of a skill. They are named
by HMACs with a key that only the home has. It claims only what was checked here.
"""

from __future__ import annotations

import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from typing import Any, Literal, TypeAlias

from personalpeft.backends.processor import instruction_sets
from personalpeft.certificate import (
    FORMAT,
    VERSION,
    Certificate,
    require_signing,
    sign_statement,
)
from personalpeft.errors import Cancelled, Forgotten, NotFound, PersonalPeftError
from personalpeft.ids import new_id
from personalpeft.learning.erasure_plan import ErasurePlan, texts_of
from personalpeft.learning.evaluate.exposure import (
    UNSEEN,
    Exposure,
    MatchedSecret,
    Secret,
    find_secret,
    match_secret,
    measure_exposure,
    words_of,
)
from personalpeft.learning.layers import ancestors
from personalpeft.learning.publish import imported_inputs
from personalpeft.learning.report import LearnReport
from personalpeft.services import Services
from personalpeft.stacks import live_stack
from personalpeft.store.backup import COPY_NAME
from personalpeft.store.certificate_keys import CertificateKeys, load_certificate_keys
from personalpeft.store.hash_chain import read_chain_head
from personalpeft.store.store import Store
from personalpeft.store.types import ErasureResult
from personalpeft.types import (
    Json,
    Message,
    Progress,
    Revision,
    Signal,
    SignalKind,
    SignalRole,
    Stack,
    Turn,
    canonical_digest,
    canonical_json,
)

ErasureKind: TypeAlias = Literal["item", "conversation", "layer", "user"]

MAX_SECRETS = 4
"""How many answers are measured, since each takes some hundred passes of the model."""
# Each is compared with all remaining texts.
_MAX_TRIED = 4 * MAX_SECRETS
_PACKAGES = ("personalpeft", "torch", "transformers", "tokenizers", "numpy")


class CertificateDraft:
    """The certificate of one erasure while it is made. Nothing of it is stored."""

    def __init__(
        self, services: Services, user: str, kind: ErasureKind, cancelled: Callable[[], bool]
    ) -> None:
        """Read the keys of the home. Raises ``MissingPackage``, ``HomeError``, ``Damaged``."""
        require_signing()
        store = services.store
        self._services, self._user, self._cancelled = services, user, cancelled
        self._keys = load_certificate_keys(store.home, store.database, store.entropy)
        at = services.clock.now()
        self._statement: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "request": {
                "id": new_id("c", at, store.entropy),
                "at": _time(at),
                "kind": kind,
                "user": self._keys.name("user", user),
            },
        }
        self._secrets: list[Secret] = []
        self._matched: list[MatchedSecret] = []
        self._before: list[Exposure] = []
        self._not_measured = ""

    def measure_before(self, plan: ErasurePlan, progress: Progress) -> None:
        """Measure how far the live stack has memorized the items. Raises ``Cancelled``."""
        try:
            stack = live_stack(self._services, self._user)
            if not {entry.revision for entry in stack.entries} & plan.removal.revisions:
                self._not_measured = "no live revision was built from it"
                return
            self._secrets = self._find_secrets(plan, stack)
            if not self._secrets:
                self._not_measured = "no answer of it has a word that occurs nowhere else"
                return
            self._match(plan.elsewhere, stack.base, progress)
            self._before = self._measure(stack, "Measuring before", progress)
        except Cancelled:
            raise
        except PersonalPeftError as error:
            self._not_measured = f"{type(error).__name__} before the erasure"

    def describe(self, plan: ErasurePlan) -> None:
        """Describe what is about to be erased. Call it under the write lock."""
        removal = plan.removal
        revisions = self._services.store.catalog.revisions(self._user)
        self._describe_items(plan.items)
        self._statement["closure"] = {
            "turns": sorted(removal.turns),
            "signals": sorted(removal.signals),
            "emptied": sorted(removal.emptied),
            "revisions": sorted(r.digest for r in revisions if r.id in removal.revisions),
        }
        self._statement["revisions"] = {"before": self._heads()}
        self._statement["remains"] = self._remains([each.id for each in plan.remaining])

    def finish(
        self,
        plan: ErasurePlan,
        erased: ErasureResult,
        rebuilt: Sequence[LearnReport],
        waiting: Mapping[str, str],
        progress: Progress,
    ) -> Certificate:
        """Describe the outcome, measure again, and sign."""
        statement, store = self._statement, self._services.store
        after = self._measure_after(progress)
        statement["closure"] |= _counts(erased)
        statement["revisions"]["after"] = self._heads()
        statement["rebuilt"] = [
            {"layer": self._layer(report.layer), "outcome": str(report.outcome.value)}
            for first in rebuilt
            for report in (first, *first.above)
        ]
        statement["not_rebuilt"] = [self._layer(layer) for layer in sorted(waiting)]
        statement["equality"] = self._check_inputs(plan)
        statement["exposure"] = self._exposure(after)
        with store.database.read_transaction() as db:
            entries, head = read_chain_head(db, self._user)
        statement["chain"] = {"entries": entries, "head": head}
        return self._sign()

    def describe_user(self) -> None:
        """Describe the whole user who is about to be erased. Call it under the write lock."""
        store, user = self._services.store, self._user
        turns, signals = store.ledger.turns(user), store.ledger.signals(user, current=False)
        self._describe_items((*turns, *signals))
        self._statement["closure"] = {
            "turns": sorted(turn.id for turn in turns),
            "signals": sorted(signal.id for signal in signals),
            "emptied": [],
            "revisions": sorted(revision.digest for revision in store.catalog.revisions(user)),
        }
        self._statement["revisions"] = {"before": self._heads(), "after": []}
        self._statement["remains"] = self._remains([])

    def finish_user(self, complete: bool) -> Certificate:
        """Sign the certificate of a whole user."""
        self._statement["closure"]["complete"] = complete
        self._statement |= {
            "rebuilt": [],
            "not_rebuilt": [],
            "equality": {"check": "none", "holds": None, "revisions": []},
            "exposure": _not_measured("no revision of the user is left"),
            "chain": None,
        }
        return self._sign()

    # What is erased

    def _describe_items(self, items: Iterable[Turn | Signal]) -> None:
        self._statement["items"] = [
            {
                "id": item.id,
                "kind": "turn" if isinstance(item, Turn) else str(item.kind),
                "names": [self._keys.name("item", item.id, text) for text in _texts(item)],
            }
            for item in items
        ]

    def _heads(self) -> list[Json]:
        store, user = self._services.store, self._user
        heads = [layer.head for layer in store.catalog.layers(user) if layer.head]
        return [self._describe_revision(store.catalog.revision(user, head)) for head in heads]

    def _describe_revision(self, revision: Revision) -> Json:
        return {
            "layer": self._layer(revision.layer),
            "digest": revision.digest,
            "inputs": revision.inputs,
            "recipe": canonical_digest(revision.recipe),
            "base": revision.base,
        }

    def _layer(self, name: str) -> str:
        """Return the name of a layer. A skill's own name is the user's word."""
        return name if name in ("style", "memory") else _skill_name(self._keys, name)

    def _remains(self, mentions: Sequence[str]) -> Json:
        """Return what the home knows of that may hold the items still."""
        store = self._services.store
        closure = self._statement["closure"]
        concerned = {*closure["turns"], *closure["emptied"]}
        signals = store.ledger.signals(self._user, current=False)
        concerned |= {each.turn for each in signals if each.id in closure["signals"]}
        turns = store.ledger.turns(self._user)
        backends = {turn.backend for turn in turns if turn.id in concerned}
        former = store.home.parent.glob(f"{store.home.name}.replaced-*")
        return {
            "backups": [
                {"folder": str(folder), "copies": _count_copies(folder)}
                for folder in store.erasures.folders()
            ],
            "former_homes": sorted(map(str, former)),
            "published": list(store.publications.folders(self._user)),
            "remote_engines": sorted(each for each in backends if each == "vllm"),
            "mentions": sorted(mentions),
            "exports": "not recorded by the home",
            "logs": "the home logs no texts; other programs' logs are not known to it",
        }

    # What is checked

    def _check_inputs(self, plan: ErasurePlan) -> Json:
        """Check that no live revision has an erased input, at any depth.

        A revision's bytes depend on its ``inputs`` alone: lessons by content, recipe, base, parent
        and the revisions below. So without an erased input it is a build that never saw the items.
        """
        store, user, removal = self._services.store, self._user, plan.removal
        checked = []
        for layer in store.catalog.layers(user):
            if layer.head is None:
                continue
            head = store.catalog.revision(user, layer.head)
            lineage, is_whole = _all_inputs(store, head)
            imported = any(each.inputs == imported_inputs(each.digest) for each in lineage)
            signals = {signal for each in lineage for signal in each.signals}
            ids = {each.id for each in lineage}
            holds = is_whole and not signals & removal.signals and not ids & removal.revisions
            # What an imported adapter was built from is not known here.
            checked.append(
                {"digest": head.digest, "inputs": head.inputs, "holds": holds and not imported}
            )
        holds_all = all(each["holds"] for each in checked) if checked else None
        return {"check": "inputs", "holds": holds_all, "revisions": checked}

    def _find_secrets(self, plan: ErasurePlan, stack: Stack) -> list[Secret]:
        store, user = self._services.store, self._user
        live = {entry.revision for entry in stack.entries} & plan.removal.revisions
        trained = {
            signal
            for each in live
            for revision in ancestors(store, store.catalog.revision(user, each))
            for signal, role in revision.signals.items()
            if role == SignalRole.TRAINED
        }
        # What the revision was trained on first. A turn and its feedback may have the same answer.
        answers: dict[str, tuple[str, tuple[Message, ...], str]] = {}
        for item in sorted(plan.items, key=lambda each: each.id not in trained):
            for messages, answer in self._answers(item):
                key = canonical_json([answer, *(each.to_list() for each in messages)])
                answers.setdefault(key, (item.id, messages, answer))
        tried = islice(answers.values(), _MAX_TRIED)
        found = (find_secret(*each, plan.elsewhere) for each in tried)
        return list(islice(filter(None, found), MAX_SECRETS))

    def _answers(self, item: Turn | Signal) -> Iterable[tuple[tuple[Message, ...], str]]:
        """Yield the answers of an item, each after its prompt."""
        if isinstance(item, Turn):
            yield item.messages, item.reply
            return
        payload = item.payload
        if item.kind is SignalKind.FACT:
            answer = payload.get("answer") or payload["text"]
            for question in payload.get("questions") or ():
                yield (Message("user", question),), answer
        elif item.kind is SignalKind.DEMONSTRATION:
            before = tuple(Message.from_list(each) for each in payload.get("before", ()))
            yield (*before, Message("user", payload["prompt"])), payload["answer"]
        elif item.turn is not None and item.kind is not SignalKind.COMMENT:
            turn = self._services.store.ledger.turn(self._user, item.turn)
            yield turn.messages, str(payload.get("text", turn.reply))

    # Exposure

    def _match(self, elsewhere: Sequence[str], base: str, progress: Progress) -> None:
        rng = random.Random(self._services.clock.entropy(16))
        words = words_of(elsewhere)
        with self._services.model.learning():
            for number, secret in enumerate(self._secrets):
                progress("Matching", number / len(self._secrets))
                self._check_not_cancelled()
                engine = self._services.learning_engine
                matched = match_secret(engine, secret, words, base, rng)
                self._matched += [matched] if matched else []
        if not self._matched:
            self._not_measured = "there are too few other texts of its form"

    def _measure(self, stack: Stack, stage: str, progress: Progress) -> list[Exposure]:
        found = []
        with self._services.model.learning():
            for number, matched in enumerate(self._matched):
                progress(stage, number / len(self._matched))
                self._check_not_cancelled()
                engine = self._services.learning_engine
                found.append(measure_exposure(engine, self._user, matched, stack, self._cancelled))
        self._check_not_cancelled()
        return found

    def _check_not_cancelled(self) -> None:
        if self._cancelled():
            raise Cancelled("Cancelled while it was measured.", hint="Give the command again.")

    def _measure_after(self, progress: Progress) -> list[Exposure]:
        if not self._before:
            return []
        try:
            stack = live_stack(self._services, self._user)
            return self._measure(stack, "Measuring after", progress)
        except PersonalPeftError as error:
            self._not_measured = f"{type(error).__name__} after the erasure"
            return []
        finally:
            # The stacks of this user were attached for it.
            self._services.drop_user_caches(self._user)

    def _exposure(self, after: Sequence[Exposure]) -> Json:
        if not after:
            return _not_measured(self._not_measured)
        results = zip(self._matched, self._before, after, strict=True)
        statement = {
            **_not_measured(""),
            "results": [
                {
                    "item": matched.secret.item,
                    "before": _describe_exposure(before),
                    "after": _describe_exposure(now),
                }
                for matched, before, now in results
            ],
        }
        self._matched, self._secrets = [], []
        return statement

    def _sign(self) -> Certificate:
        environment = self._environment()
        self._statement |= {
            "method": "exact: rows erased, revisions built from them erased, layers built again "
            "from the remaining ledger",
            "base": self._services.base.digest,
            "environment": environment,
            "environment_digest": canonical_digest(environment),
            # Nothing is encrypted at rest yet, so there is no key to destroy.
            "keys_destroyed": [],
        }
        return sign_statement(self._statement, self._keys.signing)

    def _environment(self) -> Json:
        found = {}
        for package in _PACKAGES:
            with suppress(PackageNotFoundError):
                found[package] = version(package)
        return {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "processor": canonical_digest(instruction_sets()),
            "packages": found,
        }


def items_with_text(store: Store, certificate: Certificate, text: str) -> tuple[str, ...]:
    """Implement ``Runtime.items_with_text``."""
    keys = load_certificate_keys(store.home, store.database, store.entropy)
    return tuple(
        item["id"]
        for item in certificate.statement["items"]
        if keys.name("item", item["id"], text) in item["names"]
    )


def _skill_name(keys: CertificateKeys, layer: str) -> str:
    return f"skill {keys.name('layer', layer)[:16]}"


def _texts(item: Turn | Signal) -> list[str]:
    return [item.messages[-1].content, item.reply] if isinstance(item, Turn) else texts_of(item)


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


def _counts(erased: ErasureResult) -> Json:
    return {
        "reports": erased.reports,
        "vectors": erased.vectors,
        "files": erased.files,
        "complete": erased.complete,
    }


def _not_measured(reason: str) -> Json:
    return {"unseen": UNSEEN, "results": [], "not_measured": reason}


def _describe_exposure(exposure: Exposure) -> Json:
    return {
        "rank": exposure.rank,
        "bits": exposure.bits,
        "auc": exposure.auc,
        "extracted": exposure.is_extracted,
    }


def _count_copies(folder: Any) -> int | None:
    """Return how many copies lie in a folder, or None if it cannot be reached."""
    try:
        return sum(bool(COPY_NAME.fullmatch(each.name)) for each in folder.iterdir())
    except OSError:
        return None


def _time(at: datetime) -> str:
    return at.isoformat()
