"""Certificates of erasure: signed statements of what a home forgot, without the words of it.

A certificate is JSON: ``statement``, ``public_key`` and ``signature`` (hex). The signature is
Ed25519 (RFC 8032) over a prefix and the canonical JSON of the statement. Anyone can check it without
the home. It proves that the holder of the key made the statement, and that nothing was changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from jinja2 import Environment, StrictUndefined, Template, TemplateError
from pydantic import ConfigDict, Field, TypeAdapter, with_config

from personalpeft.arguments import check_path
from personalpeft.errors import Damaged, HomeError, InvalidInput, NotFound, map_write_errors
from personalpeft.extras import extra_required
from personalpeft.types import Json, canonical_json, parse_strict_json

FORMAT = "personalpeft.certificate"
VERSION = 1
_PREFIX = b"personalpeft.certificate.v1\n"
_MAX_BYTES = 64 << 20
_KEY = "[0-9a-f]{64}"


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class Certificate:
    """A signed certificate. docs/explanation/certificate.md describes the statement.

    Attributes:
        statement: What the home states.
        public_key: The home's Ed25519 key, 64 hex digits.
        signature: The signature, 128 hex digits.
    """

    statement: Mapping[str, Any]
    public_key: Annotated[str, Field(pattern=f"^{_KEY}$")]
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]

    def to_json(self) -> str:
        """Return the certificate as JSON, as ``verify_certificate`` reads it."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    def to_markdown(self) -> str:
        """Return a page that a person can read."""
        keys = {"public_key": self.public_key, "signature": self.signature}
        return _page().render({**self.statement, **keys})

    def write(self, file: str | Path) -> tuple[Path, Path]:
        """Write the JSON and, beside it, the page with the suffix ``.md``; return both paths.

        Raises:
            InvalidInput: A file is there already, or the folder cannot be written.
        """
        paths = check_certificate_path(file)
        for path, text in zip(paths, (self.to_json(), self.to_markdown()), strict=True):
            hint = "Name a new file in a folder that you can write."
            with map_write_errors(path, hint=hint), path.open("x", encoding="utf-8") as out:
                out.write(text)
        return paths


@cache
def _page() -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    text = (resources.files(__package__) / "certificate.md.jinja").read_text("utf-8")
    return environment.from_string(text)


def check_certificate_path(file: str | Path) -> tuple[Path, Path]:
    """Return the paths of the JSON and of the page, if both can be written.

    Raises:
        InvalidInput: A file is there already, or there is no such folder.
    """
    path = check_path("file", file)
    path = path if path.suffix == ".json" else path.with_name(f"{path.name}.json")
    paths = path, path.with_suffix(".md")
    if not path.parent.is_dir():
        raise InvalidInput(f"There is no folder {path.parent}.", hint="Create it first.")
    for each in paths:
        if each.exists() or each.is_symlink():
            raise InvalidInput(f"{each} exists.", hint="Name a new file for the certificate.")
    return paths


def require_signing() -> ModuleType:
    """Return the module that signs. Raises ``MissingPackage`` if it is not installed."""
    with extra_required():
        from cryptography.hazmat.primitives.asymmetric import ed25519
    return ed25519


def sign_statement(statement: Json, seed: bytes) -> Certificate:
    """Return a statement signed by the key of a home.

    Raises:
        MissingPackage: The package cryptography is not installed.
    """
    key = require_signing().Ed25519PrivateKey.from_private_bytes(seed)
    signature = key.sign(_PREFIX + canonical_json(statement).encode())
    return Certificate(statement, public_key_of(seed), signature.hex())


def public_key_of(seed: bytes) -> str:
    """Return the public key of a home as a certificate has it. Raises ``MissingPackage``."""
    key = require_signing().Ed25519PrivateKey.from_private_bytes(seed)
    return str(key.public_key().public_bytes_raw().hex())


def verify_certificate(file: str | Path, *, key: str | None = None) -> Certificate:
    """Check a certificate, and return it. No home is opened.

    Without ``key`` it proves only that nothing was changed since the holder of the key in it signed
    it. To know that this is your home's key, compare it with one that you got another way.

    Args:
        file: The JSON.
        key: The public key that must have signed it: 64 hex digits.

    Raises:
        NotFound: There is no such file.
        InvalidInput: The file is no certificate, or the key is no key.
        Damaged: The signature is wrong, or another key signed it.
        MissingPackage: The package cryptography is not installed.
    """
    ed25519 = require_signing()
    from cryptography.exceptions import InvalidSignature

    path = check_path("file", file)
    certificate, signed = _read(path)
    wanted = certificate.public_key if key is None else key.strip().lower()
    if re.fullmatch(_KEY, wanted) is None:
        raise InvalidInput(
            "The key must be 64 hex digits.", hint="Copy public_key from a certificate."
        )
    if wanted != certificate.public_key:
        raise Damaged(
            f"The certificate was signed by another key: {certificate.public_key}.",
            hint="Ask the home that is to have signed it.",
        )
    try:
        public_key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(wanted))
        public_key.verify(bytes.fromhex(certificate.signature), signed)
    except (InvalidSignature, ValueError) as error:
        raise Damaged(
            "The signature does not fit: the certificate was changed.",
            hint="Get the file again from its source.",
        ) from error
    _check_statement(certificate, path)
    return certificate


def _check_statement(certificate: Certificate, path: Path) -> None:
    """Raise ``InvalidInput`` for a statement that is signed but has not the keys of one."""
    try:
        certificate.to_markdown()
        names = [(item["id"], *item["names"]) for item in certificate.statement["items"]]
    except (TemplateError, LookupError, TypeError, AttributeError, ValueError) as error:
        raise _no_certificate(path) from error
    if not all(isinstance(text, str) for each in names for text in each):
        raise _no_certificate(path)


def _read(path: Path) -> tuple[Certificate, bytes]:
    """Return the certificate in a file, and the bytes that it says were signed."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _no_certificate(path)
        parsed = parse_strict_json(data.decode("utf-8"), unique_keys=True)
        certificate = TypeAdapter(Certificate).validate_python(parsed)
        signed = _PREFIX + canonical_json(certificate.statement).encode()
        if certificate.statement["format"] != FORMAT:
            raise _no_certificate(path)
        version = certificate.statement["version"]
    except FileNotFoundError as error:
        raise NotFound(f"There is no file {path}.", hint="Check the path.") from error
    except (ValueError, RecursionError, KeyError) as error:
        raise _no_certificate(path) from error
    except OSError as error:
        raise HomeError(
            f"{path} cannot be read: {error.strerror or error}.", hint="Check the path."
        ) from error
    if version != VERSION:
        raise InvalidInput(
            f"The certificate has version {version!a:.20}; this program reads {VERSION}.",
            hint="Install a newer version of personalpeft.",
        )
    return certificate, signed


def _no_certificate(path: Path) -> InvalidInput:
    return InvalidInput(
        f"{path} is no certificate of this program.",
        hint="Name the JSON file, and not the page beside it.",
    )
