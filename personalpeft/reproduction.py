"""Reproduce recorded revisions from the ledger: to check them, and to repair a home.

Invariants: a check changes nothing in the home. A repair only puts back a file whose digest comes
out as recorded, so no revision ever changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.types import Adapter
from personalpeft.deprecation import RenamedAttributes
from personalpeft.errors import AdapterError, Damaged, NotFound
from personalpeft.formatting import HasJson
from personalpeft.learning.candidate import (
    build_adapter,
    describe_environment,
    recorded_environment,
)
from personalpeft.learning.learner import Learner
from personalpeft.learning.outcomes import ReproductionOutcome
from personalpeft.learning.reproduction_plan import Obstacle, plan_reproduction
from personalpeft.learning.train.loop import train_alone
from personalpeft.services import Services
from personalpeft.store.gc import delete_partial_files
from personalpeft.store.integrity import find_lost_blobs
from personalpeft.store.locks import learn_lease
from personalpeft.store.types import LostBlob, Problem
from personalpeft.types import Progress, Revision

Tensor: TypeAlias = npt.NDArray[np.float64]

_UNKNOWN = "not recorded"


@dataclass(frozen=True, slots=True)
class Closeness:
    """How near a reproduced adapter is to the recorded one.

    Attributes:
        distance: The length of the difference of all weights, relative to the recorded ones.
        cosine: The cosine of all weights.
        tensors: The relative distance of each tensor, ``<projection>.A`` or ``<projection>.B``.
    """

    distance: float
    cosine: float
    tensors: Mapping[str, float]

    def __str__(self) -> str:
        worst = max(self.tensors, key=lambda name: self.tensors[name])
        return (
            f"relative distance of the weights {self.distance:.2g}, cosine {self.cosine:.6f};"
            f" most in {worst}: {self.tensors[worst]:.2g}"
        )


@dataclass(frozen=True, slots=True)
class ReproductionReport(HasJson, RenamedAttributes, renamed={"rebuilt": "reproduced"}):
    """How the reproduction of one revision ended.

    Attributes:
        digest: The recorded digest.
        reproduced: The digest of the new file; None if nothing was built.
        same_inputs: Whether lessons, recipe, base and the revisions below are as recorded.
        closeness: How near the weights are; None where equal, or where the recorded file is gone.
        recorded: The environment of the first build. Earlier versions recorded none.
        here: The environment of the new build.
        detail: What is missing, in words.
        seconds: How long it took.
    """

    json_properties = ("equal",)

    user: str
    layer: str
    revision: str
    outcome: ReproductionOutcome
    digest: str
    reproduced: str | None = None
    same_inputs: bool = False
    closeness: Closeness | None = None
    recorded: Mapping[str, str] = field(default_factory=dict)
    here: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether the new file has the recorded digest."""
        return self.outcome is ReproductionOutcome.EQUAL

    @property
    def differences(self) -> tuple[tuple[str, str, str], ...]:
        """What of the environment differs: its name, as recorded, and here."""
        pairs = (
            (name, self.recorded.get(name, _UNKNOWN), here) for name, here in self.here.items()
        )
        return tuple(pair for pair in pairs if pair[1] != pair[2])

    def __str__(self) -> str:
        lines = [f"{self.user} · {self.revision}: {self.outcome.text}"]
        if self.detail:
            lines.append(f"  {self.detail}")
        if self.outcome is ReproductionOutcome.DIFFERENT:
            digest = (self.reproduced or "")[:12]
            lines.append(f"  recorded {self.digest[:12]}, reproduced {digest}")
            near = self.closeness or "not known, since the recorded file is missing or damaged"
            lines.append(f"  how near: {near}")
            lines += [f"  {line}" for line in self._explain()]
        if self.reproduced:
            lines.append(f"  {self.seconds:.1f} s")
        return "\n".join(lines)

    def _explain(self) -> list[str]:
        """Return why the digests may differ."""
        if not self.same_inputs:
            why = [
                "why: the inputs are not all as recorded. The build format, general prompts or the",
                "  model that embeds may be of another version.",
            ]
        elif self.differences:
            why = ["why: the inputs are the same, and the environment differs"]
        else:
            why = [
                "why: the inputs and the environment are the same. Please report this: a build should",
                "  give the same bytes.",
            ]
        return why + [f"  {name}: {before}, here {here}" for name, before, here in self.differences]


@dataclass(frozen=True, slots=True)
class RepairReport(HasJson):
    """What a repair did.

    Attributes:
        repaired: The revisions whose file was built again and put back.
        unrepaired: The revisions whose file is still missing or damaged, and why.
        live: The ids of those of them that are live, as "user/revision".
        parts: How many partial files and unfinished backups of killed programs were deleted.
        problems: What ``Runtime.verify`` finds afterwards.
    """

    repaired: tuple[ReproductionReport, ...] = ()
    unrepaired: tuple[ReproductionReport, ...] = ()
    live: frozenset[str] = frozenset()
    parts: int = 0
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{each.user} · {each.revision}: REPAIRED, its file is back" for each in self.repaired
        ]
        for each in self.unrepaired:
            lines += [f"{each}", f"  {self._remedy(each)}"]
        if self.parts:
            lines.append(f"partial files deleted: {self.parts}")
        return "\n".join(lines)

    def _remedy(self, report: ReproductionReport) -> str:
        """Return what can be done about a file that was not put back."""
        if report.outcome is ReproductionOutcome.OTHER_BASE:
            return "to repair it, name its base: personalpeft verify --repair --base NAME"
        name = f"{report.layer} --user {report.user}"
        if f"{report.user}/{report.revision}" in self.live:
            return (
                "it is live and stays so, but cannot answer. Restore the file from a backup, or roll"
                f" back and learn again: personalpeft rollback {name}; personalpeft learn"
                f" --from-scratch --layer {name}"
            )
        return "it is not live: only a rollback to it needs the file, which a backup may have"


def reproduce(
    services: Services,
    user: str,
    revision_id: str,
    *,
    progress: Progress,
    cancelled: Callable[[], bool],
) -> ReproductionReport:
    """Implement ``User.reproduce``, which documents the arguments."""
    revision = services.store.catalog.revision(user, revision_id)
    with services.model.learning():
        report, _ = _reproduce(services, revision, progress, cancelled)
    return report


def repair(
    services: Services, *, progress: Progress, cancelled: Callable[[], bool]
) -> RepairReport:
    """Implement ``Runtime.repair``, which documents the arguments. ``problems`` are left out."""
    store = services.store
    parts = delete_partial_files(store)
    repaired: list[ReproductionReport] = []
    left: dict[str, ReproductionReport] = {}
    waiting = list(find_lost_blobs(store))
    if waiting:
        with services.model.learning():
            while waiting:
                again, count = [], len(repaired)
                for blob in waiting:
                    report = _repair_blob(services, blob, progress, cancelled)
                    if report is None:
                        continue
                    if report.equal:
                        repaired.append(report)
                        left.pop(blob.digest, None)
                        continue
                    left[blob.digest] = report
                    if report.outcome is ReproductionOutcome.INPUTS_MISSING:
                        again.append(blob)
                # What was put back may be the missing input of another.
                waiting = again if len(repaired) > count else []
    live = {
        f"{each.user}/{layer.head}"
        for each in left.values()
        for layer in store.catalog.layers(each.user)
        if layer.head == each.revision
    }
    return RepairReport(tuple(repaired), tuple(left.values()), frozenset(live), parts)


def _repair_blob(
    services: Services, blob: LostBlob, progress: Progress, cancelled: Callable[[], bool]
) -> ReproductionReport | None:
    """Build a file again for one of its revisions, and put it back where the digest is right.

    Returns the report of the last revision that was tried. None: all are forgotten by now, or
    another program has put the file back.
    """
    store = services.store
    report = None
    for user, revision_id in blob.owners:
        # Under the lease nothing of the user is learned or forgotten.
        with store.leases.acquire(learn_lease(user)):
            if store.blobs.is_intact(store.blobs.expected_path(blob.digest)):
                return None
            try:
                revision = store.catalog.revision(user, revision_id)
            except NotFound:
                continue
            report, data = _reproduce(services, revision, progress, cancelled)
            if report.equal:
                store.blobs.put(user, data)
                return report
    return report


def _reproduce(
    services: Services, revision: Revision, progress: Progress, cancelled: Callable[[], bool]
) -> tuple[ReproductionReport, bytes]:
    """Build a revision again, and return the report and the file; no bytes if nothing was built."""
    began = services.clock.timer()
    about = revision.user, revision.layer, revision.id
    configs = Learner.from_services(services).recipes
    plan = plan_reproduction(services, configs, revision)
    if isinstance(plan, Obstacle):
        report = ReproductionReport(*about, plan.outcome, revision.digest, detail=plan.detail)
        return report, b""
    weights = train_alone(
        services, plan, progress=progress, cancelled=cancelled, keeps_checkpoints=False
    )
    blob = pack(build_adapter(plan, weights))
    reproduced = hashlib.sha256(blob).hexdigest()
    is_equal = reproduced == revision.digest
    report = ReproductionReport(
        *about,
        ReproductionOutcome.EQUAL if is_equal else ReproductionOutcome.DIFFERENT,
        revision.digest,
        reproduced,
        plan.has_same_inputs,
        None if is_equal else _compare_with_recorded(services, revision, blob),
        recorded_environment(revision.scores),
        describe_environment(services.learning_engine.backend),
        seconds=round(services.clock.timer() - began, 3),
    )
    return report, blob


def _compare_with_recorded(services: Services, revision: Revision, blob: bytes) -> Closeness | None:
    """Return how near a reproduced file is to the recorded one, or None where that cannot be read."""
    try:
        recorded = unpack(services.store.blobs.read(revision.digest), source=revision.id)
    except (Damaged, AdapterError):
        return None
    return compare_weights(recorded, unpack(blob, source="the reproduced file"))


def compare_weights(recorded: Adapter, reproduced: Adapter) -> Closeness | None:
    """Return how near two adapters are; None if their shapes differ."""
    before, after = _tensors(recorded), _tensors(reproduced)
    if {k: v.shape for k, v in before.items()} != {k: v.shape for k, v in after.items()}:
        return None
    old, new = (np.concatenate([some[name].ravel() for name in before]) for some in (before, after))
    lengths = np.linalg.norm(old) * np.linalg.norm(new)
    return Closeness(
        _distance(old, new),
        float(old @ new / lengths) if lengths else 0.0,
        {name: _distance(tensor, after[name]) for name, tensor in before.items()},
    )


def _distance(old: Tensor, new: Tensor) -> float:
    """Return the length of the difference, relative to the old one. A zero length counts as 1."""
    return float(np.linalg.norm(new - old) / (np.linalg.norm(old) or 1.0))


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    return {
        f"{name}.{half}": np.asarray(matrix, np.float64)
        for name, pair in adapter.weights.items()
        for half, matrix in (("A", pair.a), ("B", pair.b))
    }
