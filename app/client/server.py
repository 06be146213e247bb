"""``personalpeft.Runtime`` over HTTP: the users, and acts on a whole home."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from personalpeft.archive import ImportSummary
from personalpeft.deprecation import RenamedAttributes
from personalpeft.errors import PersonalFileError
from personalpeft.ids import check_user_id
from personalpeft.learning.options import Condition, no_progress, not_cancelled
from personalpeft.learning.report import LearnReport
from personalpeft.learning.train.config import Start
from personalpeft.store.types import GarbageReport, Problem, UserSummary
from personalpeft.types import Progress
from personalpeft_app.client.remote import RemoteUser
from personalpeft_app.client.streaming import connection_lost, follow
from personalpeft_app.client.transport import Transport
from personalpeft_app.http.api_v1 import operations as do
from personalpeft_app.http.api_v1 import schemas as v


def connect(url: str, token: str, *, timeout: float = 600.0) -> Client:
    """Return a client of the server at ``http://HOST:PORT``. Nothing is sent yet.

    ``timeout`` is the most seconds between two bytes of a response. Raises ``InvalidInput``.
    """
    return Client(Transport(url, token, timeout))


class Client(
    RenamedAttributes,
    renamed={"collect": "collect_garbage", "served": "read_published_file"},
):
    """A server, from ``connect``. Thread-safe. ``personalpeft.Runtime`` documents each method.

    All but ``user`` and ``whoami`` need an admin token.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def user(self, user_id: str, *, create: bool = True) -> RemoteUser:
        check_user_id(user_id)
        self._transport.call(do.MAKE_USER if create else do.SUMMARY, user=user_id)
        return RemoteUser(user_id, self._transport)

    def whoami(self) -> v.TokenInfo:
        """Return the user of the token, and the base that answers."""
        return self._transport.call(do.WHOAMI)

    def import_user(self, file: str | Path, *, as_user: str | None = None) -> ImportSummary:
        try:
            data = Path(file).expanduser().read_bytes()
        except OSError as error:
            raise PersonalFileError(
                f"{file} cannot be read: {error.strerror or error}.", hint="Check the path."
            ) from error
        return self._transport.call(do.IMPORT, data, v.ImportQuery(as_user))

    def users(
        self, *, after: str | None = None, limit: int = 100, search: str = ""
    ) -> tuple[UserSummary, ...]:
        query = v.UsersQuery(after, limit, search)
        page: v.Page[UserSummary] = self._transport.call(do.USERS, None, query)
        return page.items

    def learn_many(
        self,
        users: Sequence[str],
        layer: str | None = None,
        *,
        start: Start = "auto",
        seconds: float | None = None,
        steps: int | None = None,
        memory: float | None = None,
        dry_run: bool = False,
        accept: bool = False,
        progress: Progress = no_progress,
        cancelled: Condition = not_cancelled,
    ) -> tuple[LearnReport, ...]:
        """Learn as ``Runtime.learn_many``, in the server. Leaving this call early stops it."""
        body = v.LearnManyBody(
            layer, start, seconds, steps, memory, dry_run, accept, users=tuple(users)
        )
        job = follow(
            self._transport, self._transport.call(do.LEARN_MANY, body), progress, cancelled
        )
        if not job.over:
            raise connection_lost("a learn")
        return job.reports

    def read_published_file(self, digest: str, file: str) -> bytes:
        return self._transport.call(do.SERVED, digest=digest, file=file)

    def verify(self) -> tuple[Problem, ...]:
        return self._transport.call(do.VERIFY)

    def collect_garbage(self, *, dry_run: bool = False) -> GarbageReport:
        return self._transport.call(do.COLLECT, None, v.CollectQuery(dry_run))
