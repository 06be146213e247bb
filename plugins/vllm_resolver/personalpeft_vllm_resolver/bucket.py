"""Copies in object storage, read through pyarrow: ``<address>/<digest>/<file>``.

pyarrow is imported with the first read: most processes of vLLM never read, and a process with
pyarrow's threads should not fork. Credentials come from the storage's own variables and files.

Invariants: see ``sources``.
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

from personalpeft_vllm_resolver.sources import CHUNK, Copy, InvalidCopy, MissingCopy


class Bucket:
    """A place in object storage by pyarrow's address: s3, gs, abfs or file.

    ``timeout`` is in seconds for each file. Raises ``ValueError`` without pyarrow.
    """

    def __init__(self, uri: str, timeout: float) -> None:
        if find_spec("pyarrow") is None:
            raise ValueError("stacks in a bucket need pyarrow: pip install pyarrow")
        parts = urlsplit(uri)
        # The query may contain secrets.
        self.name = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._uri, self._timeout = uri, timeout
        self._lock = threading.Lock()
        self._filesystem: tuple[Any, str] | None = None

    def copies(self, digest: str) -> Iterable[Copy]:
        return [_BucketCopy(self, digest)]

    def read(self, digest: str, file: str) -> Generator[bytes]:
        """See ``Copy.read``."""
        # A part, the error that ends the read, or None at the end.
        parts: Queue[bytes | Exception | None] = Queue(1)
        cancelled = threading.Event()

        def read_parts() -> None:
            try:
                for part in self._parts(f"{digest}/{file}"):
                    parts.put(part)
                    if cancelled.is_set():
                        return
                parts.put(None)
            except Exception as error:  # noqa: BLE001 - it is raised in the reading thread
                parts.put(error)

        # In a thread: the storage library retries for minutes, and cannot be stopped.
        threading.Thread(target=read_parts, name="personalpeft-bucket", daemon=True).start()
        deadline = time.monotonic() + self._timeout
        try:
            while (part := parts.get(timeout=max(0.0, deadline - time.monotonic()))) is not None:
                if isinstance(part, Exception):
                    raise part
                yield part
        except Empty:
            raise InvalidCopy(f"a file took longer than {self._timeout:g} s") from None
        finally:
            cancelled.set()
            with suppress(Empty):
                parts.get_nowait()

    def _parts(self, path: str) -> Generator[bytes]:
        import pyarrow
        from pyarrow.fs import FileType

        try:
            storage, root = self._open()
            (found,) = storage.get_file_info([f"{root}/{path}"])
            if found.type == FileType.NotFound:
                raise MissingCopy(f"{path} does not exist")
            # A pipe in a mounted folder would never end.
            if found.type != FileType.File:
                raise InvalidCopy(f"{path} must be a plain file")
            with storage.open_input_stream(found.path, compression=None) as opened:
                while chunk := opened.read(CHUNK):
                    yield chunk
        except FileNotFoundError as error:
            raise MissingCopy(f"{path} was deleted") from error
        except pyarrow.ArrowException as error:
            # Its text may contain the whole address.
            raise InvalidCopy(f"the bucket cannot be opened ({type(error).__name__})") from error

    def _open(self) -> tuple[Any, str]:
        from pyarrow.fs import FileSystem

        with self._lock:
            if self._filesystem is None:
                storage, root = FileSystem.from_uri(self._uri)
                self._filesystem = storage, root.rstrip("/")
            return self._filesystem


@dataclass(frozen=True, slots=True)
class _BucketCopy:
    bucket: Bucket
    digest: str

    def __str__(self) -> str:
        return self.bucket.name

    def read(self, file: str) -> Generator[bytes]:
        return self.bucket.read(self.digest, file)
