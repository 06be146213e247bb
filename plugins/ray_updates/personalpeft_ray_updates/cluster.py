"""The only code that knows Ray: the connection, the tasks, and where they run.

Ray brings bundles to a node and results back through its object store, and retries a task whose
process or node died. Nothing of this package's own is pickled: bytes, texts and numbers only.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.client import ray as ray_client
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import personalpeft
from personalpeft import InvalidInput, NotFound, PersonalPeftError, ServingFailed
from personalpeft.errors import ERROR_CODES
from personalpeft_ray_updates import node

# Of a Ray that is started here: bundles and results of the tasks that run.
_OBJECT_STORE_BYTES = 512 << 20
_CONNECT_SECONDS = 5.0
_BOARD_SECONDS = 5.0
_NODE_LABEL = "ray.io/node-id"


class TaskLost(Exception):
    """The processes of a task ended or failed, also when Ray tried again."""


class TaskStopped(Exception):
    """A task was ended because the caller stopped."""


class NodeRefusal(Exception):
    """A node cannot learn these bundles, for a reason that concerns no other node."""

    def __init__(self, node_id: str, error: PersonalPeftError) -> None:
        super().__init__(error.message)
        self.node_id = node_id
        self.error = error


@dataclass(frozen=True, slots=True)
class TaskResources:
    """What a task takes of a node; a share of a GPU is allowed. Ray retries it ``retries`` times."""

    cpus: int
    gpus: float
    retries: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A running task: its node and process, its stage, the share that is done, and its number."""

    node: str
    pid: int
    stage: str
    done: float
    number: int


@contextmanager
def connect_ray(address: str = "local", num_cpus: int | None = None) -> Iterator[None]:
    """Use Ray inside: the connected one, else the one at ``address``, else a new local one.

    A new one has ``num_cpus``, and counts the GPUs itself. Raises ``NotFound`` if there is no Ray at
    the address.
    """
    if ray.is_initialized():
        yield
        return
    options: dict[str, Any] = {}
    if address == "local":
        # A local Ray sends no usage statistics.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options = {
            "num_cpus": num_cpus,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "include_dashboard": False,
        }
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


class Cluster:
    """The nodes of the connected Ray that have room for a task.

    Raises ``InvalidInput`` if no node has, or if this process is no part of the cluster.
    """

    def __init__(self, base: str, backend: str, resources: TaskResources) -> None:
        if ray_client.is_connected():
            raise InvalidInput(
                "This program must run inside of the cluster, and reaches Ray from outside.",
                hint="Run it on a machine of the cluster; `ray start --address` makes one of it.",
            )
        self._base, self._backend, self._resources = base, backend, resources
        self.refusals: dict[str, PersonalPeftError] = {}
        if not self._fitting():
            sizes = [each["Resources"] for each in ray.nodes() if each["Alive"]]
            cpus = max((each.get("CPU", 0) for each in sizes), default=0)
            gpus = max((each.get("GPU", 0) for each in sizes), default=0)
            raise InvalidInput(
                f"A worker must fit on a node: the largest has {cpus:g} CPUs and {gpus:g} GPUs, "
                f"got {resources.cpus} and {resources.gpus:g} for a worker.",
                hint="Use less for each worker, or give Ray more when it is started.",
            )
        board: Any = ray.remote(_Board)
        here = ray.get_runtime_context().get_node_id()
        # On this node, so that it is there as long as this program.
        self._board: Any = board.options(
            num_cpus=0,
            max_restarts=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        ).remote()

    def submit(self, name: str, bundles: Sequence[bytes]) -> Task:
        """Start a task, whose users learn in one pass, on any node that has not refused.

        The name on the board is used once.
        """
        refused = ",".join(sorted(self.refusals))
        # A process is used again, since it has the base in memory; by default not with a GPU.
        learn: Any = ray.remote(
            num_cpus=self._resources.cpus,
            num_gpus=self._resources.gpus,
            max_retries=self._resources.retries,
            max_calls=0,
            label_selector={_NODE_LABEL: f"!in({refused})"} if refused else {},
        )(learn_on_node)
        # In the object store of this node, so that the death of another loses no bundle.
        held = ray.put(list(bundles))
        return Task(name, learn.remote(held, self._base, self._backend, self._board, name))

    def refuse(self, refusal: NodeRefusal) -> None:
        """Use a node no more. Raises its error if no other node is left."""
        self.refusals[refusal.node_id] = refusal.error
        if not self._fitting() - self.refusals.keys():
            number = len(self.refusals)
            raise type(refusal.error)(
                f"No node of the cluster can learn, {number} refused: {refusal.error.message}",
                hint=f"{refusal.error.hint} A node names its base in {node.BASE_VARIABLE}.",
            )

    def attempts(self) -> Mapping[str, Attempt]:
        """Return the tasks that have begun, by name."""
        try:
            rows = ray.get(self._board.read.remote(), timeout=_BOARD_SECONDS)
        except ray.exceptions.RayError:
            return {}
        return {name: Attempt(*row) for name, row in rows.items()}

    def stop(self) -> None:
        """Ask all tasks to end after their step."""
        with suppress(ray.exceptions.RayError):
            ray.get(self._board.stop.remote(), timeout=_BOARD_SECONDS)

    def close(self) -> None:
        """End what this started."""
        ray.kill(self._board, no_restart=True)

    def _fitting(self) -> set[str]:
        """Return the ids of living nodes that have the resources of a task when they are empty."""
        wanted = {"CPU": self._resources.cpus, "GPU": self._resources.gpus}
        return {
            each["NodeID"]
            for each in ray.nodes()
            if each["Alive"]
            and all(each["Resources"].get(name, 0) >= size for name, size in wanted.items())
        }


class Task:
    """A running or finished task."""

    def __init__(self, name: str, reference: Any) -> None:
        self.name = name
        self._reference = reference

    def get_results(self) -> list[bytes]:
        """Return the results of a finished task.

        Raises:
            TaskLost, TaskStopped, NodeRefusal: There are none.
            PersonalPeftError: A bundle was refused.
        """
        try:
            answer = ray.get(self._reference)
        except ray.exceptions.TaskCancelledError as error:
            raise TaskStopped from error
        except ray.exceptions.RayError as error:
            raise TaskLost(_describe(error)) from error
        if "error" in answer:
            raise _make_error(answer["error"], answer["node"])
        return [bytes(each) for each in answer["results"]]

    def cancel(self) -> None:
        """End it at once, with its process."""
        ray.cancel(self._reference, force=True)


def wait_for_tasks(tasks: Sequence[Task], seconds: float) -> list[Task]:
    """Return the finished tasks, as soon as there is one, or none after some seconds."""
    pending = {task._reference: task for task in tasks}
    ready, _ = ray.wait(list(pending), num_returns=1, timeout=seconds)
    return [pending[each] for each in ready]


class _Board:
    """The Ray actor that says what runs where, and that tasks ask whether to stop."""

    def __init__(self) -> None:
        self._rows: dict[str, tuple[str, int, str, float, int]] = {}
        self._stopped = False

    def start(self, name: str, node_id: str, pid: int) -> None:
        number = self._rows[name][-1] + 1 if name in self._rows else 1
        self._rows[name] = node_id, pid, "Opening", 0.0, number

    def update(self, name: str, stage: str, done: float) -> bool:
        if name in self._rows:
            node_id, pid, _, _, number = self._rows[name]
            self._rows[name] = node_id, pid, stage, done, number
        return self._stopped

    def read(self) -> dict[str, tuple[str, int, str, float, int]]:
        return self._rows

    def stop(self) -> None:
        self._stopped = True


def learn_on_node(
    bundles: list[bytes], base: str, backend: str, board: Any, name: str
) -> dict[str, Any]:
    """The Ray task."""
    node_id = ray.get_runtime_context().get_node_id()
    board.start.remote(name, node_id, os.getpid())

    def heartbeat(stage: str, done: float) -> bool:
        try:
            return bool(ray.get(board.update.remote(name, stage, done), timeout=_BOARD_SECONDS))
        except ray.exceptions.RayError:
            # The board is lost or late. The learn goes on without it.
            return False

    return {**node.learn(bundles, base, backend, heartbeat), "node": node_id}


def _make_error(fields: Mapping[str, Any], node_id: str) -> NodeRefusal | PersonalPeftError:
    kind = getattr(personalpeft, str(fields["kind"]), None)
    if kind not in ERROR_CODES:
        kind = ServingFailed
    error: PersonalPeftError = kind(str(fields["message"]), hint=str(fields["hint"]))
    return error if fields["of_bundle"] else NodeRefusal(node_id, error)


def _describe(error: ray.exceptions.RayError) -> str:
    """Return one line. An exception of a task is a bug. Its last line names it."""
    if isinstance(error, ray.exceptions.RayTaskError):
        return str(error).strip().rpartition("\n")[2].strip()
    if isinstance(error, ray.exceptions.WorkerCrashedError | ray.exceptions.NodeDiedError):
        return "its process or node died"
    return type(error).__name__
