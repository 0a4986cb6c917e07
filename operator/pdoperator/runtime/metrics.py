"""Prometheus metrics of the operator. One registry per instance, so that tests can make many."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class Metrics:
    """`registry` is what the process serves on its metrics port."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.clusters = Gauge("pdcluster_operator_clusters", "PDClusters with a task", registry=self.registry)
        self.leading = Gauge("pdcluster_operator_leading", "1 while the Lease is held", registry=self.registry)
        self.seconds = Histogram(
            "pdcluster_operator_reconcile_seconds",
            "Duration of one reconcile",
            buckets=(0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=self.registry,
        )
        self.results = Counter(
            "pdcluster_operator_reconciles", "Reconciles by outcome", ("outcome",), registry=self.registry
        )

        self.probe_seconds = Histogram(
            "pdcluster_operator_probe_seconds",
            "Duration of one real request of the operator's through a prefill and a decode pod",
            buckets=(0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0),
            registry=self.registry,
        )
        self.probes = Counter(
            "pdcluster_operator_probes",
            "Real requests of the operator's by outcome",
            ("outcome",),
            registry=self.registry,
        )

    def probed(self, outcome: str, seconds: float) -> None:
        """One real request ended: served, failed, timed out, busy, unreachable or unauthorized."""
        self.probes.labels(outcome).inc()
        self.probe_seconds.observe(seconds)

    def reconciled(self, outcome: str, seconds: float) -> None:
        """One reconcile ended: ok, failed (an API call was refused), error (deadline, exception) or ended
        (cut off with its PDCluster or with the Lease)."""
        self.results.labels(outcome).inc()
        self.seconds.observe(seconds)
