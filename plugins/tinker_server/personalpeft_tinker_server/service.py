"""Sessions, runs and samplers of all owners, and the two workers that execute their calls."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from sqlite3 import Row

from personalpeft import Runtime
from personalpeft.adapters.types import Manifest
from personalpeft.clock import Clock
from personalpeft.errors import InvalidInput, NotFound, QueueFull
from personalpeft_tinker_server import models
from personalpeft_tinker_server.checkpoints import USER_SCHEME, Checkpoints, trained_parts
from personalpeft_tinker_server.database import FOLDER, USER_OWNER, Database
from personalpeft_tinker_server.executor import SILENCE_SECONDS, Executor
from personalpeft_tinker_server.futures import Futures, QueuedCall, call_id
from personalpeft_tinker_server.sampling import Sampler
from personalpeft_tinker_server.sources import Sources
from personalpeft_tinker_server.training import Trainer

# Runs with a call in the last minute, of clients that send heartbeats, that one owner may have.
MAX_RUNS = 16
# Seconds without a heartbeat after which a run is over. Until then its client may come back.
_RUN_SECONDS = 24 * 3600.0
# Seconds without a heartbeat after which weights that a client saved without a name are deleted.
_TEMPORARY_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class Options:
    """What the environment sets.

    Attributes:
        aliases: Further names of the base, for clients that cannot be told another.
        tokenizer: The hub id or path by which clients find the tokenizer.
    """

    aliases: tuple[str, ...] = ()
    tokenizer: str | None = None

    ALIASES = "PERSONALPEFT_TINKER_ALIASES"
    TOKENIZER = "PERSONALPEFT_TINKER_TOKENIZER"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Options:
        """Return the options in environment variables."""
        aliases = environment.get(cls.ALIASES, "").split(",")
        return cls(
            tuple(name.strip() for name in aliases if name.strip()),
            environment.get(cls.TOKENIZER) or None,
        )


class Service:
    """All of the API but HTTP. Safe to use from several threads.

    Args:
        runtime: The open runtime. Its engine that learns is loaded with the first call that needs it.
        options: What the environment sets.
        clock: The time and the entropy.
    """

    def __init__(self, runtime: Runtime, options: Options, clock: Clock) -> None:
        self._runtime, self._options = runtime, options
        self._clock = steady = _steady(clock)
        self._db = Database(runtime.plugin_data(FOLDER))
        self._sources = Sources(runtime, self._db)
        self._started = False
        self._lock = threading.Lock()
        self._sources.erase_forgotten()
        # Clients that were there at the stop could not send heartbeats since.
        self._db.execute(
            "update sessions set seen = ? where seen >= (select max(seen) from sessions) - ? and not ended",
            *(self._now(), SILENCE_SECONDS),
        )
        # The clock may have been set back since.
        self._db.execute("update sessions set seen = min(seen, ?)", self._now())
        self.futures = Futures(self._db, steady)
        self.checkpoints = Checkpoints(runtime, self._db, clock, options.aliases)
        executor = Executor(runtime, self._db, self.futures, self.checkpoints, steady)
        self._trainer = Trainer(executor, self._db, self.futures, steady, self._delete_old)
        self._sampler = Sampler(runtime, self._db, self.futures, self.checkpoints, clock)
        if self.futures.queued(in_runs=True) or self.futures.queued(in_runs=False):
            self._start()

    def close(self) -> None:
        """Stop the workers. Calls without a result are executed after the next start."""
        self.futures.close()
        with self._lock:
            self._trainer.close()
            self._sampler.close()
            self._db.close()

    def run_maintenance(self) -> None:
        """Free what silent clients hold, now instead of in a few seconds."""
        self._trainer.run_maintenance()

    # Owners

    def owner(self, user: str) -> str:
        """Return the owner of what a user's API keys make.

        Creates the user, so that it can be forgotten. Erases what a forgotten user of this id left.
        """
        self._runtime.user(user)
        owner = f"{USER_OWNER}{user}"
        self._sources.erase_former(owner)
        return owner

    # Sessions

    def create_session(self, owner: str, request: models.CreateSession) -> str:
        """Return the id of a new session."""
        session = f"session-{self._clock.entropy(8).hex()}"
        tags = json.dumps([request.sdk_version, *request.tags])
        self._db.execute(
            "insert into sessions (id, owner, seen, tags) values (?, ?, ?, ?)",
            *(session, owner, self._now(), tags),
        )
        return session

    def heartbeat(self, owner: str, session: str) -> None:
        """Keep a session. Raises ``NotFound``."""
        if not self._db.execute(
            "update sessions set seen = ?, ended = 0 where id = ? and owner = ?",
            *(self._now(), session, owner),
        ):
            raise NotFound("There is no such session.", hint="Create it again.")

    def end_session(self, owner: str, session: str) -> None:
        """Count a session's client as silent. An unknown session is ignored."""
        self._db.execute(
            "update sessions set seen = min(seen, ?), ended = 1 where id = ? and owner = ?",
            *(self._now() - SILENCE_SECONDS, session, owner),
        )

    def base_names(self) -> tuple[str, ...]:
        """Return the names of the base that clients may use."""
        return (self._runtime.base().card.name, *self._options.aliases)

    @property
    def context(self) -> int:
        """The most tokens of a prompt and its reply."""
        return self._runtime.base().card.context

    def tokenizer(self, base: str) -> str:
        """Return the id or path by which clients find the tokenizer."""
        return self._options.tokenizer or self._runtime.base().card.source.repo or base

    # Runs

    def create_run(self, owner: str, request: models.CreateModel, body: bytes) -> QueuedCall:
        """Create a run, and queue the call that opens it.

        Raises:
            InvalidInput: The base is another one, or cannot be trained so.
            NotFound: There is no such session.
            QueueFull: The owner has as many runs as allowed.
        """
        lora = request.lora_config
        if not (lora.train_mlp or lora.train_attn):
            raise InvalidInput(
                "The unembedding cannot be trained alone: this base adapts attention and MLP.",
                hint="Set train_attn or train_mlp.",
            )
        if request.optimizer_config.type != "adamw":
            raise InvalidInput("The only optimizer is adamw.", hint="Leave optimizer_config out.")
        self._check_base(request.base_model)
        run = self._add_run(
            owner,
            request.session_id,
            request.model_seq_id,
            request.base_model,
            rank=lora.rank,
            seed=lora.seed,
            attn=lora.train_attn,
            mlp=lora.train_mlp,
        )
        return self._queue(owner, "create_model", body, call_id("create", run), run=run)

    def create_run_from(self, owner: str, request: models.LoadWeights, body: bytes) -> QueuedCall:
        """Create a run of the shape of saved weights, and queue the call that loads them."""
        if request.base_model is not None:
            self._check_base(request.base_model)
        base, manifest = self.weights_info(owner, request.path)
        attn, mlp = trained_parts(manifest.targets)
        run = self._add_run(
            owner,
            request.session_id or "",
            request.model_seq_id or 0,
            request.base_model or base,
            rank=manifest.rank,
            seed=0,
            attn=attn,
            mlp=mlp,
        )
        return self._queue(owner, "load_weights", body, call_id("create", run), run=run)

    def queue(self, owner: str, kind: str, body: bytes, run: str, seq: int | None) -> QueuedCall:
        """Queue a call of a run. Raises ``NotFound``, ``QueueFull``."""
        self.run(owner, run)
        id_ = None if seq is None else call_id(run, seq)
        return self._queue(owner, kind, body, id_, run=run, seq=seq)

    def run(self, owner: str, run: str) -> Row:
        """Return the row of a run. Raises ``NotFound``."""
        row = self._db.row("select * from runs where id = ? and owner = ?", run, owner)
        if row is None:
            raise NotFound(f"There is no run {run[:80]!a}.", hint="Create it again.")
        return row

    def runs(self, owner: str) -> list[Row]:
        """Return the runs of an owner, newest first."""
        return self._db.rows("select * from runs where owner = ? order by created desc, id", owner)

    def runs_of_session(self, owner: str, session: str) -> tuple[list[str], list[str]]:
        """Return the ids of the runs and samplers of a session."""
        found = [
            self._db.rows(f"select id from {table} where owner = ? and session = ?", owner, session)
            for table in ("runs", "samplers")
        ]
        runs, samplers = ([row["id"] for row in rows] for rows in found)
        return runs, samplers

    def sessions(self, owner: str) -> list[str]:
        """Return the ids of an owner's sessions."""
        rows = self._db.rows("select id from sessions where owner = ? order by seen desc", owner)
        return [row["id"] for row in rows]

    def unload(self, owner: str, run: str) -> None:
        """Release a run. Its saved weights stay."""
        self.run(owner, run)
        self._db.execute("update runs set open = 0 where id = ?", run)
        self._trainer.notify()

    def weights_info(self, owner: str, path: str) -> tuple[str, Manifest]:
        """Return the name of the base and the manifest of saved weights. Raises ``NotFound``."""
        if path.startswith(USER_SCHEME):
            raise InvalidInput(
                "The shape of a user's layer is that of the run.",
                hint="Create a run of the layer's rank, then load the layer into it.",
            )
        row = self.checkpoints.find(owner, path)
        manifest = self.checkpoints.manifest(row)
        base = json.loads(row["about"])["base"] or self._runtime.base().card.name
        return base, manifest

    # Sampling

    def create_sampler(self, owner: str, request: models.CreateSampler) -> str:
        """Return the id of a sampler of saved weights or of the base. Raises ``NotFound``."""
        self._check_session(owner, request.session_id)
        if request.model_path is not None:
            self.checkpoints.find(owner, request.model_path)
        elif request.base_model is not None:
            self._check_base(request.base_model)
        else:
            raise InvalidInput(
                "A sampler needs a base_model or a model_path.", hint="Send one of them."
            )
        return self._db.add_sampler(
            owner,
            request.session_id,
            request.sampling_session_seq_id,
            request.model_path,
            request.base_model or self.base_names()[0],
        )

    def sampler(self, owner: str, sampler: str) -> Row:
        """Return the row of a sampler. Raises ``NotFound``."""
        row = self._db.row("select * from samplers where id = ? and owner = ?", sampler, owner)
        if row is None:
            raise NotFound("There is no such sampler.", hint="Create it again.")
        return row

    def sample(self, owner: str, request: models.Sample, body: bytes) -> QueuedCall:
        """Queue a sampling call. Raises ``QueueFull``, ``InvalidInput``."""
        if request.base_model is not None:
            self._check_base(request.base_model)
        id_ = None
        if request.sampling_session_id is not None and request.seq_id is not None:
            # The sampler may be another owner's: that is found when the call is executed.
            id_ = call_id("sample", owner, request.sampling_session_id, request.seq_id)
        return self._queue(owner, "sample", body, id_)

    def interpolate(self, owner: str, body: bytes) -> QueuedCall:
        """Queue an interpolation of saved weights. Raises ``QueueFull``."""
        return self._queue(owner, "interpolate", body)

    def cancel(self, owner: str, id_: str) -> None:
        """End a queued sampling call of an owner. Any other id is ignored."""
        if isinstance(self.futures.wait(owner, id_, 0), QueuedCall):
            self._sampler.cancel(id_)

    def pause_reason(self, id_: str) -> str | None:
        """Return why a queued call waits for room; None if it does not."""
        return self._sampler.pause_reason(id_)

    def _queue(
        self,
        owner: str,
        kind: str,
        body: bytes,
        id_: str | None = None,
        *,
        run: str | None = None,
        seq: int | None = None,
    ) -> QueuedCall:
        """Queue a call of a run for the trainer, and any other for the sampler."""
        self._start()
        call = self.futures.submit(owner, kind, body, id_=id_, run=run, seq=seq)
        if run is not None:
            self._db.execute("update runs set seen = ? where id = ?", self._now(), run)
            self._trainer.notify()
        elif call.is_new:
            self._sampler.submit(call)
        return call

    def _add_run(
        self,
        owner: str,
        session: str,
        number: int,
        base: str,
        *,
        rank: int,
        seed: int | None,
        attn: bool,
        mlp: bool,
    ) -> str:
        self._check_session(owner, session)
        # Clients since SDK 0.38 compute this name themselves.
        run = f"{session}:train:{number}"
        if self._db.row("select 1 from runs where id = ?", run) is not None:
            return run
        (count,) = self._db.rows(
            "select count(*) as count from runs join sessions on sessions.id = runs.session"
            " where runs.owner = ?1 and runs.open and sessions.seen >= ?2 and (runs.seen >= ?2"
            " or exists (select 1 from calls where run = runs.id and status = 'queued'))",
            *(owner, self._now() - SILENCE_SECONDS),
        )
        if count["count"] >= MAX_RUNS:
            raise QueueFull(
                f"{MAX_RUNS} runs of this API key are in use.",
                hint="Leave one without calls for a minute, or end its client.",
                retry_after=10.0,
            )
        if seed is None:
            seed = int.from_bytes(self._clock.entropy(4), "little")
        now = self._now()
        self._db.execute(
            "insert into runs (id, owner, session, base, base_digest, rank, seed, attn, mlp,"
            " created, seen, open) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1)",
            *(run, owner, session, base, self._runtime.base().digest, rank, seed % 2**63),
            *(int(attn), int(mlp), now, now),
        )
        return run

    def _check_session(self, owner: str, session: str) -> None:
        if not self._db.row("select 1 from sessions where id = ? and owner = ?", session, owner):
            raise NotFound("There is no such session.", hint="Create it again.")

    def _check_base(self, name: str) -> None:
        names = self.base_names()
        if name not in names:
            raise InvalidInput(
                f"This server's base is {names[0]}, not {name[:80]!a}.",
                hint=f"Ask for {names[0]}, or set {Options.ALIASES} on the server to names that"
                " clients use for it.",
            )

    def _start(self) -> None:
        """Load the model's readers and start the workers, once."""
        with self._lock:
            if self._started:
                return
            self._started = True
            self._runtime.learning_engine().add_source(self.checkpoints.read_adapter)
            self._trainer.start()
            self._sampler.start()

    def _delete_old(self) -> None:
        """Delete what has passed its time, and what forgotten users left."""
        self._sources.erase_forgotten()
        self._db.execute(
            "update runs set open = 0 where open and not exists"
            " (select 1 from sessions where sessions.id = runs.session and sessions.seen >= ?)",
            self._now() - _RUN_SECONDS,
        )
        self.checkpoints.delete_expired()
        self.checkpoints.delete_temporary(self._now() - _TEMPORARY_SECONDS)
        self.futures.delete_old()

    def _now(self) -> float:
        return self._clock.now().timestamp()


def _steady(clock: Clock) -> Clock:
    """Return a clock that is never set, and stops while the machine is suspended.

    Ages of sessions and results are measured by it, since clients send nothing meanwhile.
    """
    start, timer = clock.now(), clock.timer()
    return Clock(
        now=lambda: start + timedelta(seconds=clock.timer() - timer),
        timer=clock.timer,
        entropy=clock.entropy,
    )
