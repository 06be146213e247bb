"""The only code that knows Ray: the connection, the room on this machine, and handles of workers.

Invariant: workers run on the machine of their caller alone. The home is there. Its database and
leases work between processes of one machine only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.client import ray as ray_client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from personalpeft import InvalidInput, LearnReport, NotFound, PersonalPeftError
from personalpeft_ray_updates.worker import OpenOptions, Worker

# Bytes of Ray's object store, which holds names and reports here.
_OBJECT_STORE_BYTES = 100 << 20
_CONNECT_SECONDS = 5.0
# Seconds that workers get to close the home at the end.
_SHUTDOWN_SECONDS = 5.0


class WorkerLost(Exception):
    """The process of a worker ended or failed."""


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What a worker takes of the machine; a share of a GPU is allowed."""

    cpus: int
    gpus: float


@contextmanager
def connect_ray(address: str = "local", **options: Any) -> Iterator[None]:
    """Use Ray inside: the connected one, else the one at ``address``, else a new local one.

    ``options`` are those of ``ray.init``. Raises ``NotFound`` if there is no Ray at the address.
    """
    if ray.is_initialized():
        yield
        return
    if address == "local":
        # A local Ray sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address not in {"local", "auto"}:
            # Ray itself would try for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition(". ")[0]
        raise NotFound(
            f"There is no Ray at {address!a} that can be used: {reason}.",
            hint="Start one on this machine with: ray start --head; or leave the address out.",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def local_ray_options(workers: int, resources: WorkerResources) -> dict[str, Any]:
    """Return options of ``ray.init`` for so many workers. Ray counts the GPUs itself."""
    return {
        "num_cpus": workers * resources.cpus,
        "object_store_memory": _OBJECT_STORE_BYTES,
        "include_dashboard": False,
    }


def max_workers(resources: WorkerResources) -> int:
    """Return how many workers fit on this machine if it is empty.

    Raises ``InvalidInput`` if none does, or if this process is not on a machine of the cluster.
    """
    if ray_client.is_connected():
        raise InvalidInput(
            "This program must run inside of the cluster, and reaches Ray from outside.",
            hint="Run it on the machine of the cluster that has the home.",
        )
    node_id = ray.get_runtime_context().get_node_id()
    node = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == node_id)
    cpus, gpus = node.get("CPU", 0), node.get("GPU", 0)
    fitting = [cpus // resources.cpus, *([gpus // resources.gpus] if resources.gpus else [])]
    if min(fitting) < 1:
        raise InvalidInput(
            f"A worker must fit on this machine: Ray has {cpus:g} CPUs and {gpus:g} GPUs, "
            f"got {resources.cpus} and {resources.gpus:g} for a worker.",
            hint="Use less for each worker, or give Ray more when it is started.",
        )
    return int(min(fitting))


class WorkerHandle:
    """One worker, which answers one request at a time.

    Attributes:
        pid: Its process id, None until the process runs.
        users: The users that it learns for now.
    """

    def __init__(self, options: OpenOptions, resources: WorkerResources) -> None:
        node_id = ray.get_runtime_context().get_node_id()
        actor: Any = ray.remote(Worker)
        # Two threads, so that ``stop`` runs during ``learn``. Ray retries nothing. The run retries,
        # because it knows the published revisions.
        self._actor: Any = actor.options(
            num_cpus=resources.cpus,
            num_gpus=resources.gpus,
            max_concurrency=2,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(options)
        self._pending: Any = self._actor.ready.remote()
        self.pid: int | None = None
        self.users: tuple[str, ...] = ()

    @property
    def is_idle(self) -> bool:
        """Whether it can take users."""
        return self._pending is None

    def start_learn(self, users: tuple[str, ...], patience: float) -> None:
        """Start a learn; see ``Worker.learn``."""
        self.users = users
        self._pending = self._actor.learn.remote(users, patience)

    def get_result(self) -> Sequence[LearnReport] | PersonalPeftError:
        """Return the result of its learn; nothing when it has just started.

        Raises ``WorkerLost``.
        """
        pending, self._pending = self._pending, None
        try:
            result = ray.get(pending)
        except ray.exceptions.RayError as error:
            raise WorkerLost(_describe(error)) from error
        if self.pid is None:
            self.pid = result
            return ()
        reports: Sequence[LearnReport] | PersonalPeftError = result
        return reports

    def stop(self) -> None:
        """Ask it to end its learn after the running step."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """End it at once."""
        ray.kill(self._actor, no_restart=True)


def wait_for_results(workers: Sequence[WorkerHandle], seconds: float) -> list[WorkerHandle]:
    """Return the workers with a result, as soon as one has, or none after some seconds."""
    pending = {worker._pending: worker for worker in workers if worker._pending is not None}
    ready, _ = ray.wait(list(pending), num_returns=1, timeout=seconds)
    return [pending[each] for each in ready]


def shutdown(workers: Sequence[WorkerHandle]) -> None:
    """Let idle workers close the home, before they are killed."""
    closing = [worker._actor.close.remote() for worker in workers]
    if closing:
        ray.wait(closing, num_returns=len(closing), timeout=_SHUTDOWN_SECONDS)


def _describe(error: ray.exceptions.RayError) -> str:
    """Return one line. An exception of a worker is a bug. Its last line names it."""
    if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
        return "its process ended"
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.RayTaskError):
        return str(error).strip().rpartition("\n")[2].strip()
    return type(error).__name__
