"""What a replica counts, as Prometheus text.

Every series has the replica's id, so that replicas behind one port are not mixed up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlsvc.serve.distribution import Distribution

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PARTS = ("preprocess", "queue", "model", "wire")
"""Of an answered request's latency, in the order in which they begin; wire is what is left of the whole."""
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """Counters of one replica.

    A request's latency is split into preprocess (decoding, checking against the contract, renaming), queue (waiting for
    a batch), model (the batch), and wire, which is the rest: reading the request and encoding its answer.
    """

    def __init__(self, replica: str, policy: str, version: str, distribution: Distribution | None = None) -> None:
        """Start at zero; `distribution` is read whenever the text is asked for."""
        self.registry = CollectorRegistry()
        self._labels = {"replica": replica, "policy": policy}
        names = tuple(self._labels)
        self._requests = Counter(
            "rlsvc_requests", "Requests answered with actions.", (*names, "transport"), registry=self.registry
        )
        self._refused = Counter(
            "rlsvc_refused", "Requests refused, by reason.", (*names, "reason"), registry=self.registry
        )
        latency = Histogram(
            "rlsvc_latency_seconds",
            "Time of answered requests by part.",
            (*names, "part"),
            buckets=SECONDS,
            registry=self.registry,
        )
        self._parts = [latency.labels(**self._labels, part=part) for part in PARTS]
        batch = Histogram(
            "rlsvc_batch_size",
            "Rows in a request's batch.",
            names,
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )
        self._batch = batch.labels(**self._labels)
        sockets = Gauge("rlsvc_websockets", "Open WebSocket connections.", names, registry=self.registry)
        self.websockets = sockets.labels(**self._labels)
        info = Gauge(
            "rlsvc_policy_info", "1, with the served version as a label.", (*names, "version"), registry=self.registry
        )
        info.labels(**self._labels, version=version).set(1)
        self._malformed = Counter(
            "rlsvc_malformed",
            "Chunks that the policy said in tokens that are no actions, by reason.",
            (*names, "reason"),
            registry=self.registry,
        )
        if distribution is not None:
            self.registry.register(_Watcher(distribution, self._labels))
        # Present from the start: an alarm on a counter that has never moved needs the zero.
        for transport in ("http", "websocket", "oip"):
            self._requests.labels(**self._labels, transport=transport)

    def answered(self, transport: str, seconds: Mapping[str, float], batch_size: int) -> None:
        """One request answered; by each of `PARTS` the seconds that it took."""
        self._requests.labels(**self._labels, transport=transport).inc()
        for name, part in zip(PARTS, self._parts, strict=True):
            part.observe(seconds[name])
        self._batch.observe(batch_size)

    def refused(self, reason: str) -> None:
        """One request refused; reasons are the few words of `codec.RequestError`, never a client's text."""
        self._refused.labels(**self._labels, reason=reason).inc()

    def malformed(self, reason: str) -> None:
        """One chunk of tokens that are no actions."""
        self._malformed.labels(**self._labels, reason=reason).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Watcher(Collector):
    """The numbers of a Distribution, by feature of the contract; made when they are read, not in each request."""

    def __init__(self, distribution: Distribution, labels: Mapping[str, str]) -> None:
        self._distribution, self._labels = distribution, labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        names, own = (*self._labels, "feature"), tuple(self._labels.values())
        values = CounterMetricFamily("rlsvc_observation_values", "Numbers that were observed.", labels=names)
        outside = CounterMetricFamily(
            "rlsvc_observation_values_outside", "Of these, outside of the training distribution.", labels=names
        )
        share = GaugeMetricFamily(
            "rlsvc_observation_outside_share",
            "Share outside of the training distribution in the recent requests, of the worst dimension.",
            labels=names,
        )
        alarm = GaugeMetricFamily(
            "rlsvc_observation_out_of_distribution", "1 while the alarm is on, else 0.", labels=names
        )
        for name, watched in self._distribution.features.items():
            labels = (*own, name)
            values.add_metric(labels, watched.values)
            outside.add_metric(labels, watched.outside)
            share.add_metric(labels, watched.share)
            alarm.add_metric(labels, float(watched.alarm))
        yield from (values, outside, share, alarm)
