"""What can be set: where things lie (the home folder with what cannot be made again, the cache folder with what can), and
how much is served at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import platformdirs

from personalpeft.deprecation import accept_renamed_arguments
from personalpeft.errors import InvalidInput

HOME = "PERSONALPEFT_HOME"
CACHE = "PERSONALPEFT_CACHE"
PLUGINS = "PERSONALPEFT_PLUGINS"
VLLM = "PERSONALPEFT_VLLM_"
_APP = "personalpeft"

Observing: TypeAlias = Literal["off", "kept", "learned"]
"""What becomes of what an app sees without asking (``User.observe``): nothing, kept in the ledger, or kept and learned as a
weak rating.
"""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """Where the vLLM server is that the vLLM backend speaks to, and how.

    ``url`` is its address, with or without ``/v1``; ``token`` what it was started with (``--api-key``); ``model`` what it
    calls the base, needed where it serves several. Stacks reach it as folders: below ``folder`` here (None: in the cache
    folder), which is ``folder_there`` as the server sees it (None: the same path). With ``resolves`` the servers behind the
    address find stacks by name themselves (``plugins/vllm_resolver``), so nothing is registered with any one of them.
    ``certificate`` is a PEM file to trust besides the system's. ``timeout`` is the longest silence within an answer, and
    ``patience`` how long what is not answered is tried again, both in seconds. Raises ``InvalidInput``.
    """

    url: str
    token: str | None = field(default=None, repr=False)
    model: str | None = None
    folder: Path | None = None
    folder_there: str | None = None
    resolves: bool = False
    certificate: Path | None = None
    timeout: float = 120.0
    patience: float = 10.0

    def __post_init__(self) -> None:
        if not _is_address(self.url.strip()):
            raise InvalidInput(
                "The vLLM server's address is none: it begins with http:// or https:// and names a host.",
                hint=f"Set {VLLM}URL to something like http://127.0.0.1:8000.",
            )
        if self.token is not None and not (self.token.isascii() and self.token.isprintable()):
            raise InvalidInput(
                "The vLLM server's token has letters in it that no header can carry.",
                hint=f"Look at {VLLM}TOKEN.",
            )
        object.__setattr__(self, "url", self.url.strip().rstrip("/").removesuffix("/v1"))
        for name, least in (("timeout", 0.1), ("patience", 0.0)):
            value = getattr(self, name)
            if (
                not isinstance(value, int | float)
                or isinstance(value, bool)
                or not least <= value < 1e6
            ):
                raise InvalidInput(
                    f"{name} cannot be {value!r}.",
                    hint=f"Give a number of seconds, {least:g} or more.",
                )


@dataclass(frozen=True, slots=True)
class Settings:
    """Two absolute paths, of which neither need exist yet, and nothing here makes them; the names of the plugins that
    may be loaded (None: all that are installed); and the server that the vLLM backend speaks to, where one is named.
    """

    home: Path
    cache: Path
    plugins: tuple[str, ...] | None = None
    vllm: VllmServer | None = None


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
        slots: Adapter stacks on the device at once.
        max_batch: Replies that are generated at once.
        host_bytes: Bytes of adapter stacks that are kept in host memory.
        max_queue: Requests that may wait, of all users together.
        max_queue_per_user: Requests of one user that may wait.
        max_running_per_user: Replies of one user that are generated at once while others wait.
        self_check: Share of replies (0 to 1) that are compared with an undisturbed run.

    Raises:
        InvalidInput: A limit is below its least value.
    """

    slots: int = 32
    max_batch: int = 16
    host_bytes: int = 256 * 2**20
    max_queue: int = 256
    max_queue_per_user: int = 64
    max_running_per_user: int = 8
    self_check: float = 0.0

    def __post_init__(self) -> None:
        least = {
            "slots": 1,
            "max_batch": 1,
            "host_bytes": 0,
            "max_queue": 1,
            "max_queue_per_user": 1,
            "max_running_per_user": 1,
        }
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise InvalidInput(
                    f"{name} cannot be {value!r}.", hint=f"Give a whole number, {smallest} or more."
                )
        share = self.self_check
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise InvalidInput(
                f"self_check cannot be {share!r}.",
                hint="Give a number from 0 (never) to 1 (every reply).",
            )


def resolve(home: str | Path | None, environ: Mapping[str, str]) -> Settings:
    """The home that was asked for, else that of ``PERSONALPEFT_HOME``, else the platform's data folder; the cache of
    ``PERSONALPEFT_CACHE``, else the platform's; the plugins that ``PERSONALPEFT_PLUGINS`` names with commas between; the
    server of ``PERSONALPEFT_VLLM_URL``. An empty variable counts as unset. Touches no file. Raises ``InvalidInput``."""
    named = tuple(name.strip() for name in environ.get(PLUGINS, "").split(",") if name.strip())
    return Settings(
        home=_absolute(
            home or environ.get(HOME) or platformdirs.user_data_dir(_APP, appauthor=False)
        ),
        cache=_absolute(environ.get(CACHE) or platformdirs.user_cache_dir(_APP, appauthor=False)),
        plugins=named or None,
        vllm=_vllm(
            {
                name.removeprefix(VLLM): said
                for name, said in environ.items()
                if name.startswith(VLLM) and said
            }
        ),
    )


def _vllm(said: Mapping[str, str]) -> VllmServer | None:
    """The server that the variables after ``PERSONALPEFT_VLLM_`` describe; None without a URL."""
    if "URL" not in said:
        return None
    folder, certificate = said.get("FOLDER"), said.get("CA")
    return VllmServer(
        url=said["URL"],
        token=said.get("TOKEN"),
        model=said.get("MODEL"),
        folder=_absolute(folder) if folder else None,
        folder_there=said.get("FOLDER_THERE"),
        resolves=_switch("RESOLVES", said.get("RESOLVES", "0")),
        certificate=_absolute(certificate) if certificate else None,
        **{
            name.lower(): _seconds(name, said[name])
            for name in ("TIMEOUT", "PATIENCE")
            if name in said
        },
    )


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # Read for what it raises: a port that is no number.
        return (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and parts.port != 0
            and not parts.query
        )
    except ValueError:
        return False


def _switch(name: str, said: str) -> bool:
    if said not in ("0", "1"):
        raise InvalidInput(f"{VLLM}{name} cannot be {said!a}.", hint="Set it to 1 or 0.")
    return said == "1"


def _seconds(name: str, said: str) -> float:
    try:
        return float(said)
    except ValueError:
        raise InvalidInput(
            f"{VLLM}{name} cannot be {said!a}.", hint="Set it to a number of seconds."
        ) from None


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
