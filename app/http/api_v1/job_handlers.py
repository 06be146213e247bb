"""What goes on in the server after it has answered, in the words of the library: learns, practices and forgettings, and the jobs that
they are.

As ``acts``, of which this is the part that takes a while.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from personalpeft.erasure import ForgetReport
from personalpeft.learning.report import LearnReport
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.jobs import Asking, Progress
from personalpeft_app.http.api_v1.paging import by_id, page
from personalpeft_app.http.api_v1.request_context import RequestContext
from personalpeft_app.http.security import caller

# How long a stream of events may be silent, in seconds: a proxy or a client would take a longer silence for the end, and a reader who has
# gone is found out by writing.
PATIENCE = 1.0


def learn(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Asking) -> LearnReport:
        return user.learn(
            body.layer, **_without_duplicates(body), progress=progress, cancelled=cancelled
        )

    return call.jobs.begin(user.id, "learn", work)


def learn_many(call: RequestContext) -> v.Job:
    runtime, body = call.runtime, call.body

    def work(progress: Progress, cancelled: Asking) -> tuple[LearnReport, ...]:
        return runtime.learn_many(
            body.users,
            body.layer,
            **_without_duplicates(body),
            progress=progress,
            cancelled=cancelled,
        )

    return call.jobs.begin(None, "learn_many", work, users=body.users)


def practice(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Asking) -> LearnReport:
        return user.practice(
            body.skill,
            verifier=body.verifier,
            family=body.family,
            shaping=body.shaping,
            rounds=body.rounds,
            seconds=body.seconds,
            steps=body.steps,
            memory=body.memory,
            accept=body.accept,
            progress=progress,
            cancelled=cancelled,
        )

    return call.jobs.begin(user.id, "practice", work)


def forget(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Asking) -> ForgetReport:
        report = user.forget(
            body.item,
            rebuild=body.rebuild,
            dry_run=body.dry_run,
            progress=progress,
            cancelled=cancelled,
        )
        if not body.dry_run:
            # What this server remembers of its own may hold the words too.
            call.jobs.forget(user.id)
            call.ephemeral.forget(user.id)
        return report

    return call.jobs.begin(user.id, "forget", work)


def jobs(call: RequestContext) -> v.Page[v.Job]:
    return page(call.jobs.of(call.user.id), call.query, by_id)


def job(call: RequestContext) -> v.Job:
    return call.jobs.get(call.user.id, call.path["job"])


def follow(call: RequestContext) -> Iterator[v.Job | None]:
    return _watched(call, call.user.id)


def cancel(call: RequestContext) -> v.Job:
    return call.jobs.cancel(call.user.id, call.path["job"])


def every_job(call: RequestContext) -> v.Page[v.Job]:
    return page(call.jobs.of(None), call.query, by_id)


def any_job(call: RequestContext) -> v.Job:
    return call.jobs.get(None, call.path["job"])


def follow_any(call: RequestContext) -> Iterator[v.Job | None]:
    return _watched(call, None)


def cancel_any(call: RequestContext) -> v.Job:
    return call.jobs.cancel(None, call.path["job"])


def _watched(call: RequestContext, user: str | None) -> Iterator[v.Job | None]:
    with call.job_streams.stream(caller().token):
        yield from call.jobs.watch(user, call.path["job"], PATIENCE)


def _without_duplicates(body: v.LearnBody) -> dict[str, Any]:
    return {
        "start": body.start,
        "seconds": body.seconds,
        "steps": body.steps,
        "memory": body.memory,
        "dry_run": body.dry_run,
        "accept": body.accept,
    }
