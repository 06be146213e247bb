"""In a container or a service with a limit, plans divide the memory of that and not of the machine."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from personalpeft import host
from personalpeft.backends.torch.backend import TorchBackend
from personalpeft.base_models.types import Base

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of the files of a machine with 64 GiB, of which 48 are free."""
    memory = psutil.virtual_memory()._replace(total=64 * GIB, available=48 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(host, "Path", lambda path: Path(f"{tmp_path}{path}"))
    return tmp_path


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "ascii")


def make_group(folder: Path, limit: int | str, used: int, pages: int) -> None:
    """Write the files of a group of version 2."""
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon 5\nactive_file {pages}\ninactive_file 0\n")


def make_former_group(folder: Path, limit: int, used: int, pages: int) -> None:
    """Write the files of a group of version 1."""
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{used}\n")
    write(folder / "memory.stat", f"cache 7\ntotal_active_file 0\ntotal_inactive_file {pages}\n")


def test_without_groups_all_of_the_machine_counts(root: Path) -> None:
    assert (host.total_memory(), host.free_memory()) == (64 * GIB, 48 * GIB)


def test_the_limit_of_a_container_counts_but_not_pages_of_files(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/\n")
    make_group(root / "sys/fs/cgroup", 4 * GIB, 3 * GIB, 2 * GIB)
    assert (host.total_memory(), host.free_memory()) == (4 * GIB, 3 * GIB)


def test_the_tightest_of_nested_groups_counts(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/user.slice/my:app.service\n")
    make_group(root / "sys/fs/cgroup/user.slice", 6 * GIB, 2 * GIB, 0)
    make_group(root / "sys/fs/cgroup/user.slice/my:app.service", "max", GIB, 0)
    assert (host.total_memory(), host.free_memory()) == (6 * GIB, 4 * GIB)


@pytest.mark.parametrize("folder", ["", "docker/1f"], ids=["in the container", "on the host"])
def test_the_limit_of_a_group_of_version_1_counts(root: Path, folder: str) -> None:
    write(root / "proc/self/cgroup", "5:cpu:/docker/1f\n4:memory:/docker/1f\n0::/\n")
    make_former_group(root / "sys/fs/cgroup/memory" / folder, 8 * GIB, 9 * GIB, 0)
    assert (host.total_memory(), host.free_memory()) == (8 * GIB, 0)


def test_a_group_of_version_1_without_a_limit_changes_nothing(root: Path) -> None:
    write(root / "proc/self/cgroup", "4:memory:/\n")
    make_former_group(root / "sys/fs/cgroup/memory", 9223372036854771712, 60 * GIB, 0)
    assert (host.total_memory(), host.free_memory()) == (64 * GIB, 48 * GIB)


def test_weights_stay_in_their_file_and_the_cache_is_small_under_a_tight_limit(
    root: Path, tiny_base: Base
) -> None:
    def longest() -> tuple[bool, int]:
        backend = TorchBackend(tiny_base, slots=1, rows=2)
        return backend.maps_weights, backend.max_length

    unlimited = longest()
    write(root / "proc/self/cgroup", "0::/\n")
    make_group(root / "sys/fs/cgroup", 1 << 20, 0, 0)
    limited = longest()
    assert (unlimited[0], limited[0]) == (False, True)
    assert limited[1] < unlimited[1]
