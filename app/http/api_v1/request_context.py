"""One request to our own API, as those who do it get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from personalpeft import Runtime, User
from personalpeft_app.http.api_v1.ephemeral_state import EphemeralState
from personalpeft_app.http.api_v1.jobs import Asking, Jobs
from personalpeft_app.http.concurrency import StreamLimiter


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request, let in and checked. ``person`` is None where the path names nobody; ``gone`` says whether the
    client went away, so that nothing is written for nobody.
    """

    runtime: Runtime
    jobs: Jobs
    ephemeral: EphemeralState
    job_streams: StreamLimiter
    user_id: User | None
    path: Mapping[str, str]
    query: Any
    body: Any
    is_disconnected: Asking

    @property
    def user(self) -> User:
        """Whose model it is about; only for operations whose path names somebody."""
        if self.user_id is None:
            raise LookupError("the path of this operation names nobody")
        return self.user_id
