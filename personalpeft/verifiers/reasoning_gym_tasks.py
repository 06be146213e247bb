"""Data sets of reasoning-gym, and the reader that makes their tasks in a child process.

It is a module of its own because it imports the package: ``sandbox.py`` imports readers once, and a
child of it then takes milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import reasoning_gym

from personalpeft.errors import InvalidInput


def create_dataset(name: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Return the data set of a family.

    Raises:
        InvalidInput: The package refuses the settings.
    """
    try:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)
    except (TypeError, ValueError, AssertionError) as error:
        raise InvalidInput(
            f"The family {name} cannot be made so: {error}",
            hint="Settings look like max_terms=2.",
        ) from error


def make_tasks(name: str, settings: Mapping[str, Any], seed: int, size: int) -> Mapping[str, str]:
    """Make the tasks of a family and drop them. A reader for ``run_reader``.

    Raises:
        InvalidInput: The package refuses the settings.
    """
    return {name: str(sum(1 for _ in create_dataset(name, settings, seed=seed, size=size)))}
