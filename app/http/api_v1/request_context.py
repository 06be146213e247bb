"""A validated request to the API, as handlers get it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from personalpeft import Runtime, User
from personalpeft_app.http.api_v1.ephemeral_state import EphemeralState
from personalpeft_app.http.api_v1.jobs import Condition, Jobs
from personalpeft_app.http.concurrency import StreamLimiter


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One authenticated, validated request.

    ``path_user`` is None if the path names no user. ``is_disconnected`` returns whether the client
    is gone.
    """

    runtime: Runtime
    jobs: Jobs
    ephemeral: EphemeralState
    job_streams: StreamLimiter
    path_user: User | None
    path: Mapping[str, str]
    query: Any
    body: Any
    is_disconnected: Condition

    @property
    def user(self) -> User:
        """The user in the path. Raises ``LookupError`` without one."""
        if self.path_user is None:
            raise LookupError("the path of this operation has no user")
        return self.path_user
