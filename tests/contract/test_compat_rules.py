"""Each rule under each backend. Expected outcomes are read off the tables of the SGLang PD rules."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rules_kit import LETTER, PP, TP, Pair, decode, prefill, tp

from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.compat import RULES, Report, Status, check, rules_table
from pdtransfer.contract.facts import HostKVMode, RoleFacts, draft_kv_algorithm


def pp(p: int, d: int, p_tp: int = 1, d_tp: int = 1) -> dict[str, Any]:
    return {"prefill": {PP: p, TP: p_tp}, "decode": {PP: d, TP: d_tp}}


HISPARSE = HostKVMode.HISPARSE
RECEIVE = HostKVMode.HOST_RECEIVE
DRAM, VRAM = frozenset({MemoryKind.DRAM}), frozenset({MemoryKind.VRAM})

# (rule, model, settings, PDCluster, NIXL, Mooncake): P pass, W warn, F fail, U unknown, - deferred
TABLE: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("V1", "gqa8", {}, "PPP"),
    ("V1", "gqa8", decode(engine_version="0.5.24"), "FFF"),
    ("V1", "gqa8", decode(engine_version=None), "UUU"),
    ("V1", "gqa8", decode(engine=EngineType.REFERENCE), "FFF"),
    ("V2", "gqa8", {"engine_version": "0.5.23.post1"}, "PPP"),
    ("V2", "gqa8", {"engine_version": "0.6.0"}, "WWW"),
    ("V2", "gqa8", {"engine_version": None}, "UUU"),
    ("A1", "gqa8", prefill(data_parallel=2), "WWW"),
    ("A1", "gqa8", decode(data_parallel=2, dp_attention_flag=True, tensor_parallel=2), "WWW"),
    ("A1", "gqa8", {}, "PPP"),
    ("A2", "gqa8", prefill(tensor_parallel=4, attention_data_parallel=3), "FFF"),
    ("A2", "gqa8", prefill(tensor_parallel=4, attention_data_parallel=2, data_parallel=2), "FFF"),
    ("A2", "gqa8", prefill(tensor_parallel=4, attention_data_parallel=2), "PPP"),
    ("A3", "mla", tp(3, 2), "FFF"),
    ("A3", "gqa8", tp(2, 8), "PPP"),
    ("A3", "gqa8", tp(8, 2), "PPP"),
    # Attention TP is what counts: 8 // 2 = 4 against 4.
    ("A3", "gqa8", {"prefill": {TP: 6, "attention_data_parallel": 3}, "decode": {TP: 4}}, "PPP"),
    ("A4", "mla", tp(4, 8), "PPP"),
    ("A5", "gqa8", tp(4, 8), "PWW"),
    ("A5", "gqa8", tp(4, 8, staging_buffer=True), "PPP"),
    ("A5", "gqa8", tp(4, 4), "PPP"),
    ("A5", "mla", tp(4, 8), "PPP"),
    ("A5", None, tp(4, 8), "PUU"),
    ("A6", "gqa4", tp(8, 16), "PFP"),
    ("A6", "gqa4", tp(4, 8), "PPP"),
    ("A6", "gqa4", tp(16, 8), "PPP"),
    ("A6", "mla", tp(8, 16), "PPP"),
    ("A6", None, tp(8, 16), "PUP"),
    ("A7", "mimo", tp(2, 4), "PFF"),
    ("A7", "mimo", tp(4, 4), "PPP"),
    ("A7", "gqa8", tp(2, 4), "PPP"),
    ("A8", "gqa8", pp(4, 2), "FFF"),
    ("A8", "gqa8", pp(4, 4), "PPP"),
    ("A8", "gqa8", pp(4, 1), "PPP"),
    ("A9", "gqa8", pp(2, 1), "PFP"),
    ("A9", "swa8", pp(2, 1), "FFF"),
    ("A9", "mla", pp(2, 1), "PPP"),
    ("A9", "linear", pp(2, 1), "PPP"),
    ("A9", "gqa8", pp(2, 2), "PPP"),
    # 36 layers over 4 stages of 9 divide; over 5 stages of 7 and 8: 7 * 5 = 35, not 36.
    ("A10", "gqa8", pp(4, 1, 1, 2), "PPP"),
    ("A10", "gqa8", pp(5, 1, 1, 2), "PFF"),
    # At equal TP NIXL refuses (A9), and Mooncake maps by the same arithmetic.
    ("A10", "gqa8", pp(5, 1), "PPF"),
    ("A10", "gqa8", pp(5, 5, 1, 2), "PPP"),
    ("A10", "mla", pp(4, 1, 1, 2), "PPP"),
    ("A11", "gqa8", {PP: 2, "speculative_algorithm": "EAGLE"}, "FFF"),
    ("A11", "gqa8", {PP: 2, "speculative_algorithm": "NGRAM"}, "FFF"),
    ("A12", "mla", {"decode": {"context_parallel": 2, TP: 2}}, "FFF"),
    ("A13", "mla", {"prefill": {"context_parallel": 2, TP: 2}}, "PPP"),
    ("A13", "mla", {"prefill": {"context_parallel": 2, TP: 2, "all_cp_ranks_transfer": True}}, "FFF"),
    ("A14", "mla", {TP: 4, "dcp_size": 2}, "FPP"),
    ("A14", "mla", {TP: 4, "decode": {"dcp_size": 2}}, "FPP"),
    ("A14", "mla", {TP: 4, "prefill": {"dcp_size": 2}}, "FFF"),
    ("A14", "gqa8", {TP: 4, "decode": {"dcp_size": 2}}, "FFF"),
    ("A15", "gqa8", {TP: 4, "dcp_size": 2}, "PFF"),
    ("A15", "mla", {TP: 4, "dcp_size": 2, "prefill": {"context_parallel": 2}}, "PFF"),
    ("A15", "mla", {TP: 4, "dcp_size": 2}, "PPP"),
    ("A16", "dsa", {TP: 4, "dcp_size": 2}, "FFF"),
    ("A16", "mla", {TP: 4, "dcp_size": 2}, "WWW"),
    ("A16", "mla", {TP: 4, "prefill": {"dcp_size": 2, "context_parallel": 2}}, "FFF"),
    ("A16", "mla", {TP: 4, "prefill": {"context_parallel": 2}}, "PPP"),
    ("A22", "gqa8", tp(3, 3), "FFF"),
    ("A22", "gqa8", tp(16, 16), "PPP"),
    ("A22", "mla", tp(3, 3), "PPP"),
    ("B1", "gqa8", decode(page_size=32), "FFF"),
    ("B1", "gqa8", decode(page_size=None), "UUU"),
    ("B2", "gqa8", decode(page_size=64, page_size_requested=32, observed=True), "WWW"),
    ("B2", "gqa8", decode(page_size=64, page_size_requested=64, observed=True), "PPP"),
    ("B3", "gqa8", decode(kv_dtype="bf16"), "FFF"),
    # A flag that is not set in a command that is known whole is SGLang's default, 'auto'.
    ("B3", "gqa8", decode(kv_dtype=None), "FFF"),
    ("B3", "gqa8", {"kv_dtype": None}, "PPP"),
    ("B4", "gqa8", {"kv_dtype": "auto", "decode": {"model_dtype": "float16"}}, "FFF"),
    ("B4", "gqa8", {"kv_dtype": "auto"}, "PPP"),
    # --dtype that is not set is the model's own, bfloat16 here.
    ("B4", "gqa8", {"kv_dtype": "auto", "decode": {"model_dtype": None}}, "PPP"),
    ("B4", None, {"kv_dtype": "auto", "decode": {"model_dtype": "float16"}}, "FFF"),
    ("B4", "gqa8", decode(model_dtype="float16"), "PPP"),
    (
        "B6",
        "dsa",
        {"kv_dtype": "fp8_e4m3", **prefill(dsa_backend="trtllm"), **decode(dsa_backend="flashmla_kv")},
        "FFF",
    ),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3", "dsa_backend": "trtllm"}, "PPP"),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3"}, "PPP"),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3", **prefill(dsa_backend="trtllm")}, "UUU"),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3", **decode(host_kv=HISPARSE)}, "UUU"),
    ("B6", "dsa", {**prefill(dsa_backend="trtllm"), **decode(dsa_backend="flashmla_kv")}, "PPP"),
    ("B7", "gqa8", decode(model_name="example/other"), "FFF"),
    ("B7", "gqa8", {"prefill": {"model_revision": "a"}, "decode": {"model_revision": "b"}}, "FFF"),
    ("B7", "gqa8", decode(model_name=None), "UUU"),
    ("B8", "gqa8", tp(2, 4, kv_dtype="mxfp8"), "FFF"),
    ("B8", "gqa8", tp(4, 4, kv_dtype="mxfp8"), "PPP"),
    ("B8", "mla", tp(2, 4, kv_dtype="mxfp8"), "PPP"),
    ("B9", "gqa8", {"kv_dtype": "fp4_e2m1"}, "FFF"),
    ("B12", "gqa8", prefill(chunked_prefill_size=1000), "FFF"),
    ("B12", "gqa8", decode(chunked_prefill_size=1000), "PPP"),
    ("B12", "gqa8", prefill(chunked_prefill_size=-1), "PPP"),
    ("B14", "gqa8", decode(context_length=4096), "WWW"),
    ("B14", "gqa8", {"context_length": 8192, "decode": {"max_total_tokens": 4096}}, "WWW"),
    ("B14", "gqa8", {"context_length": 8192, "decode": {"max_total_tokens": 9000}}, "PPP"),
    ("C1", "gqa8", decode(speculative_algorithm="EAGLE"), "FPP"),
    ("C1", "gqa8", decode(speculative_algorithm="NGRAM"), "PPP"),
    ("C2", "gqa8", prefill(speculative_algorithm="EAGLE3"), "FFF"),
    ("C2", "gqa8", prefill(speculative_algorithm="ngram"), "PPP"),
    ("C3", "gqa8", tp(2, 4) | {"decode": {TP: 4, "speculative_algorithm": "STANDALONE", "draft_layers": 36}}, "PFF"),
    ("C3", "gqa8", tp(2, 4) | {"decode": {TP: 4, "speculative_algorithm": "EAGLE", "draft_layers": 1}}, "PPP"),
    (
        "C4",
        "gqa8",
        tp(2, 4, staging_buffer=True) | {"decode": {TP: 4, "speculative_algorithm": "EAGLE"}},
        "PFP",
    ),
    ("C4", "gqa8", tp(4, 4, staging_buffer=True) | {"decode": {TP: 4, "speculative_algorithm": "EAGLE"}}, "PPP"),
    ("C5", "gqa8", {**prefill(speculative_algorithm="EAGLE"), **decode(speculative_algorithm="DSPARK")}, "FFF"),
    ("C5", "gqa8", {**prefill(speculative_algorithm="NEXTN"), **decode(speculative_algorithm="EAGLE")}, "PPP"),
    (
        "C5",
        "gqa8",
        {"speculative_algorithm": "EAGLE", "prefill": {"draft_model": "a"}, "decode": {"draft_model": "b"}},
        "FFF",
    ),
    ("C7", "gqa8", {"speculative_algorithm": "STANDALONE", "decode": {"decode_radix_cache": True}}, "FFF"),
    ("C7", "gqa8", {"speculative_algorithm": "NGRAM", "decode": {"decode_radix_cache": True}}, "FFF"),
    ("C7", "gqa8", {"speculative_algorithm": "NEXTN", "decode": {"decode_radix_cache": True}}, "PPP"),
    ("C7", "gqa8", {"speculative_algorithm": "EAGLE3", "decode": {"decode_radix_cache": True}}, "PPP"),
    ("D1", "linear", tp(2, 2), "PPP"),
    ("D1", "linear", tp(1, 2), "FWW"),
    ("D1", "gqa8", tp(1, 2), "PPP"),
    ("D1", None, tp(1, 2), "UUU"),
    ("D2", "swa8", tp(1, 4), "PFF"),
    ("D2", "swa8", tp(4, 4), "PPP"),
    ("D5", "linear", prefill(ssm_dtype="bfloat16"), "FFF"),
    ("D5", "gqa8", prefill(ssm_dtype="bfloat16"), "PPP"),
    ("E1", "gqa8", decode(disable_radix_cache=False), "WWW"),
    ("E1", "gqa8", decode(disable_radix_cache=False, decode_radix_cache=True), "PPP"),
    ("E1", "gqa8", {}, "PPP"),
    ("E2", "gqa8", decode(hierarchical_cache=True), "FFF"),
    ("E2", "gqa8", decode(hierarchical_cache=True, decode_radix_cache=True), "PPP"),
    ("E3", "dsa", decode(host_kv=HISPARSE, decode_radix_cache=True), "FFF"),
    ("E3", "swa8", decode(hierarchical_cache=True, decode_radix_cache=True), "FFF"),
    ("E3", "gqa8", decode(hierarchical_cache=True, decode_radix_cache=True), "PPP"),
    ("E4", "gqa8", decode(decode_offload=True), "FFF"),
    ("E4", "gqa8", prefill(decode_offload=True), "FFF"),
    ("E4", "gqa8", {"hicache_storage_backend": "file", **decode(decode_offload=True)}, "PPP"),
    (
        "E4",
        "gqa8",
        decode(decode_offload=True, hicache_storage_backend="file", retraction_backup="host_pool"),
        "FFF",
    ),
    ("E6", "gqa8", prefill(retraction_backup="host_pool"), "FFF"),
    ("E6", "linear", decode(retraction_backup="host_pool"), "FFF"),
    ("E6", "gqa8", decode(retraction_backup="host_pool"), "PPP"),
    ("E7", "gqa8", prefill(optimistic_prefill=True, pipeline_parallel=2), "WWW"),
    ("F1", "gqa8", prefill(host_kv=RECEIVE), "FFF"),
    ("F2", "gqa8", decode(host_kv=RECEIVE), "PFF"),
    ("F3", "gqa8", tp(4, 2) | {"decode": {TP: 2, "memory_kinds": DRAM}}, "PFP"),
    ("F3", "gqa8", tp(4, 2) | {"decode": {TP: 2, "host_kv": HISPARSE}}, "PFP"),
    ("F3", "gqa8", tp(4, 4) | {"decode": {TP: 4, "memory_kinds": DRAM}}, "PPP"),
    ("F3", "mla", tp(4, 2) | {"decode": {TP: 2, "memory_kinds": DRAM}}, "PPP"),
    ("F3", "gqa8", tp(4, 2) | {"decode": {TP: 2, "memory_kinds": VRAM}}, "PPP"),
    ("F3", None, tp(4, 2) | {"decode": {TP: 2, "memory_kinds": DRAM}}, "PUP"),
    ("F4", "dsa", decode(host_kv=HISPARSE, speculative_algorithm="EAGLE"), "FFP"),
    ("F4", "dsa", decode(host_kv=HISPARSE), "PPP"),
    ("F5", "dsa", decode(host_kv=HISPARSE), "PPP"),
    ("F5", "gqa8", decode(host_kv=HISPARSE), "FFF"),
    ("F5", "dsa", decode(host_kv=HISPARSE, mixed_chunk=True), "FFF"),
    ("F5", "dsa", decode(host_kv=HISPARSE, decode_radix_cache=True), "FFF"),
    ("F5", None, decode(host_kv=HISPARSE), "UUU"),
    ("F6", "dsa", prefill(host_kv=HISPARSE), "FFF"),
    ("F7", "gqa8", {}, "---"),
    ("F7", "gqa8", {"memory_kinds": VRAM, "decode": {"regions_without_memory_kind": 3, "segments": 9}}, "FFF"),
    ("F7", "gqa8", {"memory_kinds": VRAM, "segments": 9, "regions_without_memory_kind": 0}, "PPP"),
    ("F8", "gqa8", {"segments": 8, "decode": {"segments": 0}}, "FFF"),
    ("F8", "gqa8", {"segments": 8}, "PPP"),
    ("F8", "gqa8", {}, "---"),
    ("F9", "dsa", decode(host_kv=HISPARSE, memory_kinds=VRAM), "FFP"),
    ("F9", "dsa", decode(host_kv=HISPARSE, memory_kinds=VRAM | DRAM), "PPP"),
    ("F9", "dsa", decode(host_kv=HISPARSE), "--P"),
    ("G1", "mla", decode(staging_buffer=True), "FFF"),
    ("G1", "gqa8", decode(staging_buffer=True), "PPP"),
    ("G1", None, decode(staging_buffer=True), "UUU"),
    ("G2", "gqa8", prefill(staging_buffer=True, chunked_prefill_size=-1), "FFF"),
    ("G2", "gqa8", prefill(staging_buffer=True, pipeline_parallel=2), "PFP"),
    ("G2", "gqa8", prefill(staging_buffer=True), "PPP"),
    ("G3", "gqa8", prefill(staging_buffer=True), "FPP"),
    ("H2", "gqa8", decode(nixl_backend="LIBFABRIC"), "FFP"),
    ("H5", "gqa8", prefill(host="127.0.0.1"), "FFF"),
    ("H5", "gqa8", decode(host="localhost"), "FFF"),
    ("H5", "gqa8", {"host": "::"}, "PPP"),
    ("H5", "gqa8", {"host": "127.0.0.1"}, "WWW"),
    ("H6", "gqa8", decode(bootstrap_port=9000), "WWW"),
    ("H10", "gqa8", decode(sampling_mask=True), "FFF"),
]
ROW = re.compile(r'\(\s*"([A-Z]\d+)",.*?"([PWFU-]{3})",?\s*\)', re.DOTALL)


def letter(report: Report, rule: str) -> str:
    finding = report.finding(rule)
    if finding is None:
        assert rule in report.deferred
        return "-"
    return LETTER[finding.status]


@pytest.mark.parametrize(("rule", "model", "settings", "expected"), TABLE)
def test_rule_per_backend(pair: Pair, rule: str, model: str | None, settings: dict[str, Any], expected: str) -> None:
    found = "".join(letter(check(*pair(model, **settings, backend=b)), rule) for b in Backend)
    assert found == expected


@pytest.mark.parametrize("model", ["gqa8", "gqa4", "swa8", "mimo", "mla", "dsa", "linear"])
@pytest.mark.parametrize("backend", list(Backend))
def test_equal_sides_fit(pair: Pair, model: str, backend: Backend) -> None:
    report = check(*pair(model, tensor_parallel=2, backend=backend))
    assert [f.rule for f in report.findings if f.status is not Status.PASS] == []
    assert report.deferred == ("F7", "F8", "H7")


def test_every_rule_has_a_row_that_breaks_it_or_is_always_fine() -> None:
    rows = [row for path in Path(__file__).parent.glob("test_*rules*.py") for row in ROW.findall(path.read_text())]
    assert len(rows) > len(TABLE) / 2  # the expression does find rows
    broken = {rule for rule, expected in rows if set(expected) & {"F", "W"}}
    # H1 sets the backends apart, which the tables' columns can not; the others are always fine, or only told.
    assert {r.id for r in RULES} - broken == {"A4", "B13", "E9", "H1"}
    assert len({r.id for r in RULES}) == len(RULES)


def test_different_backends_fail(pair: Pair) -> None:
    p, d = pair(prefill={"backend": Backend.NIXL}, decode={"backend": Backend.MOONCAKE})
    finding = check(p, d).finding("H1")
    assert finding and finding.status is Status.FAIL
    assert "prefill uses transfer backend NIXL, decode Mooncake" in finding.message


def test_geometry_differences_are_named_with_both_values(facts: Callable[..., RoleFacts]) -> None:
    finding = check(facts(Role.PREFILL, "gqa8"), facts(Role.DECODE, "gqa4")).finding("B7")
    assert finding and finding.message.startswith("prefill model has kv_heads 8, decode model has 4.")


def test_dsa_rows_hurt_differently_in_the_two_directions(pair: Pair) -> None:
    """B6: 576 into 656 is silently wrong, 656 into 576 kills the prefill rank's thread."""
    fp8 = {"kv_dtype": "fp8_e4m3", "backend": Backend.NIXL}
    for p, d, severity in (("trtllm", "flashmla_kv", "WRONG"), ("flashmla_kv", "trtllm", "PDEAD")):
        finding = check(*pair("dsa", **fp8, **prefill(dsa_backend=p), **decode(dsa_backend=d))).finding("B6")
        assert finding and finding.severity == severity and "576" in finding.message and "656" in finding.message


def test_sglangs_unequal_tp_into_host_memory_names_the_thread_that_dies(pair: Pair) -> None:
    report = check(*pair(**(tp(4, 2) | {"decode": {TP: 2, "memory_kinds": DRAM}}), backend=Backend.NIXL))
    finding = report.finding("F3")
    assert finding and finding.severity == "PDEAD" and "direct-to-host" in finding.message
    assert "prefill attention TP 4, decode attention TP 2" in finding.message and "PDCluster" in finding.action


def test_unknown_names_the_fact_and_when_it_will_be_known(pair: Pair) -> None:
    report = check(*pair(decode={"page_size": None}))
    finding = report.finding("B1")
    assert report.verdict is Status.UNKNOWN
    assert finding and finding.needs == "decode.page_size" and "shows its card" in finding.action


def test_nothing_is_guessed_about_empty_facts() -> None:
    report = check(RoleFacts(role=Role.PREFILL), RoleFacts(role=Role.DECODE))
    assert report.verdict is Status.UNKNOWN and not report.of(Status.FAIL)
    assert {f.rule for f in report.of(Status.UNKNOWN)} >= {"V1", "B1", "B3", "B7", "C2", "D1", "E2", "G1", "H2", "H5"}


def test_reference_is_held_to_nixls_limits_and_says_so(pair: Pair) -> None:
    settings = tp(4, 2) | {"decode": {TP: 2, "memory_kinds": DRAM}}
    report = check(*pair(**settings, backend=Backend.NIXL, engine=EngineType.REFERENCE))
    finding = report.finding("F3")
    assert finding and finding.status is Status.FAIL and finding.emulated
    assert "Emulated: the Reference engine" in finding.message
    ours = check(*pair(**settings, engine=EngineType.REFERENCE))
    assert ours.verdict is Status.PASS and not any(f.emulated for f in ours.findings)


def test_flags_that_only_sglang_has_do_not_bind_reference(pair: Pair) -> None:
    report = check(*pair(decode={"hierarchical_cache": True}, engine=EngineType.REFERENCE))
    finding = report.finding("E2")
    assert finding and finding.status is Status.PASS and "does not apply" in finding.message


def test_what_refuses_to_start_is_settled_once_both_run(pair: Pair) -> None:
    running = pair(decode={"hierarchical_cache": True}, observed=True)
    finding = check(*running).finding("E2")
    assert finding and finding.status is Status.PASS


def test_a_rule_of_a_version_range_binds_only_there(facts: Callable[..., RoleFacts]) -> None:
    rule = replace(RULES[0], since="0.5.20", until="0.6")
    versions = ["0.5.19", "v0.5.20", "0.5.23.post1", "0.6.0", None, "nightly"]
    found = [rule.applies(facts(Role.PREFILL, engine_version=v)) for v in versions]
    assert found == [False, True, True, False, True, True]


def test_verdict_is_the_worst_and_a_report_travels_as_json(pair: Pair) -> None:
    report = check(*pair(prefill={"page_size": 32}, decode={"engine_version": None, "bootstrap_port": 1}))
    assert report.verdict is Status.FAIL and not report.fits
    data = json.loads(report.to_json())
    assert data["verdict"] == "Fail"
    assert {"rule", "status", "message", "action", "severity"} <= set(data["findings"][0])
    assert Report.model_validate(data) == report


def test_draft_kv_algorithms() -> None:
    assert [draft_kv_algorithm(a) for a in ("", "none", "NGRAM", "n-gram", "lookahead")] == [""] * 5
    assert [draft_kv_algorithm(a) for a in ("eagle3", "NEXTN", "DSpark")] == ["EAGLE3", "EAGLE", "DSPARK"]


def test_the_table_lists_every_rule_with_a_column_per_backend() -> None:
    lines = rules_table().splitlines()
    header = next(line for line in lines if line.startswith("| Rule"))
    assert [c.strip() for c in header.split("|")[3:6]] == ["PDCluster", "NIXL", "Mooncake"]
    row = next(line for line in lines if line.startswith("| F3 "))
    assert [c.strip() for c in row.split("|")[3:6]] == ["fine", "PDEAD", "fine"]
    assert all(any(line.startswith(f"| {r.id} |") for line in lines) for r in RULES)


def test_hundreds_of_pairs_a_second(pair: Pair) -> None:
    p, d = pair()
    start = time.process_time()
    for _ in range(100):
        check(p, d)
    assert time.process_time() - start < 0.5
