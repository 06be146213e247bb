"""A stack is pulled from our HTTP server with a token; other servers resolve and learn nothing."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from resolver_makers import TOKEN, cache, copies_in, file_of, held, learned, ok, raw_server, stack

import personalpeft
from personalpeft import Runtime
from personalpeft.adapters.formats.published import PublishedAdapterFolder
from personalpeft_app.http.api_v1.blueprint import ApiV1
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server
from personalpeft_vllm_resolver.settings import read_settings

MADE = stack()


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    monkeypatch.setenv("PERSONALPEFT_CACHE", str(tmp_path / "personalpeft-cache"))
    with personalpeft.open(tmp_path / "home", backend="fake") as opened:
        yield opened


@pytest.fixture
def url(runtime: Runtime) -> Iterator[str]:
    api, limiter = ApiV1(runtime), limiter_of(runtime)
    server = Server(
        make_app(runtime, more=[api.blueprint], limiter=limiter), limiter, host="127.0.0.1", port=0
    )
    thread = threading.Thread(target=lambda: server.run(grace=1, close=runtime.close))
    thread.start()
    yield f"http://127.0.0.1:{server.port}"
    server.stop()
    thread.join(20)
    api.close()


def test_a_stack_is_pulled_with_a_workers_or_an_administrators_api_key(
    tmp_path: Path, runtime: Runtime, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime.api_keys.ensure_admin_key()
    admin, adas = (
        runtime.api_keys.admin_key_file.read_text().strip(),
        runtime.api_keys.create("ada")[1],
    )
    worker = runtime.api_keys.create(None, worker=True)[1]
    made = stack(size=3_000_000)
    with closing(PublishedAdapterFolder(runtime.settings.cache / "served", "program")) as folders:
        folders.put(made)
        for token, given in ((adas, False), ("pp_wrong", False), (worker, True), (admin, True)):
            with closing(cache(tmp_path / token[-8:], url=url, token=token)) as pulled:
                path = pulled.get(made.digest)
                assert (path is not None) == given
                assert not path or held(path) == made.files
                assert token not in caplog.text
    assert "API key" in caplog.text
    with closing(cache(tmp_path, url=f"{url}/", token=admin)) as pulled:
        assert pulled.get(made.digest) is None
    assert "personalpeft:" in caplog.text


@pytest.mark.exhaustive
def test_a_published_stack_of_a_user_without_requests_is_pulled_from_our_server(
    tmp_path: Path, runtime: Runtime, url: str
) -> None:
    ada, worker = runtime.user("ada"), runtime.api_keys.create(None, worker=True)[1]
    learned(ada)
    done = runtime.publish()
    assert done.stacks[0].name
    digest = done.stacks[0].name.removeprefix("personalpeft:")
    with closing(cache(tmp_path, url=url, token=worker)) as pulled:
        path = pulled.get(digest)
        assert path is not None
        assert held(path) == held(done.folder / digest)
    ada.forget(ada.signals()[0].id, rebuild=False)
    with closing(cache(tmp_path, url=url, token=worker)) as pulled:
        assert pulled.get(digest) is None


def test_the_folder_is_tried_before_the_server(tmp_path: Path) -> None:
    other = stack(7)
    with (
        closing(PublishedAdapterFolder(tmp_path / "shared", "program")) as folders,
        raw_server(lambda line, request: line.sendall(ok(file_of(other, request)))) as (url, came),
        closing(cache(tmp_path, folder=tmp_path / "shared", url=url, token=TOKEN)) as pulled,
    ):
        folders.put(MADE)
        assert pulled.get(MADE.digest)
        assert came == []
        assert pulled.get(other.digest)
        assert [request.split(b" ")[1].decode() for request in came] == [
            f"/api/v1/published/{other.digest}/{name}" for name in other.files
        ]


def other_numbers(line: socket.socket, request: bytes) -> None:
    line.sendall(ok(file_of(stack(1), request)))


def too_short(line: socket.socket, request: bytes) -> None:
    data = file_of(MADE, request)
    line.sendall(ok(data[:-1], len(data)))


def cut_by_its_length(line: socket.socket, request: bytes) -> None:
    data = file_of(MADE, request)
    line.sendall(ok(data, len(data) - 1))


def endless(line: socket.socket, request: bytes) -> None:
    line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        line.sendall(bytes(100_000))


def dripping(line: socket.socket, request: bytes) -> None:
    line.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        line.sendall(b"x")
        time.sleep(0.05)


def dripping_headers(line: socket.socket, request: bytes) -> None:
    line.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while True:
        line.sendall(b"x")
        time.sleep(0.05)


def silent(line: socket.socket, request: bytes) -> None:
    line.recv(1)


def hanging_up(line: socket.socket, request: bytes) -> None:
    return


def no_http(line: socket.socket, request: bytes) -> None:
    line.sendall(b"SSH-2.0-OpenSSH_9.9\r\n" * 3)


def broken(line: socket.socket, request: bytes) -> None:
    line.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n")


HOSTILE = [
    other_numbers,
    too_short,
    cut_by_its_length,
    endless,
    dripping,
    dripping_headers,
    silent,
    hanging_up,
    no_http,
    broken,
]


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_server_resolves_nothing_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: Callable[[socket.socket, bytes], None]
) -> None:
    begun = time.monotonic()
    with (
        raw_server(answer) as (url, _),
        closing(cache(tmp_path, url=url, token=TOKEN, timeout=1, cache_bytes=1_000_000)) as pulled,
    ):
        assert pulled.get(MADE.digest) is None
        assert copies_in(tmp_path) == []
    assert time.monotonic() - begun < 8
    assert caplog.text.count(f"personalpeft:{MADE.digest}") >= 1
    assert TOKEN not in caplog.text


def test_redirects_are_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with raw_server(lambda line, request: line.sendall(ok(file_of(MADE, request)))) as (
        elsewhere,
        came,
    ):

        def sends(line: socket.socket, request: bytes) -> None:
            path = request.split(b" ")[1]
            line.sendall(
                b"HTTP/1.1 302 Found\r\nLocation: %s%s\r\n\r\n" % (elsewhere.encode(), path)
            )

        with (
            raw_server(sends) as (url, _),
            closing(cache(tmp_path, url=url, token=TOKEN)) as pulled,
        ):
            assert pulled.get(MADE.digest) is None
        assert came == []
    assert "redirect" in caplog.text


def test_no_proxy_receives_the_api_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        raw_server(hanging_up) as (proxy, heard),
        raw_server(lambda line, request: line.sendall(ok(file_of(MADE, request)))) as (url, came),
        closing(cache(tmp_path, url=url, token=TOKEN)) as pulled,
    ):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert pulled.get(MADE.digest)
        assert TOKEN.encode() in came[0]
        assert heard == []


def test_an_unreachable_server_resolves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(cache(tmp_path, url="http://127.0.0.1:9", token=TOKEN)) as pulled:
        assert pulled.get(MADE.digest) is None
    assert "refused" in caplog.text


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("openssl") is None, reason="nothing here makes a certificate")
def test_certificates_are_verified_and_slow_tls_servers_time_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout key.pem -out ca.pem -days 2"
    named = "-subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(f"{made} {named}".split(), cwd=tmp_path, capture_output=True, check=True)
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(tmp_path / "ca.pem", tmp_path / "key.pem")
    options = {"token": TOKEN, "timeout": 1}
    with raw_server(lambda line, request: line.sendall(ok(file_of(MADE, request))), tls) as (
        url,
        came,
    ):
        with closing(cache(tmp_path, url=url, **options)) as pulled:
            assert pulled.get(MADE.digest) is None
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
        assert came == []
        with closing(cache(tmp_path, url=url, ca=tmp_path / "ca.pem", **options)) as pulled:
            assert pulled.get(MADE.digest)
    with (
        raw_server(dripping, tls) as (url, _),
        closing(cache(tmp_path, url=url, ca=tmp_path / "ca.pem", **options)) as pulled,
    ):
        assert pulled.get(MADE.digest) is None
    assert "1 s" in caplog.text


@pytest.mark.parametrize(
    "variables",
    [
        {"URL": "ftp://host", "TOKEN": TOKEN},
        {"URL": f"https://me:{TOKEN}@host", "TOKEN": TOKEN},
        {"URL": "http://host"},
        {"URL": "http://host", "TOKEN": f"{TOKEN}\nX-More: 1"},
        {"FOLDER": "/x", "CACHE_BYTES": "much"},
        {"FOLDER": "/x", "TIMEOUT": "0"},
    ],
)
def test_invalid_settings_are_refused_without_repeating_an_api_key(
    variables: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match="PERSONALPEFT_RESOLVER_") as refused:
        read_settings({f"PERSONALPEFT_RESOLVER_{name}": value for name, value in variables.items()})
    assert TOKEN not in str(refused.value)


def test_without_sources_nothing_is_resolved_and_settings_show_no_api_key() -> None:
    assert (
        read_settings(
            {"PATH": "/bin", "PERSONALPEFT_RESOLVER_CACHE": "/x", "PERSONALPEFT_RESOLVER_URL": ""}
        )
        is None
    )
    assert TOKEN not in repr(
        read_settings(
            {"PERSONALPEFT_RESOLVER_URL": "https://h", "PERSONALPEFT_RESOLVER_TOKEN": TOKEN}
        )
    )


def test_an_unreadable_certificate_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no\.pem"):
        cache(tmp_path, url="https://host", token=TOKEN, ca=tmp_path / "no.pem")
