"""Read files and JSON from sources that are not trusted; write files and folders atomically.

Invariant: for any bytes, a reader returns plain finite values or raises ``AdapterError``.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from personalpeft.errors import AdapterError, InvalidInput, map_write_errors
from personalpeft.sandbox import Limits, find_function, run_reader
from personalpeft.types import canonical_json, parse_strict_json

T = TypeVar("T")

FILE_LIMIT = 8 * 2**30
DEPTH_LIMIT = 32
_DAMAGED = "The file is damaged or does not follow the format; get it again from its source."


class Fault(AdapterError):
    """What is wrong with a file, as the rest of a sentence that ``naming`` begins."""

    def __init__(self, message: str, *, hint: str = _DAMAGED) -> None:
        super().__init__(message, hint=hint)


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Raise ``AdapterError`` with the name of a file for a ``Fault`` inside."""
    try:
        yield
    except Fault as fault:
        raise AdapterError(f"{source}: {fault.message}", hint=fault.hint) from fault


def safe_repr(value: object) -> str:
    """Return an untrusted value for a message: ASCII, at most 80 characters."""
    text = ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."


def read_file(path: Path, *, limit: int = FILE_LIMIT) -> bytes:
    """Read a regular file of at most ``limit`` bytes."""
    with naming(path):
        try:
            # Checked before opening: opening a named pipe without a writer blocks.
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise Fault("is not a plain file.", hint="Give the path of a file.")
            if status.st_size > limit:
                raise Fault(f"has {status.st_size} bytes; at most {limit} are read.")
            with path.open("rb") as file:
                return file.read(status.st_size)
        except Fault:
            raise
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            hint = "Check the path and who may read it."
            raise Fault(f"cannot be read: {reason}.", hint=hint) from error


def read_untrusted(
    path: Path, parse: Callable[[bytes], T], *, limit: int = FILE_LIMIT
) -> tuple[T, str]:
    """Read a file, have a child with limits parse its bytes, and parse them here.

    Args:
        path: The file.
        parse: A function of a module. It raises ``Fault``.
        limit: The most bytes that are read.

    Returns:
        What ``parse`` returned, and the SHA-256 of the bytes.

    Raises:
        AdapterError: The file cannot be read or parsed, or the child ended without a result.
    """
    data = read_file(path, limit=limit)
    run_reader(
        f"{__name__}:parse_in_child",
        {"parser": f"{parse.__module__}:{parse.__name__}", "source": str(path)},
        Limits.for_files(len(data), memory_factor=8, bytes_a_second=1 << 22),
        source=str(path),
        error=AdapterError,
        data=data,
    )
    with naming(path):
        return parse(data), hashlib.sha256(data).hexdigest()


def parse_in_child(parser: str, source: str, data: bytes) -> Mapping[str, str]:
    """Parse bytes in a child of ``sandbox``."""
    with naming(source):
        find_function(parser)(data)
    return {}


def parse_json(data: bytes | str, *, what: str, depth: int = DEPTH_LIMIT) -> Any:
    """Parse strict JSON (RFC 8259).

    Args:
        data: The JSON; bytes are UTF-8.
        what: What the JSON is in its file, for errors.
        depth: How deep values may be nested.

    Raises:
        Fault: It is not strict JSON, has a key twice, is nested too deeply, or is no Unicode.
    """
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = parse_strict_json(text, unique_keys=True)
        _check_depth(value, depth)
        canonical_json(value).encode()  # Each text can be written as UTF-8 again.
    except UnicodeError as error:
        raise Fault(f"{what} is not UTF-8.") from error
    except RecursionError as error:
        raise Fault(f"{what} is nested too deeply.") from error
    except ValueError as error:
        raise Fault(f"{what} is not valid JSON ({error}).") from error
    return value


def parse_object(data: bytes | str, *, what: str) -> dict[str, Any]:
    """Parse a strict JSON object. Raises ``Fault`` as ``parse_json``, and if it is no object."""
    value = parse_json(data, what=what)
    if not isinstance(value, dict):
        raise Fault(f"{what} is not a JSON object.")
    return value


def _check_depth(value: Any, depth: int) -> None:
    if isinstance(value, dict | list):
        if depth == 0:
            raise ValueError("nested too deeply")
        for inner in value.values() if isinstance(value, dict) else value:
            _check_depth(inner, depth - 1)


@contextmanager
def write_folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces an empty or missing ``folder`` on success."""
    with map_write_errors(folder, hint="Choose a folder that can be written to."):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InvalidInput(
                f"{folder} is there already.",
                hint="Name a folder that does not exist yet or is empty.",
            )
        folder.parent.mkdir(parents=True, exist_ok=True)
        sibling = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            yield sibling
            if folder.exists():
                folder.rmdir()
            sibling.rename(folder)
        finally:
            shutil.rmtree(sibling, ignore_errors=True)
