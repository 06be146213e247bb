"""Self-checks find a backend that mixes rows up and log no user data; metrics count events."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
from serving_makers import (
    BASE,
    ManualClock,
    SteppedBackend,
    ask,
    engine_on,
    preload,
    request,
    stack,
    text,
    wait_for_running,
    wait_until,
)

from personalpeft.backends.base import Continuation, Score
from personalpeft.backends.fake import FakeBackend
from personalpeft.backends.sequence import SequenceState
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine
from personalpeft.engine.metrics import GAUGES, Metrics
from personalpeft.settings import Serving


class LeakingBackend(FakeBackend):
    """Shares a row's cache with another of the same prompt: a prefix cache that ignores the stack."""

    def admit(self, row: SequenceState) -> int | None:
        number = super().admit(row)
        if number is not None:
            live = self._running[number]
            first = self.__dict__.setdefault("kept", {}).setdefault(row.prompt_tokens, live)
            live.stack, live.reply = first.stack, first.reply
        return number


class ForgetfulBackend(FakeBackend):
    """Reads the prompt of the first row for every row."""

    def admit(self, row: SequenceState) -> int | None:
        number = super().admit(row)
        if number is not None:
            live = self._running[number]
            first = self.__dict__.setdefault("first", row)
            # The first request's token list, which has the same length.
            live.state = copy(row)
            live.state.prompt_tokens = first.prompt_tokens
            live.reply = self.reply(first, live.stack)
        return number


@contextmanager
def checked(backend: FakeBackend, **serving: Any) -> Iterator[Engine]:
    with engine_on(backend, **{"self_check": 1.0, **serving}) as engine:
        yield engine


def checks(engine: Engine, count: int) -> None:
    wait_until(lambda: engine.metrics()["self_checks_total"] == count)


def test_a_backend_that_separates_rows_passes_every_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with checked(FakeBackend(BASE, slots=2, rows=4)) as engine:
        engine.complete(
            [request((n % 2,), f"prompt {n}", temperature=1.0, seed=n) for n in range(8)]
        )
        checks(engine, 8)
        assert engine.metrics()["self_check_mismatches_total"] == 0
    assert caplog.records == []


@pytest.mark.parametrize("backend", [LeakingBackend, ForgetfulBackend])
def test_a_backend_that_leaks_is_found_and_no_user_data_is_logged(
    backend: type[FakeBackend], caplog: pytest.LogCaptureFixture
) -> None:
    with checked(backend(BASE, slots=2, rows=4)) as engine, caplog.at_level(logging.WARNING):
        prompts = (
            ["a secret", "a secret"] if backend is LeakingBackend else ["a secret", "anothers"]
        )
        replies = [
            text(engine, request((n,), prompt, user=f"user-{n}"))
            for n, prompt in enumerate(prompts)
        ]
        checks(engine, 2)
        wait_until(lambda: engine.metrics()["self_check_mismatches_total"] == 1)
        (record,) = caplog.records
        message = record.getMessage()
        assert "self-check" in message
        for private in ("secret", "another", "user-", *replies):
            assert private not in message


@pytest.mark.parametrize(
    ("max_tokens", "shift", "mismatches"), [(2, 0.3, 0), (2, 1.0, 1), (12, 0.11, 1), (12, 0.09, 0)]
)
def test_rounding_of_a_short_reply_is_no_mismatch_and_another_stack_is(
    max_tokens: int, shift: float, mismatches: int
) -> None:
    class RoundingBackend(FakeBackend):
        logprob_tolerance = 0.1

        def score(
            self, items: Sequence[Continuation], *args: Any, **more: Any
        ) -> tuple[Score, ...]:
            return tuple(
                replace(score, token_logprobs=tuple(each - shift for each in score.token_logprobs))
                for score in super().score(items, *args, **more)
            )

    with checked(RoundingBackend(BASE)) as engine:
        text(engine, request((1,), "a prompt", max_tokens=max_tokens))
        checks(engine, 1)
        assert engine.metrics()["self_check_mismatches_total"] == mismatches


def test_no_reply_is_checked_unless_requested() -> None:
    with engine_on() as engine:
        text(engine, request((1,)))
        assert engine.metrics()["self_checks_total"] == 0
    assert Serving().self_check == 0


def test_the_checked_sample_is_drawn_from_the_clocks_entropy() -> None:
    draws = iter([b"\0\0\0\x7f", b"\0\0\0\x81"])
    clock = Clock(entropy=lambda count: next(draws))
    with checked(FakeBackend(BASE), self_check=0.5, clock=clock) as engine:
        for _ in range(2):
            text(engine, request())
        checks(engine, 1)


def test_checks_wait_for_an_idle_engine_and_their_backlog_is_bounded() -> None:
    stepped = SteppedBackend(rows=2)
    with checked(stepped) as engine:
        calls = [ask(engine, *(request((1,), f"prompt {n}") for n in range(40)))]
        wait_for_running(engine, 2)
        assert engine.metrics()["self_checks_total"] == 0
        stepped.run()
        calls[0].end()
        checks(engine, 32)
        assert engine.metrics()["self_checks_skipped_total"] == 8


def test_a_failing_check_ends_no_reply() -> None:
    class UnscorableBackend(FakeBackend):
        def score(
            self,
            items: Sequence[Continuation],
            stack: str | None,
            *,
            kl: bool = False,
            top: int = 0,
        ) -> tuple[Score, ...]:
            raise MemoryError

    with checked(UnscorableBackend(BASE)) as engine:
        assert text(engine, request())
        wait_until(lambda: engine.metrics()["self_checks_skipped_total"] == 1)
        assert text(engine, request())


# Metrics


def test_the_metrics_of_a_reply() -> None:
    stepped, time = SteppedBackend(), ManualClock()
    with engine_on(stepped, clock=time.clock()) as engine:
        preload(engine, stack(1))
        query = request((1,))
        reply = ask(engine, query)
        wait_for_running(engine, 1)
        for count, time.at in enumerate((2.0, 5.0, 8.0), 1):
            stepped.go()
            wait_until(lambda count=count: len(reply.pieces) == count)
        now = engine.metrics()
        assert (now["num_requests_running"], now["rows"], now["slots_used"], now["slots"]) == (
            1,
            4,
            1,
            2,
        )
        assert 0 < now["kv_cache_usage_perc"] < 1
        stepped.run()
        assert reply.text
        wait_for_running(engine, 0)
        after = engine.metrics()
        assert after["request_success_total"] == 1
        assert after["generation_tokens_total"] == 8
        assert after["prompt_tokens_total"] == len(engine.tokenize(query))
        measured = {name: (seen.count, seen.total) for name, seen in after.histograms.items()}
        assert measured == {
            "time_to_first_token_seconds": (1, 2.0),
            "time_per_output_token_seconds": (7, 6.0),
            "e2e_request_latency_seconds": (1, 8.0),
            "request_queue_time_seconds": (1, 0.0),
            "stack_load_seconds": (1, 0.0),
        }


def test_a_histogram_counts_each_value_in_the_first_bucket_that_holds_it() -> None:
    metrics = Metrics()
    for seconds in (0.0005, 0.001, 0.3, 1000.0, 0.3, 0.3):
        metrics.observe("stack_load_seconds", seconds)
    seen = metrics.snapshot(dict.fromkeys(GAUGES, 0), {}).histograms["stack_load_seconds"]
    assert seen.count == 6
    assert seen.total == pytest.approx(0.0015 + 0.9 + 1000)
    assert [seen.counts[seen.bounds.index(b)] for b in (0.001, 0.5)] == [2, 3]
    assert seen.counts[-1] == 1
    with pytest.raises(KeyError):
        metrics.count("nonsense")


def test_metrics_name_no_user() -> None:
    with engine_on() as engine:
        text(engine, request((1,), "a secret", user="somebody"))
        shown = repr(engine.metrics())
        assert "somebody" not in shown
        assert "secret" not in shown
