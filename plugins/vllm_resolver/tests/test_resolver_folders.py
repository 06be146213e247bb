"""A stack is pulled by name from a shared folder whole and verified, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolver_makers import (
    cache,
    change_weights,
    copies_in,
    delete_weights,
    enlarge_config,
    held,
    learned,
    stack,
)

import personalpeft
from personalpeft.adapters.formats.published import PublishedAdapterFolder
from personalpeft_vllm_resolver.cache import parse_digest
from personalpeft_vllm_resolver.sources import SharedFolder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    return tmp_path / "shared"


@pytest.fixture
def program(shared: Path) -> Iterator[PublishedAdapterFolder]:
    with closing(PublishedAdapterFolder(shared, "a-program")) as folders:
        yield folders


def test_a_stack_is_pulled_once_and_outlives_its_publisher(
    tmp_path: Path, shared: Path, program: PublishedAdapterFolder
) -> None:
    made = stack()
    program.put(made)
    with closing(cache(tmp_path, folder=shared)) as pulled:
        path = pulled.get(made.digest)
        assert path is not None
        assert held(path) == made.files
        assert not path.is_relative_to(shared)
        program.remove(made.digest)
        assert pulled.get(made.digest) == path
        assert held(path) == made.files
    assert copies_in(tmp_path) == []


@given(
    st.text()
    | st.from_regex(r"personalpeft:[0-9a-fA-F]{60,68}(:[a-z0-9]+)?|[0-9a-f]{64}", fullmatch=True)
)
def test_only_valid_stack_names_are_resolved(name: str) -> None:
    prefix, _, digest = name.partition(":")
    is_ours = (
        prefix == "personalpeft" and len(digest) == 64 and set(digest) <= set("0123456789abcdef")
    )
    assert parse_digest(name) == (digest if is_ours else None)


def linked(folder: Path) -> None:
    target = (folder / "adapter_config.json").rename(folder.parent / "elsewhere")
    (folder / "adapter_config.json").symlink_to(target)


def piped(folder: Path) -> None:
    delete_weights(folder)
    os.mkfifo(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("spoil", [change_weights, delete_weights, enlarge_config, linked, piped])
def test_an_invalid_stack_is_not_resolved_and_leaves_nothing(
    tmp_path: Path,
    shared: Path,
    program: PublishedAdapterFolder,
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    made = stack()
    spoil(program.put(made))
    with closing(cache(tmp_path, folder=shared)) as pulled:
        assert pulled.get(made.digest) is None
        assert copies_in(tmp_path) == []
        assert f"personalpeft:{made.digest}" in caplog.text
        # Meanwhile another program has published a valid one.
        with closing(PublishedAdapterFolder(shared, "b-program")) as other:
            other.put(made)
            assert pulled.get(made.digest) is not None


def test_a_missing_stack_is_not_resolved(tmp_path: Path, shared: Path) -> None:
    with closing(cache(tmp_path, folder=shared)) as pulled:
        assert pulled.get("0" * 64) is None
        shared.mkdir()
        assert pulled.get("0" * 64) is None


def test_concurrent_requests_pull_a_stack_once(
    tmp_path: Path, shared: Path, program: PublishedAdapterFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, others = stack(), [stack(seed) for seed in range(1, 4)]
    for each in (made, *others):
        program.put(each)
    begun, may_go = [], threading.Event()
    copies = SharedFolder.copies

    def slowly(source: SharedFolder, digest: str) -> object:
        begun.append(digest)
        assert may_go.wait(20)
        return copies(source, digest)

    monkeypatch.setattr(SharedFolder, "copies", slowly)
    with closing(cache(tmp_path, folder=shared)) as pulled:
        paths: list[Path | None] = []
        asking = [
            threading.Thread(target=lambda: paths.append(pulled.get(made.digest))) for _ in range(8)
        ]
        asking += [threading.Thread(target=pulled.get, args=(other.digest,)) for other in others]
        for each in asking:
            each.start()
        may_go.set()
        for each in asking:
            each.join(20)
        assert sorted(begun) == sorted([made.digest, *(other.digest for other in others)])
        assert len(paths) == 8
        assert len(set(paths)) == 1
        assert held(paths[0]) == made.files if paths[0] else False
    # A failed caller retries by itself.
    with closing(cache(tmp_path, folder=shared)) as pulled:
        program.remove(made.digest)
        assert pulled.get(made.digest) is None
        program.put(made)
        assert pulled.get(made.digest) is not None


def test_a_full_cache_accepts_nothing_new_and_keeps_its_copies(
    tmp_path: Path, shared: Path, program: PublishedAdapterFolder, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, large = stack(1, 100_000), stack(2, 100_000), stack(3, 9_000_000)
    for each in (first, second, large):
        program.put(each)
    with closing(cache(tmp_path, folder=shared, cache_bytes=250_000)) as pulled:
        given = pulled.get(first.digest)
        assert given is not None
        assert pulled.get(large.digest) is None
        assert "PERSONALPEFT_RESOLVER_CACHE_BYTES" in caplog.text
        # An aborted copy occupies no space.
        assert pulled.get(second.digest) is not None
        assert pulled.get(stack(4, 100_000).digest) is None
        assert held(given) == first.files
        assert copies_in(tmp_path) == sorted([first.digest, second.digest])


def test_copies_of_a_killed_process_are_removed_and_a_living_ones_stay(
    tmp_path: Path, shared: Path, program: PublishedAdapterFolder
) -> None:
    first, second, third = stack(1), stack(2), stack(3)
    for each in (first, second, third):
        program.put(each)
    code = (
        "import os, sys; from personalpeft_vllm_resolver.cache import open_cache; "
        "from personalpeft_vllm_resolver.settings import read_settings; "
        "assert open_cache(read_settings(os.environ)).get(sys.argv[1]); os._exit(9)"
    )
    environ = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(shared),
        "PERSONALPEFT_RESOLVER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    # Without site packages: it needs neither personalpeft nor vLLM.
    killed = subprocess.run(
        [sys.executable, "-S", "-c", code, first.digest], env=environ, check=False
    )
    assert killed.returncode == 9
    assert copies_in(tmp_path) == [first.digest]
    with (
        closing(cache(tmp_path, folder=shared)) as living,
        closing(cache(tmp_path, folder=shared)) as other,
    ):
        assert living.get(second.digest)
        assert other.get(third.digest)
        assert copies_in(tmp_path) == sorted([second.digest, third.digest])


def test_a_forked_child_removes_nothing_of_its_parent(
    tmp_path: Path, shared: Path, program: PublishedAdapterFolder
) -> None:
    made = stack()
    program.put(made)
    with closing(cache(tmp_path, folder=shared)) as pulled:
        path = pulled.get(made.digest)
        child = multiprocessing.get_context("fork").Process(target=pulled.close)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert path is not None
        assert held(path) == made.files


@pytest.mark.exhaustive
def test_during_publications_a_worker_gets_whole_stacks_or_none(
    tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(tmp_path / "personalpeft-cache"))
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        ada = runtime.user("ada")
        learned(ada)
        wanted: dict[str, dict[str, bytes]] = {}
        for weight in (0.5, 1.0):
            ada.set_weight("style", weight)
            done = runtime.publish(to=shared)
            wanted |= {path.name: held(path) for path in done.folder.iterdir()}
        over, given = threading.Event(), Counter[str]()

        def work(number: int) -> None:
            while not over.is_set():
                with closing(cache(tmp_path / f"{number}", folder=shared)) as pulled:
                    for digest, files in wanted.items():
                        path = pulled.get(digest)
                        assert path is None or held(path) == files
                        given[digest] += path is not None

        workers = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for worker in workers:
            worker.start()
        for turn in range(60):
            ada.set_weight("style", 0.5 if turn % 2 else 1.0)
            runtime.publish(to=shared)
        over.set()
        for worker in workers:
            worker.join(20)
    assert len(given) == 2
    assert min(given.values()) > 2
    # A stack withdrawn during the copy is missing, and no copy is ever wrong.
    assert "digest" not in caplog.text


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, shared: Path) -> None:
    place = tmp_path / "cache"
    place.mkdir()
    place.chmod(0o777)
    with pytest.raises(PermissionError, match="PERSONALPEFT_RESOLVER_CACHE"):
        cache(tmp_path, folder=shared)
    place.rename(tmp_path / "real")
    (tmp_path / "real").chmod(0o700)
    place.symlink_to(tmp_path / "real")
    with pytest.raises(PermissionError):
        cache(tmp_path, folder=shared)


def test_a_name_is_the_one_that_the_backend_requests() -> None:
    made = stack()
    assert parse_digest(made.name) == made.digest
