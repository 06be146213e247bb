"""A Ray cluster of three nodes that share no folder; a file sets how long their steps take."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_makers import Nodes, World

# Read when Ray is imported. By default Ray's workers yield to all other processes and are killed
# when memory is short. That would disturb the tests' timing.
os.environ.update(
    RAY_worker_niceness="0",
    RAY_memory_monitor_refresh_ms="0",
    RAY_USAGE_STATS_ENABLED="0",
    HF_HUB_OFFLINE="1",
)


@pytest.fixture(scope="session")
def pace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the seconds of a step in a worker; without it steps take no time."""
    return tmp_path_factory.mktemp("pace") / "seconds"


@pytest.fixture(scope="session")
def cluster(
    own_folders: None, pace: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Nodes]:
    """This process on a node without CPUs, beside the nodes that learn."""
    import ray
    from ray.cluster_utils import Cluster

    small = {"include_dashboard": False, "object_store_memory": 100 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    ray.init(
        address=made.address,
        log_to_driver=False,
        logging_level=40,
        runtime_env={"worker_process_setup_hook": _paced_by(str(pace))},
    )
    yield Nodes(made, tmp_path_factory.mktemp("nodes"))
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def nodes(cluster: Nodes) -> Nodes:
    """Three living nodes of one CPU, each with folders of its own."""
    cluster.restore(3)
    return cluster


@pytest.fixture
def world(tmp_path: Path, pace: Path) -> Iterator[World]:
    yield World(tmp_path, pace)
    pace.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory, pace: Path) -> dict[str, tuple[str, ...]]:
    """The revisions that users reach by learning alone."""
    return World(tmp_path_factory.mktemp("alone"), pace).learn_alone()


def _paced_by(file: str) -> Callable[[], None]:
    def slow_down() -> None:
        import time
        from contextlib import suppress
        from pathlib import Path

        from personalpeft.backends import fake

        step = fake.FakeSession.step

        def paced(self, *asked):  # type: ignore[no-untyped-def]
            with suppress(FileNotFoundError):
                time.sleep(float(Path(file).read_text()))
            return step(self, *asked)

        fake.FakeSession.step = paced

    return slow_down
