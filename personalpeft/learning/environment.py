"""Describe what a build's bytes depend on beside its inputs: the processor and the libraries.

Equal inputs give equal bytes on one kind of processor, with the same versions of libraries. A
revision's scores record this description. So a rebuild elsewhere can tell why its bytes differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from personalpeft.backends.base import Backend
from personalpeft.backends.processor import instruction_sets
from personalpeft.learning.train.config import BUILD_FORMAT

ENVIRONMENT = "environment"
"""Key in a revision's scores."""

_PACKAGES = ("personalpeft", "numpy", "tokenizers", "torch", "transformers")


def describe_environment(backend: Backend) -> dict[str, str]:
    """Return the environment of builds on a backend, as a revision's scores record it."""
    return {"backend": f"{backend.name}: {backend.description}", **describe_installation()}


def describe_installation() -> dict[str, str]:
    """Return the part of the environment that is known without a model."""
    instructions = hashlib.sha256(instruction_sets().encode()).hexdigest()[:12]
    return {
        "build format": str(BUILD_FORMAT),
        "instruction sets": instructions,
        **{name: _version(name) for name in _PACKAGES},
    }


def recorded_environment(scores: Mapping[str, object]) -> dict[str, str]:
    """Return the environment in a revision's scores. Earlier versions recorded none."""
    recorded = scores.get(ENVIRONMENT)
    return {str(k): str(v) for k, v in recorded.items()} if isinstance(recorded, Mapping) else {}


@cache
def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
