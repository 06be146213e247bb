"""Who may ask a server of this home: secrets, each of one user, of administration, or of workers that serve its stacks elsewhere.

Invariants: the file ``token`` holds the first secret of administration as text, so that programs of the same account can
read it; of every other secret only a digest is kept, and it is shown once. A secret that was revoked is nobody's from the
next request on, in every process. Both files can be read by their owner alone. A new or revoked secret survives a power cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TypeAlias

from personalpeft.errors import HomeError, InvalidInput, NotFound, nearest
from personalpeft.ids import check_user_id
from personalpeft.store import error_mapping
from personalpeft.store.blobs import replace_file, sync_folder

FIRST = "token"
OTHERS = "tokens.json"
_PREFIX = "pp_"
_BYTES = 32
_ID = 12
# Longer than any secret of ours; what is longer is not even hashed.
_LONGEST = 256

_Seen: TypeAlias = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One secret, by the beginning of its SHA-256. ``user`` is whose it is; None: administration, which may do
    everything for everybody, or a ``worker``, which may fetch the stacks that are served or published and nothing else.
    """

    id: str
    user: str | None
    at: str
    worker: bool = False


class Tokens:
    """The secrets of one home. Safe to use from several threads and processes."""

    def __init__(
        self,
        home: Path,
        *,
        now: Callable[[], datetime],
        entropy: Callable[[int], bytes],
        lease: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._home = home
        self._now = now
        self._entropy = entropy
        self._lease = lease
        self._turn = threading.Lock()
        self._seen: _Seen | None = None
        self._by_digest: dict[str, Token] = {}
        self._sessions: dict[str, Token] = {}

    @property
    def first(self) -> Path:
        """Where the first secret of administration lies, or will lie."""
        return self._home / FIRST

    def ensure_first(self) -> bool:
        """Makes the file ``token`` where there is none; whether it did. Raises ``HomeError``."""
        with error_mapping.home_faults(self._home):
            if self.first.exists():
                return False
            part = self._home / f".{FIRST}-{self._entropy(6).hex()}.part"
            try:
                replace_file(part, f"{self._secret()}\n".encode())
                # Two servers that start at once must agree on one secret: whoever is second finds the name taken.
                os.link(part, self.first)
            except FileExistsError:
                return False
            finally:
                part.unlink(missing_ok=True)
            sync_folder(self._home)
            return True

    def make(self, user: str | None, *, worker: bool = False) -> tuple[Token, str]:
        """A new secret of a user, or without one of administration or of a ``worker``: what is kept of it, and itself, which is
        nowhere else. Raises ``InvalidId``, ``InvalidInput``, ``HomeError``, ``Busy``.
        """
        if worker and user is not None:
            raise InvalidInput(
                "A worker serves everybody's stacks.", hint="Name no user for its token."
            )
        if user is not None:
            check_user_id(user)
        secret = self._secret()
        digest = _digest(secret)
        token = Token(digest[:_ID], user, self._now().isoformat(timespec="seconds"), worker)
        with self._changing() as known:
            known[digest] = token
        return token, secret

    def make_session(self, user: str) -> str:
        """Return a new secret of a user that is in no file and ends with this process. Raises ``InvalidId``."""
        check_user_id(user)
        secret = self._secret()
        digest = _digest(secret)
        with self._turn:
            self._sessions[digest] = Token(
                digest[:_ID], user, self._now().isoformat(timespec="seconds")
            )
        return secret

    def revoke(self, token_id: str) -> Token:
        """Ends a secret that ``make`` made, by its id or the beginning of it. Raises ``NotFound``, ``InvalidInput``,
        ``HomeError``, ``Busy``.
        """
        with self._changing() as known:
            found = [
                digest
                for digest, token in known.items()
                if token_id and token.id.startswith(token_id)
            ]
            if len(found) > 1:
                raise InvalidInput(
                    f"{len(found)} tokens begin with {token_id!a}.", hint="Give more of the id."
                )
            if not found:
                ids = [token.id for token in known.values()]
                raise NotFound(
                    f"There is no token {token_id[:64]!a}.",
                    hint=nearest(token_id, ids, what="token"),
                )
            return known.pop(found[0])

    def known(self) -> tuple[Token, ...]:
        """Every secret that ``make`` made and nobody revoked, oldest first. Raises ``HomeError``."""
        return tuple(self._read_others().values())

    def holder(self, secret: str) -> Token | None:
        """Whose secret that is; None where it is nobody's. Raises ``HomeError``."""
        if not secret or len(secret) > _LONGEST:
            return None
        with self._turn:
            seen = tuple(_state(self._home / name) for name in (FIRST, OTHERS))
            if seen != self._seen:
                self._by_digest = {**self._read_first(), **self._read_others()}
                self._seen = seen
            # Looked up by digest: how long that takes says nothing about the secrets.
            digest = _digest(secret)
            return self._by_digest.get(digest) or self._sessions.get(digest)

    def _secret(self) -> str:
        return _PREFIX + self._entropy(_BYTES).hex()

    def _read_first(self) -> dict[str, Token]:
        text = self._read(FIRST).strip()
        return {_digest(text): Token(_digest(text)[:_ID], None, "")} if text else {}

    def _read_others(self) -> dict[str, Token]:
        text = self._read(OTHERS)
        try:
            kept = json.loads(text or "{}")
            return {str(digest): Token(**token) for digest, token in kept.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise HomeError(
                f"{self._home / OTHERS} is damaged.", hint="Take it away and make the tokens anew."
            ) from error

    def _read(self, name: str) -> str:
        path = self._home / name
        with error_mapping.home_faults(self._home), suppress(FileNotFoundError):
            if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise HomeError(f"Others can read {path}.", hint=f"Run: chmod 600 {path}")
            return path.read_text("utf-8", "replace")
        return ""

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Token]]:
        with self._lease("tokens"):
            known = self._read_others()
            yield known
            kept = {digest: asdict(token) for digest, token in known.items()}
            with error_mapping.home_faults(self._home):
                replace_file(self._home / OTHERS, json.dumps(kept, indent=1).encode())
                # Without it a power cut brings a revoked token back.
                sync_folder(self._home)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _state(path: Path) -> tuple[int, int, int] | None:
    """Changes whenever the file was replaced, or who may read it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino
