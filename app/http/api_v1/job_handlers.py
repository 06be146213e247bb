"""Handlers of learns, practices and forgets, which go on as jobs after the response."""

from __future__ import annotations

from collections.abc import Iterator

from personalpeft.erasure import ForgetReport
from personalpeft.learning.report import LearnReport
from personalpeft_app.http.api_v1 import schemas as v
from personalpeft_app.http.api_v1.jobs import Condition, Progress
from personalpeft_app.http.api_v1.paging import by_id, page
from personalpeft_app.http.api_v1.request_context import RequestContext
from personalpeft_app.http.security import caller

# Seconds between signs of life in a stream: proxies and clients take a longer silence for the end,
# and only writing shows that a reader is gone.
HEARTBEAT_SECONDS = 1.0


def learn(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Condition) -> LearnReport:
        return user.learn(**body.fields(), progress=progress, cancelled=cancelled)

    return call.jobs.begin(user.id, "learn", work)


def learn_many(call: RequestContext) -> v.Job:
    runtime, body = call.runtime, call.body

    def work(progress: Progress, cancelled: Condition) -> tuple[LearnReport, ...]:
        return runtime.learn_many(**body.fields(), progress=progress, cancelled=cancelled)

    return call.jobs.begin(None, "learn_many", work, users=body.users)


def practice(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Condition) -> LearnReport:
        return user.practice(**body.fields(), progress=progress, cancelled=cancelled)

    return call.jobs.begin(user.id, "practice", work)


def forget(call: RequestContext) -> v.Job:
    user, body = call.user, call.body

    def work(progress: Progress, cancelled: Condition) -> ForgetReport:
        report = user.forget(**body.fields(), progress=progress, cancelled=cancelled)
        if not body.dry_run:
            # Jobs and comparisons of this server may hold the forgotten text too.
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
        yield from call.jobs.watch(user, call.path["job"], HEARTBEAT_SECONDS)
