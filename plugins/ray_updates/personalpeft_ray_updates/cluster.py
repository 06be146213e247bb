"""All that knows Ray: which one is used, what fits on this machine, and a worker process as something to ask and to lose.

Invariant: workers run on the machine of their caller alone, however many the cluster has. The home lies there, and its
database and leases hold between the processes of one machine only.
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
from personalpeft_ray_updates.worker import Opening, Worker

# Bytes that Ray keeps for what processes hand each other. Here that is names and reports.
_STORE = 100 << 20
# Seconds that whoever is at an address is given to answer.
_PATIENCE = 5.0
# Seconds that workers are given to close the home when all is done.
_MANNERS = 5.0


class Lost(Exception):
    """The process of a worker is gone, or broke."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a worker takes of the machine."""

    cpus: int
    gpus: float


@contextmanager
def connected(address: str = "local", **room: Any) -> Iterator[None]:
    """Within it there is a Ray: the one that this program uses already, else the one at ``address``; "local" is one of its own on
    this machine, with this ``room``. Raises ``NotFound`` where there is none at the address.
    """
    if ray.is_initialized():
        yield
        return
    if address == "local":
        # What is started here tells its makers nothing of it.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        if address not in {"local", "auto"}:
            # Ray itself would try for minutes.
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), _PATIENCE).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **room)
    except (OSError, ValueError, RuntimeError) as error:
        raise NotFound(
            f"There is no Ray at {address!a} that can be used: {str(error).strip().partition('. ')[0]}.",
            hint="Start one on this machine with: ray start --head; or leave the address out.",
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def enough(workers: int, means: Means) -> dict[str, Any]:
    """The room for so many workers in a Ray of their own; of GPUs it has what it finds."""
    return {
        "num_cpus": workers * means.cpus,
        "object_store_memory": _STORE,
        "include_dashboard": False,
    }


def room(means: Means) -> int:
    """How many workers fit on this machine, were it empty. Raises ``InvalidInput`` where none does, and where this program is
    not on a machine of the cluster.
    """
    if ray_client.is_connected():
        raise InvalidInput(
            "This program reaches Ray from outside of the cluster.",
            hint="Run it on the machine of the cluster that the home lies on.",
        )
    here = ray.get_runtime_context().get_node_id()
    has = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == here)
    fits = [
        has.get("CPU", 0) // means.cpus,
        *([has.get("GPU", 0) // means.gpus] if means.gpus else []),
    ]
    if min(fits) < 1:
        raise InvalidInput(
            f"Ray has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs on this machine, and a worker takes {means.cpus}"
            f" and {means.gpus:g}.",
            hint="Ask for less for each worker, or give Ray more when it is started.",
        )
    return int(min(fits))


class Hand:
    """One worker. It answers one question after another; ``users`` are who is with it now, ``pid`` is None until it is there."""

    def __init__(self, opening: Opening, means: Means) -> None:
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        # A second thread hears that it is to stop. What was lost is asked again by us, who know what has become of it, not by Ray.
        remote: Any = ray.remote(Worker)
        self._actor: Any = remote.options(
            num_cpus=means.cpus,
            num_gpus=means.gpus,
            max_concurrency=2,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=here,
        ).remote(opening)
        self._answer: Any = self._actor.ready.remote()
        self.pid: int | None = None
        self.users: tuple[str, ...] = ()

    @property
    def idle(self) -> bool:
        """Whether it waits for users."""
        return self._answer is None

    def learn(self, users: tuple[str, ...], patience: float) -> None:
        """Gives it users; see ``Worker.learn``."""
        self.users = users
        self._answer = self._actor.learn.remote(users, patience)

    def heard(self) -> Sequence[LearnReport] | PersonalPeftError:
        """What came of its users, who are then with it no more; nothing where it has only just come. Raises ``Lost``."""
        answer, self._answer = self._answer, None
        try:
            said = ray.get(answer)
        except ray.exceptions.RayError as error:
            raise Lost(_why(error)) from error
        if self.pid is None:
            self.pid = said
            return ()
        told: Sequence[LearnReport] | PersonalPeftError = said
        return told

    def stop(self) -> None:
        """Asks it to end its learn after the step that runs."""
        self._actor.stop.remote()

    def kill(self) -> None:
        """Ends it at once."""
        ray.kill(self._actor, no_restart=True)


def wait(hands: Sequence[Hand], seconds: float) -> list[Hand]:
    """Those that have answered, as soon as one has, or nobody after so long."""
    asked = {hand._answer: hand for hand in hands if hand._answer is not None}
    answered, _ = ray.wait(list(asked), num_returns=1, timeout=seconds)
    return [asked[answer] for answer in answered]


def dismiss(hands: Sequence[Hand]) -> None:
    """Has workers that have nothing to do close the home, before they are killed."""
    closed = [hand._actor.close.remote() for hand in hands]
    if closed:
        ray.wait(closed, num_returns=len(closed), timeout=_MANNERS)


def _why(error: ray.exceptions.RayError) -> str:
    """In one line. What a worker raised is a bug, which its last line names; of a death Ray says more than helps."""
    if isinstance(error, ray.exceptions.RayActorError) and not error.actor_init_failed:
        return "its process ended"
    if isinstance(error, ray.exceptions.RayActorError | ray.exceptions.RayTaskError):
        return str(error).strip().rpartition("\n")[2].strip()
    return type(error).__name__
