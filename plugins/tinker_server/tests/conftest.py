"""Servers on the tiny base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tinker_makers import TinkerServer, open_server, serving

from personalpeft.memory.embedder import HashEmbedder


@pytest.fixture(scope="module", autouse=True)
def quick_embedder() -> Iterator[None]:
    """Embed without a model, which would take most of the time of a learn on the tiny base."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("personalpeft.runtime.MiniLM", HashEmbedder)
        yield


@pytest.fixture(scope="session", autouse=True)
def float32() -> Iterator[None]:
    """Compute in float32 on one thread, where equal means equal."""
    import torch

    from personalpeft.backends.torch import backend, device
    from personalpeft.backends.torch.device import DeviceChoice

    where = DeviceChoice(torch.device("cpu"), torch.float32, "for tests")
    with pytest.MonkeyPatch.context() as patch:
        for module in (backend, device):
            patch.setattr(module, "choose_device", lambda **options: where)
        torch.set_num_threads(1)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, float32: None) -> Iterator[TinkerServer]:
    """A server that the tests of a module share; each has sessions of its own."""
    with open_server(tmp_path_factory.mktemp("home")) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(server: TinkerServer) -> Iterator[str]:
    """The address of the server on a socket."""
    with serving(server) as address:
        yield address


@pytest.fixture
def start(tmp_path: Path, float32: None) -> Iterator[Callable[[], TinkerServer]]:
    """Starts a server on one home, again and again: each start stops the one before."""
    with ExitStack() as running:

        def restart() -> TinkerServer:
            running.close()
            return running.enter_context(open_server(tmp_path / "home"))

        yield restart
