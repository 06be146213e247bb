"""One-time codes that sign a browser in, so that no lasting secret is in a link.

Invariants: this process keeps the digest of a code, in memory. A code works once, for ``SECONDS``.
It signs in as one user and never as an administrator.
"""

from __future__ import annotations

import hashlib
import threading

from personalpeft.clock import SYSTEM, Clock
from personalpeft.ids import check_user_id
from personalpeft.store.api_keys import ApiKeys

SECONDS = 600
"""How long a code can be used."""
_BYTES = 24


class SignInCodes:
    """The codes of one server. Safe to use from several threads."""

    def __init__(self, api_keys: ApiKeys, clock: Clock = SYSTEM) -> None:
        self._api_keys = api_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._users: dict[str, tuple[str, str | None, float]] = {}

    def issue(self, user: str) -> str:
        """Return a new code that signs in as ``user``. Raises ``InvalidId``."""
        check_user_id(user)
        code = self._clock.entropy(_BYTES).hex()
        with self._lock:
            self._drop_expired()
            since = self._api_keys.user_since(user)
            self._users[_digest(code)] = user, since, self._clock.timer() + SECONDS
        return code

    def redeem(self, code: str) -> str | None:
        """Exchange a code for the secret of a session, None if it is unknown, used or too old."""
        with self._lock:
            self._drop_expired()
            user, since, _ = self._users.pop(_digest(code), (None, None, 0))
        return None if user is None else self._api_keys.create_session_key(user, since)

    def _drop_expired(self) -> None:
        now = self._clock.timer()
        self._users = {digest: each for digest, each in self._users.items() if now < each[-1]}


def _digest(code: str) -> str:
    return hashlib.sha256(code.encode("utf-8", "replace")).hexdigest()
