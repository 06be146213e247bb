"""A real vLLM server's error messages are those that the backend's error mapping expects."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from backend_makers import attach, generate, random_adapter, random_stack, row
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


def test_an_unsupported_rank_is_reported(backend: Backend) -> None:
    with pytest.raises(ServingFailed, match="rank") as caught:
        attach(backend, "wide", random_stack(backend, 1, rank=RANK + 1))
    assert "--max-lora-rank" in caught.value.hint
    attach(backend, "narrow", random_stack(backend, 1))
    assert generate(backend, [row(backend, "hello", "narrow")])[0].text


def test_a_folder_that_the_server_cannot_see_is_reported(
    vllm_server: VllmServer, vllm_base: Base, shared_cache: Path
) -> None:
    blind = VllmServer(vllm_server.url, folder_there="/nowhere")
    with pytest.raises(ServingFailed):
        VllmBackend(vllm_base, cache=shared_cache, server=blind, entropy=os.urandom)


def load_and_generate(server: VllmServer, folder: Path, tokens: Sequence[int]) -> tuple[int, ...]:
    """Load a PEFT folder into vLLM directly and return the generated tokens."""
    named = {"lora_name": folder.name, "lora_path": str(folder)}
    httpx2.post(f"{server.url}/v1/load_lora_adapter", json=named).raise_for_status()
    body = {
        "model": folder.name,
        "prompt": list(tokens),
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    completion = (
        httpx2.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    )
    httpx2.post(f"{server.url}/v1/unload_lora_adapter", json=named).raise_for_status()
    return tuple(completion["choices"][0]["token_ids"])


def test_an_exported_peft_folder_generates_what_the_stack_generates(
    backend: Backend, vllm_server: VllmServer, tmp_path: Path
) -> None:
    made = random_adapter(backend, 3)
    attach(backend, "ours", compose([(made, 1.0)]))
    cases = row(backend, "hello", "ours", temperature=0.0, max_tokens=8)
    (ours,) = generate(backend, [cases])
    export_peft(made, backend.base.architecture, tmp_path / "theirs", base_name="base")
    assert load_and_generate(vllm_server, tmp_path / "theirs", cases.prompt_tokens) == ours.tokens


def test_an_exported_stack_of_mixed_ranks_and_projections_generates_what_the_stack_generates(
    backend: Backend, vllm_server: VllmServer, tmp_path: Path
) -> None:
    style, skill = (
        random_adapter(backend, 3, rank=2),
        random_adapter(backend, 4, rank=5, layer="skill.sums"),
    )
    memory = keep_projections(random_adapter(backend, 5, rank=3, layer="memory"), "mlp.")
    below = [(style, 1.0), (keep_projections(skill, "self_attn.q_proj", "self_attn.o_proj"), -0.5)]
    parts = [*below, (memory, 0.75)]
    for key, layers in (("below", below), ("whole", parts)):
        attach(backend, key, compose(layers))
    cases = [
        row(backend, "hello", key, temperature=0.0, max_tokens=8) for key in ("below", "whole")
    ]
    less, whole = generate(backend, cases)
    assert less.tokens != whole.tokens
    export_stack_peft(parts, backend.base.architecture, tmp_path / "stack", base_name="base")
    assert (
        load_and_generate(vllm_server, tmp_path / "stack", cases[1].prompt_tokens) == whole.tokens
    )


def keep_projections(made: Adapter, *names: str) -> Adapter:
    """Return the adapter with only these projections."""
    pairs = {name: pair for name, pair in made.weights.items() if name.startswith(names)}
    return replace(
        made, weights=pairs, manifest=replace(made.manifest, targets=tuple(sorted(pairs)))
    )


def test_a_stack_that_the_server_lost_is_registered_again(
    backend: Backend, vllm_server: VllmServer
) -> None:
    attach(backend, "one", random_stack(backend, 1))
    cases = [row(backend, "hello", stack, temperature=0.0) for stack in ("one", None)]
    before = [reply.text for reply in generate(backend, cases)]
    for name in listed(vllm_server) - {"base"}:
        httpx2.post(
            f"{vllm_server.url}/v1/unload_lora_adapter", json={"lora_name": name}
        ).raise_for_status()
    assert [reply.text for reply in generate(backend, cases)] == before
    assert len(listed(vllm_server)) >= 3


def test_another_base_of_the_same_shape_is_refused(
    vllm_server: VllmServer, tiny_base: Base, shared_cache: Path
) -> None:
    known = listed(vllm_server)
    with pytest.raises(BaseMismatch) as caught:
        vllm_backend(tiny_base, shared_cache, vllm_server)
    assert "base's folder" in caught.value.hint
    assert listed(vllm_server) == known


def test_closing_leaves_nothing_on_the_server(
    vllm_server: VllmServer, vllm_base: Base, shared_cache: Path
) -> None:
    known = listed(vllm_server)
    backend = vllm_backend(vllm_base, shared_cache, vllm_server)
    attach(backend, "one", random_stack(backend, 1))
    assert len(listed(vllm_server) - known) == 2
    backend.close()
    assert listed(vllm_server) == known
