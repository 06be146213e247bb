"""Execute training calls on the sessions of their runs.

Invariants: passes of several runs that are executed together are one call of
``Backend.forward_backward``. A restart restores the last stored state of a run and executes the
later calls again. So the run continues as if nothing had happened.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import safetensors.numpy

from personalpeft import PersonalPeftError, Runtime
from personalpeft.backends.base import AdamParams, ForwardResult, Session, SessionSpec
from personalpeft.clock import Clock
from personalpeft.errors import InvalidInput, format_origin
from personalpeft_tinker_server import models
from personalpeft_tinker_server.checkpoints import Checkpoints, Kind
from personalpeft_tinker_server.codec import ForwardBackward, read, read_forward_backward
from personalpeft_tinker_server.database import Database
from personalpeft_tinker_server.futures import Futures, Outcome, QueuedCall
from personalpeft_tinker_server.losses import DatumLoss, build_losses
from personalpeft_tinker_server.reverse_kl import add_gradients, open_reference
from personalpeft_tinker_server.run_spec import RunSpec
from personalpeft_tinker_server.sources import Sources

log = logging.getLogger(__name__)

REFUSED = "refused"
"""The kind of a call that was refused when it was posted. Its body is the text of the error."""

PASSES = frozenset({"forward", "forward_backward", "forward_backward_protobuf"})
"""The kinds of calls that are passes of the model."""

# Seconds between stores of a run's state, during which samples wait up to 0.4 s longer. A restart
# executes the later calls again.
STORE_SECONDS = 120.0
# Seconds that a training pass waits for chats and samples.
_YIELD_SECONDS = 0.25
# Seconds without a heartbeat after which a client counts as silent; the SDK sends one each 10 s.
SILENCE_SECONDS = 60.0
# Seconds without a call after which a run leaves memory. Clients never say that they are done.
_IDLE_RUN_SECONDS = 300.0
_CHECK_INPUTS = "Check the inputs of the loss, or load weights and use a lower learning rate."


@dataclass(slots=True)
class _Run:
    """A run in memory.

    Attributes:
        spec: What it trains.
        session: Its session.
        stored: When its state was stored last.
        finished: When its last call ended.
        has_gradients: Whether the session has gradients. A stored state has none.
    """

    spec: RunSpec
    session: Session
    stored: float
    finished: float
    has_gradients: bool = False


class Executor:
    """The runs in memory, and what their calls do. For one thread.

    Args:
        runtime: The open runtime; its engine is loaded with the first call.
        database: Has the runs.
        futures: Has the calls.
        checkpoints: Keeps saved weights.
        clock: The time.
    """

    def __init__(
        self,
        runtime: Runtime,
        database: Database,
        futures: Futures,
        checkpoints: Checkpoints,
        clock: Clock,
    ) -> None:
        self._runtime, self._db, self._futures = runtime, database, futures
        self._checkpoints, self._clock = checkpoints, clock
        self._sources = Sources(runtime, database)
        self._runs: dict[str, _Run] = {}

    def is_any_busy(self, seconds: float, *, except_for: Collection[str | None]) -> bool:
        """Return whether another run in memory ended a call within the last seconds."""
        now = self._clock.timer()
        others = (run for run_id, run in self._runs.items() if run_id not in except_for)
        return any(now - run.finished < seconds for run in others)

    def execute(self, calls: Sequence[QueuedCall]) -> None:
        """Execute calls of different runs, and store their outcomes."""
        passes = [call for call in calls if call.kind in PASSES]
        for call in calls:
            if call.kind not in PASSES:
                with self._outcome_of(call):
                    self._finish(call, self._single(call))
        if passes:
            self._execute_passes(passes)

    def _execute_passes(self, calls: Sequence[QueuedCall]) -> None:
        """Execute passes of different runs together."""
        prepared: list[tuple[QueuedCall, _Run, ForwardBackward, list[DatumLoss]]] = []
        for call in calls:
            with self._outcome_of(call):
                run = self._open(call.run or "")
                request = _read_pass(self._futures.body(call), call.kind)
                prepared.append((call, run, request, self._losses(request)))
        backend = self._runtime.training_backend()
        for backward in (True, False):
            group = [each for each in prepared if each[2].forward_only is not backward]
            if not group:
                continue
            try:
                results = backend.forward_backward(
                    [run.session for _, run, _, _ in group],
                    [losses for _, _, _, losses in group],
                    backward=backward,
                    logprobs=True,
                    between=self._yield,
                )
            except Exception as error:  # noqa: BLE001 - the clients get it
                for call, *_ in group:
                    self.drop(call.run)
                    self._fail(call, error)
                continue
            for (call, run, _, losses), own in zip(group, results, strict=True):
                if not all(math.isfinite(result.loss) for result in own):
                    self.drop(call.run)
                    self._fail(call, _not_finite())
                    continue
                run.has_gradients |= backward
                self._finish(call, _write_pass(losses, own))

    def _yield(self) -> None:
        """Let chats and samples go first, for a moment."""
        self._runtime.learning_engine().yield_to_requests(_YIELD_SECONDS)

    def _losses(self, request: ForwardBackward) -> list[DatumLoss]:
        return build_losses(
            request.loss_fn,
            request.data,
            request.config,
            self._runtime.training_backend(),
        )

    def _single(self, call: QueuedCall) -> bytes:
        """Execute a call that is no pass, and return its result as JSON."""
        body = self._futures.body(call)
        if call.kind == REFUSED:
            raise InvalidInput(body.decode())
        if call.kind == "create_model":
            self._open(call.run or "")
            return _json(type="create_model", model_id=call.run)
        if call.kind == "load_weights":
            return self._load(call, read(models.LoadWeights, body))
        run = self._open(call.run or "")
        if call.kind == "optim_step":
            norm = run.session.optim_step(_read_adam(read(models.OptimStep, body)))
            run.has_gradients = False
            if not math.isfinite(norm):
                # A later start must not add them again.
                self._store_state(run)
                raise InvalidInput(
                    "The gradients are not finite, so no step was made and they are cleared.",
                    hint=_CHECK_INPUTS,
                )
            return _json(type="optim_step", metrics={"grad_norm:mean": norm})
        if call.kind == "reverse_kl":
            return self._reverse_kl(run, call).model_dump_json().encode()
        if call.kind == "save_weights":
            saving = read(models.SaveWeights, body)
            path = self._save(call, run, "weights", saving, saving.path or f"{call.seq or 0:06d}")
            return _json(type="save_weights", path=path)
        if call.kind == "save_weights_for_sampler":
            return self._save_for_sampler(call, run, read(models.SaveWeightsForSampler, body))
        raise InvalidInput(f"There is no call {call.kind}.", hint="Update the server.")

    def _reverse_kl(self, run: _Run, call: QueuedCall) -> models.ReverseKLResponse:
        request = read(models.ReverseKL, self._futures.body(call))
        backend = self._runtime.training_backend()
        adapter, sources = self._checkpoints.adapter(call.owner, request.reference_model_path)
        self._sources.add(run.spec.run, sources)
        reference = open_reference(backend, adapter)
        try:
            response = add_gradients(backend, run.session, reference, request, between=self._yield)
        finally:
            reference.close()
        if not math.isfinite(response.metrics["loss:mean"]):
            self.drop(call.run)
            raise _not_finite()
        run.has_gradients = True
        # The reference may be deleted, and the call could not be executed again.
        run.stored = -math.inf
        return response

    def _save(
        self, call: QueuedCall, run: _Run, kind: Kind, request: models.SaveWeights, name: str
    ) -> str:
        path = self._checkpoints.save(
            run.spec,
            kind,
            name,
            run.session.weights(),
            run.session.state() if kind == "weights" else None,
            ttl=request.ttl_seconds,
            overwrite=request.overwrite,
            call=call.id,
            temporary=kind == "sampler_weights"
            and request.path is None
            and not request.ttl_seconds,
        )
        # None of a user who was forgotten meanwhile.
        saved = self._db.row("select adapter from checkpoints where path = ?", path)
        self._set_parent(run, None if saved is None else saved["adapter"])
        return path

    def _set_parent(self, run: _Run, digest: str | None) -> None:
        """Set what the run goes on from: the weights that it loaded or saved last."""
        run.spec = replace(run.spec, parent=digest)
        self._db.execute("update runs set parent = ? where id = ?", digest, run.spec.run)

    def _save_for_sampler(
        self, call: QueuedCall, run: _Run, request: models.SaveWeightsForSampler
    ) -> bytes:
        name = request.path or f"unnamed-{call.seq or 0:06d}"
        path = self._save(call, run, "sampler_weights", request, name)
        if request.sampling_session_seq_id is None:
            return _json(type="save_weights_for_sampler", path=path)
        (row,) = self._db.rows("select session from runs where id = ?", run.spec.run)
        sampler = self._db.add_sampler(
            call.owner, row["session"], request.sampling_session_seq_id, path, run.spec.base
        )
        return _json(type="save_weights_for_sampler", sampling_session_id=sampler)

    def _load(self, call: QueuedCall, request: models.LoadWeights) -> bytes:
        run = self._open(call.run or "")
        state, parent, sources = self._checkpoints.training_state(
            run.spec, call.owner, request.path, optimizer=request.optimizer
        )
        run.has_gradients = False
        run.session.restore(state)
        # The maintenance, which erases by them, runs on this thread.
        self._sources.replace(run.spec.run, sources)
        self._set_parent(run, parent)
        return _json(type="load_weights", path=request.path, model_id=call.run)

    def _open(self, run_id: str) -> _Run:
        """Return a run with its session, brought to where it was before a restart."""
        if run_id in self._runs:
            return self._runs[run_id]
        (row,) = self._db.rows("select * from runs where id = ?", run_id)
        base = self._runtime.base()
        # None in rows of an earlier version.
        if row["base_digest"] not in (None, base.digest):
            raise InvalidInput(
                f"This run was trained on another base, {row['base_digest'][:12]}.",
                hint=f"Serve that base again, or create a run on {base.card.name}.",
            )
        spec = RunSpec.of(row)
        backend = self._runtime.training_backend()
        session = backend.session(
            SessionSpec(
                spec.rank,
                spec.scaling,
                spec.targets(list(base.architecture.projections)),
                spec.seed,
            )
        )
        now = self._clock.timer()
        run = self._runs[run_id] = _Run(spec, session, stored=now, finished=now)
        stored = row["state_file"] and self._db.read_file(row["state_file"])
        executed = 0
        if stored:
            session.restore(safetensors.numpy.load(stored))
            executed = row["state_executed"]
        try:
            for call in self._futures.executed_after(run_id, executed):
                self._execute_again(run, call)
        except BaseException:
            del self._runs[run_id]
            session.close()
            raise
        return run

    def _execute_again(self, run: _Run, call: QueuedCall) -> None:
        """Repeat the effect of a call on the session."""
        if call.kind in PASSES:
            request = _read_pass(self._futures.body(call), call.kind)
            if not request.forward_only:
                backend = self._runtime.training_backend()
                backend.forward_backward([run.session], [self._losses(request)])
                run.has_gradients = True
        elif call.kind in ("optim_step", "reverse_kl", "load_weights"):
            self._single(call)

    def _finish(self, call: QueuedCall, result: bytes) -> None:
        self._futures.finish(call, Outcome(result, None, None))
        run = self._runs.get(call.run or "")
        if run is None:
            return
        run.finished = self._clock.timer()
        if run.has_gradients:
            return
        is_due = self._clock.timer() - run.stored >= STORE_SECONDS
        # What was loaded may be deleted, and could not be loaded again.
        if call.kind == "load_weights" or (call.kind == "optim_step" and is_due):
            self._store_state(run)

    def _store_state(self, run: _Run) -> None:
        """Store the state of a run that has no gradients, from which a restart continues."""
        run.stored = self._clock.timer()
        state = run.session.state()
        if not all(np.isfinite(array).all() for array in state.values()):
            # It could not be restored. The calls after the state before lead here again.
            return
        file = self._db.put_file(safetensors.numpy.save(dict(state)))
        old = self._db.rows("select state_file from runs where id = ?", run.spec.run)
        self._db.execute(
            "update runs set state_file = ?, state_executed = executed where id = ? and open",
            *(file, run.spec.run),
        )
        # The run of a forgotten user has no row or is over, so the new file has no name then.
        self._db.delete_unnamed_files([file, *(row["state_file"] for row in old)])

    def evict_runs(self) -> None:
        """Free the memory of runs that are not in use, and the state of runs that are over."""
        now = self._clock.now().timestamp()
        live = {
            row["id"]
            for row in self._db.rows(
                "select runs.id from runs join sessions on sessions.id = runs.session"
                " where runs.open and sessions.seen >= ? and (runs.seen >= ?"
                " or exists (select 1 from calls where run = runs.id and status = 'queued'))",
                *(now - SILENCE_SECONDS, now - _IDLE_RUN_SECONDS),
            )
        }
        for run_id in set(self._runs) - live:
            run = self._runs.pop(run_id)
            try:
                if not run.has_gradients:
                    self._store_state(run)
            finally:
                run.session.close()
        for row in self._db.rows(
            "select id, state_file from runs where not open and state_file is not null"
        ):
            self._db.execute("update runs set state_file = null where id = ?", row["id"])
            self._db.delete_unnamed_files([row["state_file"]])

    @contextmanager
    def _outcome_of(self, call: QueuedCall) -> Iterator[None]:
        """Store what the block raises as the call's outcome."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the client gets it
            self._fail(call, error)

    def _fail(self, call: QueuedCall, error: Exception) -> None:
        """Store an error as the call's outcome, and undo what the call did to its run."""
        self._futures.finish(call, failure(error))
        if not isinstance(error, PersonalPeftError):
            # Opened again, it has what the calls that succeeded did.
            self.drop(call.run)

    def drop(self, run_id: str | None) -> None:
        """Free a run's session without storing its state."""
        run = self._runs.pop(run_id or "", None)
        if run is not None:
            run.session.close()

    def close(self) -> None:
        """Free all sessions."""
        for run in self._runs.values():
            run.session.close()
        self._runs.clear()


def _not_finite() -> InvalidInput:
    return InvalidInput("The loss is not finite, so no gradients were added.", hint=_CHECK_INPUTS)


def _read_pass(body: bytes, kind: str) -> ForwardBackward:
    return read_forward_backward(
        body, protobuf=kind == "forward_backward_protobuf", forward=kind == "forward"
    )


def _read_adam(request: models.OptimStep) -> AdamParams:
    params = request.adam_params
    if params is None:
        raise InvalidInput("The only optimizer is AdamW.", hint="Send AdamParams.")
    return AdamParams(
        params.learning_rate,
        params.beta1,
        params.beta2,
        params.eps,
        params.weight_decay,
        params.grad_clip_norm or None,
    )


def _write_pass(losses: Sequence[DatumLoss], results: Sequence[ForwardResult]) -> bytes:
    """Return the results of a pass as the JSON of a ``ForwardBackwardOutput``."""
    outputs = []
    for loss, result in zip(losses, results, strict=True):
        logprobs = loss.logprobs(result)
        tensor = models.Tensor(data=logprobs.ravel().tolist(), shape=list(logprobs.shape))
        outputs.append({"logprobs": tensor})
    total = sum(result.loss for result in results)
    output = models.ForwardBackwardOutput(loss_fn_outputs=outputs, metrics={"loss:sum": total})
    return output.model_dump_json().encode()


def failure(error: Exception) -> Outcome:
    """Return the outcome of a call that failed: the client's mistake, or the server's."""
    if isinstance(error, PersonalPeftError):
        return Outcome(None, f"{error.message} {error.hint}".strip(), "user")
    log.error("a call failed: %s", format_origin(error))
    return Outcome(
        None, f"The server failed ({type(error).__name__}); its log has the details.", "server"
    )


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()
