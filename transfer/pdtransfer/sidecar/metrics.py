"""Prometheus text of one sidecar: ranks, roster, verdicts, and what the ranks measured.

python -m pdtransfer.sidecar.metrics     # the list of all metrics, as in docs/metrics.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from pdtransfer.contract.metrics import FAMILIES, OPEN, PREFIX, Cell, Family
from pdtransfer.contract.verdict import VerdictState
from pdtransfer.sidecar import views
from pdtransfer.sidecar.hub import Hub

RANK_LABELS = ("rank", "role")
"""In front of the labels of everything that a rank measured."""

_OWN = (
    Family("ready", "gauge", "1 when /readyz answers 200"),
    Family("draining", "gauge", "1 when the pod takes no new transfers"),
    Family("ranks_expected", "gauge", "Ranks the engine will have in this pod"),
    Family("ranks_registered", "gauge", "Ranks connected now"),
    Family("ranks_stale", "gauge", "Ranks whose heartbeat is late"),
    Family("rank_info", "gauge", "1 for each rank connected now", dict.fromkeys((*RANK_LABELS, "incarnation"), OPEN)),
    Family(
        "rank_bad_samples",
        "gauge",
        "Samples of a rank's last report that are not shown: not in this sidecar's list, or malformed",
        dict.fromkeys(RANK_LABELS, OPEN),
    ),
    Family("roster_term", "gauge", "Term of the roster key"),
    Family("roster_counter", "gauge", "Counter of the roster key"),
    Family("tls_problem", "gauge", "1 when certificate files could not be used"),
    Family("tls_expires_timestamp_seconds", "gauge", "When the served certificate ends (Unix time)"),
    Family("verdicts", "gauge", "Peer ranks by verdict", {"state": tuple(s.value for s in VerdictState)}),
    Family("refused_ranks_total", "counter", "Ranks that were refused, by reason", {"reason": OPEN}),
    Family("refused_rosters_total", "counter", "Rosters that were refused, by reason", {"reason": OPEN}),
    Family("refused_clients_total", "counter", "Clients of the control API that were refused", {"reason": OPEN}),
    Family("tls_reloads_total", "counter", "Certificates taken from renewed files, by outcome", {"reason": OPEN}),
)
OWN: Mapping[str, Family] = {f.name: f for f in _OWN}
"""What the sidecar itself measures, by name."""


def _metric(family: Family, before: Sequence[str], rows: Iterable[tuple[Sequence[str], Cell]]) -> Metric:
    """prometheus_client's object of one family, with the labels `before` in front of its own."""
    name, labels = PREFIX + family.name, [*before, *family.labels]
    if family.kind == "histogram":
        histogram = HistogramMetricFamily(name, family.help, labels=labels)
        bounds = [*(str(b) for b in family.buckets), "+Inf"]
        for values, (total, *counts) in rows:
            sums = [sum(counts[: i + 1]) for i in range(len(counts))]
            histogram.add_metric(list(values), list(zip(bounds, sums, strict=True)), total)
        return histogram
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    plain = kind(name, family.help, labels=labels)
    for values, cell in rows:
        plain.add_metric(list(values), cell[0])
    return plain


def _own(name: str, *rows: tuple[Sequence[str], float]) -> Metric:
    return _metric(OWN[name], (), [(labels, [value]) for labels, value in rows])


class SidecarCollector(Collector):
    """Reads the hub at each scrape; holds nothing."""

    def __init__(self, hub: Hub, wiring: bool) -> None:
        self._hub, self._wiring = hub, wiring

    def collect(self) -> Iterable[Metric]:
        hub, state, now = self._hub, self._hub.state, self._hub.clock()
        ready = views.readiness(state, now, self._wiring, hub.tls_problem).ready
        yield _own("ready", ((), float(ready)))
        yield _own("draining", ((), float(state.draining)))
        yield _own("ranks_expected", ((), state.expected_ranks))
        yield _own("ranks_registered", ((), len(state.ranks)))
        yield _own("ranks_stale", ((), len(views.stale_ranks(state, now))))
        yield _own("roster_term", ((), state.key.term))
        yield _own("roster_counter", ((), state.key.counter))
        yield _own("tls_problem", ((), float(bool(hub.tls_problem or hub.tls_warning))))
        yield _own("tls_expires_timestamp_seconds", ((), hub.tls_expires))
        verdicts = Counter(v.state for r in state.ranks for v in r.verdicts)
        yield _own("verdicts", *(((s.value,), verdicts[s]) for s in VerdictState))
        for name in ("refused_ranks", "refused_rosters", "refused_clients", "tls_reloads"):
            seen = [((label,), count) for (what, label), count in sorted(hub.counts.items()) if what == name]
            yield _own(f"{name}_total", *seen)
        yield from self._ranks()

    def _ranks(self) -> Iterable[Metric]:
        ranks, role = self._hub.state.ranks, self._hub.state.identity.role.value
        yield _own("rank_info", *(((str(r.rank), role, r.card.incarnation), 1.0) for r in ranks))
        yield _own("rank_bad_samples", *(((str(r.rank), role), r.bad_samples) for r in ranks))
        for family in FAMILIES.values():
            rows = [
                ((str(r.rank), role, *series), cell) for r in ranks for series, cell in r.metrics.get(family.name, ())
            ]
            if rows:
                yield _metric(family, RANK_LABELS, rows)


def render(hub: Hub, wiring: bool) -> tuple[bytes, str]:
    """(body, content type) of GET /metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SidecarCollector(hub, wiring))
    return generate_latest(registry), CONTENT_TYPE_LATEST


def markdown() -> str:
    """The list of all metrics."""
    lines = [
        "# Metrics of a pod",
        "The sidecar serves them on its health port, `/metrics` (9441). This list is made from the code:",
        "`python -m pdtransfer.sidecar.metrics > docs/metrics.md`.",
        "",
        "What a rank measured carries `rank` and `role` (prefill or decode) in front of the labels named here. It is",
        "counted from the start of the rank's process: a rank that restarts starts at zero, which `rate()` and",
        "`increase()` take as a counter reset, and `pdtransfer_rank_info` names its incarnation. A label value that is",
        "not known beforehand (a reason, a transport) is bounded in number; what comes after that is `other`.",
        "Seconds and bytes throughout.",
    ]
    for title, families in (("Ranks", FAMILIES), ("Sidecar", OWN)):
        lines += ["", f"## {title}", "| Name | Type | Labels | What |", "|---|---|---|---|"]
        for f in families.values():
            labels = ", ".join(f"{k} ({', '.join(v)})" if v else k for k, v in f.labels.items())
            lines.append(f"| `{PREFIX}{f.name}` | {f.kind} | {labels} | {f.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
