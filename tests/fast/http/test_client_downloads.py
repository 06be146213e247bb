"""A file saved by the client is private from its first byte and appears only when complete."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from http_makers import LocalServer, serve_locally

from personalpeft import InvalidInput, Runtime
from personalpeft_app.client import Unreachable, connect
from personalpeft_app.http.api_v1.blueprint import ApiV1


@pytest.fixture
def site(runtime: Runtime) -> Iterator[LocalServer]:
    with closing(ApiV1(runtime)) as api, serve_locally(runtime, more=[api.blueprint]) as site:
        # Large enough that a part of it is written before the last bytes arrive.
        for number in range(4):
            runtime.user("ada").teach(f"question {number}", os.urandom(20_000).hex())
        yield site


class Proxy:
    """A proxy that holds back the last bytes of a download until ``rest`` decides about them."""

    def __init__(self, site: LocalServer) -> None:
        host, _, port = site.url.removeprefix("http://").partition(":")
        self._server = (host, int(port))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.held = threading.Event()
        self.rest = threading.Event()
        self.breaks = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self.rest.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join(20)

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            with client, socket.create_connection(self._server) as server:
                received = client.recv(2**16)
                server.sendall(received)
                answer = b""
                while more := server.recv(2**16):
                    answer += more
                if b"/export" not in received:
                    client.sendall(answer)
                    continue
                client.sendall(answer[:-50])
                self.held.set()
                self.rest.wait(20)
                if not self.breaks:
                    client.sendall(answer[-50:])


@pytest.fixture
def proxy(site: LocalServer) -> Iterator[Proxy]:
    with closing(Proxy(site)) as made:
        yield made


@contextmanager
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.exhaustive
def test_a_download_is_private_while_it_arrives_and_appears_when_complete(
    site: LocalServer, proxy: Proxy, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    # The world-readable leftover of an older version's interrupted download.
    (folder / ".ada.personal.part").write_bytes(b"")
    (folder / ".ada.personal.part").chmod(0o666)
    left = (folder / ".ada.personal.part").stat().st_ino
    ada = connect(proxy.url, site.secret).user("ada")
    with no_umask(), ThreadPoolExecutor(1) as threads:
        saving = threads.submit(ada.export, folder / "ada.personal")
        try:
            assert proxy.held.wait(20)
            assert not (folder / "ada.personal").exists()
            while_it_came = [path.stat() for path in folder.iterdir()]
        finally:
            proxy.rest.set()
        saving.result(20)
    # On Linux the file has no name yet.
    assert {stat.S_IMODE(each.st_mode) for each in while_it_came if each.st_ino != left} <= {0o600}
    assert not next(each for each in while_it_came if each.st_ino == left).st_size
    assert stat.S_IMODE((folder / "ada.personal").stat().st_mode) == 0o600
    assert (
        connect(site.url, site.secret).import_user(folder / "ada.personal", as_user="bob").user
        == "bob"
    )
    with pytest.raises(InvalidInput):
        ada.export(folder / "ada.personal")


def test_an_interrupted_download_leaves_nothing(
    site: LocalServer, proxy: Proxy, tmp_path: Path
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    proxy.breaks = True
    proxy.rest.set()
    with pytest.raises(Unreachable) as caught:
        connect(proxy.url, site.secret).user("ada").export(folder / "ada.personal")
    assert caught.value.hint
    assert list(folder.iterdir()) == []
