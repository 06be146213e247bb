"""Settings: folders, plugins, the vLLM server and the limits of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

import platformdirs

from personalpeft.arguments import check_choice, check_number, check_path
from personalpeft.deprecation import RenamedAttributes, accept_renamed_arguments, warn_renamed
from personalpeft.errors import HomeError, InvalidInput

HOME = "PERSONALPEFT_HOME"
CACHE = "PERSONALPEFT_CACHE"
PLUGINS = "PERSONALPEFT_PLUGINS"
VLLM = "PERSONALPEFT_VLLM_"
WEIGHTS = "PERSONALPEFT_WEIGHTS"
LEARNING_DEVICE = "PERSONALPEFT_LEARNING_DEVICE"
KEYS = "PERSONALPEFT_KEYS"
PASSPHRASE = "PERSONALPEFT_PASSPHRASE"
DEFAULT_BATCH = 16
"""Replies that torch generates at once on a processor, unless a setting says otherwise."""
DEFAULT_SLOTS = 32
"""Adapter stacks on a processor at once, unless a setting says otherwise."""
_APP = "personalpeft"

ImplicitFeedback: TypeAlias = Literal["off", "kept", "learned"]
"""Use of implicit feedback (``User.record_implicit_feedback``).

``off`` ignores it, ``kept`` records it in the ledger, and ``learned`` learns from it as well.
"""

WeightsMode: TypeAlias = Literal["auto", "mapped", "loaded"]
"""Where the torch backend keeps the base's weights on a processor.

``mapped`` leaves them in the base's file, quantised as they are. ``loaded`` keeps them in memory,
which is faster. ``auto`` loads them if they fit into the free memory.
"""

LearningDevice: TypeAlias = Literal["auto", "cpu", "cuda"]
"""Where torch learns for a base that vLLM or llama.cpp serves.

``auto`` is the GPU if enough of its memory is free. Where torch serves, it learns on that device.
"""


@accept_renamed_arguments(patience="retry_seconds")
@dataclass(frozen=True, slots=True)
class VllmServer(RenamedAttributes, renamed={"patience": "retry_seconds"}):
    """The vLLM server of the vLLM backend.

    Args:
        url: The address, with or without ``/v1``.
        token: The server's ``--api-key``.
        model: The name of the base on the server; needed if it serves several.
        folder: The local path for stacks; None for the cache folder.
        folder_there: The same path as the server sees it; None if it is equal.
        resolves: Whether the servers find stacks by name (``plugins/vllm_resolver``).
        certificate: A PEM file to trust besides the system's.
        timeout: The longest silence within a response, in seconds.
        retry_seconds: How long unanswered requests are retried, in seconds.

    Raises:
        InvalidInput: A value is out of bounds.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    model: str | None = None
    folder: Path | None = None
    folder_there: str | None = None
    resolves: bool = False
    certificate: Path | None = None
    timeout: float = 120.0
    retry_seconds: float = 10.0

    def __post_init__(self) -> None:
        if not _is_address(self.url.strip()):
            raise InvalidInput(
                f"The vLLM server's address must be an http or https URL, got {self.url!a}.",
                hint=f"Set {VLLM}URL to something like http://127.0.0.1:8000.",
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidInput(
                "The vLLM server's token has letters in it that no header can carry.",
                hint=f"Look at {VLLM}TOKEN.",
            )
        object.__setattr__(self, "url", self.url.strip().rstrip("/").removesuffix("/v1"))
        check_number("timeout", self.timeout, 0.1, 1e6)
        check_number("retry_seconds", self.retry_seconds, 0, 1e6)


def _key_folder() -> Path:
    # On some platforms the folder of this program's settings is the home.
    return Path(platformdirs.user_config_dir(f"{_APP}-keys", appauthor=False))


@dataclass(frozen=True, slots=True)
class KeySettings:
    """Where the keys of encrypted homes come from.

    Args:
        folder: The folder of key files. It must not be in a home.
        passphrase: The passphrase of homes that have one.
    """

    folder: Path = field(default_factory=_key_folder)
    passphrase: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Settings:
    """Absolute paths of home and cache, allowed plugins (None: all), the vLLM server, weights, the
    device of learning, and the keys of encrypted homes.
    """

    home: Path
    cache: Path
    plugins: tuple[str, ...] | None = None
    vllm: VllmServer | None = None
    weights: WeightsMode = "auto"
    learning_device: LearningDevice = "auto"
    keys: KeySettings = field(default_factory=KeySettings)


@accept_renamed_arguments(
    rows="max_batch",
    waiting="max_queue",
    waiting_per_user="max_queue_per_user",
    running_per_user="max_running_per_user",
)
@dataclass(frozen=True, slots=True)
class Serving:
    """Limits of the engine.

    Args:
        slots: Adapter stacks on the device at once. None: 32, and on a GPU one for each reply that
            is generated at once, as far as its memory allows.
        max_batch: Replies that are generated at once. None: as many as suit the backend.
        users: Users who may ask at once, where ``max_batch`` is None. The backend "auto" is torch
            for more than two. None: as many as the home has when the model is loaded.
        host_bytes: Bytes of adapter stacks that are kept in host memory.
        max_queue: Requests that may wait, of all users together.
        max_queue_per_user: Requests of one user that may wait.
        max_running_per_user: Replies of one user that are generated at once while others wait.
        self_check: Share of replies (0 to 1) that are compared with an undisturbed run.

    Raises:
        InvalidInput: A limit is below its least value.
    """

    slots: int | None = None
    max_batch: int | None = None
    users: int | None = 1
    host_bytes: int = 256 * 2**20
    max_queue: int = 256
    max_queue_per_user: int = 64
    max_running_per_user: int = 8
    self_check: float = 0.0

    def __post_init__(self) -> None:
        for name in ("slots", "max_batch", "users"):
            if (limit := getattr(self, name)) is not None:
                check_number(name, limit, 1, whole=True)
        for name in ("max_queue", "max_queue_per_user", "max_running_per_user"):
            check_number(name, getattr(self, name), 1, whole=True)
        check_number("host_bytes", self.host_bytes, 0, whole=True)
        check_number("self_check", self.self_check, 0, 1)


def resolve(
    home: str | Path | None, environ: Mapping[str, str], passphrase: str | None = None
) -> Settings:
    """Read the settings from arguments and the environment. No file is touched.

    Args:
        home: The home; None for ``PERSONALPEFT_HOME`` or the platform's data folder.
        environ: The environment. An empty variable counts as unset.
        passphrase: The passphrase of encrypted homes; None for ``PERSONALPEFT_PASSPHRASE``.

    Raises:
        HomeError: The account has no home folder, and a path needs it.
        InvalidInput: The home is no path, a variable has no valid value, or a path is relative and
            the current folder was deleted.
    """
    if home is not None:
        home = check_path("home", home)
    named = tuple(name.strip() for name in environ.get(PLUGINS, "").split(",") if name.strip())
    try:
        return Settings(
            home=_absolute(
                home or environ.get(HOME) or platformdirs.user_data_dir(_APP, appauthor=False)
            ),
            cache=_absolute(
                environ.get(CACHE) or platformdirs.user_cache_dir(_APP, appauthor=False)
            ),
            plugins=named or None,
            weights=_one_of(WeightsMode, WEIGHTS, environ),
            learning_device=_one_of(LearningDevice, LEARNING_DEVICE, environ),
            keys=KeySettings(
                _absolute(environ.get(KEYS) or _key_folder()),
                (environ.get(PASSPHRASE) or None) if passphrase is None else passphrase,
            ),
            vllm=_vllm(
                {
                    name.removeprefix(VLLM): value
                    for name, value in environ.items()
                    if name.startswith(VLLM) and value
                }
            ),
        )
    except RuntimeError as error:
        # Of pathlib and platformdirs: no HOME, and no entry for the account.
        raise HomeError(
            f"A folder of this account is unknown: {str(error).rstrip('.')}.",
            hint=f"Set HOME, or give full paths in {HOME}, {CACHE} and {KEYS}.",
        ) from error
    except FileNotFoundError as error:
        raise InvalidInput(
            "The current folder does not exist, and a relative path needs it.",
            hint=f"Change to another folder, or give full paths in {HOME}, {CACHE} and {KEYS}.",
        ) from error


def _vllm(values: Mapping[str, str]) -> VllmServer | None:
    """Read the variables after ``PERSONALPEFT_VLLM_``; None without a URL."""
    if "URL" not in values:
        return None
    seconds = {"timeout": "TIMEOUT", "retry_seconds": "RETRY_SECONDS"}
    if "PATIENCE" in values and "RETRY_SECONDS" not in values:
        warn_renamed(f"{VLLM}PATIENCE", f"{VLLM}RETRY_SECONDS")
        seconds["retry_seconds"] = "PATIENCE"
    folder, certificate = values.get("FOLDER"), values.get("CA")
    resolves = values.get("RESOLVES", "0")
    check_choice(f"{VLLM}RESOLVES", resolves, Literal["0", "1"])
    return VllmServer(
        url=values["URL"],
        token=values.get("TOKEN"),
        model=values.get("MODEL"),
        folder=_absolute(folder) if folder else None,
        folder_there=values.get("FOLDER_THERE"),
        resolves=resolves == "1",
        certificate=_absolute(certificate) if certificate else None,
        **{
            field: _seconds(name, values[name]) for field, name in seconds.items() if name in values
        },
    )


def _one_of(literal: Any, name: str, environ: Mapping[str, str]) -> Any:
    """Return the value of a variable with a fixed set of values; the default is ``auto``."""
    value = environ.get(name) or "auto"
    check_choice(name, value, literal)
    return value


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Reading the port raises ValueError if it is not a number.
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.query
        )
    except ValueError:
        return False


def _seconds(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InvalidInput(
            f"{VLLM}{name} must be a number of seconds, got {value!a}.",
            hint="Give a number, such as 60.",
        ) from None


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
