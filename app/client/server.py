"""``personalpeft.Runtime`` over a line: its users, and what is of a whole home."""

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
    """A client of the server at ``http://HOST:PORT``. Asks nothing yet. ``timeout`` is how many seconds a silence may last. Raises
    ``InvalidInput`` for an address or token that cannot be one.
    """
    return Client(Transport(url, token, timeout))


class Client(
    RenamedAttributes,
    renamed={"collect": "collect_garbage", "served": "read_published_file"},
):
    """A server; made by ``connect``. Safe to use from several threads."""

    def __init__(self, line: Transport) -> None:
        self._line = line

    def user(self, user_id: str, *, create: bool = True) -> RemoteUser:
        """As ``Runtime.user``."""
        check_user_id(user_id)
        self._line.call(do.MAKE_USER if create else do.SUMMARY, user=user_id)
        return RemoteUser(user_id, self._line)

    def whoami(self) -> v.Holder:
        """Whose the token is that this client was made with, and the base that answers."""
        found: v.Holder = self._line.call(do.WHOAMI)
        return found

    def import_user(self, file: str | Path, *, as_user: str | None = None) -> ImportSummary:
        """As ``Runtime.import_user``; needs a token of administration."""
        try:
            data = Path(file).expanduser().read_bytes()
        except OSError as error:
            raise PersonalFileError(
                f"{file} cannot be read: {error.strerror or error}.", hint="Look at the path."
            ) from error
        imported: ImportSummary = self._line.call(do.IMPORT, data, v.ImportQuery(as_user))
        return imported

    def users(
        self, *, after: str | None = None, limit: int = 100, search: str = ""
    ) -> tuple[UserSummary, ...]:
        """Do as ``Runtime.users``, with an admin token."""
        query = v.UsersQuery(after, limit, search)
        page: v.Page[UserSummary] = self._line.call(do.USERS, None, query)
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
        """As ``Runtime.learn_many``; it runs in the server, and needs a token of administration. Whoever leaves this call in
        the middle stops it there.
        """
        body = v.LearnManyBody(
            layer, start, seconds, steps, memory, dry_run, accept, users=tuple(users)
        )
        job = follow(self._line, self._line.call(do.LEARN_MANY, body), progress, cancelled)
        if not job.over:
            raise connection_lost("a learn")
        return job.reports

    def read_published_file(self, digest: str, file: str) -> bytes:
        """As ``Runtime.served``; needs a token of administration."""
        data: bytes = self._line.call(do.SERVED, digest=digest, file=file)
        return data

    def verify(self) -> tuple[Problem, ...]:
        """As ``Runtime.verify``; needs a token of administration."""
        problems: tuple[Problem, ...] = self._line.call(do.VERIFY)
        return problems

    def collect_garbage(self, *, dry_run: bool = False) -> GarbageReport:
        """As ``Runtime.collect``; needs a token of administration."""
        collected: GarbageReport = self._line.call(do.COLLECT, None, v.CollectQuery(dry_run))
        return collected
