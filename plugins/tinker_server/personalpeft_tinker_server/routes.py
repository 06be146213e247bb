"""The routes of Tinker's API, below ``/tinker/api/v1``.

A long call answers with a ``request_id``; ``retrieve_future`` waits for its result.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flask import Blueprint, Response, request
from pydantic import BaseModel

from personalpeft.clock import Clock
from personalpeft.errors import InvalidInput, QueueFull
from personalpeft.learning.outcomes import render_reasons
from personalpeft.plugins import HttpHost
from personalpeft_tinker_server import models
from personalpeft_tinker_server.checkpoints import format_time, trained_parts
from personalpeft_tinker_server.codec import (
    PROTOBUF,
    M,
    read,
    read_forward_backward,
    read_number,
    write_protobuf,
)
from personalpeft_tinker_server.executor import REFUSED
from personalpeft_tinker_server.futures import QueuedCall
from personalpeft_tinker_server.service import Service

T = TypeVar("T")
PREFIX = "/tinker/api/v1"

# Below the 45 s after which the SDK gives a poll up.
POLL_SECONDS = 20.0
# Seconds that a download link works.
_LINK_SECONDS = 900.0
# Seconds after which a client exchanges its API key again.
_TOKEN_SECONDS = 3600.0
# Bytes from which a client is asked to make room before it fetches a result.
LARGE_RESULT = 2**20
_JSON = "application/json"


class Routes:
    """The API as a Flask blueprint.

    Args:
        service: What the routes call.
        host: Tells who calls.
        clock: The time and the entropy of download links.
        max_polls: How many polls may wait at once, so that other requests find a thread.
    """

    def __init__(self, service: Service, host: HttpHost, clock: Clock, max_polls: int) -> None:
        self._service, self._host, self._clock = service, host, clock
        self._polls = threading.Semaphore(max_polls)
        self._links: dict[str, tuple[float, str, str]] = {}
        self._links_lock = threading.Lock()
        self.blueprint = Blueprint("tinker", __name__, url_prefix=PREFIX)
        post, get = self._post, self._get
        post("client/config", self._client_config)
        post("auth/token", self._exchange_key)
        post("create_session", self._create_session)
        post("session_heartbeat", self._heartbeat)
        post("sessions/<session>/finish", self._finish_session)
        post("telemetry", self._telemetry)
        get("get_server_capabilities", self._capabilities)
        self._add("GET", "healthz", host.public(lambda: _respond({"status": "ok"})))
        post("create_model", self._create_model)
        post("get_info", self._get_info)
        post("unload_model", self._unload)
        post("forward_backward", self._forward_backward)
        post("forward", lambda: self._queue("forward", models.ForwardBackward))
        post("optim_step", lambda: self._queue("optim_step", models.OptimStep))
        post("save_weights", lambda: self._queue("save_weights", models.SaveWeights))
        post(
            "save_weights_for_sampler",
            lambda: self._queue("save_weights_for_sampler", models.SaveWeightsForSampler),
        )
        post("load_weights", self._load_weights)
        post("weights_info", self._weights_info)
        post("create_sampling_session", self._create_sampler)
        post("asample", self._sample)
        post("cancel_future", self._cancel)
        post("retrieve_future", self._retrieve)
        post("mint/checkpoints/interpolate", self._interpolate)
        post(
            "mint/forward_backward_reverse_kl",
            lambda: self._queue("reverse_kl", models.ReverseKL),
        )
        post("personal/adopt", self._adopt)
        get("samplers/<sampler>", self._sampler)
        get("sessions", self._sessions)
        get("sessions/<session>", self._session)
        get("checkpoints", self._checkpoints)
        get("training_runs", self._training_runs)
        get("training_runs/<run>", lambda run: self._run(self._service.run(self._owner, run)))
        get("training_runs/<run>/checkpoints", self._checkpoints)
        one = "training_runs/<run>/checkpoints/<kind>/<name>"
        self._add("DELETE", one, self._delete)
        self._add("GET", f"{one}/archive", self._archive)
        self._add("POST", f"{one}/publish", lambda **path: self._publish(public=True, **path))
        self._add("DELETE", f"{one}/publish", lambda **path: self._publish(public=False, **path))
        self._add("PUT", f"{one}/ttl", self._ttl)
        self._add("GET", "downloads/<key>", host.public(lambda key: self._download(key)))

    @property
    def _owner(self) -> str:
        """Return who owns what this request makes: a user, or an administrator's API key."""
        user = self._host.user()
        return f"token:{self._host.api_key_id()}" if user is None else self._service.owner(user)

    def _post(self, rule: str, view: Callable[..., Any]) -> None:
        self._add("POST", rule, self._host.large_body(lambda **path: _respond(view(**path))))

    def _get(self, rule: str, view: Callable[..., Any]) -> None:
        self._add("GET", rule, lambda **path: _respond(view(**path)))

    def _add(self, method: str, rule: str, view: Callable[..., Any]) -> None:
        self.blueprint.add_url_rule(
            f"/{rule}", f"{method} {rule}".replace(".", "_"), view, methods=[method]
        )

    # Sessions

    def _client_config(self) -> dict[str, Any]:
        # Passes of moderate size: other runs and chats take turns between them.
        return {
            # With it a client takes keys that do not begin with "tml-".
            "pjwt_auth_enabled": not _presented_key().startswith("tml-"),
            "use_pyqwest_transport": False,
            "proto_write_fwdbwd": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            "fwdbwd_max_chunk_bytes_count": 2_000_000,
        }

    def _exchange_key(self) -> dict[str, Any]:
        """Return a JWT that ends with the API key, so that it outlives a restart of the server."""
        now = int(self._clock.now().timestamp())
        parts = {"alg": "none", "typ": "JWT"}, {"iat": now, "exp": now + int(_TOKEN_SECONDS)}
        encoded = [base64.urlsafe_b64encode(json.dumps(part).encode()) for part in parts]
        head = b".".join(part.rstrip(b"=") for part in encoded).decode()
        return {"jwt": f"{head}.{_presented_key().rpartition('.')[2]}"}

    def _create_session(self) -> dict[str, Any]:
        session = self._service.create_session(self._owner, self._read(models.CreateSession))
        return {"type": "create_session", "session_id": session}

    def _heartbeat(self) -> dict[str, Any]:
        self._service.heartbeat(self._owner, self._read(models.SessionRef).session_id)
        return {"type": "session_heartbeat"}

    def _finish_session(self, session: str) -> Response:
        self._service.end_session(self._owner, session)
        return Response(status=204)

    def _telemetry(self) -> dict[str, Any]:
        """Take the end of a session from the events; nothing of them is kept."""
        sent = self._read(models.Telemetry)
        if any(event.event == "SESSION_END" for event in sent.events):
            self._service.end_session(self._owner, sent.session_id)
        return {"status": "accepted"}

    def _capabilities(self) -> dict[str, Any]:
        context = self._service.context
        return {
            "supported_models": [
                {"model_name": name, "max_context_length": context}
                for name in self._service.base_names()
            ]
        }

    def _sessions(self) -> dict[str, Any]:
        sessions, _ = _page(self._service.sessions(self._owner))
        return {"sessions": sessions}

    def _session(self, session: str) -> dict[str, Any]:
        runs, samplers = self._service.runs_of_session(self._owner, session)
        return {"training_run_ids": runs, "sampler_ids": samplers}

    # Training

    def _create_model(self) -> dict[str, Any]:
        body = request.get_data()
        call = self._service.create_run(self._owner, read(models.CreateModel, body), body)
        return _future(call)

    def _get_info(self) -> dict[str, Any]:
        row = self._service.run(self._owner, self._read(models.ModelRef).model_id)
        tokenizer = self._service.tokenizer(row["base"])
        data = {"arch": "lora", "model_name": row["base"], "tokenizer_id": tokenizer}
        return {
            "type": "get_info",
            "model_id": row["id"],
            "model_data": data,
            "model_name": row["base"],
            "is_lora": True,
            "lora_rank": row["rank"],
            # What the run trains; a wish for the unembedding is ignored.
            "train_unembed": False,
            "train_mlp": bool(row["mlp"]),
            "train_attn": bool(row["attn"]),
        }

    def _unload(self) -> dict[str, Any]:
        run = self._read(models.ModelRef).model_id
        self._service.unload(self._owner, run)
        return {"type": "unload_model", "model_id": run, "request_id": run}

    def _forward_backward(self) -> dict[str, Any]:
        protobuf = request.mimetype == PROTOBUF
        return self._queue_read(
            "forward_backward_protobuf" if protobuf else "forward_backward",
            lambda body: read_forward_backward(body, protobuf=protobuf, forward=False),
        )

    def _queue(self, kind: str, model: type[Any]) -> dict[str, Any]:
        return self._queue_read(kind, lambda body: read(model, body))

    def _queue_read(self, kind: str, read_body: Callable[[bytes], Any]) -> dict[str, Any]:
        """Queue a call of a run; one with a mistake as a call that fails.

        Clients count a call that was refused, so its number must not be missing.
        """
        body = request.get_data()
        try:
            parsed = read_body(body)
        except InvalidInput as error:
            number = read_number(body, protobuf=request.mimetype == PROTOBUF)
            if number is None:
                raise
            kind, body = REFUSED, f"{error.message} {error.hint}".encode()
        else:
            number = parsed.model_id, parsed.seq_id
        # 0 is no number in protobuf.
        run, seq = number[0], number[1] or None
        return _future(self._service.queue(self._owner, kind, body, run, seq))

    # Weights

    def _load_weights(self) -> dict[str, Any]:
        body = request.get_data()
        if read_number(body, protobuf=False) is None:
            parsed = read(models.LoadWeights, body)
            if parsed.model_id is None:
                return _future(self._service.create_run_from(self._owner, parsed, body))
        return self._queue("load_weights", models.LoadWeights)

    def _weights_info(self) -> dict[str, Any]:
        path = self._read(models.WeightsInfo).tinker_path
        base, manifest = self._service.weights_info(self._owner, path)
        attn, mlp = trained_parts(manifest.targets)
        return {
            "base_model": base,
            "is_lora": True,
            "lora_rank": manifest.rank,
            "train_unembed": False,
            "train_mlp": mlp,
            "train_attn": attn,
        }

    def _checkpoints(self, run: str | None = None) -> dict[str, Any]:
        checkpoints = self._service.checkpoints
        rows, cursor = _page(checkpoints.rows(self._owner, run))
        described = [checkpoints.describe(row).model_dump() for row in rows]
        return {"checkpoints": described, "cursor": cursor}

    def _training_runs(self) -> dict[str, Any]:
        rows, cursor = _page(self._service.runs(self._owner))
        return {"training_runs": [self._run(row) for row in rows], "cursor": cursor}

    def _run(self, row: Any) -> dict[str, Any]:
        checkpoints = self._service.checkpoints
        last: dict[str, models.Checkpoint] = {}
        for saved in checkpoints.rows(row["owner"], row["id"]):
            last.setdefault(saved["kind"], checkpoints.describe(saved))
        return models.TrainingRun(
            training_run_id=row["id"],
            base_model=row["base"],
            model_owner=row["owner"],
            lora_rank=row["rank"],
            last_request_time=format_time(row["seen"]),
            last_checkpoint=last.get("weights"),
            last_sampler_checkpoint=last.get("sampler_weights"),
        ).model_dump()

    def _delete(self, run: str, kind: str, name: str) -> Response:
        checkpoints = self._service.checkpoints
        checkpoints.delete(checkpoints.find_own(self._owner, run, kind, name))
        return Response(status=204)

    def _ttl(self, run: str, kind: str, name: str) -> Response:
        checkpoints = self._service.checkpoints
        row = checkpoints.find_own(self._owner, run, kind, name)
        checkpoints.set_ttl(row, self._read(models.SetTtl).ttl_seconds)
        return Response(status=204)

    def _publish(self, run: str, kind: str, name: str, *, public: bool) -> Response:
        checkpoints = self._service.checkpoints
        checkpoints.set_public(checkpoints.find_own(self._owner, run, kind, name), public)
        return Response(status=204)

    def _archive(self, run: str, kind: str, name: str) -> Response:
        """Redirect to a link that works without an API key for a while, as clients expect."""
        row = self._service.checkpoints.find(self._owner, f"tinker://{run}/{kind}/{name}")
        now = self._clock.timer()
        key = self._clock.entropy(24).hex()
        with self._links_lock:
            self._links = {key: link for key, link in self._links.items() if link[0] > now}
            self._links[key] = (now + _LINK_SECONDS, self._owner, row["path"])
        expires = format_time(self._clock.now().timestamp() + _LINK_SECONDS)
        location = f"{request.host_url.rstrip('/')}{PREFIX}/downloads/{key}"
        return Response(status=302, headers={"Location": location, "Expires": expires})

    def _download(self, key: str) -> Response:
        until, owner, path = self._links.get(key, (0.0, "", ""))
        if until <= self._clock.timer():
            return Response("The link has expired. Ask for the archive again.\n", status=404)
        checkpoints = self._service.checkpoints
        data = checkpoints.archive(checkpoints.find(owner, path))
        return Response(
            data,
            mimetype="application/x-tar",
            headers={"Content-Disposition": "attachment; filename=checkpoint.tar"},
        )

    def _interpolate(self) -> dict[str, Any]:
        self._read(models.Interpolate)
        return _future(self._service.interpolate(self._owner, request.get_data()))

    def _adopt(self) -> dict[str, Any]:
        asked = self._read(models.Adopt)
        user = self._host.user()
        if user is not None and user != asked.user:
            return {"error": "This API key is another user's.", "_status": 403}
        report = self._service.checkpoints.adopt(self._owner, asked)
        return models.AdoptResponse(
            revision=report.revision or "",
            live=report.live,
            outcome=str(report.outcome),
            reason=render_reasons(report.reasons),
        ).model_dump()

    # Sampling

    def _create_sampler(self) -> dict[str, Any]:
        sampler = self._service.create_sampler(self._owner, self._read(models.CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": sampler}

    def _sampler(self, sampler: str) -> dict[str, Any]:
        row = self._service.sampler(self._owner, sampler)
        return {
            "sampler_id": sampler,
            "base_model": row["base"],
            "model_path": row["model_path"],
            "type": "get_sampler",
        }

    def _sample(self) -> dict[str, Any]:
        body = request.get_data()
        asked = read(models.Sample, body)
        call = self._service.sample(self._owner, asked, body)
        sequences = [f"{call.id}-{index}" for index in range(asked.num_samples)]
        return {**_future(call), "sample_sequence_ids": sequences}

    def _cancel(self) -> dict[str, Any]:
        self._service.cancel(self._owner, self._read(models.RetrieveFuture).request_id)
        return {"type": "cancel_future"}

    # Futures

    def _retrieve(self) -> Any:
        asked = self._read(models.RetrieveFuture)
        id_ = asked.request_id
        found = self._service.futures.wait(self._owner, id_, 0)
        if isinstance(found, QueuedCall):
            if not self._polls.acquire(blocking=False):
                raise QueueFull(
                    "Too many requests wait for results.",
                    hint="Ask for fewer at once, or serve with a larger --max-queue.",
                    retry_after=1.0,
                )
            try:
                found = self._service.futures.wait(self._owner, id_, POLL_SECONDS)
            finally:
                self._polls.release()
        if found is None:
            return {"error": "There is no such request.", "category": "unknown", "_status": 410}
        if isinstance(found, QueuedCall):
            reason = self._service.pause_reason(id_)
            state = "active" if reason is None else "paused_capacity"
            return {
                "type": "try_again",
                "request_id": id_,
                "queue_state": state,
                "queue_state_reason": reason,
            }
        if found.error is not None:
            return {"error": found.error, "category": found.category}
        size = len(found.result or b"")
        if asked.allow_metadata_only and size >= LARGE_RESULT:
            return {"status": "complete_metadata", "response_payload_size": size}
        accepted = request.headers.get("Accept", "")
        message = None
        if PROTOBUF in accepted:
            message = write_protobuf(found.result or b"{}", json_allowed=_JSON in accepted)
        if message is not None:
            return Response(message, mimetype=PROTOBUF)
        return Response(found.result, mimetype=_JSON)

    def _read(self, kind: type[M]) -> M:
        return read(kind, request.get_data())


def _future(call: QueuedCall) -> dict[str, Any]:
    return {"request_id": call.id, "model_id": call.run}


def _presented_key() -> str:
    """Return the API key as the client sent it, where the server looks for it."""
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    return (secret if kind.lower() == "bearer" else request.headers.get("X-Api-Key", "")).strip()


def _page(rows: list[T]) -> tuple[list[T], dict[str, int]]:
    """Return the rows that this request asks for, and the cursor of the answer."""
    offset = max(0, request.args.get("offset", 0, type=int))
    limit = min(max(1, request.args.get("limit", 20, type=int)), 1000)
    cursor = {"offset": offset, "limit": limit, "total_count": len(rows)}
    return rows[offset : offset + limit], cursor


def _respond(value: Response | BaseModel | Mapping[str, Any]) -> Response:
    if isinstance(value, Response):
        return value
    fields = dict(value)
    status = fields.pop("_status", 200)
    return Response(json.dumps(fields), status=status, mimetype=_JSON)
