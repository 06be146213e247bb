"""The plugin in a Python with vLLM, and in a whole server that gets requests for unknown stacks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from resolver_makers import (
    PLUGIN,
    PYTHON,
    card_for_vllm,
    copies_in,
    random_stack,
    request_completion,
    stack,
    write_stack,
)

import personalpeft
from benchmarks import vllm
from personalpeft.adapters.formats.published import PublishedAdapterFolder
from personalpeft.base_models.registry import find_card
from personalpeft.base_models.resolve import resolve_base
from personalpeft.base_models.types import Base

ASK = """
import asyncio, json, os, sys, time
from vllm.lora.resolver import LoRAResolverRegistry
from personalpeft_vllm_resolver.cache import Cache
from personalpeft_vllm_resolver.plugin import register

# Without settings it resolves nothing.
folder = os.environ.pop("PERSONALPEFT_RESOLVER_FOLDER")
register()
assert not LoRAResolverRegistry.get_supported_resolvers()
os.environ["PERSONALPEFT_RESOLVER_FOLDER"] = folder
register()
# As in most of vLLM's processes, which never ask.
assert not os.listdir(os.environ["PERSONALPEFT_RESOLVER_CACHE"])
resolver = LoRAResolverRegistry.get_resolver("personalpeft")
pulled = Cache.get
ticks = 0

def slowly(cache, digest):
    time.sleep(0.3)
    return pulled(cache, digest)

async def tick():
    global ticks
    while True:
        await asyncio.sleep(0.01)
        ticks += 1

async def ask(name):
    found = await resolver.resolve_lora("base", name)
    return found and [found.lora_name, os.path.basename(found.lora_path), sorted(os.listdir(found.lora_path))]

async def ask_all():
    ticking = asyncio.create_task(tick())
    resolved = await asyncio.gather(*map(ask, sys.argv[1:]))
    ticking.cancel()
    return resolved

Cache.get = slowly
print("SAID", json.dumps([asyncio.run(ask_all()), ticks]))
"""


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        not PYTHON.is_file(),
        reason="there is no vLLM here; make vllm-env makes an environment for it",
    ),
]


def test_vllm_resolves_our_stacks_by_name_without_blocking_its_loop_and_no_others(
    tmp_path: Path,
) -> None:
    made = stack()
    with closing(PublishedAdapterFolder(tmp_path / "shared", "program")) as folders:
        folders.put(made)
        environ = {
            **os.environ,
            "PERSONALPEFT_RESOLVER_FOLDER": str(tmp_path / "shared"),
            "PERSONALPEFT_RESOLVER_CACHE": str(tmp_path / "cache"),
            "PYTHONPATH": str(PLUGIN),
            "VLLM_NO_USAGE_STATS": "1",
        }
        names = [made.name, "another", f"personalpeft:{'0' * 64}", made.digest]
        done = subprocess.run(
            [PYTHON, "-c", ASK, *names],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-2000:]
    printed: list[Any] = json.loads(done.stdout.partition("SAID ")[2])
    assert printed[0] == [[made.name, made.digest, sorted(made.files)], None, None, None]
    # The event loop was not blocked.
    assert printed[1] > 10
    # It removed itself at exit.
    assert copies_in(tmp_path) == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def base(place: Path) -> Base:
    return resolve_base(find_card(card_for_vllm(place)), cache=place / "personalpeft-cache")


@pytest.fixture(scope="module")
def complete(base: Base, place: Path) -> Iterator[Callable[[str], str]]:
    """Request completions from a server with two adapter slots, a folder and a bucket."""
    environment = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(place / "shared"),
        "PERSONALPEFT_RESOLVER_BUCKET": f"file://{place / 'bucket'}",
        "PERSONALPEFT_RESOLVER_CACHE": str(place / "cache"),
        "PYTHONPATH": str(PLUGIN),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    few = ("--enforce-eager", "--max-num-seqs", "2", "--max-cpu-loras", "2")
    with vllm.run_server(
        PYTHON,
        base.folder,
        place / "vllm.log",
        slots=2,
        rank=8,
        longest=512,
        dtype="float32",
        options=few,
        environment=environment,
        echo=print,
    ) as server:
        yield partial(request_completion, server.url)


@pytest.mark.timeout(900)
def test_a_server_serves_stacks_it_did_not_know_also_after_their_publisher_ended(
    complete: Callable[[str], str], base: Base, place: Path
) -> None:
    # More stacks than slots, so that it reads the others again.
    stacks = [random_stack(base, seed) for seed in range(4)]
    with closing(PublishedAdapterFolder(place / "shared", "program")) as folders:
        for each in stacks:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                complete(each.name)
            folders.put(each)
        bare, *first = [complete(name) for name in ("base", *(each.name for each in stacks))]
        assert len({bare, *first}) == 1 + len(stacks)
        for each in stacks:
            folders.remove(each.digest)
        assert [complete(each.name) for each in stacks] == first
        assert complete("base") == bare
        assert {each.digest for each in stacks} <= set(copies_in(place))


@pytest.mark.timeout(900)
def test_a_server_serves_published_stacks_of_users_without_a_running_home(
    complete: Callable[[str], str],
    base: Base,
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(place / "personalpeft-cache"))
    with personalpeft.open(tmp_path / "home", base=card_for_vllm(place)) as home:
        for number, name in enumerate(("ada", "bo")):
            home.user(name).import_peft(
                write_stack(random_stack(base, 100 + number), tmp_path / name), layer="style"
            )
        (adas,) = home.publish(["ada"], to=place / "shared").stacks
        bos = home.publish(["bo"], to=tmp_path / "out")
    assert adas.name
    assert bos.stacks[0].name
    with pytest.raises(urllib.error.HTTPError, match="404"):
        complete(bos.stacks[0].name)
    # As `aws s3 sync` would copy it.
    shutil.copytree(bos.folder, place / "bucket")
    answers = [
        complete("base"),
        complete(adas.name),
        complete(bos.stacks[0].name),
    ]
    assert len(set(answers)) == 3
    assert {adas.name[13:], bos.stacks[0].name[13:]} <= set(copies_in(place))
    assert "file://" in (place / "vllm.log").read_text("utf-8", "replace")
