"""What a real vLLM server says where it refuses and forgets: the words that the backend takes its errors from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from backend_makers import adapter, attach, composed, row, written
from vllm_maker import RANK, vllm_backend

from personalpeft.adapters.compose import compose
from personalpeft.adapters.formats.peft import export_peft, export_stack_peft
from personalpeft.adapters.types import Adapter
from personalpeft.backends.base import Backend
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.base_models.types import Base
from personalpeft.errors import BaseMismatch, ServingFailed
from personalpeft.settings import VllmServer

pytestmark = pytest.mark.vllm


@pytest.fixture
def backend(vllm_server: VllmServer, vllm_base: Base, shared_cache: Path) -> Iterator[Backend]:
    backend = vllm_backend(vllm_base, shared_cache, vllm_server, slots=4)
    yield backend
    backend.close()


def listed(server: VllmServer) -> set[str]:
    return {model["id"] for model in httpx2.get(f"{server.url}/v1/models").json()["data"]}


def test_a_rank_that_the_server_has_no_room_for_is_said_to_be_that(backend: Backend) -> None:
    with pytest.raises(ServingFailed, match="rank") as caught:
        attach(backend, "wide", composed(backend, 1, rank=RANK + 1))
    assert "--max-lora-rank" in caught.value.hint
    attach(backend, "narrow", composed(backend, 1))
    assert written(backend, [row(backend, "hello", "narrow")])[0].text


def test_a_folder_that_the_server_does_not_see_is_said_to_be_that(
    vllm_server: VllmServer, vllm_base: Base, shared_cache: Path
) -> None:
    blind = VllmServer(vllm_server.url, folder_there="/nowhere")
    with pytest.raises(ServingFailed):
        VllmBackend(vllm_base, cache=shared_cache, server=blind, entropy=os.urandom)


def loaded_and_asked(server: VllmServer, folder: Path, tokens: Sequence[int]) -> tuple[int, ...]:
    """What vLLM writes with a PEFT folder that it is told of without us."""
    named = {"lora_name": folder.name, "lora_path": str(folder)}
    httpx2.post(f"{server.url}/v1/load_lora_adapter", json=named).raise_for_status()
    body = {
        "model": folder.name,
        "prompt": list(tokens),
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    said = (
        httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    )
    httpx2.post(f"{server.url}/v1/unload_lora_adapter", json=named).raise_for_status()
    return tuple(said["choices"][0]["token_ids"])


def test_an_exported_peft_folder_is_loaded_and_says_what_the_stack_says(
    backend: Backend, vllm_server: VllmServer, tmp_path: Path
) -> None:
    made = adapter(backend, 3)
    attach(backend, "ours", compose([(made, 1.0)]))
    asked = row(backend, "hello", "ours", temperature=0.0, max_tokens=8)
    (ours,) = written(backend, [asked])
    export_peft(made, backend.base.architecture, tmp_path / "theirs", base_name="base")
    assert loaded_and_asked(vllm_server, tmp_path / "theirs", asked.prompt_tokens) == ours.tokens


def test_an_exported_stack_of_layers_of_other_ranks_and_projections_says_what_the_stack_says(
    backend: Backend, vllm_server: VllmServer, tmp_path: Path
) -> None:
    style, skill = adapter(backend, 3, rank=2), adapter(backend, 4, rank=5, layer="skill.sums")
    memory = only(adapter(backend, 5, rank=3, layer="memory"), "mlp.")
    below = [(style, 1.0), (only(skill, "self_attn.q_proj", "self_attn.o_proj"), -0.5)]
    parts = [*below, (memory, 0.75)]
    for key, layers in (("below", below), ("whole", parts)):
        attach(backend, key, compose(layers))
    asked = [
        row(backend, "hello", key, temperature=0.0, max_tokens=8) for key in ("below", "whole")
    ]
    less, whole = written(backend, asked)
    assert less.tokens != whole.tokens
    export_stack_peft(parts, backend.base.architecture, tmp_path / "stack", base_name="base")
    assert loaded_and_asked(vllm_server, tmp_path / "stack", asked[1].prompt_tokens) == whole.tokens


def only(made: Adapter, *names: str) -> Adapter:
    """An adapter of those projections alone."""
    pairs = {name: pair for name, pair in made.pairs.items() if name.startswith(names)}
    return replace(made, pairs=pairs, manifest=replace(made.manifest, targets=tuple(sorted(pairs))))


def test_a_stack_that_the_server_has_lost_is_told_again(
    backend: Backend, vllm_server: VllmServer
) -> None:
    attach(backend, "one", composed(backend, 1))
    asked = [row(backend, "hello", stack, temperature=0.0) for stack in ("one", None)]
    before = [reply.text for reply in written(backend, asked)]
    for name in listed(vllm_server) - {"base"}:
        httpx2.post(
            f"{vllm_server.url}/v1/unload_lora_adapter", json={"lora_name": name}
        ).raise_for_status()
    assert [reply.text for reply in written(backend, asked)] == before
    assert len(listed(vllm_server)) >= 3


def test_another_base_of_the_same_shape_is_refused(
    vllm_server: VllmServer, tiny_base: Base, shared_cache: Path
) -> None:
    known = listed(vllm_server)
    with pytest.raises(BaseMismatch) as caught:
        vllm_backend(tiny_base, shared_cache, vllm_server)
    assert "--model" in caught.value.hint
    assert listed(vllm_server) == known


def test_closing_leaves_nothing_on_the_server(
    vllm_server: VllmServer, vllm_base: Base, shared_cache: Path
) -> None:
    known = listed(vllm_server)
    backend = vllm_backend(vllm_base, shared_cache, vllm_server)
    attach(backend, "one", composed(backend, 1))
    assert len(listed(vllm_server) - known) == 2
    backend.close()
    assert listed(vllm_server) == known
