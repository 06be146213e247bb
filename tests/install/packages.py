"""List the packages of the environment whose Python runs this, as JSON."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path


def packages() -> dict[str, float]:
    """Return each installed package and the size of its files in MB."""
    sizes = {}
    for package in metadata.distributions():
        files = [Path(str(file.locate())) for file in package.files or ()]
        size = sum(file.stat().st_size for file in files if file.is_file())
        sizes[package.name.lower().replace("_", "-")] = size / 1e6
    return sizes


if __name__ == "__main__":
    print(json.dumps(packages()))
