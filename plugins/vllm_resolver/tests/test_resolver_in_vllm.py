"""The thin part that knows vLLM, in a Python that has it: what ``PERSONALPEFT_BENCH_VLLM`` names, or ``make vllm-env`` made.

A whole server that is asked for a stack that it has never heard of is tests/fast/backends' business, which starts one.
"""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from resolver_makers import stack, what_lies_in

from personalpeft.adapters.served_folder import ServedFolders

PLUGIN = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("PERSONALPEFT_BENCH_VLLM") or PLUGIN.parents[1] / ".venv-vllm" / "bin" / "python")

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


@pytest.mark.vllm
@pytest.mark.skipif(not PYTHON.is_file(), reason="there is no vLLM here; make vllm-env makes an environment for it")
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
