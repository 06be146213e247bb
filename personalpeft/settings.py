"""What can be set: where things lie (the home folder with what cannot be made again, the cache folder with what can), and
how much is served at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import platformdirs

from personalpeft.errors import InvalidInput

HOME = "PERSONALPEFT_HOME"
CACHE = "PERSONALPEFT_CACHE"
PLUGINS = "PERSONALPEFT_PLUGINS"
_APP = "personalpeft"

Observing: TypeAlias = Literal["off", "kept", "learned"]
"""What becomes of what an app sees without asking (``User.observe``): nothing, kept in the ledger, or kept and learned as a
weak rating.
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """Two absolute paths, of which neither need exist yet, and nothing here makes them; and the names of the plugins that
    may be loaded (None: all that are installed).
    """

    home: Path
    cache: Path
    plugins: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Serving:
    """How much is served at once, and how much may wait.

    ``slots`` stacks are on the device at once and ``rows`` replies are written at once. ``host_bytes`` of stacks that had
    to leave their slot stay in host memory. ``waiting`` requests may wait, ``waiting_per_user`` of them one user's, and
    while others wait one user has at most ``running_per_user`` rows. ``self_check`` is the share of replies (0 to 1)
    that are compared with a cold run afterwards. Raises ``InvalidInput``.
    """

    slots: int = 32
    rows: int = 16
    host_bytes: int = 256 * 2**20
    waiting: int = 256
    waiting_per_user: int = 64
    running_per_user: int = 8
    self_check: float = 0.0

    def __post_init__(self) -> None:
        least = {"slots": 1, "rows": 1, "host_bytes": 0, "waiting": 1, "waiting_per_user": 1, "running_per_user": 1}
        for name, smallest in least.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise InvalidInput(f"{name} cannot be {value!r}.", hint=f"Give a whole number, {smallest} or more.")
        share = self.self_check
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise InvalidInput(
                f"self_check cannot be {share!r}.", hint="Give a number from 0 (never) to 1 (every reply)."
            )


def resolve(home: str | Path | None, environ: Mapping[str, str]) -> Settings:
    """The home that was asked for, else that of ``PERSONALPEFT_HOME``, else the platform's data folder; the cache of
    ``PERSONALPEFT_CACHE``, else the platform's; the plugins that ``PERSONALPEFT_PLUGINS`` names with commas between. An
    empty variable counts as unset. Touches no file."""
    named = tuple(name.strip() for name in environ.get(PLUGINS, "").split(",") if name.strip())
    return Settings(
        home=_absolute(home or environ.get(HOME) or platformdirs.user_data_dir(_APP, appauthor=False)),
        cache=_absolute(environ.get(CACHE) or platformdirs.user_cache_dir(_APP, appauthor=False)),
        plugins=named or None,
    )


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
