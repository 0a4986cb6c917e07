"""The catalogue of what a rank measures: names, help, labels and buckets, known to rank and sidecar. Pure.

The sidecar shows each family as `pdtransfer_<name>` with the labels rank and role (the pod's) in front
of the family's own. Base units (seconds, bytes); counters end in `_total`; nothing outside the catalogue
is recorded or shown, and a label has declared values, or at most `MAX_VALUES` that are not declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX = "pdtransfer_"
OTHER = "other"
"""Stands for a label value that is not declared, or that came after `MAX_VALUES` others."""
MAX_VALUES = 24
MAX_LABEL = 64
"""Characters of a label's value."""

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 1.0)
BYTES = tuple(float(1 << n) for n in range(16, 36, 2))
"""64 KiB to 16 GiB."""

STRATEGIES = ("direct", "sliced", "staged", "merge", "split")
OUTCOMES = ("succeeded", "failed", "aborted")
OPEN: tuple[str, ...] = ()
"""Values that are not known beforehand (a reason, a transport): bounded in number."""


@dataclass(frozen=True)
class Family:
    """One metric. `labels` maps a label to its values, or to OPEN."""

    name: str
    kind: Kind
    help: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    """Upper bounds without +Inf, of a histogram."""

    @property
    def stem(self) -> str:
        """The name without the counter's suffix."""
        return self.name.removesuffix("_total")

    def series(self, values: Mapping[str, object]) -> tuple[str, ...]:
        """Label values in the family's order; what is not declared becomes OTHER."""
        found = (str(values.get(label, ""))[:MAX_LABEL] for label in self.labels)
        return tuple(
            v if v in allowed or not allowed else OTHER for v, allowed in zip(found, self.labels.values(), strict=True)
        )

    @property
    def cells(self) -> int:
        """Numbers of one series."""
        return len(self.buckets) + 2 if self.kind == "histogram" else 1

    @property
    def limit(self) -> int:
        """The most series it may have."""
        size = 1
        for allowed in self.labels.values():
            size *= (len(allowed) or MAX_VALUES) + 1
        return size


def _counter(name: str, text: str, **labels: tuple[str, ...]) -> Family:
    return Family(name, "counter", text, labels)


def _gauge(name: str, text: str, **labels: tuple[str, ...]) -> Family:
    return Family(name, "gauge", text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...], **labels: tuple[str, ...]) -> Family:
    return Family(name, "histogram", text, labels, buckets)


_FAMILIES = (
    # --- what moved
    _counter(
        "bytes_total",
        "KV bytes moved, by the side's view, strategy and the transport that the probe found",
        direction=("sent", "received"),
        strategy=STRATEGIES,
        transport=OPEN,
    ),
    _counter("descriptors_total", "Descriptors posted to NIXL, by strategy", strategy=STRATEGIES),
    _counter("handles_total", "Transfer handles posted to NIXL, by strategy", strategy=STRATEGIES),
    _counter("copied_bytes_total", "Bytes copied between pages and staging slots", operation=("pack", "scatter")),
    _counter("transfers_total", "Transfers that ended, by how", strategy=STRATEGIES, outcome=OUTCOMES),
    _counter("failures_total", "Transfers that failed, by the error's reason", reason=OPEN),
    _counter(
        "deadlines_total",
        "Deadlines that passed, by what was waited for: the other side, prefill's compute, bytes, posted handles of "
        "a failed transfer, a control connection, a probe",
        state=("waiting", "ready", "transfer", "settle", "connect", "probe"),
    ),
    _counter("request_repeats_total", "Requests that decode sent again after a reconnect"),
    # --- how long it took
    _histogram(
        "transfer_seconds",
        "From the request (decode) or its arrival (prefill) to the transfer's end",
        SECONDS,
        strategy=STRATEGIES,
        outcome=OUTCOMES,
    ),
    _histogram("queue_seconds", "From a request to its first posted byte", SECONDS),
    _histogram("ready_wait_seconds", "Waits for a chunk's ready event", SECONDS),
    _histogram("plan_seconds", "Planning of one chunk", SHORT),
    _histogram("handle_seconds", "From a handle's post to its completion", SECONDS),
    _histogram("staging_wait_seconds", "From a wish for staging slots to a granted one", SECONDS),
    _histogram("transfer_bytes", "Bytes of one finished transfer", BYTES),
    # --- what is there now
    _gauge("inflight", "Transfers that are not settled"),
    _gauge("queued_requests", "Requests of which nothing has moved yet"),
    _gauge("inflight_bytes", "Bytes of posted handles that are neither done nor late"),
    _gauge("inflight_handles", "Posted handles that are not done"),
    _gauge(
        "staging_slots",
        "Slots of this rank's staging arenas by state: decode lends them to sources, prefill packs in them",
        state=("free", "granted", "quarantined"),
    ),
    _gauge("emulated_vram", "1: device memory of this rank is host memory that passes for it; no figure is a GPU's"),
    # --- fences
    _gauge("quarantined_bytes", "Bytes that a late write may still hit", kind=("pages", "slots")),
    _counter(
        "quarantine_released_total",
        "Quarantines that ended, by the fence that ended them",
        fence=("acknowledged", "source_end", "rotation"),
    ),
    _gauge("generation", "Agent generation of this rank, 0 for the first"),
    _counter("rotations_total", "Agent generations that were replaced", outcome=("succeeded", "failed")),
    _histogram("rotation_teardown_seconds", "Destruction of an old agent generation", SECONDS),
    # --- peers
    _gauge("peers", "Peer ranks by the state of their verdict", state=("Probing", "Wired", "Refused", "Unreachable")),
    _gauge("wired_peers", "Wired peer ranks by the transport that their probe found", transport=OPEN),
    _gauge("loading_peers", "Peer ranks that wait to be loaded into the agent"),
    _counter("peer_reloads_total", "Peers removed and loaded again after NIXL lost their connection"),
    _histogram("peer_load_seconds", "Loading of one peer into the agent and its eager connection", SECONDS),
    _counter("peer_moves_total", "Peers that moved to another agent generation"),
    _counter("probes_total", "Probes of peers, by outcome", outcome=("succeeded", "failed")),
    # --- trouble
    _counter("requests_refused_total", "Requests that were refused at once"),
    _counter("connections_refused_total", "Control connections that were refused"),
    _counter("frame_errors_total", "Connections that sent what is no frame, or one that could not be handled"),
    _counter("stray_frames_total", "Frames that fit no transfer or come from the wrong side"),
    _counter("notifications_total", "NIXL notifications received"),
    _counter("progress_errors_total", "Progress calls of the agent that failed"),
    _counter("task_errors_total", "Tasks of one peer that broke"),
    _counter("undeclared_metrics_total", "Records that the catalogue does not know, and that were dropped"),
    _gauge("thread_age_seconds", "Since the last turn of the endpoint's thread: large when a call of the agent hangs"),
)

FAMILIES: Mapping[str, Family] = {f.name: f for f in _FAMILIES}
"""By name."""

Series = tuple[str, ...]
"""Values of a family's labels, in its order."""
Cell = list[float]
"""[value] of a counter or gauge; [sum, count of each bucket ..., count above the last] of a histogram."""
Samples = dict[str, list[tuple[Series, Cell]]]
"""Everything a rank measured since it began, by family: whole each time, so that a lost report costs nothing."""


def checked(report: object) -> tuple[Samples, int]:
    """What of a rank's report can be shown, and how much can not: a rank that is broken, or newer than
    this catalogue, must not cost the others their scrape."""
    if not isinstance(report, dict):
        return {}, 1
    found: Samples = {}
    bad = sum(name not in FAMILIES for name in report)
    for family in _FAMILIES:
        rows = report.get(family.name, [])
        if not isinstance(rows, list | tuple):
            bad += 1
            continue
        kept: dict[Series, Cell] = {}
        for row in rows[: family.limit]:
            sample = _sample(family, row)
            if sample is None or sample[0] in kept:
                bad += 1
            else:
                kept[sample[0]] = sample[1]
        bad += max(0, len(rows) - family.limit)
        if kept:
            found[family.name] = list(kept.items())
    return found, bad


def _sample(family: Family, row: object) -> tuple[Series, Cell] | None:
    if not isinstance(row, list | tuple) or len(row) != 2:
        return None
    labels, cell = row
    if not isinstance(labels, list | tuple) or not isinstance(cell, list | tuple):
        return None
    if len(labels) != len(family.labels) or len(cell) != family.cells:
        return None
    if not all(isinstance(v, str) and v.isprintable() for v in labels):
        return None
    if not all(isinstance(v, int | float) and abs(v) < 1e300 and isfinite(v) for v in cell):
        return None
    if family.kind != "gauge" and any(v < 0 for v in cell):
        return None
    return family.series(dict(zip(family.labels, labels, strict=True))), [float(v) for v in cell]
