"""What all tests share: no network, and one cache folder for everything that is prepared from packages or seeds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import example_counts
import pytest
from backend_makers import fake_backend, llamacpp_backend, torch_backend
from vllm_maker import running, tiny_base_for_vllm, vllm_backend

from personalpeft.backends.base import Backend
from personalpeft.base_models.types import Base
from personalpeft.settings import CACHE, HOME, VllmServer

# Before anything imports Triton, which reads it then: kernels for a GPU are tested on the processor. TRITON_INTERPRET=0
# tests them on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Registered before pytest reads --hypothesis-profile.
example_counts.register()


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of PERSONALPEFT_CACHE where it is set, so that the real base need not be prepared anew; else a temporary one,
    which processes that share the tests share too.
    """
    with pytest.MonkeyPatch.context() as patch:
        run = tmp_path_factory.getbasetemp()
        own = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "shared-cache"
        folder = Path(os.environ.get(CACHE) or own)
        patch.setenv(CACHE, str(folder))
        patch.setenv(HOME, str(tmp_path_factory.mktemp("no-home") / "never-used"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="session")
def tiny_base(shared_cache: Path) -> Base:
    """A Llama of two blocks with random weights and one token for each byte."""
    import torch

    from personalpeft.base_models.registry import find_card
    from personalpeft.base_models.resolve import resolve_base

    torch.set_num_threads(1)
    return resolve_base(find_card("tiny-random"), cache=shared_cache)


@pytest.fixture(scope="session")
def torch_tiny(tiny_base: Base, shared_cache: Path) -> Backend:
    """The torch backend on the tiny base, in float32 and with the kernels that serve people where they can be built; who
    attaches something to it detaches it again.
    """
    return torch_backend(tiny_base, slots=4, cache=shared_cache)


@pytest.fixture(scope="session")
def llamacpp_tiny(tiny_base: Base, shared_cache: Path) -> Backend:
    """The llama.cpp backend on the tiny base; who attaches something to it detaches it again."""
    return llamacpp_backend(tiny_base, shared_cache, slots=4)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, vllm_base: Base) -> Iterator[VllmServer]:
    """A real server on ``vllm_base``, which takes about a minute to start."""
    with running(vllm_base, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_base(shared_cache: Path) -> Base:
    """The tiny base in a shape that vLLM takes."""
    return tiny_base_for_vllm(shared_cache)


@pytest.fixture(scope="session")
def vllm_tiny(vllm_server: VllmServer, vllm_base: Base, shared_cache: Path) -> Iterator[Backend]:
    """The vLLM backend on a real server; who attaches something to it detaches it again."""
    backend = vllm_backend(vllm_base, shared_cache, vllm_server, slots=4)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def fake() -> Backend:
    """The backend without a model; who attaches something to it detaches it again."""
    return fake_backend(slots=4)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """One thread for the tiny base, whose sums are too small to share out; all of them for a real one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(
            (os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1
        )
