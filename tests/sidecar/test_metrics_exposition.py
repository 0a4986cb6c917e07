"""What a scrape of the sidecar shows of its ranks, read by prometheus_client's parser."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from sidecar_kit import CLUSTER, POD, FakeEndpoint, card, running, until

from pdtransfer.contract.base import Role
from pdtransfer.contract.link import Heartbeat, Hello
from pdtransfer.contract.metrics import FAMILIES, MAX_VALUES, OTHER, PREFIX, checked
from pdtransfer.session.metrics import Metrics
from pdtransfer.sidecar import metrics
from pdtransfer.sidecar.hub import Hub
from pdtransfer.sidecar.model import Identity, PodState
from pdtransfer.sidecar.rank_link import RankLink


def hub(*reports: object) -> Hub:
    """A hub with one registered rank a report."""
    made = Hub(PodState(identity=Identity(CLUSTER, POD, Role.PREFILL)), clock=lambda: 0.0)
    for rank, report in enumerate(reports):
        made.message(rank, Hello(card=card(rank, tp_size=len(reports)), expected_ranks=len(reports)))
        made.message(rank, Heartbeat(metrics=report))
    return made


def samples(of: Hub) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of a scrape, each series once."""
    text = metrics.render(of, True)[0].decode()
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for s in parsed(text):
        key = (s.name, tuple(sorted(s.labels.items())))
        assert key not in found, f"{key} twice"
        found[key] = s.value
    return found


def parsed(text: str) -> Iterator[Sample]:
    names = []
    for family in text_string_to_metric_families(text):
        names.append(family.name)
        assert family.documentation and family.type in ("counter", "gauge", "histogram")
        yield from family.samples
    assert len(names) == len(set(names))


def series(name: str, **labels: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    return PREFIX + name, tuple(sorted(labels.items()))


P0 = {"rank": "0", "role": "prefill"}


def test_a_scrape_shows_each_ranks_counters_gauges_and_histograms_with_rank_and_role() -> None:
    m = Metrics()
    m.count("bytes_total", 3 << 30, direction="sent", strategy="staged", transport="RDMA")
    m.gauge("quarantined_bytes", 4096, kind="pages")
    for seconds in (0.0007, 0.2, 0.2, 100.0):
        m.observe("transfer_seconds", seconds, strategy="staged", outcome="succeeded")
    got = samples(hub(m.snapshot(), Metrics().snapshot()))
    assert got[series("bytes_total", **P0, direction="sent", strategy="staged", transport="RDMA")] == 3 << 30
    assert got[series("quarantined_bytes", **P0, kind="pages")] == 4096
    labels = {**P0, "strategy": "staged", "outcome": "succeeded"}
    assert got[series("transfer_seconds_count", **labels)] == 4
    assert got[series("transfer_seconds_sum", **labels)] == pytest.approx(100.4007)
    # Cumulative: 0.7 ms is in the bucket of 1 ms and all above, 100 s in +Inf alone.
    wanted = {"0.0005": 0, "0.001": 1, "0.1": 1, "0.25": 3, "60.0": 3, "+Inf": 4}
    assert {le: got[series("transfer_seconds_bucket", **labels, le=le)] for le in wanted} == wanted
    assert got[series("frame_errors_total", rank="1", role="prefill")] == 0  # there from the start
    assert got[series("rank_info", **P0, incarnation="i1")] == 1


def test_a_rank_that_restarts_is_a_counter_reset_under_another_incarnation() -> None:
    of = hub([])
    m = Metrics()
    m.count("frame_errors_total", 9)
    of.message(0, Heartbeat(metrics=m.snapshot()))
    assert samples(of)[series("frame_errors_total", **P0)] == 9
    of.message(7, Hello(card=card(0, tp_size=1, incarnation="i2"), expected_ranks=1))
    gone = samples(of)
    assert series("frame_errors_total", **P0) not in gone  # nothing is known of the new one: no value, not zero
    of.message(0, Heartbeat(metrics=m.snapshot()))  # of the old connection: nobody's
    of.message(7, Heartbeat(metrics=Metrics().snapshot()))
    got = samples(of)
    assert got[series("frame_errors_total", **P0)] == 0
    assert [k for k in got if k[0] == "pdtransfer_rank_info"] == [series("rank_info", **P0, incarnation="i2")]


def test_a_heartbeat_without_a_report_leaves_the_last_one_standing() -> None:
    m = Metrics()
    m.gauge("inflight", 2)
    of = hub(m.snapshot())
    of.message(0, Heartbeat(inflight=5))
    assert samples(of)[series("inflight", **P0)] == 2


BAD = [
    "text",
    [],
    {"bytes_total": "x"},
    {"bytes_total": [1, None, "ab", [[], [1]], [["sent", "direct"], [1.0]], [["sent", "direct", "TCP", "x"], [1.0]]]},
    {"frame_errors_total": [[[], [-1.0]]]},
    {"frame_errors_total": [[[], [1.0]], [[], [2.0]]]},
    {"frame_errors_total": [[[], ["1"]]]},
    {"frame_errors_total": [[[], [True, 1]]]},
    {"frame_errors_total": [[[], [10**400]]]},
    {"failures_total": [[[3], [1.0]], [["a\nb"], [1.0]], [["\ud800"], [1.0]]]},
    {"queue_seconds": [[[], [1.0, 2.0]]]},
    {"queue_seconds": [[[], [1.0, *[-1.0] * 17]]]},
    {"unknown_total": [[[], [1.0]]], "ready": [[[], [0.0]]], "rank_info": [[["9", "x", "y"], [1.0]]]},
]


@pytest.mark.parametrize("report", BAD, ids=range(len(BAD)))
def test_a_broken_report_costs_its_own_samples_only(report: object) -> None:
    healthy = Metrics()
    healthy.count("frame_errors_total", 2)
    of = hub(report, healthy.snapshot())
    got = samples(of)
    assert got[series("rank_bad_samples", **P0)] >= 1
    assert got[series("frame_errors_total", rank="1", role="prefill")] == 2
    assert got[series("rank_bad_samples", rank="1", role="prefill")] == 0
    assert got[("pdtransfer_ranks_registered", ())] == 2


def test_a_report_as_large_as_a_line_may_be_is_cut_to_the_catalogue() -> None:
    rows = [[[f"Reason{i}"], [1.0]] for i in range(100_000)]
    of = hub({"failures_total": rows, **{f"n{i}": [] for i in range(10_000)}})
    got = samples(of)
    assert sum(k[0] == "pdtransfer_failures_total" for k in got) <= MAX_VALUES + 1
    assert got[series("rank_bad_samples", **P0)] == 10_000 + 100_000 - (MAX_VALUES + 1)


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**320), 10**320),
    st.floats(),
    st.text(max_size=80),
    st.sampled_from(["sent", "direct", "TCP", "other", "pages"]),
)
anything = st.recursive(
    values, lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
rows = st.lists(
    st.tuples(st.lists(values, max_size=4), st.lists(st.floats(0, 1e9) | values, max_size=19)) | anything, max_size=6
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(FAMILIES)) | st.text(max_size=10), rows, max_size=6) | anything)
def test_no_report_can_break_the_scrape(report: object) -> None:
    kept, bad = checked(report)
    assert bad >= 0
    for name, series_of in kept.items():
        family = FAMILIES[name]
        for labels, cell in series_of:
            assert all(v in a or v == OTHER for v, a in zip(labels, family.labels.values(), strict=True) if a)
            assert all(isinstance(v, float) and math.isfinite(v) for v in cell)
    of = hub(report)
    got = samples(of)
    assert got[("pdtransfer_ranks_registered", ())] == 1


async def test_over_the_socket_a_malformed_report_keeps_the_rank_and_a_good_one_is_scraped(tmp_path: Path) -> None:
    async with running(tmp_path) as sidecar, httpx.AsyncClient(trust_env=False, timeout=20.0) as client:
        health = f"http://127.0.0.1:{sidecar.health.port}"
        ends = [FakeEndpoint(card(i)) for i in range(2)]
        ends[0].metrics = {"frame_errors_total": "nonsense", "x" * 1000: [1]}
        m = Metrics()
        m.observe("plan_seconds", 0.003)
        ends[1].metrics = m.snapshot()
        links = [RankLink(tmp_path / "s.sock", e, expected_ranks=2).start() for e in ends]
        try:
            await until(lambda: len(sidecar.hub.state.ranks) == 2 and sidecar.hub.state.ranks[1].metrics)
            await until(lambda: sidecar.hub.state.ranks[0].bad_samples)
            answer = await client.get(f"{health}/metrics")
            got = {(s.name, tuple(sorted(s.labels.items()))): s.value for s in parsed(answer.text)}
            assert answer.status_code == 200
            assert got[series("rank_bad_samples", **P0)] == 2
            assert got[series("plan_seconds_count", rank="1", role="prefill")] == 1
        finally:
            for link in links:
                link.stop()


def test_a_full_report_is_a_few_kilobytes() -> None:
    m = Metrics()
    for strategy in ("direct", "sliced", "staged"):
        m.count("bytes_total", 1e12, direction="sent", strategy=strategy, transport="RDMA")
        m.observe("transfer_seconds", 0.123456, strategy=strategy, outcome="succeeded")
    line = Heartbeat(metrics=json.loads(json.dumps(m.snapshot()))).model_dump_json()
    assert len(line) < 8 << 10


async def test_metrics_that_can_not_be_read_do_not_end_a_ranks_link(tmp_path: Path) -> None:
    class Broken(FakeEndpoint):
        @property
        def metrics(self) -> object:
            raise RuntimeError("a gauge that breaks")

        @metrics.setter
        def metrics(self, value: object) -> None: ...

    async with running(tmp_path) as sidecar:
        link = RankLink(tmp_path / "s.sock", Broken(card(0, tp_size=1)), expected_ranks=1).start()
        try:
            await until(lambda: sidecar.hub.state.ranks and sidecar.hub.state.ranks[0].seen)
            first = sidecar.hub.state.ranks[0]
            await until(lambda: sidecar.hub.state.ranks[0].seen > first.seen + 0.4)  # the next heartbeat
            assert link.error == "" and sidecar.hub.state.ranks[0].conn == first.conn
        finally:
            link.stop()
