"""A server keeps a body only with a valid API key, a large one only on a file route, and bounds them."""

from __future__ import annotations

import json
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import pytest
from example_counts import all_cases
from flask import Blueprint, request
from http_makers import LocalServer, serve_locally, wait_for

from personalpeft import Runtime
from personalpeft.types import Demonstration
from personalpeft_app.client import NotAllowed, connect
from personalpeft_app.http import security, validation
from personalpeft_app.http.api_v1.blueprint import ApiV1

MIB = 2**20
CHAT = "/v1/chat/completions"
IMPORT = "/api/v1/import"


@pytest.fixture
def site(runtime: Runtime) -> Iterator[LocalServer]:
    with closing(ApiV1(runtime)) as api, serve_locally(runtime, more=[api.blueprint]) as site:
        runtime.user("ada")
        yield site


@contextmanager
def connected(site: LocalServer) -> Iterator[socket.socket]:
    host, _, port = site.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as opened:
        yield opened


def begin(site: LocalServer, on: socket.socket, path: str, secret: str, *headers: str) -> None:
    """Send the headers of a request without its body."""
    kind = "application/json" if path == CHAT else "application/octet-stream"
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {secret}",
        f"Content-Type: {kind}",
    ]
    on.sendall("\r\n".join([*lines, *headers, "", ""]).encode())


def answer(on: socket.socket) -> tuple[int, str]:
    """Return the status of the next response, and its headers and body."""
    got, length = b"", 0
    while not got.endswith(b"\r\n\r\n"):
        got += _some(on, 1)
    for line in got.lower().splitlines():
        if line.startswith(b"content-length:"):
            length = int(line.split()[1])
    body = b""
    while len(body) < length:
        body += _some(on, length - len(body))
    return int(got.split()[1]), (got + body).decode()


def _some(on: socket.socket, most: int) -> bytes:
    some = on.recv(most)
    assert some, "the server closed the connection without an answer"
    return some


def test_a_large_body_without_an_api_key_is_refused_before_it_is_sent(site: LocalServer) -> None:
    for path in (CHAT, IMPORT):
        for announced in (f"Content-Length: {200 * MIB}", "Transfer-Encoding: chunked"):
            with connected(site) as caller:
                begin(site, caller, path, "pp_wrong", announced)
                status, response = answer(caller)
                assert status == 401
                assert "API key" in response
                assert "application/json" in response
                assert not caller.recv(100)


def test_a_body_without_an_api_key_is_not_kept_and_its_sender_reads_the_refusal(
    site: LocalServer,
) -> None:
    size = 3 * MIB
    with connected(site) as caller:
        before = _deleted_files()
        begin(site, caller, CHAT, "pp_wrong", f"Content-Length: {size}")
        caller.sendall(bytes(size))
        assert answer(caller)[0] == 401
        assert _deleted_files() == before


def _deleted_files() -> int:
    """Count the open files without a name of this process. They hold request bodies."""
    folder = Path("/proc/self/fd")
    if not folder.exists():
        return 0
    return sum(
        "(deleted)" in str(each.readlink()) for each in list(folder.iterdir()) if each.is_symlink()
    )


def test_a_large_body_is_accepted_by_file_routes_from_authorized_users_only(
    site: LocalServer,
) -> None:
    ada, size = site.api_key_of("ada"), validation.LARGEST + 1
    for path, secret, announced, status in (
        (CHAT, site.secret, size, 413),
        ("/api/v1/nothing", site.secret, size, 413),
        (IMPORT, ada, size, 403),
        ("/api/v1/users/bob/peft", ada, size, 403),
        (IMPORT, site.secret, validation.LARGEST_FILE + 1, 413),
    ):
        # Before it is sent.
        with connected(site) as caller:
            begin(site, caller, path, secret, f"Content-Length: {announced}")
            assert answer(caller)[0] == status, (path, status)
    for path, secret in (
        ("/api/v1/users/ada/peft", ada),
        ("/api/v1/users/ada/gguf", site.secret),
        (IMPORT, site.secret),
    ):
        with connected(site) as caller:
            begin(site, caller, path, secret, f"Content-Length: {size}")
            caller.sendall(bytes(size))
            # Zeros are no such file.
            assert answer(caller)[0] in (400, 422), path


def test_a_plugins_view_may_take_a_large_body_from_any_api_key(runtime: Runtime) -> None:
    routes = Blueprint("plugin", __name__)
    view = security.for_large_bodies(lambda: str(len(request.get_data())))
    routes.add_url_rule("/plugin", "large", view, methods=["POST"])
    body = b"x" * (validation.LARGEST + 1)
    with serve_locally(runtime, more=[routes]) as site, connected(site) as caller:
        begin(site, caller, "/plugin", site.api_key_of("ada"), f"Content-Length: {len(body)}")
        caller.sendall(body)
        status, text = answer(caller)
    assert status == 200
    assert text.endswith(str(len(body)))


def test_a_chunked_body_is_bounded(site: LocalServer) -> None:
    body = json.dumps({"model": "ada", "messages": [{"role": "user", "content": "Hello"}]}).encode()
    with connected(site) as caller:
        begin(site, caller, CHAT, site.secret, "Transfer-Encoding: chunked")
        caller.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        assert answer(caller)[0] == 200
    part = b"%x\r\n%b\r\n" % (MIB, bytes(MIB))
    for sent in (b"%x\r\n" % validation.LARGEST_FILE, part * (validation.LARGEST // MIB + 1)):
        with connected(site) as caller:
            begin(site, caller, IMPORT, site.secret, "Transfer-Encoding: chunked")
            caller.sendall(sent)
            assert answer(caller)[0] == 413
    with connected(site) as caller:
        begin(site, caller, CHAT, site.secret, "Transfer-Encoding: chunked")
        caller.sendall(b"what is no number\r\n")
        status, response = answer(caller)
        assert status == 400
        assert "application/json" in response


def test_clients_that_send_slowly_block_no_other_client(site: LocalServer) -> None:
    with ExitStack() as stack:
        slow = [stack.enter_context(connected(site)) for _ in range(site.limiter.count + 8)]
        for caller in slow[8:]:
            begin(site, caller, CHAT, site.secret, "Content-Length: 10")
        with connected(site) as caller:
            body = json.dumps({"model": "ada", "messages": [{"role": "user", "content": "Hello"}]})
            begin(site, caller, CHAT, site.secret, f"Content-Length: {len(body)}")
            caller.sendall(body.encode())
            assert answer(caller)[0] == 200


@pytest.mark.parametrize("kind", all_cases(["head", "refused body", "body"], usual=["body"]))
def test_clients_that_trickle_leave_threads_for_others(site: LocalServer, kind: str) -> None:
    secret = "pp_wrong" if kind == "refused body" else site.secret
    over = threading.Event()

    def trickle(callers: list[socket.socket]) -> None:
        while not over.wait(0.2):
            for caller in callers:
                with suppress(OSError):
                    caller.sendall(b"a")

    with ExitStack() as stack:
        slow = [stack.enter_context(connected(site)) for _ in range(site.limiter.count + 84)]
        stack.callback(over.set)
        for caller in slow:
            if kind == "head":
                caller.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ")
            else:
                begin(site, caller, CHAT, secret, "Content-Length: 10000")
        threading.Thread(target=trickle, args=(slow,), daemon=True).start()
        time.sleep(0.5)
        begun = time.monotonic()
        with connected(site) as caller:
            caller.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert answer(caller)[0] == 200
        assert time.monotonic() - begun < 8


def test_request_bodies_are_bounded_in_total_and_one_api_key_gets_half(
    runtime: Runtime, site: LocalServer
) -> None:
    first, second, third = (runtime.api_keys.create(None)[1] for _ in range(3))
    with ExitStack() as stack:

        def hold_half(secret: str) -> socket.socket:
            """Announce half of all bytes twice. One is refused, and the other connection returned."""
            callers = [stack.enter_context(connected(site)) for _ in range(2)]
            for caller in callers:
                begin(site, caller, IMPORT, secret, f"Content-Length: {validation.LARGEST_FILE}")
            refused = select.select(callers, [], [], 10)[0]
            assert len(refused) == 1
            status, response = answer(refused[0])
            assert status == 429
            assert "Retry-After: " in response
            callers.remove(refused[0])
            return callers[0]

        holding = hold_half(first)
        hold_half(second)
        assert _send_some(site, third) == 429
        # A client that disconnects frees its share.
        holding.close()
        wait_for(lambda: _send_some(site, third) == 422)


def _send_some(site: LocalServer, secret: str) -> int:
    with connected(site) as caller:
        begin(site, caller, IMPORT, secret, "Content-Length: 1")
        caller.sendall(b"x")
        return answer(caller)[0]


def test_the_room_of_a_body_is_freed_with_the_response(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"model": "ada", "messages": [], "user": "x" * MIB}).encode()
    monkeypatch.setattr(validation, "LARGEST_FILE", 2 * len(body))
    with serve_locally(runtime) as site, connected(site) as caller:
        for _ in range(3):
            begin(site, caller, CHAT, site.secret, f"Content-Length: {len(body)}")
            caller.sendall(body)
            status, response = answer(caller)
            assert status == 400, response


def test_a_large_file_is_imported_by_the_client_and_a_refusal_reaches_it(
    site: LocalServer, tmp_path: Path
) -> None:
    ada = site.runtime.user("ada")
    # Incompressible data.
    ada.teach_many(
        Demonstration(f"question {number}", os.urandom(40_000).hex()) for number in range(125)
    )
    file = ada.export(tmp_path / "ada.personal").path
    assert file.stat().st_size > validation.LARGEST
    assert connect(site.url, site.secret).import_user(file, as_user="bob").signals == 125
    for secret in ("pp_wrong", site.api_key_of("ada")):
        with pytest.raises(NotAllowed):
            connect(site.url, secret).import_user(file, as_user="cy")
    assert [each.id for each in site.runtime.users()] == ["ada", "bob"]
