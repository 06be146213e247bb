"""A server on the tiny base, for tests that kill it: ``serve_program.py HOME PORT``."""

from __future__ import annotations

import sys
from pathlib import Path

import personalpeft
from personalpeft_app.http import security
from personalpeft_app.http.concurrency import limiter_of
from personalpeft_app.http.server import make_app
from personalpeft_app.http.wsgi_server import Server
from personalpeft_tinker_server import TinkerExtension


def main(home: str, port: str) -> None:
    with personalpeft.open(Path(home), base="tiny-random", backend="torch") as runtime:
        extension = TinkerExtension(runtime, security.plugin_host())
        limiter = limiter_of(runtime)
        app = make_app(runtime, more=[extension.blueprint])
        Server(app, limiter, host="127.0.0.1", port=int(port)).run(grace=0, close=extension.close)


if __name__ == "__main__":
    main(*sys.argv[1:])
