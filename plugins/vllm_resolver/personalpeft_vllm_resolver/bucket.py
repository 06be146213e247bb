"""Copies in object storage, read through pyarrow: ``<address>/<digest>/<file>``.

pyarrow and what it loads for a kind of storage are imported when the first stack is looked for: most of vLLM's processes never do, and
a process that has threads of it should fork no other.

Invariants as in ``sources``. Who may read is said by the storage's own variables and files, never here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from queue import Empty, Queue
from typing import Any
from urllib.parse import urlsplit

from personalpeft_vllm_resolver.sources import CHUNK, Copy, Missing, Unfit


class Bucket:
    """A place in object storage, or a mounted one, by an address that pyarrow knows: s3, gs, abfs, file. ``timeout`` is how long a
    file may take, in seconds. Raises ``ValueError`` where pyarrow is not installed.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        if find_spec("pyarrow") is None:
            raise ValueError(
                "stacks in a bucket are read with pyarrow, which is not here: pip install pyarrow"
            )
        parts = urlsplit(uri)
        # What stands behind a question mark may be secret.
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._uri, self._timeout = uri, timeout
        self._turn = threading.Lock()
        self._found: tuple[Any, str] | None = None

    def copies(self, digest: str) -> Iterable[Copy]:
        return [_Object(self, digest)]

    def read(self, digest: str, file: str) -> Generator[bytes]:
        """See ``Copy.read``."""
        # One thing at a time goes through it: a part, the error that ends it, or None at the end.
        parts: Queue[bytes | Exception | None] = Queue(1)
        given_up = threading.Event()

        def pull() -> None:
            try:
                for part in self._parts(f"{digest}/{file}"):
                    parts.put(part)
                    if given_up.is_set():
                        return
                parts.put(None)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where it is waited for
                parts.put(error)

        # Storage that says nothing is asked again and again by its library, which nobody can stop, for minutes.
        threading.Thread(target=pull, name="personalpeft-bucket", daemon=True).start()
        ends = time.monotonic() + self._timeout
        try:
            while (part := parts.get(timeout=max(0.0, ends - time.monotonic()))) is not None:
                if isinstance(part, Exception):
                    raise part
                yield part
        except Empty:
            raise Unfit(f"it took longer than {self._timeout:g} s over a file") from None
        finally:
            given_up.set()
            with suppress(Empty):
                parts.get_nowait()

    def _parts(self, path: str) -> Generator[bytes]:
        import pyarrow
        from pyarrow.fs import FileType

        try:
            storage, root = self._opened()
            (found,) = storage.get_file_info([f"{root}/{path}"])
            if found.type == FileType.NotFound:
                raise Missing(f"{path} is not there")
            # A pipe of a mounted one would never end.
            if found.type != FileType.File:
                raise Unfit(f"{path} is no plain file")
            with storage.open_input_stream(found.path, compression=None) as opened:
                while chunk := opened.read(CHUNK):
                    yield chunk
        except FileNotFoundError as error:
            raise Missing(f"{path} is not there any more") from error
        except pyarrow.ArrowException as error:
            # Its words may hold the whole address.
            raise Unfit(f"it cannot be opened as a bucket ({type(error).__name__})") from error

    def _opened(self) -> tuple[Any, str]:
        from pyarrow.fs import FileSystem

        with self._turn:
            if self._found is None:
                storage, root = FileSystem.from_uri(self._uri)
                self._found = storage, root.rstrip("/")
            return self._found


@dataclass(frozen=True, slots=True)
class _Object:
    bucket: Bucket
    digest: str

    def __str__(self) -> str:
        return self.bucket.name

    def read(self, file: str) -> Generator[bytes]:
        return self.bucket.read(self.digest, file)
