"""What a real vLLM server says where it refuses and forgets: the words that the backend takes its errors from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from backend_makers import adapter, attach, composed, row, written
from vllm_maker import RANK, vllm_backend

from personalpeft.adapters.compose import compose
from personalpeft.adapters.peft_folder import export_peft
from personalpeft.backends.base import Backend
from personalpeft.backends.vllm.backend import VllmBackend
from personalpeft.bases.base import Base
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
    with pytest.raises(ServingFailed, match="does not see"):
        VllmBackend(vllm_base, cache=shared_cache, server=blind, entropy=os.urandom)


def test_an_exported_peft_folder_is_loaded_and_says_what_the_stack_says(
    backend: Backend, vllm_server: VllmServer, tmp_path: Path
) -> None:
    """Without us: vLLM loads what ``export-peft`` writes."""
    made = adapter(backend, 3)
    attach(backend, "ours", compose([(made, 1.0)]))
    asked = row(backend, "hello", "ours", temperature=0.0, max_tokens=8)
    (ours,) = written(backend, [asked])
    export_peft(made, backend.base.architecture, tmp_path / "theirs", base_name="base")
    folder = {"lora_name": "theirs", "lora_path": str(tmp_path / "theirs")}
    httpx2.post(f"{vllm_server.url}/v1/load_lora_adapter", json=folder).raise_for_status()
    body = {
        "model": "theirs",
        "prompt": list(asked.tokens),
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    said = httpx2.post(f"{vllm_server.url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    httpx2.post(f"{vllm_server.url}/v1/unload_lora_adapter", json=folder).raise_for_status()
    assert tuple(said["choices"][0]["token_ids"]) == ours.tokens


def test_a_stack_that_the_server_has_lost_is_told_again(backend: Backend, vllm_server: VllmServer) -> None:
    attach(backend, "one", composed(backend, 1))
    asked = [row(backend, "hello", stack, temperature=0.0) for stack in ("one", None)]
    before = [reply.text for reply in written(backend, asked)]
    for name in listed(vllm_server) - {"base"}:
        httpx2.post(f"{vllm_server.url}/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
    assert [reply.text for reply in written(backend, asked)] == before
    assert len(listed(vllm_server)) >= 3


def test_another_base_of_the_same_shape_is_refused(
    vllm_server: VllmServer, tiny_base: Base, shared_cache: Path
) -> None:
    known = listed(vllm_server)
    with pytest.raises(BaseMismatch, match="is not") as caught:
        vllm_backend(tiny_base, shared_cache, vllm_server)
    assert "--model" in caught.value.hint
    assert listed(vllm_server) == known


def test_closing_leaves_nothing_on_the_server(vllm_server: VllmServer, vllm_base: Base, shared_cache: Path) -> None:
    known = listed(vllm_server)
    backend = vllm_backend(vllm_base, shared_cache, vllm_server)
    attach(backend, "one", composed(backend, 1))
    assert len(listed(vllm_server) - known) == 2
    backend.close()
    assert listed(vllm_server) == known
