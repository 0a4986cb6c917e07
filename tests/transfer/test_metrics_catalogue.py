"""The catalogue of metrics: Prometheus' naming rules, who records what, bounds, and the list in docs."""

from __future__ import annotations

import ast
import logging
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import pdtransfer
from pdtransfer.contract.metrics import FAMILIES, MAX_LABEL, MAX_VALUES, OTHER, PREFIX, Family, checked
from pdtransfer.session.metrics import Metrics
from pdtransfer.sidecar.metrics import OWN, RANK_LABELS, markdown

ROOT = Path(__file__).parents[2]
ALL = [*FAMILIES.values(), *OWN.values()]
# Of Prometheus' practices for names, and what promlint refuses.
OTHER_UNITS = re.compile(
    r"(?:^|_)(?:ms|us|ns|msec|milliseconds?|microseconds?|nanoseconds?|minutes?|hours?|days?|kb|kib|mb|mib|gb|gib|"
    r"bits?|percent|percentage|kilobytes?|megabytes?|celsius|second|byte)(?:_|$)"
)
RESERVED_LABELS = {"le", "quantile", "job", "instance", "namespace", "pod", "container", "type"}


def faults(family: Family, prefix: str = PREFIX) -> list[str]:
    """What a linter of Prometheus names says of a family."""
    name, found = prefix + family.name, []
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        found.append("not snake_case")
    if (family.kind == "counter") != name.endswith("_total"):
        found.append("counters, and counters alone, end in _total")
    if re.search(r"_(count|sum|bucket|created|info)$", family.stem) and name != f"{PREFIX}rank_info":
        found.append("a suffix that histograms and counters make")
    if OTHER_UNITS.search(name):
        found.append("not a base unit")
    if ("seconds" in name and not family.stem.endswith("_seconds")) or (
        "bytes" in name and not family.stem.endswith("bytes")
    ):
        found.append("the unit comes last")
    if re.search(rf"(^|_){family.kind}(_|$)", family.name):
        found.append("its type in the name")
    if not family.help or family.help.endswith(".") or "\n" in family.help:
        found.append("help text")
    for label in family.labels:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", label) or label.startswith("__") or label in RESERVED_LABELS:
            found.append(f"label {label}")
        if label in RANK_LABELS and family.name in FAMILIES:
            found.append(f"label {label} is the sidecar's")
    if (family.kind == "histogram") != bool(family.buckets) or list(family.buckets) != sorted(set(family.buckets)):
        found.append("buckets")
    return found


@pytest.mark.parametrize("family", ALL, ids=lambda f: f.name)
def test_names_units_labels_and_help_follow_prometheus_conventions(family: Family) -> None:
    assert faults(family) == []


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Family("moved_bytes", "counter", "x"), "counters, and counters alone, end in _total"),
        (Family("moved_total", "gauge", "x"), "counters, and counters alone, end in _total"),
        (Family("wait_ms", "gauge", "x"), "not a base unit"),
        (Family("seconds_waited", "gauge", "x"), "the unit comes last"),
        (Family("bytes_moved_total", "counter", "x"), "the unit comes last"),
        (Family("waitSeconds", "gauge", "x"), "not snake_case"),
        (Family("wait_bucket", "gauge", "x"), "a suffix that histograms and counters make"),
        (Family("depth_gauge", "gauge", "x"), "its type in the name"),
        (Family("depth", "gauge", ""), "help text"),
        (Family("depth", "gauge", "x", {"le": ()}), "label le"),
        (Family("wait_seconds", "histogram", "x", {}, (2.0, 1.0)), "buckets"),
    ],
)
def test_the_check_of_names_finds_each_kind_of_bad_one(bad: Family, why: str) -> None:
    assert why in faults(bad)


def test_no_name_is_taken_twice_and_labels_are_few() -> None:
    names = [f.name for f in ALL]
    assert len(names) == len(set(names)) and len({f.stem for f in ALL}) == len(names)
    # A histogram's own series must be no other family's name.
    made = {f"{f.name}{s}" for f in ALL if f.kind == "histogram" for s in ("_bucket", "_sum", "_count")}
    assert not made & set(names)
    # At most so many lines of text a rank, whatever it does.
    assert sum(f.limit * f.cells for f in FAMILIES.values()) < 20_000


def records() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the package that records something: where, and the call."""
    for path in sorted(Path(pdtransfer.__file__).parent.rglob("*.py")):
        if path.name == "metrics.py":
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not call.args or not isinstance(call.args[0], ast.Constant):
                continue
            what = ast.unparse(call.func)
            if re.search(r"(^|\.)(_?core|metrics|self)\.(count|observe|gauge)$|^(count|observe|gauge)$", what):
                yield f"{path.name}:{call.lineno}", call


def test_every_record_in_the_package_is_declared_with_its_kind_and_labels() -> None:
    seen = set()
    for where, call in records():
        name = call.args[0].value  # type: ignore[attr-defined]
        family = FAMILIES.get(name)
        assert family is not None, f"{where}: {name} is not in contract/metrics.py"
        kind = {"count": "counter", "observe": "histogram", "gauge": "gauge"}[ast.unparse(call.func).split(".")[-1]]
        assert kind == family.kind, f"{where}: {name} is a {family.kind}"
        labels = {k.arg: k.value for k in call.keywords}
        if None not in labels:  # no **mapping
            assert set(labels) == set(family.labels), f"{where}: {name} has the labels {sorted(family.labels)}"
        for label, value in labels.items():
            if label is not None and isinstance(value, ast.Constant):
                allowed = family.labels[label]
                assert not allowed or value.value in allowed, f"{where}: {label}={value.value} is not declared"
        seen.add(name)
    never = set(FAMILIES) - seen - {"undeclared_metrics_total"}
    assert not never, f"declared and never recorded: {sorted(never)}"


def test_every_kind_of_deadline_is_counted_somewhere() -> None:
    counted = {
        word.value
        for _, call in records()
        if call.args[0].value == "deadlines_total"  # type: ignore[attr-defined]
        for keyword in call.keywords
        for word in ast.walk(keyword.value)
        if isinstance(word, ast.Constant)
    }
    assert counted == set(FAMILIES["deadlines_total"].labels["state"])


def test_docs_list_every_metric() -> None:
    shown = (ROOT / "docs" / "metrics.md").read_text()
    assert shown == markdown(), "run: python -m pdtransfer.sidecar.metrics > docs/metrics.md"
    assert all(f"`{PREFIX}{f.name}`" in shown for f in ALL)


# --- the recorder --------------------------------------------------------------------------


def test_counters_gauges_and_histograms_say_what_was_recorded() -> None:
    m = Metrics()
    m.count("bytes_total", 5, direction="sent", strategy="staged", transport="TCP")
    m.count("bytes_total", 7, transport="TCP", strategy="staged", direction="sent")
    m.count("frame_errors_total")
    m.gauge("inflight", 3)
    m.gauge("inflight", 2)
    for seconds in (0.0004, 0.0005, 0.0006, 61.0):
        m.observe("queue_seconds", seconds)
    got = m.snapshot()
    assert got["bytes_total"] == [(("sent", "staged", "TCP"), [12])]
    assert got["frame_errors_total"] == [((), [1])] and got["inflight"] == [((), [2])]
    ((labels, (total, *counts)),) = got["queue_seconds"]
    # Bounds are inclusive: 0.4 and 0.5 ms in the first, 0.6 ms in the second, 61 s above the last.
    assert labels == () and total == pytest.approx(61.0015)
    assert counts == [2, 1, *[0] * 14, 1] and len(FAMILIES["queue_seconds"].buckets) == 16
    flat = m.flat()
    assert flat["bytes"] == 12 and flat["bytes{direction=sent,strategy=staged,transport=TCP}"] == 12
    assert flat["frame_errors"] == 1 and flat["stray_frames"] == 0 and "queue_seconds" not in flat


def test_what_is_not_declared_is_dropped_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    m = Metrics()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            m.count("no_such_total")
        m.observe("inflight", 1)  # another kind
        m.count("frame_errors_total", -1)
        m.gauge("inflight", float("nan"))
    assert m.flat()["undeclared_metrics"] == 6 and m.flat()["frame_errors"] == 0
    assert "no_such_total" not in m.snapshot() and "inflight" not in m.snapshot()
    assert [r.message for r in caplog.records if "no_such_total" in r.message].__len__() == 1


def test_labels_from_outside_can_not_grow_without_bound() -> None:
    m = Metrics()
    for i in range(1000):
        m.count("failures_total", reason=f"Reason{i}")
    m.count("failures_total", reason="x" * 1000)
    m.count("transfers_total", strategy="teleport", outcome="succeeded")
    rows = dict(m.snapshot()["failures_total"])
    assert len(rows) <= MAX_VALUES + 2 and sum(c[0] for c in rows.values()) == 1001
    assert rows[(OTHER,)][0] >= 1001 - MAX_VALUES - 1
    assert all(len(v) <= MAX_LABEL for labels in rows for v in labels)
    assert m.snapshot()["transfers_total"] == [((OTHER, "succeeded"), [1])]


def test_threads_lose_no_count() -> None:
    m = Metrics()

    def work() -> None:
        for _ in range(2000):
            m.count("failures_total", reason="Aborted")
            m.observe("plan_seconds", 0.001)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        m.snapshot()
    got = m.snapshot()
    assert got["failures_total"] == [(("Aborted",), [8000])] and sum(got["plan_seconds"][0][1][1:]) == 8000


def test_a_report_of_the_recorder_passes_the_sidecars_check_unchanged() -> None:
    m = Metrics()
    m.count("bytes_total", 5, direction="sent", strategy="staged", transport="TCP")
    m.observe("transfer_seconds", 0.2, strategy="direct", outcome="succeeded")
    m.gauge("thread_age_seconds", 0.01)
    assert checked(m.snapshot()) == (m.snapshot(), 0)
