"""Copies in object storage, read through pyarrow: ``<address>/<digest>/<file>``.

pyarrow is imported with the first read. Most processes of vLLM never read, and a process with
pyarrow's threads should not fork. Credentials come from the storage's own variables and files.

Invariants: see ``sources``.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from personalpeft_vllm_resolver.sources import CHUNK, Copy, InvalidCopy, MissingCopy, read_within


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
        # With a limit, since the storage library retries for minutes.
        return [
            Copy(
                self.name,
                lambda file: read_within(self._timeout, self._parts(f"{digest}/{file}")),
            )
        ]

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
