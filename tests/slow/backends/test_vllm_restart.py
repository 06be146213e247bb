"""A real vLLM server restarts while a home is open, with another model and then with the right one."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from backend_makers import attach, generate, random_stack, row
from vllm_maker import running, tiny_base_for_vllm, vllm_backend

from benchmarks.vllm import free_port
from personalpeft.base_models.types import Base
from personalpeft.errors import BaseMismatch

pytestmark = [pytest.mark.slow, pytest.mark.vllm]


def test_server_with_another_model_is_refused_and_the_right_one_is_used_again(
    vllm_base: Base, shared_cache: Path, tmp_path: Path
) -> None:
    port = free_port()
    with running(vllm_base, tmp_path, port=port) as server:
        backend = vllm_backend(vllm_base, shared_cache, server, slots=2)
        attach(backend, "one", random_stack(backend, 1))
        asked = [row(backend, "hello", stack, temperature=0.0) for stack in ("one", None)]
        before = [reply.tokens for reply in generate(backend, asked)]
    with running(tiny_base_for_vllm(shared_cache, seed=10), tmp_path, port=port):
        for each in asked:
            with pytest.raises(BaseMismatch):
                generate(backend, [each])
        with pytest.raises(BaseMismatch):
            attach(backend, "two", random_stack(backend, 2))
        listed = httpx2.get(f"{server.url}/v1/models").json()["data"]
        assert [each["id"] for each in listed] == ["base"]
    with running(vllm_base, tmp_path, port=port):
        assert [reply.tokens for reply in generate(backend, asked)] == before
        attach(backend, "two", random_stack(backend, 2))
        backend.close()
