"""Where things lie: the home folder with what cannot be made again, and the cache folder with what can."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

HOME = "PERSONALPEFT_HOME"
CACHE = "PERSONALPEFT_CACHE"
_APP = "personalpeft"


@dataclass(frozen=True, slots=True)
class Settings:
    """Two absolute paths. Neither need exist yet, and nothing here makes them."""

    home: Path
    cache: Path


def resolve(home: str | Path | None, environ: Mapping[str, str]) -> Settings:
    """The home that was asked for, else that of ``PERSONALPEFT_HOME``, else the platform's data folder; the cache of
    ``PERSONALPEFT_CACHE``, else the platform's. An empty variable counts as unset. Touches no file."""
    return Settings(
        home=_absolute(home or environ.get(HOME) or platformdirs.user_data_dir(_APP, appauthor=False)),
        cache=_absolute(environ.get(CACHE) or platformdirs.user_cache_dir(_APP, appauthor=False)),
    )


def _absolute(path: str | Path) -> Path:
    return Path(path).expanduser().absolute()
