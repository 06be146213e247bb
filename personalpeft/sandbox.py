"""Run a reader of untrusted files in a child process with limits.

A reader is a function of this package. It parses bytes that it is given, or files, whose digests it
returns. The caller parses the same bytes afterwards. So a file that crashes a parser, or takes too
much memory or time, ends a child and not this process.

A server process imports the readers once and forks a child for each call, since imports take a
hundred times as long as a fork. The server reads no file itself. It ends after a minute without a
call, and with this process. Without ``fork`` (Windows) there is a new server for each call. A frozen
program has no Python to start, so it reads files itself.

The child inherits no descriptor and no environment variable but the search paths. It cannot write
files. It keeps this account's right to read files: docs/explanation/privacy.md says what is not
covered.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Self, cast

from personalpeft import host
from personalpeft.errors import ERROR_CODES, PersonalPeftError, get_error_type

_IDLE_SECONDS = 60
# Of an interpreter with the imports of a reader, and some room.
_MEMORY, _SECONDS = 2 << 30, 30
_ANSWER_LIMIT = 1 << 20
# A busy machine gives a child a small part of a processor.
_WALL_PER_CPU_SECOND = 20
_ENVIRONMENT = ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH", "LC_ALL", "LANG")
_HINT = "The file is damaged or was made to do harm; get it again from its source."


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may use: bytes of address space, and seconds of processor time.

    macOS does not enforce the first, and Windows neither.
    """

    memory: int
    seconds: int

    @classmethod
    def for_files(cls, size: int, *, memory_factor: int, bytes_a_second: int) -> Self:
        """Return the limits for files of ``size`` bytes.

        One byte may take ``memory_factor`` bytes of memory, beside the interpreter. A second of
        processor time reads at least ``bytes_a_second``.
        """
        return cls(_MEMORY + memory_factor * size, _SECONDS + size // bytes_a_second)


def run_reader(
    reader: str,
    arguments: Mapping[str, Any],
    limits: Limits,
    *,
    source: str,
    error: type[PersonalPeftError],
    data: bytes | None = None,
    hint: str = _HINT,
) -> Mapping[str, str]:
    """Run a reader in a child.

    Args:
        reader: The function, as ``module:name``.
        arguments: Its arguments, which JSON can hold.
        limits: What the child may use.
        source: What messages call the file.
        error: What to raise if the child ends without an answer.
        data: Bytes that are in no file. The reader gets them as its argument ``data``.
        hint: The hint of ``error``.

    Returns:
        What the reader returned: the SHA-256 of each file that it parsed, or other texts by name.

    Raises:
        PersonalPeftError: What the reader raised, or ``error``.
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        more = {} if data is None else {"data": data}
        return cast(Mapping[str, str], find_function(reader)(**arguments, **more))
    request = {
        "reader": reader,
        "arguments": arguments,
        "limits": asdict(limits),
        "bytes": None if data is None else len(data),
    }
    answer = _ask(
        json.dumps(request).encode() + b"\n" + (data or b""), limits.seconds * _WALL_PER_CPU_SECOND
    )
    match answer:
        case {"digests": dict(digests)}:
            return {str(name): str(digest) for name, digest in digests.items()}
        case {"error": str(name), "message": str(message), "hint": str(hint)}:
            kinds = {each.__name__: each for each in ERROR_CODES}
            raise kinds.get(name, error)(message, hint=hint)
    raise error(
        f"{source}: the process that read it ended without a result, or reached a limit.",
        hint=hint,
    )


class _Server:
    """A process that answers one request at a time."""

    def __init__(self) -> None:
        # The readers may be on a path that the program added.
        paths = os.pathsep.join(str(Path(each).absolute()) for each in sys.path)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**kept, **threads, "PYTHONPATH": paths},
            cwd=Path(sys.executable).anchor,
            start_new_session=True,
        )
        self._requests = cast(IO[bytes], process.stdin)
        self._answers = cast(IO[bytes], process.stdout)

    def ask(self, request: bytes, seconds: float) -> Any:
        """Return the answer, or None if the server ended. Kill it after ``seconds``."""
        timer = threading.Timer(seconds, self._kill)
        timer.daemon = True
        timer.start()
        try:
            self._requests.write(request)
            self._requests.flush()
            line = self._answers.readline(2 * _ANSWER_LIMIT)
            return json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the server."""
        for pipe in (self._requests, self._answers):
            with suppress(OSError):
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        self._kill()
        self._process.wait()

    def drop_pipes(self) -> None:
        """Let a forked process neither write to the server nor keep it from ending."""
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in (self._requests, self._answers):
            with suppress(OSError, ValueError):
                os.dup2(nothing, pipe.fileno(), inheritable=False)
        os.close(nothing)

    def _kill(self) -> None:
        if self._process.poll() is None:
            host.kill_session(self._process)


_lock = threading.Lock()
_server: _Server | None = None
# Never freed: a thread of the parent may have been in them, and their locks stay held here.
_servers_of_parents: list[_Server] = []


def _ask(request: bytes, seconds: float) -> Any:
    """Return the answer to a request, or None."""
    global _server
    with _lock:
        if _server is not None:
            if (answer := _server.ask(request, seconds)) is not None:
                return answer
            # It was idle for a minute and has ended.
            _close()
        try:
            _server = _Server()
        except OSError:
            return None  # The system allows no further process.
        if (answer := _server.ask(request, seconds)) is None:
            _close()
        return answer


@atexit.register
def _close() -> None:
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _begin_anew() -> None:
    """Leave the server of the process that this one was forked from, and the lock of its threads."""
    global _lock, _server
    _lock = threading.Lock()
    if _server is not None:
        _server.drop_pipes()
        _servers_of_parents.append(_server)
        _server = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


def serve() -> None:
    """Answer requests from the standard input until it ends. This is the server's program."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while host.wait_for_input(requests, _IDLE_SECONDS) and (line := requests.readline()):
        request = json.loads(line)
        reader, arguments = find_function(request["reader"]), request["arguments"]
        if request["bytes"] is not None:
            arguments["data"] = requests.read(request["bytes"])
        run = partial(_run, reader, arguments)
        limits = Limits(**request["limits"])
        answer = host.run_confined(run, limits.memory, limits.seconds, _ANSWER_LIMIT)
        answers.write(_as_line(answer))
        answers.flush()
        if not host.can_fork():
            return


def find_function(name: str) -> Callable[..., Any]:
    """Return a function by its module and name, as ``module:name``."""
    module, _, function = name.partition(":")
    return cast(Callable[..., Any], getattr(import_module(module), function))


def _as_line(answer: bytes) -> bytes:
    """Return an answer as a line of JSON. The child is not trusted to write one."""
    with suppress(ValueError):
        return json.dumps(json.loads(answer)).encode() + b"\n"
    return b"{}\n"


def _run(reader: Callable[..., Any], arguments: dict[str, Any]) -> bytes:
    """Return the answer of a reader as JSON. Any other error of a reader ends its process."""
    try:
        answer: dict[str, Any] = {"digests": reader(**arguments)}
    except PersonalPeftError as error:
        answer = {
            "error": get_error_type(error).__name__,
            "message": error.message,
            "hint": error.hint,
        }
    return json.dumps(answer).encode()
