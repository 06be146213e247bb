"""The API keys of a home. A key belongs to one user, an administrator or a remote worker.

Invariants: the file ``token`` holds the first administrator's key as text, for programs of the same
account. An encrypted home has no such file, so a copy of it allows access to no server. Of every
other key only a digest is stored, and its secret is shown once. A revoked key is invalid from the
next request on, in every process. Only the owner may read both files. Changes survive a power cut.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

from personalpeft import file_system
from personalpeft.deprecation import RenamedAttributes
from personalpeft.errors import HomeError, InvalidInput, NotFound, suggest_nearest
from personalpeft.ids import check_user_id
from personalpeft.store.error_mapping import map_home_errors
from personalpeft.store.store import Store

ADMIN_KEY_FILE = "token"
KEYS_FILE = "tokens.json"
_PREFIX = "pp_"
# Clients of other services refuse a key that does not begin as theirs do, such as "sk-". Others
# exchange the key for a JWT, which an extension gives the key as its signature.
_FOREIGN_PREFIX = re.compile(
    rf"(eyJ[\w-]{{1,256}}\.eyJ[\w-]{{1,256}}\.)?([a-z]{{1,8}}-(?={_PREFIX}))?"
)
_SECRET_BYTES = 32
_ID_DIGITS = 12
_MAX_SECRET_LENGTH = 256

_FileState: TypeAlias = tuple[int, int, int] | None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One key, identified by the beginning of its secret's SHA-256.

    ``user`` is its owner. None is an administrator, who may act for every user, or a ``worker``. A
    worker may only fetch served and published stacks. ``at`` is when it was created.
    """

    id: str
    user: str | None
    at: str
    worker: bool = False

    @property
    def is_admin(self) -> bool:
        """Whether it is an administrator's."""
        return self.user is None and not self.worker

    def may_act_for(self, user: str) -> bool:
        """Return whether its owner may read and change the data of a user."""
        return self.is_admin or self.user == user


class ApiKeys(
    RenamedAttributes,
    renamed={
        "first": "admin_key_file",
        "ensure_first": "ensure_admin_key",
        "make": "create",
        "known": "list_keys",
        "holder": "authenticate",
    },
):
    """The API keys of one home. Safe to use from several threads and processes.

    Each method may raise ``HomeError``, and a change ``Busy`` during another process's change.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._home = store.home
        self.admin_key_file = store.home / ADMIN_KEY_FILE
        """The path of the first administrator's key; the file may not exist yet."""
        self._mutex = threading.Lock()
        self._states: tuple[_FileState, ...] | None = None
        self._by_digest: dict[str, ApiKey] = {}
        # Each with what ``user_since`` returned, None for a user who did not exist yet.
        self._session_keys: dict[str, tuple[ApiKey, str | None]] = {}

    def ensure_admin_key(self) -> bool:
        """Create the file ``token`` unless it exists; return whether it was created.

        An encrypted home gets none: ``create`` an administrator's key.
        """
        with map_home_errors(self._home):
            if self._store.encrypted or self.admin_key_file.exists():
                return False
            with self._store.database.write_lock():
                # Two servers that start at once must share one key.
                if self.admin_key_file.exists():
                    return False
                file_system.replace_file(self.admin_key_file, f"{self._new_secret()}\n".encode())
                file_system.sync_folder(self._home)
            return True

    def drop_admin_key_file(self) -> None:
        """Delete the file ``token``. Its key stays valid: only its digest is stored from then on."""
        for digest, key in self._read_admin_key().items():
            with self._change() as keys:
                keys[digest] = self._new_key(digest, key.user)
        with map_home_errors(self._home):
            self.admin_key_file.unlink(missing_ok=True)
            file_system.sync_folder(self._home)

    def create(self, user: str | None, *, worker: bool = False) -> tuple[ApiKey, str]:
        """Create a key of a user. Without one it belongs to an administrator or a ``worker``.

        Return the key and its secret. The secret is stored nowhere. Raises ``InvalidInput``.
        """
        if worker and user is not None:
            raise InvalidInput("A worker's key cannot have a user.", hint="Name no user.")
        if user is not None:
            check_user_id(user)
        secret = self._new_secret()
        digest = _digest(secret)
        key = self._new_key(digest, user, worker)
        with self._change() as keys:
            keys[digest] = key
        return key, secret

    def user_since(self, user: str) -> str | None:
        """Return when a user was made, None if there is none. An id may get another user."""
        row = self._store.database.fetch_one("select since from user where id = ?", user)
        return None if row is None else str(row["since"])

    def create_session_key(self, user: str, since: str | None = None) -> str:
        """Return a new secret of a user that is in no file and ends with this process.

        It ends with the user too, whichever process erases that one.

        Args:
            user: The user.
            since: What ``user_since`` returned when the session was granted. None: the present
                user, or the first one of that id.

        Raises:
            InvalidId: It is no id of a user.
        """
        check_user_id(user)
        secret = self._new_secret()
        digest = _digest(secret)
        with self._mutex:
            key = self._new_key(digest, user)
            self._session_keys[digest] = key, since or self.user_since(user)
        return secret

    def revoke(self, key_id: str) -> ApiKey:
        """Delete a key by a unique prefix of its id. Raises ``NotFound``, ``InvalidInput``."""
        with self._change() as keys:
            fitting = [d for d, key in keys.items() if key_id and key.id.startswith(key_id)]
            if len(fitting) > 1:
                raise InvalidInput(
                    f"{len(fitting)} API keys begin with {key_id!a}.", hint="Give more of the id."
                )
            if not fitting:
                hint = suggest_nearest(key_id, [key.id for key in keys.values()], what="API key")
                if not keys:
                    hint = f"The first administrator's has no id: delete {self.admin_key_file}"
                raise NotFound(f"There is no API key {key_id[:64]!a}.", hint=hint)
            return keys.pop(fitting[0])

    def revoke_all(self, user: str) -> int:
        """Delete all keys of a user, those of sessions too, and return how many were stored."""
        with self._mutex:
            sessions = self._session_keys.items()
            self._session_keys = {digest: each for digest, each in sessions if each[0].user != user}
        owned = [key.id for key in self.list_keys() if key.user == user]
        if owned:
            with self._change() as keys:
                for digest in [d for d, key in keys.items() if key.user == user]:
                    del keys[digest]
        return len(owned)

    def list_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys that ``create`` made and that are not revoked, oldest first."""
        return tuple(self._read_keys().values())

    def authenticate(self, secret: str) -> ApiKey | None:
        """Return the key of a secret, or None. Raises ``HomeError``.

        Letters and a hyphen before the secret are ignored, as in ``sk-pp_...``, and so are the
        header and the claims of a JWT.
        """
        secret = _FOREIGN_PREFIX.sub("", secret, count=1)
        if not secret or len(secret) > _MAX_SECRET_LENGTH:
            return None
        with self._mutex:
            states = tuple(_file_state(self._home / n) for n in (ADMIN_KEY_FILE, KEYS_FILE))
            if states != self._states:
                self._by_digest = {**self._read_admin_key(), **self._read_keys()}
                self._states = states
            # A lookup by digest takes a time that reveals nothing of the secrets.
            digest = _digest(secret)
            return self._by_digest.get(digest) or self._session_key(digest)

    def _session_key(self, digest: str) -> ApiKey | None:
        """Return the key of a session whose user still exists."""
        key, since = self._session_keys.get(digest, (None, None))
        if key is None or key.user is None:
            return None
        now = self.user_since(key.user)
        if since is not None and now != since:
            del self._session_keys[digest]
            return None
        self._session_keys[digest] = key, now
        return key

    def _new_secret(self) -> str:
        return _PREFIX + self._store.entropy(_SECRET_BYTES).hex()

    def _new_key(self, digest: str, user: str | None, worker: bool = False) -> ApiKey:
        at = self._store.now().isoformat(timespec="seconds")
        return ApiKey(digest[:_ID_DIGITS], user, at, worker)

    def _read_admin_key(self) -> dict[str, ApiKey]:
        secret = self._read_text(ADMIN_KEY_FILE).strip()
        digest = _digest(secret)
        return {digest: ApiKey(digest[:_ID_DIGITS], None, "")} if secret else {}

    def _read_keys(self) -> dict[str, ApiKey]:
        text = self._read_text(KEYS_FILE)
        try:
            stored = json.loads(text or "{}")
            return {str(digest): ApiKey(**key) for digest, key in stored.items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise HomeError(
                f"{self._home / KEYS_FILE} is damaged.",
                hint="Delete it and create the API keys again.",
            ) from error

    def _read_text(self, name: str) -> str:
        path = self._home / name
        with map_home_errors(self._home), suppress(FileNotFoundError):
            if not file_system.only_owner_reads(path.stat()):
                raise HomeError(f"Other accounts can read {path}.", hint=f"Run: chmod 600 {path}")
            return path.read_text("utf-8", "replace")
        return ""

    @contextmanager
    def _change(self) -> Iterator[dict[str, ApiKey]]:
        with self._store.database.write_lock():
            keys = self._read_keys()
            yield keys
            stored = {digest: asdict(key) for digest, key in keys.items()}
            with map_home_errors(self._home):
                file_system.replace_file(
                    self._home / KEYS_FILE, json.dumps(stored, indent=1).encode()
                )
                # Without it a power cut can bring a revoked key back.
                file_system.sync_folder(self._home)


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "replace")).hexdigest()


def _file_state(path: Path) -> _FileState:
    """Return what changes when the file is replaced or its permissions change."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_ctime_ns, state.st_size, state.st_ino
