"""A stack is pulled from a mounted bucket or S3 whole and verified, or not at all."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from resolver_makers import (
    TOKEN,
    cache,
    change_weights,
    copies_in,
    delete_weights,
    enlarge_config,
    file_of,
    held,
    learned,
    ok,
    raw_server,
    stack,
    write_stack,
)
from s3_maker import copy_to, has_s3, s3_server

import personalpeft
from personalpeft_vllm_resolver.settings import read_settings

pytest.importorskip("pyarrow")
SECRET = "a-secret-of-the-bucket"


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    if not has_s3():
        pytest.skip("there is no S3 server here; make vllm-env installs one")
    with (
        s3_server(tmp_path_factory.mktemp("s3") / "log") as environment,
        pytest.MonkeyPatch.context() as patch,
    ):
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment


# An S3 server is part of the vLLM environment.
@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.vllm)])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Path], str]:
    """Copy a folder into a bucket and return the bucket's address."""
    if request.param == "file":
        return lambda folder: (
            f"file://{shutil.copytree(folder, tmp_path / 'bucket' / 'a-home', symlinks=True)}"
        )
    environment = request.getfixturevalue("s3")
    return lambda folder: copy_to(environment, tmp_path.name, folder)


def test_a_published_and_copied_stack_is_pulled_by_name(
    tmp_path: Path,
    filled: Callable[[Path], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(tmp_path / "personalpeft-cache"))
    with personalpeft.open(tmp_path / "home", backend="fake") as runtime:
        learned(runtime.user("ada"))
        done = runtime.publish(to=tmp_path / "out")
    (published,) = done.stacks
    assert published.name
    digest = published.name.removeprefix("personalpeft:")
    address = filled(done.folder)
    caplog.set_level("INFO")
    with closing(cache(tmp_path, bucket=f"{address}/")) as pulled:
        path = pulled.get(digest)
        assert path is not None
        assert held(path) == {
            file.name: file.read_bytes() for file in (done.folder / digest).iterdir()
        }
        assert published.name in caplog.text
        assert address in caplog.text
        assert pulled.get("0" * 64) is None
        assert f"personalpeft:{'0' * 64}" in caplog.text
    assert SECRET not in caplog.text


def a_folder_in_its_place(folder: Path) -> None:
    delete_weights(folder)
    (folder / "adapter_model.safetensors").mkdir()
    (folder / "adapter_model.safetensors" / "more").write_bytes(b"more")


@pytest.mark.parametrize(
    "spoil", [change_weights, delete_weights, enlarge_config, a_folder_in_its_place]
)
def test_an_invalid_stack_in_a_bucket_is_not_resolved_and_leaves_nothing(
    tmp_path: Path,
    filled: Callable[[Path], str],
    caplog: pytest.LogCaptureFixture,
    spoil: Callable[[Path], None],
) -> None:
    made = stack(size=3_000_000)
    (tmp_path / "part").mkdir()
    spoil(write_stack(made, tmp_path / "part" / made.digest))
    with closing(cache(tmp_path, bucket=filled(tmp_path / "part"))) as pulled:
        assert pulled.get(made.digest) is None
        assert "personalpeft:" in caplog.text
        assert copies_in(tmp_path) == []


def test_a_pipe_in_a_mounted_bucket_blocks_no_request(tmp_path: Path) -> None:
    made = stack()
    folder = write_stack(made, tmp_path / made.digest)
    delete_weights(folder)
    os.mkfifo(folder / "adapter_model.safetensors")
    with closing(cache(tmp_path, bucket=f"file://{tmp_path}")) as pulled:
        assert pulled.get(made.digest) is None


def test_sources_are_tried_in_the_order_folder_bucket_server(
    tmp_path: Path,
) -> None:
    in_all, in_bucket, at_server = stack(1), stack(2), stack(3)
    for place, having in (("shared/part", [in_all]), ("bucket", [in_all, in_bucket])):
        (tmp_path / place).mkdir(parents=True)
        for each in having:
            write_stack(each, tmp_path / place / each.digest)
    # A stack of the folder must not be requested from the bucket.
    change_weights(tmp_path / "bucket" / in_all.digest)
    with (
        raw_server(lambda line, request: line.sendall(ok(file_of(at_server, request)))) as (
            url,
            came,
        ),
        closing(
            cache(
                tmp_path,
                folder=tmp_path / "shared",
                bucket=f"file://{tmp_path}/bucket",
                url=url,
                token=TOKEN,
            )
        ) as pulled,
    ):
        assert pulled.get(in_all.digest)
        assert pulled.get(in_bucket.digest)
        assert came == []
        assert pulled.get(at_server.digest)


@pytest.mark.vllm
def test_a_missing_or_foreign_bucket_is_logged_and_resolves_nothing(
    tmp_path: Path, s3: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for address in ("s3://no-such-bucket/a", "zz://bucket/a"):
        with closing(cache(tmp_path, bucket=address)) as pulled:
            assert pulled.get("0" * 64) is None
    assert "ArrowInvalid" in caplog.text


def refusing(line: socket.socket, request: bytes) -> None:
    line.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")


def silent(line: socket.socket, request: bytes) -> None:
    time.sleep(60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("answer", [refusing, silent])
def test_storage_that_refuses_or_hangs_resolves_nothing_within_a_timeout(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[..., None],
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with raw_server(answer) as (url, came):
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        began = time.monotonic()
        with closing(cache(tmp_path, bucket="s3://stacks/a?region=us-east-1", timeout=5)) as pulled:
            assert pulled.get("0" * 64) is None
        assert time.monotonic() - began < 20
        assert came
    assert "s3://stacks/a: " in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "address",
    ["stacks", "stacks/a", "s3://", f"s3://me:{SECRET}@stacks/a", "file:a", "s3://[stacks/a"],
)
def test_an_invalid_address_is_refused_without_being_repeated(address: str) -> None:
    with pytest.raises(ValueError, match="PERSONALPEFT_RESOLVER_BUCKET") as refused:
        read_settings({"PERSONALPEFT_RESOLVER_BUCKET": address})
    assert SECRET not in str(refused.value)


def test_settings_never_show_a_buckets_address_which_may_hold_secrets() -> None:
    wanted = read_settings(
        {
            "PERSONALPEFT_RESOLVER_BUCKET": f"abfs://c@a.dfs.core.windows.net/p?client_secret={SECRET}"
        }
    )
    assert wanted is not None
    assert SECRET not in repr(wanted)


def test_pyarrow_is_imported_only_for_a_bucket_and_its_absence_is_reported(
    tmp_path: Path,
) -> None:
    code = (
        "import os; from personalpeft_vllm_resolver.cache import open_cache; "
        "from personalpeft_vllm_resolver.settings import read_settings; open_cache(read_settings(os.environ))"
    )
    environ = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(tmp_path),
        "PERSONALPEFT_RESOLVER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }

    def started(**more: str) -> subprocess.CompletedProcess[str]:
        # Without any site packages.
        program = [sys.executable, "-S", "-c", code]
        return subprocess.run(
            program, env={**environ, **more}, capture_output=True, text=True, check=False
        )

    assert started().returncode == 0
    refused = started(PERSONALPEFT_RESOLVER_BUCKET="s3://stacks/a")
    assert refused.returncode == 1
    assert "pyarrow" in refused.stderr.splitlines()[-1]
