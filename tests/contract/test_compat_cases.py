"""Pairs of settings that people really ran (public bug reports) and what the fit check must say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from rules_kit import Cards, Pair, failed

from pdtransfer.contract.base import Backend, MemoryKind, Role
from pdtransfer.contract.compat import Status, check, check_cards, check_rank_pair
from pdtransfer.contract.facts import HostKVMode

NOT_PASS = {Status.FAIL, Status.WARN, Status.UNKNOWN}


def test_swa_gqa_unequal_tp(pair: Pair) -> None:
    report = check(*pair("swa8", prefill={"tensor_parallel": 1}, decode={"tensor_parallel": 4}, backend=Backend.NIXL))
    assert (report.verdict, failed(report)) == (Status.FAIL, ["D2"])
    finding = report.first_failure
    assert finding is not None
    assert "prefill attention TP 1, decode attention TP 4" in finding.message and "hangs" in finding.message
    # PDCluster: windows are K and V of a page space of their own, cut by head like any other.
    ours = check(*pair("swa8", prefill={"tensor_parallel": 1}, decode={"tensor_parallel": 4}))
    assert ours.verdict is Status.PASS, ours.first_failure
    assert check(*pair("swa8", tensor_parallel=4)).verdict is Status.PASS


@pytest.mark.parametrize("backend", list(Backend))
def test_kv_dtype_differs(pair: Pair, backend: Backend) -> None:
    report = check(*pair(prefill={"kv_dtype": "bfloat16"}, decode={"kv_dtype": "fp8_e4m3"}, backend=backend))
    assert failed(report) == ["B3"]
    message = report.findings[[f.rule for f in report.findings].index("B3")].message
    assert "'bfloat16'" in message and "'fp8_e4m3'" in message


def test_kv_dtype_differs_is_refused_at_the_handshake(engine_cards: Cards) -> None:
    # page 16 x 8 heads x 64 dims: 16384 bytes in bfloat16, 8192 in fp8.
    p = engine_cards(Role.PREFILL)[0]
    d = engine_cards(Role.DECODE, kv_dtype="fp8_e4m3", element=1)[0]
    assert (p.layout.regions[0].item_bytes, d.layout.regions[0].item_bytes) == (16384, 8192)
    report = check_rank_pair(p, d)
    assert report.verdict is Status.FAIL and failed(report)[0] == "B3" and "L7" in failed(report)


def test_kv_dtype_spelled_differently(pair: Pair) -> None:
    report = check(*pair(prefill={"kv_dtype": "auto"}, decode={"kv_dtype": "bfloat16"}))
    assert failed(report) == ["B3"]


def test_page_size_differs(pair: Pair) -> None:
    report = check(*pair(prefill={"page_size": 64}, decode={"page_size": 32}))
    assert failed(report) == ["B1"]
    finding = report.first_failure
    assert finding and "64" in finding.message and "32" in finding.message and "pageSize" in finding.action


def test_page_size_rewritten_at_start_shows_on_the_cards(pair: Pair, engine_cards: Cards) -> None:
    spec_p, spec_d = pair(page_size=16)
    report = check_cards(
        engine_cards(Role.PREFILL, page=16),
        engine_cards(Role.DECODE, page=64),
        prefill_spec=spec_p,
        decode_spec=spec_d,
    )
    assert failed(report)[0] == "B1"
    rewritten = report.finding("B2")
    assert rewritten and rewritten.status is Status.WARN and "given page size 16 and uses 64" in rewritten.message


def test_speculation_on_one_side(pair: Pair) -> None:
    eagle = {"speculative_algorithm": "EAGLE3", "attention_backend": "fa3"}
    for backend in Backend:
        assert failed(check(*pair(prefill=eagle, backend=backend))) == ["C2"]
        ngram = {"speculative_algorithm": "NGRAM", "attention_backend": "flashinfer"}
        assert check(*pair(prefill=ngram, backend=backend)).verdict is Status.PASS
    assert check(*pair(decode=eagle, backend=Backend.NIXL)).verdict is Status.PASS
    assert failed(check(*pair(decode=eagle))) == ["C1"]
    assert check(*pair(**eagle)).verdict is Status.PASS


@pytest.mark.parametrize(("p", "d"), [(4, 4), (4, 2), (1, 4)])
def test_hisparse_host_buffers(pair: Pair, p: int, d: int) -> None:
    sides: dict[str, Any] = {
        "prefill": {"tensor_parallel": p, "memory_kinds": {MemoryKind.VRAM}},
        "decode": {
            "tensor_parallel": d,
            "host_kv": HostKVMode.HISPARSE,
            "memory_kinds": {MemoryKind.DRAM, MemoryKind.VRAM},
        },
    }
    ours, nixl = check(*pair(**sides)), check(*pair(**sides, backend=Backend.NIXL))
    assert [f.status for f in ours.findings if f.rule == "F3"] == [Status.PASS]
    assert [f.status for f in nixl.findings if f.rule == "F3"] == [Status.PASS if p == d else Status.FAIL]


@pytest.mark.parametrize("tp", [1, 4])
def test_hisparse_host_buffers_move_between_cards(engine_cards: Cards, tp: int) -> None:
    report = check_cards(
        engine_cards(Role.PREFILL, 4),
        engine_cards(Role.DECODE, tp, memory=(MemoryKind.DRAM, MemoryKind.VRAM)),
    )
    assert report.verdict is Status.PASS, report.first_failure


def test_memory_kinds_missing(pair: Pair, engine_cards: Cards) -> None:
    for backend in Backend:
        report = check(*pair(decode={"memory_kinds": frozenset(), "observed": True}, backend=backend))
        assert failed(report) == ["F7"]
        finding = report.first_failure
        assert finding and "asked for again" in finding.action and "recycled" in finding.action
    stale = engine_cards(Role.DECODE, memory=(None,))
    report = check_cards(engine_cards(Role.PREFILL), stale)
    assert "F7" in failed(report) and "8 of 8 KV regions" in (report.finding("F7") or report.findings[0]).message


def test_dp_without_dp_attention(pair: Pair) -> None:
    copies = {"data_parallel": 2}
    report = check(*pair(prefill=copies))
    assert report.verdict is Status.WARN
    finding = report.finding("A1")
    assert finding and "2 whole copies inside one server" in finding.message
    legacy = {"data_parallel": 2, "dp_attention_flag": True, "tensor_parallel": 4}
    report = check(*pair(prefill=legacy, decode={"tensor_parallel": 2}))
    assert report.verdict is Status.WARN
    finding = report.finding("A1")
    assert finding and finding.severity == "NORM" and "attention DP 2, attention TP 2" in finding.message


def test_mla_pp_mismatch(pair: Pair) -> None:
    stages = {"pipeline_parallel": 4}
    for backend in Backend:
        assert check(*pair("mla", prefill=stages, backend=backend)).verdict is Status.PASS
    gqa = check(*pair("gqa8", prefill=stages, backend=Backend.NIXL))
    assert failed(gqa) == ["A9"] and "4 pipeline stages, decode 1" in (gqa.first_failure or gqa.findings[0]).message
    assert failed(check(*pair("mla", decode=stages, backend=Backend.NIXL))) == ["A8"]
    assert check(*pair("gqa8", prefill=stages)).verdict is Status.PASS


def test_more_ranks_than_kv_heads(pair: Pair) -> None:
    for backend, verdict in ((Backend.PDCLUSTER, Status.PASS), (Backend.NIXL, Status.WARN)):
        report = check(*pair("gqa8", prefill={"tensor_parallel": 8}, decode={"tensor_parallel": 16}, backend=backend))
        assert report.verdict is verdict, report.first_failure


def test_rounds_to_zero(pair: Pair) -> None:
    sizes: dict[str, Any] = {"prefill": {"tensor_parallel": 8}, "decode": {"tensor_parallel": 16}}
    report = check(*pair("gqa4", **sizes, backend=Backend.NIXL))
    assert failed(report) == ["A6"]
    finding = report.first_failure
    assert finding and "8" in finding.message and "16" in finding.message and "4 KV heads" in finding.message
    assert finding.severity == "PDEAD"
    assert check(*pair("gqa4", **sizes)).verdict is Status.PASS


def test_context_length_on_one_side(pair: Pair) -> None:
    report = check(*pair(prefill={"context_length": 8192}))
    assert report.verdict is Status.WARN
    finding = report.finding("B14")
    assert finding and "8192" in finding.message and "--context-length" in finding.action
    assert check(*pair(context_length=8192)).verdict is Status.PASS


def test_tp_not_divisible(pair: Pair) -> None:
    for backend in Backend:
        report = check(*pair("mla", prefill={"tensor_parallel": 3}, decode={"tensor_parallel": 2}, backend=backend))
        assert failed(report) == ["A3"]
        assert "TP 3" in (report.first_failure or report.findings[0]).message


def test_decode_hicache_without_radix(pair: Pair) -> None:
    report = check(*pair(decode={"hierarchical_cache": True}))
    assert failed(report) == ["E2"]
    both = check(*pair(decode={"hierarchical_cache": True, "decode_radix_cache": True}))
    # SGLang calls decode's prefix cache experimental.
    assert both.fits and [f.rule for f in both.of(Status.WARN)] == ["E8"]
    assert check(*pair(prefill={"hierarchical_cache": True})).verdict is Status.PASS


def test_staging_with_mla(pair: Pair) -> None:
    for backend in (Backend.NIXL, Backend.MOONCAKE):
        assert failed(check(*pair("mla", prefill={"staging_buffer": True}, backend=backend))) == ["G1"]
    assert "G1" in failed(check(*pair("mla", prefill={"staging_buffer": True})))


def test_every_case_names_what_to_change(pair: Pair) -> None:
    broken: Sequence[dict[str, Any]] = (
        {"prefill": {"page_size": 32}},
        {"prefill": {"tensor_parallel": 3}, "decode": {"tensor_parallel": 2}},
        {"decode": {"hierarchical_cache": True}},
    )
    for sides in broken:
        for finding in check(*pair(**sides)).of(Status.FAIL):
            assert finding.action and finding.title and finding.severity
