"""What the environment of a vLLM server says of where stacks are and where they go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PREFIX = "PERSONALPEFT_RESOLVER_"
NEEDED = f"set {PREFIX}FOLDER, {PREFIX}BUCKET or {PREFIX}URL to where they are"


@dataclass(frozen=True, slots=True)
class Settings:
    """``folder`` is the place below which programs have their stacks (their PERSONALPEFT_VLLM_FOLDER, as it is seen here).
    ``bucket`` is an address in object storage. ``url`` is the address of a personalpeft server, ``token`` one that it made for
    workers, ``certificate`` a PEM file to trust besides the system's. ``timeout`` is how long either may take over a file, in
    seconds. Copies lie below ``cache`` (None: a folder of this user among the temporary ones), at most ``cache_bytes`` for each
    process.
    """

    folder: Path | None
    bucket: str | None = field(repr=False)
    url: str | None
    token: str = field(repr=False)
    certificate: Path | None
    timeout: float
    cache: Path | None
    cache_bytes: int


def read(environ: Mapping[str, str]) -> Settings | None:
    """What the variables after ``PERSONALPEFT_RESOLVER_`` say; None where they name neither a folder, a bucket nor a server. An empty
    one counts as unset. Raises ``ValueError``, which never repeats a token.
    """
    said = {
        name.removeprefix(PREFIX): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value
    }
    if not said.keys() & {"FOLDER", "BUCKET", "URL"}:
        return None
    if "BUCKET" in said:
        _check_bucket(said["BUCKET"])
    url, token = said.get("URL"), said.get("TOKEN", "")
    if url is not None:
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.username
        ):
            raise ValueError(f"{PREFIX}URL is no address: give https://HOST:PORT, and no password.")
        # http.client would repeat a header that it refuses.
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"{PREFIX}URL needs a token of that server in {PREFIX}TOKEN: personalpeft token make --worker."
            )
    return Settings(
        folder=_path(said.get("FOLDER")),
        bucket=said.get("BUCKET"),
        url=None if url is None else url.rstrip("/"),
        token=token,
        certificate=_path(said.get("CA")),
        timeout=_number("TIMEOUT", said.get("TIMEOUT", "60")),
        cache=_path(said.get("CACHE")),
        cache_bytes=int(_number("CACHE_BYTES", said.get("CACHE_BYTES", str(16 * 2**30)))),
    )


def _check_bucket(said: str) -> None:
    try:
        parts = urlsplit(said)
    except ValueError:
        parts = urlsplit("")
    if (
        not parts.scheme
        or not (parts.netloc or parts.path.startswith("/"))
        or parts.password is not None
    ):
        raise ValueError(
            f"{PREFIX}BUCKET is no address: give s3://BUCKET/PREFIX (or gs, abfs, file), and no password; who may read is said "
            "by the storage's own variables."
        )


def _path(said: str | None) -> Path | None:
    return None if said is None else Path(said).expanduser().absolute()


def _number(name: str, said: str) -> float:
    try:
        value = float(said)
    except ValueError:
        value = 0
    if not 0 < value < 1e18:
        raise ValueError(f"{PREFIX}{name} is {said!a}, which is no number above 0.")
    return value
