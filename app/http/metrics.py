"""``/metrics`` in the text format of Prometheus, under the names of ``docs/explanation/serving.md``.

Names after the prefix are vLLM's where they mean the same. No label names a user, prompt or reply.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

from flask import Blueprint, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from personalpeft import Runtime
from personalpeft.engine.metrics import COUNTERS, GAUGES, HISTOGRAMS
from personalpeft_app.http.concurrency import ConcurrencyLimiter
from personalpeft_app.http.security import require_admin

PREFIX = "personalpeft:"
HTTP_GAUGES = {
    "http_requests_running": "requests that the server is answering",
    "http_requests_most": "requests that the server answers at once",
}


def blueprint(runtime: Runtime, limiter: ConcurrencyLimiter) -> Blueprint:
    """Return the route, for admins."""
    routes = Blueprint("metrics", __name__)
    registry = CollectorRegistry()
    registry.register(_Serving(runtime, limiter))

    @routes.get("/metrics")
    def metrics() -> Response:
        require_admin()
        return Response(generate_latest(registry), content_type=CONTENT_TYPE_LATEST)

    return routes


class _Serving(Collector):
    """Read the engine's numbers at each scrape."""

    def __init__(self, runtime: Runtime, limiter: ConcurrencyLimiter) -> None:
        self._runtime = runtime
        self._limiter = limiter

    def describe(self) -> list[Metric]:
        # Without this, registering would collect. That loads the model.
        return []

    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily(
            PREFIX + "build", "what serves", {"version": version("personalpeft")}
        )
        values = {
            "http_requests_running": self._limiter.in_use,
            "http_requests_most": self._limiter.count,
        }
        for name, meaning in HTTP_GAUGES.items():
            yield GaugeMetricFamily(PREFIX + name, meaning, values[name])
        now = self._runtime.engine().metrics()
        for family, meanings in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for name, meaning in meanings.items():
                yield family(PREFIX + name.removesuffix("_total"), meaning, now[name])
        for name, meaning in HISTOGRAMS.items():
            found = now.histograms[name]
            below, buckets = 0, []
            for bound, count in zip((*map(str, found.bounds), "+Inf"), found.counts, strict=True):
                below += count
                buckets.append((bound, float(below)))
            yield HistogramMetricFamily(PREFIX + name, meaning, buckets, found.total)
