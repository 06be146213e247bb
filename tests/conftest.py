"""Fixtures of all tests: no network, and one cache folder for all prepared bases."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import example_counts
import pytest
from backend_makers import fake_backend, llamacpp_backend, torch_backend
from pickle_watch import PickleWatch
from vllm_maker import running, tiny_base_for_vllm, vllm_backend

from personalpeft.backends.base import Backend
from personalpeft.base_models.types import Base
from personalpeft.settings import CACHE, HOME, KEYS, VllmServer

# Triton reads this when it is imported. By default GPU kernels are tested on the processor, and
# with TRITON_INTERPRET=0 on a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--schema-cases",
        type=int,
        default=None,
        help="how many requests test_schema_fuzzing.py generates over all operations together",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Watch every test of the session, those of plugins too."""
    config.pluginmanager.register(PickleWatch())


# Registered before pytest reads --hypothesis-profile.
example_counts.register()


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return the folder of PERSONALPEFT_CACHE if set, else a temporary one.

    A set folder keeps the real base prepared. Test processes that run together share a temporary
    one.
    """
    with pytest.MonkeyPatch.context() as patch:
        run = tmp_path_factory.getbasetemp()
        own = (run.parent if "PYTEST_XDIST_WORKER" in os.environ else run) / "shared-cache"
        folder = Path(os.environ.get(CACHE) or own)
        patch.setenv(CACHE, str(folder))
        patch.setenv(HOME, str(tmp_path_factory.mktemp("no-home") / "never-used"))
        patch.setenv(KEYS, str(tmp_path_factory.mktemp("no-keys") / "never-used"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture(scope="session")
def tiny_base(shared_cache: Path) -> Base:
    """Return a Llama of two layers with random weights and one token for each byte."""
    import torch

    from personalpeft.base_models.registry import find_card
    from personalpeft.base_models.resolve import resolve_base

    torch.set_num_threads(1)
    return resolve_base(find_card("tiny-random"), cache=shared_cache)


@pytest.fixture(scope="session")
def torch_tiny(tiny_base: Base, shared_cache: Path) -> Backend:
    """Return the torch backend on the tiny base, in float32, with the CPU kernels where they can be
    built.

    A test that attaches something detaches it again.
    """
    return torch_backend(tiny_base, slots=4, cache=shared_cache)


@pytest.fixture(scope="session")
def llamacpp_tiny(tiny_base: Base, shared_cache: Path) -> Backend:
    """Return the llama.cpp backend on the tiny base.

    A test that attaches something detaches it again.
    """
    return llamacpp_backend(tiny_base, shared_cache, slots=4)


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory, vllm_base: Base) -> Iterator[VllmServer]:
    """Start a real server on ``vllm_base``. This takes about a minute."""
    with running(vllm_base, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def vllm_base(shared_cache: Path) -> Base:
    """Return the tiny base in a shape that vLLM supports."""
    return tiny_base_for_vllm(shared_cache)


@pytest.fixture(scope="session")
def vllm_tiny(vllm_server: VllmServer, vllm_base: Base, shared_cache: Path) -> Iterator[Backend]:
    """Return the vLLM backend on a real server.

    A test that attaches something detaches it again.
    """
    backend = vllm_backend(vllm_base, shared_cache, vllm_server, slots=4)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def fake() -> Backend:
    """Return the backend without a model. A test that attaches something detaches it again."""
    return fake_backend(slots=4)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Use one thread for the tiny base, since its sums are small, and all for a real one."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(
            (os.cpu_count() or 1) if request.node.get_closest_marker("slow") else 1
        )
