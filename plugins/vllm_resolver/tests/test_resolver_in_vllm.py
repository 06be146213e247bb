"""The thin part that knows vLLM, in a Python that has it and in a whole server, which is asked for stacks that it has never heard of."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from resolver_makers import PLUGIN, PYTHON, card_for_vllm, random_stack, stack, what_lies_in

from personalpeft.adapters.served_folder import ServedFolders
from personalpeft.bases.prepare import prepare
from personalpeft.bases.shelf import find_card
from personalpeft_app.bench import vllm

ASK = """
import asyncio, json, os, sys, time
from vllm.lora.resolver import LoRAResolverRegistry
from personalpeft_vllm_resolver.cache import Cache
from personalpeft_vllm_resolver.plugin import register

# One that is told nothing looks for nothing.
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
    said = await asyncio.gather(*map(ask, sys.argv[1:]))
    ticking.cancel()
    return said

Cache.get = slowly
print("SAID", json.dumps([asyncio.run(ask_all()), ticks]))
"""


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.is_file(), reason="there is no vLLM here; make vllm-env makes an environment for it"),
]


def test_vllm_gets_our_stacks_by_name_while_its_loop_goes_on_and_no_others(tmp_path: Path) -> None:
    made = stack()
    with closing(ServedFolders(tmp_path / "shared", "program")) as folders:
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
            [PYTHON, "-c", ASK, *names], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    said: list[Any] = json.loads(done.stdout.partition("SAID ")[2])
    assert said[0] == [[made.name, made.digest, sorted(made.files)], None, None, None]
    # It was not held up.
    assert said[1] > 10
    # It went away by itself at the end.
    assert what_lies_in(tmp_path) == []


@pytest.mark.timeout(900)
def test_a_server_answers_with_stacks_that_it_had_never_heard_of_also_when_their_program_is_gone(
    tmp_path: Path,
) -> None:
    base = prepare(find_card(card_for_vllm(tmp_path)), cache=tmp_path / "personalpeft-cache")
    stacks = [random_stack(base, seed) for seed in range(4)]
    environment = {
        "PERSONALPEFT_RESOLVER_FOLDER": str(tmp_path / "shared"),
        "PERSONALPEFT_RESOLVER_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(PLUGIN),
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    # It holds two stacks of the four, and so has to read the others again.
    few = ("--enforce-eager", "--max-num-seqs", "2", "--max-cpu-loras", "2")
    with (
        closing(ServedFolders(tmp_path / "shared", "program")) as folders,
        vllm.served(
            PYTHON,
            base.folder,
            tmp_path / "vllm.log",
            slots=2,
            rank=8,
            longest=512,
            dtype="float32",
            options=few,
            environment=environment,
            say=print,
        ) as server,
    ):

        def said(model: str) -> str:
            body = {"model": model, "prompt": "How do I boil an egg?", "max_tokens": 8, "temperature": 0}
            asked = urllib.request.Request(
                f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(asked, timeout=60) as answer:
                return str(json.loads(answer.read())["choices"][0]["text"])

        for each in stacks:
            with pytest.raises(urllib.error.HTTPError, match="404"):
                said(each.name)
            folders.put(each)
        bare, *first = [said(name) for name in ("base", *(each.name for each in stacks))]
        assert len({bare, *first}) == 1 + len(stacks)
        for each in stacks:
            folders.take(each.digest)
        assert [said(each.name) for each in stacks] == first
        assert said("base") == bare
        assert what_lies_in(tmp_path) == sorted(each.digest for each in stacks)
