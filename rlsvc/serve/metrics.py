"""What a replica counts, as Prometheus text.

Every series has the replica's id, so that replicas behind one port are not mixed up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlsvc.serve.distribution import Distribution
from rlsvc.serve.shadow import Shadow
from rlsvc.serve.version import Version

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PARTS = ("preprocess", "queue", "model", "wire")
"""Of an answered request's latency, in the order in which they begin; wire is what is left of the whole."""
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Loaded:
    """What a replica holds when its metrics are read.

    Attributes:
        versions: each with what it is, of `rlsvc.serve.version.ROLES`.
        distribution: the current version's; None where nothing is known of it.
        shadow: comparisons with a candidate; None where there is none.
    """

    versions: Sequence[tuple[str, Version]] = ()
    distribution: Distribution | None = None
    shadow: Shadow | None = None


class Metrics:
    """Counters of one replica.

    A request's latency is split into preprocess (decoding, checking against the contract, renaming), queue (waiting for
    a batch), model (the batch), and wire, which is the rest: reading the request and encoding its answer.
    """

    def __init__(self, replica: str, policy: str, loaded: Callable[[], Loaded]) -> None:
        """Start at zero; `loaded` is asked whenever the text is."""
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
        self._refused_versions = Counter(
            "rlsvc_refused_versions",
            "Versions that an alias meant and that were not taken, since they did not load or fit.",
            (*names, "role"),
            registry=self.registry,
        )
        self._malformed = Counter(
            "rlsvc_malformed",
            "Chunks that the policy said in tokens that are no actions, by reason.",
            (*names, "reason"),
            registry=self.registry,
        )
        self.registry.register(_Watcher(loaded, self._labels))
        # Present from the start: an alarm on a counter that has never moved needs the zero.
        self._answered = {
            transport: self._requests.labels(**self._labels, transport=transport)
            for transport in ("http", "websocket", "oip")
        }

    def answered(self, transport: str, seconds: Mapping[str, float], batch_size: int) -> None:
        """One request answered; by each of `PARTS` the seconds that it took."""
        self._answered[transport].inc()
        for name, part in zip(PARTS, self._parts, strict=True):
            part.observe(seconds[name])
        if batch_size:  # an action that was left of a chunk was in no batch
            self._batch.observe(batch_size)

    def refused(self, reason: str) -> None:
        """One request refused; reasons are the few words of `codec.RequestError`, never a client's text."""
        self._refused.labels(**self._labels, reason=reason).inc()

    def malformed(self, reason: str) -> None:
        """One chunk of tokens that are no actions."""
        self._malformed.labels(**self._labels, reason=reason).inc()

    def refused_version(self, role: str) -> None:
        """One version that was not taken."""
        self._refused_versions.labels(**self._labels, role=role).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _Watcher(Collector):
    """What the versions know of themselves; made when it is read, not in each request."""

    def __init__(self, loaded: Callable[[], Loaded], labels: Mapping[str, str]) -> None:
        self._loaded, self._labels = loaded, labels

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        now = self._loaded()
        yield from self._versions(now.versions)
        if now.distribution is not None:
            yield from self._distribution(now.distribution)
        if now.shadow is not None:
            yield from self._shadow(now.shadow)

    def _versions(self, versions: Sequence[tuple[str, Version]]) -> Iterator[Metric]:
        names, own = (*self._labels, "version", "role"), tuple(self._labels.values())
        info = GaugeMetricFamily("rlsvc_policy_info", "1 for each loaded version.", labels=names)
        sessions = GaugeMetricFamily("rlsvc_sessions", "Sessions that keep to a version.", labels=names)
        answers = CounterMetricFamily("rlsvc_version_answers", "Requests that a version answered.", labels=names[:-1])
        for role, version in versions:
            info.add_metric((*own, version.id, role), 1.0)
            sessions.add_metric((*own, version.id, role), version.sessions)
            answers.add_metric((*own, version.id), version.answered)
        yield from (info, sessions, answers)

    def _distribution(self, distribution: Distribution) -> Iterator[Metric]:
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
        for name, watched in distribution.features.items():
            labels = (*own, name)
            values.add_metric(labels, watched.values)
            outside.add_metric(labels, watched.outside)
            share.add_metric(labels, watched.share)
            alarm.add_metric(labels, float(watched.alarm))
        yield from (values, outside, share, alarm)

    def _shadow(self, shadow: Shadow) -> Iterator[Metric]:
        names, own = (*self._labels, "version"), (*self._labels.values(), shadow.version.id)
        requests = CounterMetricFamily(
            "rlsvc_shadow_requests", "Requests by what became of them in the candidate.", labels=(*names, "outcome")
        )
        for outcome in ("compared", "skipped", "failed"):
            requests.add_metric((*own, outcome), getattr(shadow, outcome))
        rms = GaugeMetricFamily(
            "rlsvc_shadow_rms_difference",
            "Root mean square of the candidate's actions minus the answers, in the contract's units.",
            labels=(*names, "dimension"),
        )
        std = GaugeMetricFamily(
            "rlsvc_shadow_answer_std", "Standard deviation of the answers that were compared.",
            labels=(*names, "dimension"),
        )  # fmt: skip
        for dimension, told in shadow.differences().items():
            rms.add_metric((*own, dimension), told["rms_difference"])
            std.add_metric((*own, dimension), told["std"])
        yield from (requests, rms, std)
