"""Self-checks find a backend that mixes rows up, and say nothing of anybody; metrics count what happens."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from serving_makers import (
    BASE,
    Stepped,
    Time,
    ask,
    engine_on,
    request,
    running,
    stack,
    text,
    wait_until,
)

from personalpeft.backends.base import Continuation, Score, SequenceState
from personalpeft.backends.fake import FakeBackend
from personalpeft.clock import Clock
from personalpeft.engine.engine import Engine
from personalpeft.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from personalpeft.settings import Serving

ROOT = Path(__file__).parents[3]


class Leaking(FakeBackend):
    """Gives a row what it kept of another with the same prompt, whoever's it is: a cache that forgets the stack."""

    def admit(self, row: SequenceState) -> int | None:
        number = super().admit(row)
        if number is not None:
            live = self._sequences[number]
            first = self.__dict__.setdefault("kept", {}).setdefault(row.prompt_tokens, live)
            live.stack, live.reply = first.stack, first.reply
        return number


class Forgetful(FakeBackend):
    """Reads the prompt of whoever came first."""

    def admit(self, row: SequenceState) -> int | None:
        number = super().admit(row)
        if number is not None:
            live = self._sequences[number]
            first = self.__dict__.setdefault("first", row)
            # The request's own list of tokens, which is as long.
            live.state = replace(row, prompt_tokens=first.prompt_tokens)
            live.state.token_ids = row.token_ids
            live.reply = self._reply(first, live.stack)
        return number


@contextmanager
def checked(backend: FakeBackend, **serving: Any) -> Iterator[Engine]:
    with engine_on(backend, **{"self_check": 1.0, **serving}) as engine:
        yield engine


def checks(engine: Engine, count: int) -> None:
    wait_until(lambda: engine.metrics()["self_checks_total"] == count)


def test_a_backend_that_keeps_rows_apart_passes_every_check(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with checked(FakeBackend(BASE, slots=2, rows=4)) as engine:
        engine.complete(
            [request((n % 2,), f"prompt {n}", temperature=1.0, seed=n) for n in range(8)]
        )
        checks(engine, 8)
        assert engine.metrics()["self_check_mismatches_total"] == 0
    assert caplog.records == []


@pytest.mark.parametrize("backend", [Leaking, Forgetful])
def test_a_backend_that_leaks_is_found_and_no_word_of_anybody_is_told(
    backend: type[FakeBackend], caplog: pytest.LogCaptureFixture
) -> None:
    with checked(backend(BASE, slots=2, rows=4)) as engine, caplog.at_level(logging.WARNING):
        prompts = ["a secret", "a secret"] if backend is Leaking else ["a secret", "anothers"]
        replies = [
            text(engine, request((n,), prompt, user=f"user-{n}"))
            for n, prompt in enumerate(prompts)
        ]
        checks(engine, 2)
        wait_until(lambda: engine.metrics()["self_check_mismatches_total"] == 1)
        (record,) = caplog.records
        said = record.getMessage()
        assert "self-check" in said
        for private in ("secret", "another", "user-", *replies):
            assert private not in said


def test_no_reply_is_checked_unless_it_is_asked_for() -> None:
    with engine_on() as engine:
        text(engine, request((1,)))
        assert engine.metrics()["self_checks_total"] == 0
    assert Serving().self_check == 0


def test_the_share_is_drawn_from_the_clocks_entropy() -> None:
    draws = iter([b"\0\0\0\x7f", b"\0\0\0\x81"])
    clock = Clock(entropy=lambda count: next(draws))
    with checked(FakeBackend(BASE), self_check=0.5, clock=clock) as engine:
        for _ in range(2):
            text(engine, request())
        checks(engine, 1)


def test_checks_wait_until_nobody_else_does_and_too_many_are_not_kept() -> None:
    stepped = Stepped(rows=2)
    with checked(stepped) as engine:
        calls = [ask(engine, *(request((1,), f"prompt {n}") for n in range(40)))]
        running(engine, 2)
        assert engine.metrics()["self_checks_total"] == 0
        stepped.run()
        calls[0].end()
        checks(engine, 32)
        assert engine.metrics()["self_checks_skipped_total"] == 8


def test_a_check_that_fails_ends_nothing() -> None:
    class Unscored(FakeBackend):
        def score(
            self, items: Sequence[Continuation], stack: str | None, *, kl: bool = False
        ) -> tuple[Score, ...]:
            raise MemoryError

    with checked(Unscored(BASE)) as engine:
        assert text(engine, request())
        wait_until(lambda: engine.metrics()["self_checks_skipped_total"] == 1)
        assert text(engine, request())


# Metrics


def test_the_numbers_of_a_reply() -> None:
    stepped, time = Stepped(), Time()
    with engine_on(stepped, clock=time.clock()) as engine:
        engine.preload(stack(1))
        asked = request((1,))
        reply = ask(engine, asked)
        running(engine, 1)
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
        running(engine, 0)
        after = engine.metrics()
        assert after["request_success_total"] == 1
        assert after["generation_tokens_total"] == 8
        assert after["prompt_tokens_total"] == len(engine.tokenize(asked))
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
    for seconds in (0.0005, 0.001, 0.3, 1000.0):
        metrics.observe("stack_load_seconds", seconds)
    metrics.observe("stack_load_seconds", 0.3, times=2)
    seen = metrics.snapshot(dict.fromkeys(GAUGES, 0), {}).histograms["stack_load_seconds"]
    assert seen.count == 6
    assert seen.total == pytest.approx(0.0015 + 0.9 + 1000)
    assert [seen.counts[seen.bounds.index(b)] for b in (0.001, 0.5)] == [2, 3]
    assert seen.counts[-1] == 1
    with pytest.raises(KeyError):
        metrics.count("nonsense")


def test_the_page_about_serving_names_every_metric_and_every_setting() -> None:
    page = (ROOT / "docs/explanation/serving.md").read_text("utf-8")
    for table in (COUNTERS, GAUGES, HISTOGRAMS):
        for name, meaning in table.items():
            assert f"| `{name}` | {meaning} |" in page, name
    for field in fields(Serving):
        assert f"| `{field.name}` | {field.default:,} |".replace(",", " ") in page, field.name


def test_metrics_name_nobody() -> None:
    with engine_on() as engine:
        text(engine, request((1,), "a secret", user="somebody"))
        said = repr(engine.metrics())
        assert "somebody" not in said
        assert "secret" not in said
