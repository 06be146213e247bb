"""The keys by which a home signs certificates and names what they are about.

They lie in ``certificate-keys.json``, readable by the owner alone. The file is made once and never
changes. Backups have it too, so a restored home proves what the former one certified.

- The signing key is an Ed25519 seed.
- The naming key makes an HMAC-SHA256 of each item. With it the home can prove later which item a
  certificate is about. Without it nobody can test a guess.
"""

from __future__ import annotations

import hmac
import json
from dataclasses import dataclass

from personalpeft import file_system
from personalpeft.errors import Damaged
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.store import Store

CERTIFICATE_KEYS = "certificate-keys.json"
_BYTES = 32


@dataclass(frozen=True, slots=True, repr=False)
class CertificateKeys:
    """The two secret keys of a home."""

    signing: bytes
    naming: bytes

    def name(self, *parts: str) -> str:
        """Return the HMAC of something, in hex. ``parts`` say what it is."""
        data = "".join(f"{len(part)}:{part}" for part in parts).encode()
        return hmac.digest(self.naming, data, "sha256").hex()


def has_certificate_keys(store: Store) -> bool:
    """Return whether a home has keys: it made a certificate, or has begun one."""
    return (store.home / CERTIFICATE_KEYS).exists()


def load_certificate_keys(store: Store) -> CertificateKeys:
    """Return the keys of a home, made on first use. Raises ``Damaged``, ``HomeError``."""
    home, cipher = store.home, store.cipher
    path = home / CERTIFICATE_KEYS
    if not path.exists():
        with store.database.write_lock(), map_home_errors(home):
            # Another process may have made them meanwhile.
            if not path.exists():
                new = {name: store.entropy(_BYTES).hex() for name in ("signing", "naming")}
                cipher.write_file(path, json.dumps(new).encode())
                file_system.sync_folder(home)
    try:
        with map_home_errors(home):
            values = json.loads(cipher.read_file(path))
        keys = {name: bytes.fromhex(values[name]) for name in ("signing", "naming")}
        if any(len(key) != _BYTES for key in keys.values()):
            raise ValueError("a key has a wrong length")
    except (Damaged, ValueError, TypeError, KeyError) as error:
        raise Damaged(
            f"{path} holds no keys of certificates.",
            hint="Restore the file from a backup. Or move it away, and the home makes new keys.",
        ) from error
    return CertificateKeys(**keys)
