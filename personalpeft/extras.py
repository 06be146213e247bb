"""Optional packages, and the extras of this distribution that install them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec

from personalpeft.errors import MissingPackage

_EXTRAS: Mapping[str, str] = {
    "llama_cpp": "llamacpp",
    "llama-cpp-python": "llamacpp",  # Named so where its version is read before it is imported.
    "httpx2": "vllm",
    "cryptography": "certificates",
    "keyring": "encryption",
    "sqlcipher3": "encryption",
    "flask": "serve",
    "cheroot": "serve",
    "prometheus_client": "serve",
    "textual": "tui",
    "markdown_it": "tui",
    "apscheduler": "daemon",
    "tzlocal": "daemon",
    "phonenumbers": "scrub",
    "stdnum": "scrub",
}


def available_extras() -> dict[str, bool]:
    """Return for each extra whether its packages are installed."""
    missing = {
        extra for name, extra in _EXTRAS.items() if name.isidentifier() and find_spec(name) is None
    }
    return {extra: extra not in missing for extra in _EXTRAS.values()}


@contextmanager
def extra_required() -> Iterator[None]:
    """Raise ``MissingPackage``, which names the extra, if an import inside finds no package."""
    try:
        yield
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise MissingPackage(
            f"This needs the package {error.name}, which is not installed.",
            hint=f"Install it: pip install 'personalpeft[{extra}]'",
        ) from error
