"""Settings of a vLLM server: where stacks are, and where copies are cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PREFIX = "PERSONALPEFT_RESOLVER_"
UNSET_MESSAGE = f"set {PREFIX}FOLDER, {PREFIX}BUCKET or {PREFIX}URL to find stacks"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings.

    Attributes:
        folder: The folder of stacks: PERSONALPEFT_VLLM_FOLDER of the programs, as seen here.
        bucket: An address in object storage.
        url: The address of a personalpeft server.
        token: An API key of that server for workers.
        certificate: A PEM file to trust besides the system's.
        timeout: Seconds that a source may take for a file.
        cache: The folder of the copies; None for a temporary folder of this user.
        cache_bytes: The most bytes of copies in each process.
    """

    folder: Path | None
    bucket: str | None = field(repr=False)
    url: str | None
    token: str = field(repr=False)
    certificate: Path | None
    timeout: float
    cache: Path | None
    cache_bytes: int


def read_settings(environ: Mapping[str, str]) -> Settings | None:
    """Return the settings from ``PERSONALPEFT_RESOLVER_*``; None without a source of stacks.

    An empty variable counts as unset. Raises ``ValueError``, which never contains an API key.
    """
    values = {
        name.removeprefix(PREFIX): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and value
    }
    if not values.keys() & {"FOLDER", "BUCKET", "URL"}:
        return None
    if "BUCKET" in values:
        _check_bucket(values["BUCKET"])
    url, token = values.get("URL"), values.get("TOKEN", "")
    if url is not None:
        parts = urlsplit(url)
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.query
            or parts.username
        ):
            raise ValueError(f"{PREFIX}URL must be https://HOST:PORT without a password.")
        # http.client would show an invalid header in its error.
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError(
                f"{PREFIX}TOKEN must be an API key of the server at {PREFIX}URL; "
                "make one with: personalpeft api-key make --worker"
            )
    return Settings(
        folder=_path(values.get("FOLDER")),
        bucket=values.get("BUCKET"),
        url=None if url is None else url.rstrip("/"),
        token=token,
        certificate=_path(values.get("CA")),
        timeout=_number("TIMEOUT", values.get("TIMEOUT", "60")),
        cache=_path(values.get("CACHE")),
        cache_bytes=int(_number("CACHE_BYTES", values.get("CACHE_BYTES", str(16 * 2**30)))),
    )


def _check_bucket(address: str) -> None:
    try:
        parts = urlsplit(address)
    except ValueError:
        parts = urlsplit("")
    if (
        not parts.scheme
        or not (parts.netloc or parts.path.startswith("/"))
        or parts.password is not None
    ):
        raise ValueError(
            f"{PREFIX}BUCKET must be s3://BUCKET/PREFIX (or gs, abfs, file) without a password; "
            "set credentials in the storage's own variables."
        )


def _path(value: str | None) -> Path | None:
    return None if value is None else Path(value).expanduser().absolute()


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < 1e18:
        raise ValueError(f"{PREFIX}{name} must be a number above 0, got {text!a}.")
    return value
