"""Saved weights: immutable adapters with ``tinker://`` paths, and what restarts training.

A checkpoint names two files. The packed adapter is served and downloaded. Only training reads the
state of the optimizer.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from sqlite3 import Row
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import safetensors.numpy

from personalpeft import LearnReport, Runtime, file_system
from personalpeft.adapters.compose import compose, concatenate
from personalpeft.adapters.formats.packed import pack, unpack
from personalpeft.adapters.formats.peft import export_peft, import_peft
from personalpeft.adapters.types import Adapter, LoRAWeights, Manifest
from personalpeft.clock import Clock
from personalpeft.errors import InvalidInput, NotFound
from personalpeft.ids import check_layer_name
from personalpeft.types import Stack, StackEntry, canonical_digest
from personalpeft_tinker_server import models
from personalpeft_tinker_server.database import MAX_BYTES, USER_OWNER, Database
from personalpeft_tinker_server.run_spec import RunSpec
from personalpeft_tinker_server.sources import Source, Sources

SCHEME = "tinker://"
USER_SCHEME = "personalpeft://"
LAYER = "skill.tinker"
"""The layer that saved weights are for, until they become a layer of a user."""

Kind: TypeAlias = Literal["weights", "sampler_weights"]
State: TypeAlias = Mapping[str, npt.NDArray[np.float32]]

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Checkpoints:
    """The saved weights of all owners.

    Args:
        runtime: The open runtime.
        database: Has the rows and files.
        clock: The time.
        aliases: Further names of the base.
    """

    def __init__(
        self, runtime: Runtime, database: Database, clock: Clock, aliases: Sequence[str] = ()
    ) -> None:
        self._runtime, self._db, self._clock = runtime, database, clock
        self._aliases = aliases
        self._sources = Sources(runtime, database)

    def save(
        self,
        spec: RunSpec,
        kind: Kind,
        name: str,
        weights: Mapping[str, LoRAWeights],
        state: State | None,
        *,
        ttl: int | None,
        overwrite: bool,
        call: str,
        temporary: bool = False,
    ) -> str:
        """Save weights durably and return their path.

        Args:
            spec: The run.
            kind: What they are for.
            name: Their name in the run.
            weights: The LoRA.
            state: The state of training.
            ttl: The seconds after which they are deleted; None keeps them.
            overwrite: Whether a checkpoint of this name may be replaced.
            call: The id of the call.
            temporary: Whether ``delete_temporary`` may delete them.

        Raises:
            InvalidInput: The name is taken, or the owner has no room left.
        """
        manifest = Manifest(
            self._runtime.base().digest,
            LAYER,
            spec.rank,
            spec.scaling,
            tuple(weights),
            {"trained_by": "tinker", "run": spec.run, "name": name},
            canonical_digest([]),
            parent=spec.parent,
        )
        return self._put(
            spec.owner,
            spec.run,
            kind,
            name,
            Adapter(manifest, weights),
            self._sources.of(spec.run),
            state=state,
            ttl=ttl,
            overwrite=overwrite,
            about={"base": spec.base, "call": call, "temporary": temporary},
        )

    def find(self, owner: str, path: str) -> Row:
        """Return the row of a checkpoint that its owner, or everyone, may read.

        Raises ``NotFound``.
        """
        row = self._db.row(
            "select * from checkpoints where path = ? and (owner = ? or public)"
            " and coalesce(expires > ?, 1)",
            *(path, owner, self._now()),
        )
        if row is None or any(map(self._sources.is_forgotten, self._sources.of(path))):
            raise NotFound(
                f"There are no weights {path[:200]!a}.",
                hint="They may have expired, or come from a layer that was forgotten; list the checkpoints of your runs.",
            )
        return row

    def find_own(self, owner: str, run: str, kind: str, name: str) -> Row:
        """Return the row of the owner's checkpoint. Raises ``NotFound``."""
        row = self.find(owner, f"{SCHEME}{run}/{kind}/{name}")
        if row["owner"] != owner:
            raise NotFound("These weights are another API key's.", hint="Only read them.")
        return row

    def rows(self, owner: str, run: str | None = None) -> list[Row]:
        """Return the checkpoints of an owner, newest first."""
        return self._db.rows(
            "select * from checkpoints where owner = ?1 and (?2 is null or run = ?2)"
            " and coalesce(expires > ?3, 1) order by created desc",
            *(owner, run, self._now()),
        )

    def delete(self, row: Row) -> None:
        """Delete a checkpoint and its files."""
        self._db.execute("delete from checkpoints where path = ?", row["path"])
        self._sources.replace(row["path"], ())
        self._db.delete_unnamed_files((row["adapter"], row["state_file"]))

    def delete_expired(self) -> None:
        """Delete the checkpoints whose time has passed."""
        for row in self._db.rows("select * from checkpoints where expires <= ?", self._now()):
            self.delete(row)

    def delete_temporary(self, silent_since: float) -> None:
        """Delete the temporary checkpoints of clients that were not seen since a time."""
        for row in self._db.rows(
            "select * from checkpoints where json_extract(about, '$.temporary') and not exists"
            " (select 1 from runs join sessions on sessions.id = runs.session"
            " where runs.id = checkpoints.run and sessions.seen >= ?)",
            silent_since,
        ):
            self.delete(row)

    def set_ttl(self, row: Row, seconds: int | None) -> None:
        """Let a checkpoint expire, or keep it with None."""
        expires = None if seconds is None else self._now() + seconds
        self._db.execute(
            "update checkpoints set expires = ?, about = json_remove(about, '$.temporary')"
            " where path = ?",
            *(expires, row["path"]),
        )

    def set_public(self, row: Row, public: bool) -> None:
        """Let every API key read a checkpoint, or its owner alone."""
        self._db.execute(
            "update checkpoints set public = ? where path = ?", int(public), row["path"]
        )

    def stack(self, owner: str, path: str | None) -> Stack:
        """Return the stack that serves saved weights; of None, the bare base."""
        base = self._runtime.base().digest
        if path is None:
            return Stack(base)
        digest = self.find(owner, path)["adapter"]
        return Stack(base, (StackEntry(LAYER, f"{LAYER}@{digest[:12]}", digest),))

    def adapter(self, owner: str, path: str) -> tuple[Adapter | None, set[Source]]:
        """Return saved weights or a user's layer, and the users' layers in them.

        For a name of the base, None and no layer. Raises ``NotFound``.
        """
        if path in (self._runtime.base().card.name, *self._aliases):
            return None, set()
        _, adapter, sources = self._read(owner, path)
        return adapter, sources

    def read_adapter(self, digest: str) -> Adapter | None:
        """Return the adapter in one of the files; None if there is none."""
        data = self._db.read_file(digest)
        base = self._runtime.base()
        return data and unpack(  # type: ignore[return-value]
            data, source="saved weights", architecture=base.architecture, base=base.digest
        )

    def training_state(
        self, spec: RunSpec, owner: str, path: str, *, optimizer: bool
    ) -> tuple[State, str | None, set[Source]]:
        """Return the state that continues from saved weights or a user's layer.

        And the digest of these weights, None for a layer, and the users' layers in them.

        Args:
            spec: The run that goes on from there.
            owner: Who asks.
            path: ``tinker://<run>/<kind>/<name>`` or ``personalpeft://<user>/<layer>``.
            optimizer: Whether to restore the optimizer, too.

        Raises:
            NotFound: There are no such weights.
            InvalidInput: They do not fit the run, or have no state of an optimizer.
        """
        row, adapter, sources = self._read(owner, path)
        parent = None if row is None else str(row["adapter"])
        targets = spec.targets(list(self._runtime.base().architecture.projections))
        if adapter.manifest.rank != spec.rank or set(adapter.weights) != set(targets):
            attn, mlp = trained_parts(adapter.weights)
            raise InvalidInput(
                f"These weights have rank {adapter.manifest.rank} and "
                f"{len(adapter.weights)} projections; the run has rank {spec.rank} and "
                f"{len(targets)}.",
                hint=f"Create the run with rank {adapter.manifest.rank}, train_attn {attn} and"
                f" train_mlp {mlp}.",
            )
        if optimizer:
            state = row and row["state_file"] and self._db.read_file(row["state_file"])
            if not state:
                raise InvalidInput(
                    "These weights have no state of an optimizer.",
                    hint="Load weights of save_state, or load without the optimizer.",
                )
            return safetensors.numpy.load(state), parent, sources
        factor = np.float32(adapter.manifest.scaling / spec.scaling)
        halves = {}
        for name, pair in adapter.weights.items():
            halves[f"{name}.A"] = np.asarray(pair.a, np.float32)
            halves[f"{name}.B"] = np.asarray(pair.b, np.float32) * factor
        return with_zero_moments(halves), parent, sources

    def archive(self, row: Row) -> bytes:
        """Return a checkpoint as a tar file of a PEFT folder."""
        base = self._runtime.base()
        out = io.BytesIO()
        with file_system.temporary_folder() as folder:
            peft = folder / "adapter"
            export_peft(self._adapter(row), base.architecture, peft, base_name=base.card.name)
            with tarfile.open(fileobj=out, mode="w") as tar:
                for file in sorted(peft.iterdir()):
                    tar.add(file, arcname=file.name)
        return out.getvalue()

    def interpolate(self, owner: str, call_name: str, request: models.Interpolate) -> str:
        """Save ``sum c_i * delta_i`` of several checkpoints, and return the path.

        The sum is exact: it is one LoRA whose rank is the sum of theirs.

        Raises:
            InvalidInput: Their numbers differ, or the sum of the ranks is too large.
            NotFound: A path has no weights.
        """
        if len(request.source_paths) != len(request.coefficients):
            raise InvalidInput(
                "There must be one coefficient for each path.", hint="Send lists of one length."
            )
        # Before the weights are read, which may be erased at any time.
        sources = set().union(*map(self._sources.of, request.source_paths))
        coefficients = dict.fromkeys(request.source_paths, 0.0)
        for path, coefficient in zip(request.source_paths, request.coefficients, strict=True):
            coefficients[path] += coefficient
        parts = [
            (self._adapter(self.find(owner, path)), coefficient)
            for path, coefficient in coefficients.items()
        ]
        pairs = concatenate(compose(parts))
        rank = max((pair.a.shape[1] for pair in pairs.values()), default=0)
        if not rank:
            raise InvalidInput("The sum is zero.", hint="Give a coefficient that is not 0.")
        if rank > models.MAX_SUM_RANK:
            raise InvalidInput(
                f"The ranks of these weights sum to {rank}; the most is {models.MAX_SUM_RANK}.",
                hint="Interpolate fewer weights, or weights of a lower rank.",
            )
        padded = {name: pair.padded(rank) for name, pair in pairs.items()}
        base = self._runtime.base()
        recipe = {"interpolated": request.source_paths, "coefficients": request.coefficients}
        manifest = Manifest(
            base.digest, LAYER, rank, 1.0, tuple(padded), recipe, canonical_digest([])
        )
        return self._put(
            owner,
            f"mix-{call_name[:16]}",
            "sampler_weights",
            request.output_path or call_name,
            Adapter(manifest, padded),
            sources,
            about={"base": "", "call": call_name},
        )

    def owner_of(self, path: str) -> str:
        """Return the owner of saved weights. Raises ``NotFound``."""
        row = self._db.row("select owner from checkpoints where path = ?", path)
        return str(self.find("" if row is None else row["owner"], path)["owner"])

    def adopt(self, owner: str, request: models.Adopt, **options: Any) -> LearnReport:
        """Judge saved weights as a candidate of a user's layer, as ``User.propose_peft`` does.

        Args:
            owner: Who asks.
            request: The weights and the layer.
            options: More of ``User.propose_peft``.

        Raises:
            NotFound: There are no such weights, or no such user.
            InvalidInput: They were trained from another user's layer.
        """
        check_layer_name(request.layer)
        others = sorted({each.user for each in self._sources.of(request.tinker_path)})
        if any(user != request.user for user in others):
            raise InvalidInput(
                f"These weights were trained from a layer of {', '.join(others)}. A layer of"
                f" {request.user} would keep them when that layer is forgotten.",
                hint="Adopt weights that were trained without it.",
            )
        adapter = self._adapter(self.find(owner, request.tinker_path))
        manifest = replace(adapter.manifest, layer=request.layer, below=(), parent=None)
        base = self._runtime.base()
        with file_system.temporary_folder() as folder:
            peft = folder / "adapter"
            export_peft(
                replace(adapter, manifest=manifest),
                base.architecture,
                peft,
                base_name=base.card.name,
            )
            user = self._runtime.user(request.user, create=False)
            return user.propose_peft(
                peft,
                layer=request.layer,
                accept=request.accept,
                **options,
            )

    def describe(self, row: Row) -> models.Checkpoint:
        """Return a row as clients read it."""
        return models.Checkpoint(
            checkpoint_id=f"{row['kind']}/{row['name']}",
            checkpoint_type="training" if row["kind"] == "weights" else "sampler",
            time=format_time(row["created"]),
            tinker_path=row["path"],
            size_bytes=row["size"],
            public=bool(row["public"]),
            expires_at=None if row["expires"] is None else format_time(row["expires"]),
        )

    def manifest(self, row: Row) -> Manifest:
        """Return the manifest of a checkpoint's adapter."""
        return self._adapter(row).manifest

    def _put(
        self,
        owner: str,
        run: str,
        kind: Kind,
        name: str,
        adapter: Adapter,
        sources: Iterable[Source],
        *,
        about: Mapping[str, Any],
        state: State | None = None,
        ttl: int | None = None,
        overwrite: bool = False,
    ) -> str:
        """Save weights and return their path. Raises ``InvalidInput``.

        A call that saved already, before a kill, saves nothing again.
        """
        path = f"{SCHEME}{run}/{kind}/{name}"
        old = self._db.row("select * from checkpoints where path = ?", path)
        if old is not None and json.loads(old["about"])["call"] == about["call"]:
            return path
        packed = pack(adapter)
        saved = None if state is None else safetensors.numpy.save(dict(state))
        size = len(packed) + len(saved or b"")
        digest = self._db.put_file(packed)
        state_file = None if saved is None else self._db.put_file(saved)
        if old is not None and not overwrite:
            self._db.delete_unnamed_files((digest, state_file))
            raise InvalidInput(
                f"The run has weights called {name} already.", hint="Choose another name."
            )
        if not self._db.has_room(owner, size):
            self._db.delete_unnamed_files((digest, state_file))
            raise InvalidInput(
                f"The weights and calls of this API key would exceed {MAX_BYTES // 2**30} GiB.",
                hint="Delete checkpoints, or save with ttl_seconds.",
            )
        now = self._now()
        with self._db.transaction(durable=True):
            # The call of a user who was forgotten meanwhile is gone, and saves nothing.
            self._db.execute(
                "insert or replace into checkpoints (path, owner, run, kind, name, adapter,"
                " state_file, size, created, expires, about)"
                " select ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?"
                " where exists (select 1 from calls where id = ?)",
                *(path, owner, run, kind, name, digest, state_file, size, now),
                None if ttl is None else now + ttl,
                *(json.dumps(about), about["call"]),
            )
            self._sources.replace(path, sources)
        replaced = () if old is None else (old["adapter"], old["state_file"])
        self._db.delete_unnamed_files((digest, state_file, *replaced))
        return path

    def _read(self, owner: str, path: str) -> tuple[Row | None, Adapter, set[Source]]:
        """Return saved weights with their row, or a user's layer, and the users' layers in them."""
        sources = self._sources_of(owner, path)
        row = None if path.startswith(USER_SCHEME) else self.find(owner, path)
        adapter = self._user_layer(owner, path) if row is None else self._adapter(row)
        # Asked twice, since a learn may promote another revision meanwhile.
        return row, adapter, sources | self._sources_of(owner, path)

    def _sources_of(self, owner: str, path: str) -> set[Source]:
        if not path.startswith(USER_SCHEME):
            return self._sources.of(path)
        return self._sources.of_layer(*_user_and_layer(owner, path))

    def _adapter(self, row: Row) -> Adapter:
        adapter = self.read_adapter(row["adapter"])
        if adapter is None:
            raise NotFound(
                "The file of these weights is missing or damaged.", hint="Save them again."
            )
        return adapter

    def _user_layer(self, owner: str, path: str) -> Adapter:
        user, layer = _user_and_layer(owner, path)
        base = self._runtime.base()
        with file_system.temporary_folder() as folder:
            peft = folder / "adapter"
            self._runtime.user(user, create=False).export_peft(peft, layer=layer)
            return import_peft(peft, base.architecture, layer=layer, base=base.digest)

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _user_and_layer(owner: str, path: str) -> tuple[str, str]:
    """Return a user and a layer of the user from a path. Raises ``NotFound`` for another user's."""
    user, _, layer = path.removeprefix(USER_SCHEME).partition("/")
    if owner.startswith(USER_OWNER) and owner != f"{USER_OWNER}{user}":
        raise NotFound("This layer is another user's.", hint="Open one of your own.")
    return user, layer


def trained_parts(projections: Iterable[str]) -> tuple[bool, bool]:
    """Return whether projections of attention are among those, and of the MLP."""
    in_attention = ["attn" in name for name in projections]
    return any(in_attention), not all(in_attention)


def with_zero_moments(halves: State) -> State:
    """Return A and B with the state of an optimizer that made no step."""
    state: dict[str, Any] = dict(halves)
    for name, half in halves.items():
        state |= {f"{name}.{moment}": np.zeros_like(half) for moment in _MOMENTS}
        state[f"{name}.step"] = np.zeros((), np.float32)
    return state


def format_time(seconds: float) -> str:
    """Return seconds since 1970 in ISO 8601."""
    from datetime import UTC, datetime

    return datetime.fromtimestamp(seconds, UTC).isoformat()
