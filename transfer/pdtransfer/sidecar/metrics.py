"""Prometheus text of one sidecar: ranks, roster, verdicts, and the counters the ranks send."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from pdtransfer.contract.verdict import VerdictState
from pdtransfer.sidecar import views
from pdtransfer.sidecar.hub import Hub

PREFIX = "pdtransfer_"
MAX_NAMES = 256
"""Distinct counter names taken from ranks: a broken rank must not blow up a scrape."""
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]{0,100}")


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


class SidecarCollector(Collector):
    """Reads the hub at each scrape; holds nothing."""

    def __init__(self, hub: Hub, wiring: bool) -> None:
        self._hub, self._wiring = hub, wiring

    def collect(self) -> Iterable[Metric]:
        hub, state, now = self._hub, self._hub.state, self._hub.clock()
        ready = views.readiness(state, now, self._wiring, hub.tls_problem).ready
        yield _gauge("ready", "1 when /readyz answers 200", float(ready))
        yield _gauge("draining", "1 when the pod takes no new transfers", float(state.draining))
        yield _gauge("ranks_expected", "Ranks the engine will have in this pod", state.expected_ranks)
        yield _gauge("ranks_registered", "Ranks connected now", len(state.ranks))
        yield _gauge("ranks_stale", "Ranks whose heartbeat is late", len(views.stale_ranks(state, now)))
        yield _gauge("roster_term", "Term of the roster key", state.key.term)
        yield _gauge("roster_counter", "Counter of the roster key", state.key.counter)
        yield _gauge(
            "tls_problem", "1 when certificate files could not be used", float(bool(hub.tls_problem or hub.tls_warning))
        )
        yield _gauge("tls_expires_timestamp_seconds", "When the served certificate ends", hub.tls_expires)
        yield from self._verdicts()
        yield from self._ranks()
        for metric in ("refused_ranks", "refused_rosters", "refused_clients", "tls_reloads"):
            family = CounterMetricFamily(PREFIX + metric, f"{metric.replace('_', ' ')} by reason", labels=["reason"])
            for (name, label), count in sorted(hub.counts.items()):
                if name == metric:
                    family.add_metric([label], count)
            yield family

    def _verdicts(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(PREFIX + "verdicts", "Peer ranks by verdict", labels=["state"])
        count = Counter(v.state for r in self._hub.state.ranks for v in r.verdicts)
        for s in VerdictState:
            family.add_metric([s.value], count[s])
        yield family

    def _ranks(self) -> Iterable[Metric]:
        ranks = self._hub.state.ranks
        inflight = GaugeMetricFamily(PREFIX + "inflight", "Transfers not settled", labels=["rank"])
        quarantined = GaugeMetricFamily(PREFIX + "quarantined_bytes", "Fenced-off bytes", labels=["rank"])
        for r in ranks:
            inflight.add_metric([str(r.rank)], r.inflight)
            quarantined.add_metric([str(r.rank)], r.quarantined_bytes)
        yield inflight
        yield quarantined
        names = sorted({n for r in ranks for n in r.counters if _NAME.fullmatch(n)})[:MAX_NAMES]
        for name in names:
            if f"{name}_total" in names:
                continue  # one family, two kinds: Prometheus would refuse the whole scrape
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(f"{PREFIX}rank_{name}", f"{name} as sent by the rank", labels=["rank"])
            for r in ranks:
                if name in r.counters:
                    family.add_metric([str(r.rank)], r.counters[name])
            yield family


def render(hub: Hub, wiring: bool) -> tuple[bytes, str]:
    """(body, content type) of GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(hub, wiring))
    return generate_latest(registry), CONTENT_TYPE_LATEST
