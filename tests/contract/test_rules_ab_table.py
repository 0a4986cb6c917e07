"""Families A and B rule by rule: broken, fitting and unknown, per backend. Expected by hand from the SGLang PD rules,
and where SGLang's own code says otherwise (tests/sglang/test_rules_against_sglang_abcd.py) from that."""

from __future__ import annotations

from typing import Any

import pytest
from rules_kit import ADP, CP, DCP, PP, TP, Pair, decided, decode, prefill, sides, tp, unknown

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat import RULES, Status, check
from pdtransfer.contract.facts import HostKVMode

SPEC, RADIX = "speculative_algorithm", "decode_radix_cache"
SM90, SM100 = Accelerator.SM90, Accelerator.SM100
HISPARSE = HostKVMode.HISPARSE

# (rule, model, settings, PDCluster NIXL Mooncake): P pass, W warn, F fail, U unknown, - decided at another time
TABLE: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("A1", "gqa8", {"data_parallel": 1, "dp_attention_flag": True}, "PPP"),
    ("A2", "gqa8", prefill(tensor_parallel=8, context_parallel=3), "FFF"),
    ("A2", "gqa8", prefill(tensor_parallel=8, context_parallel=2, attention_data_parallel=2), "PPP"),
    ("A3", "gqa8", tp(2, 3), "FFF"),
    ("A3", "gqa8", tp(6, 4), "FFF"),
    ("A5", "kimi", tp(2, 4), "PPP"),
    ("A6", "gqa8", tp(16, 32), "PFP"),
    ("A6", "gqa8", tp(8, 16), "PPP"),
    ("A8", "mla", sides({PP: 2}, {PP: 4}), "FFF"),
    ("A9", "v4", sides({PP: 2}, {}), "FFP"),
    ("A9", "v4", sides({PP: 2, TP: 2}, {TP: 4}), "FFP"),
    ("A9", "kimi", sides({PP: 2}, {}), "PPP"),
    ("A9", "swa8", sides({PP: 2}, {PP: 2}), "FPP"),
    ("A9", "swa8", sides({PP: 2, TP: 2}, {TP: 4}), "FPP"),
    ("A9", None, sides({PP: 2}, {}), "UUU"),
    ("A9", None, {}, "PPP"),
    # 12 full-attention layers of 48, each fourth: 3 stages hold 4 each; 5 stages (9 9 10 10 10) hold 2 2 3 2 3, and
    # both 2 and 3 divide 12; 7 stages (6 7 7 7 7 7 7) hold 1 2 2 1 2 2 2.
    ("A10", "linear", sides({PP: 3, TP: 1}, {TP: 2}), "PPP"),
    ("A10", "linear", sides({PP: 7, TP: 1}, {TP: 2}), "PPP"),
    # Two stages of 12 full-attention layers each hold 6; a stage of 5 comes with 9 stages never, with 36 layers over
    # 8 stages (4 4 4 4 5 5 5 5) it does: 5 x 7 = 35, not 36.
    ("A10", "gqa8", sides({PP: 8, TP: 1}, {TP: 2}), "PFF"),
    ("A10", "gqa8", sides({PP: 8, TP: 1}, {TP: 1}), "PPF"),
    ("A10", "swa8", sides({PP: 5, TP: 1}, {TP: 2}), "PPP"),
    ("A10", None, sides({PP: 5}, {TP: 2}), "PUU"),
    ("A11", "gqa8", decode(pipeline_parallel=2, speculative_algorithm="EAGLE"), "FFF"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="EAGLE"), "PPP"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="NEXTN"), "PPP"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="DSPARK"), "PPP"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="EAGLE3"), "FFF"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="NGRAM"), "FFF"),
    ("A11", "gqa8", prefill(pipeline_parallel=2, speculative_algorithm="EAGLE", multi_layer_eagle=True), "FFF"),
    ("A11", "gqa8", {PP: 1, SPEC: "STANDALONE"}, "PPP"),
    ("A11", "gqa8", unknown(SPEC, pipeline_parallel=2), "UUU"),
    # Prefill's context parallelism takes all of TP with these models: 4 ranks, of a decode that must have 1.
    ("A12", "dsa", {"decode": {TP: 4, "prefill_cp": True, "cp_strategy": "zigzag"}}, "FFF"),
    ("A12", "mla", prefill(tensor_parallel=2, context_parallel=2), "PPP"),
    (
        "A13",
        "mla",
        prefill(tensor_parallel=2, context_parallel=2, all_cp_ranks_transfer=True, kv_cache_sharding=True),
        "FPP",
    ),
    (
        "A13",
        "dsa",
        prefill(tensor_parallel=2, context_parallel=2, all_cp_ranks_transfer=True, dsa_cache_layer_split=True),
        "FPP",
    ),
    ("A13", "kimi", prefill(tensor_parallel=2, context_parallel=2, all_cp_ranks_transfer=True), "FPP"),
    ("A13", "mla", unknown("all_cp_ranks_transfer", **prefill(tensor_parallel=2, context_parallel=2)), "UUU"),
    ("A13", "kimi", prefill(tensor_parallel=2, context_parallel=2), "FPP"),
    ("A13", "mla", sides({TP: 2, CP: 2}, {"all_cp_ranks_transfer": True}), "PFF"),
    ("A14", "gqa8", {TP: 4, DCP: 2}, "FPP"),
    ("A14", "mla", sides({DCP: 2}, {DCP: 4}, tensor_parallel=4), "FFF"),
    ("A15", "mla", sides({"kv_cache_sharding": True}, {DCP: 2}, tensor_parallel=4), "PFF"),
    ("A16", "v4", {TP: 4, "decode": {DCP: 2}}, "PPP"),
    ("A16", "mla", {TP: 4, "prefill": {DCP: 2}}, "WWW"),
    ("A16", "mla", {TP: 4, "decode": {DCP: 2}}, "PPP"),
    ("A17", "mla", {TP: 4, "decode": {DCP: 4}}, "PWW"),
    ("A17", "mla", {TP: 4, DCP: 4}, "PPP"),
    ("A17", "mla", {TP: 4}, "PPP"),
    ("A17", "gqa8", {TP: 4, "decode": {DCP: 4}}, "PPP"),
    ("A17", None, {TP: 4, "decode": {DCP: 4}}, "PUU"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True)}, "FPP"),
    ("A18", "mla", {TP: 4, **decode(kv_cache_sharding=True)}, "FFF"),
    ("A18", "mla", sides({TP: 4, "kv_cache_sharding": True}, {TP: 2}), "FFF"),
    ("A18", "mla", sides({TP: 4, CP: 2, "kv_cache_sharding": True}, {TP: 4}), "FPP"),
    ("A18", "mla", sides({TP: 1, "kv_cache_sharding": True}, {TP: 1}), "FFF"),
    ("A18", "mla", sides({TP: 4, ADP: 2, "kv_cache_sharding": True}, {TP: 2}), "FFF"),
    ("A18", "gqa8", {TP: 4, **prefill(kv_cache_sharding=True)}, "FFF"),
    ("A18", "gqa8", sides({TP: 4, CP: 2, "kv_cache_sharding": True}, {TP: 2}), "FPP"),
    ("A18", "dsa", sides({TP: 4, CP: 2, "kv_cache_sharding": True}, {TP: 4}, accelerator=SM100), "FFP"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, page_size=1)}, "FFF"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, chunked_prefill_size=-1)}, "FFF"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, staging_buffer=True)}, "FFF"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, host_kv=HISPARSE)}, "FFF"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, dcp_size=2)}, "FFF"),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, unified_memory=True)}, "FFF"),
    (
        "A18",
        "mla",
        {TP: 4, **prefill(kv_cache_sharding=True, hierarchical_cache=True, hicache_storage_backend="file")},
        "FFF",
    ),
    ("A18", "mla", {TP: 4, **prefill(kv_cache_sharding=True, hierarchical_cache=True)}, "FPP"),
    ("A18", "mla", unknown("kv_cache_sharding"), "UUU"),
    ("A19", "dsa", prefill(dsa_cache_layer_split=True), "FFP"),
    ("A19", "dsa", decode(dsa_cache_layer_split=True), "FFF"),
    ("A19", "dsa", prefill(dsa_cache_layer_split=True, pipeline_parallel=2), "FFF"),
    ("A19", "mla", prefill(dsa_cache_layer_split=True), "FFF"),
    ("A19", "gqa8", {"unified_memory": True}, "FFP"),
    ("A19", "gqa8", {"unified_memory": True, PP: 2}, "FFF"),
    ("A19", "gqa8", {"unified_memory": True, SPEC: "EAGLE"}, "FFF"),
    ("A19", "dsa", {"unified_memory": True, **decode(host_kv=HISPARSE)}, "FFF"),
    ("A19", "gqa8", prefill(unified_memory=True), "FFF"),
    ("A19", "gqa8", tp(2, 4, unified_memory=True), "FFF"),
    ("A19", "gqa8", {"allocation_policy": "prefill_complete"}, "FFP"),
    ("A19", "gqa8", {"allocation_policy": "prefill_complete", TP: 2}, "FFF"),
    ("A19", "gqa8", {"allocation_policy": "prefill_complete", TP: 2, ADP: 2}, "FFF"),
    ("A19", "gqa8", {"allocation_policy": "prefill_complete", **decode(decode_radix_cache=True)}, "FFF"),
    ("A19", "gqa8", {"allocation_policy": "prefill_complete", **prefill(hierarchical_cache=True)}, "FFF"),
    (
        "A19",
        "gqa8",
        {
            "allocation_policy": "prefill_complete",
            **prefill(hierarchical_cache=True, hicache_write_policy="write_back"),
        },
        "FFP",
    ),
    ("A19", "gqa8", prefill(allocation_policy="prefill_complete"), "FFF"),
    ("A19", "glm5", sides({TP: 4, CP: 4}, {TP: 4}), "FFP"),
    ("A19", "glm5", sides({TP: 4, CP: 4, PP: 2}, {TP: 4}), "FFF"),
    ("A19", "glm5", {TP: 4}, "PPP"),
    ("A19", "gqa8", unknown("allocation_policy"), "UUU"),
    ("A19", "gqa8", unknown("unified_memory"), "UUU"),
    ("A20", "gqa8", {"pd_role_switch": True}, "WWP"),
    ("A20", "gqa8", {"pd_role_switch": True, "expert_parallel": 2, TP: 2}, "FFF"),
    ("A20", "gqa8", {"pd_role_switch": True, "moe_a2a_backend": "deepep"}, "FFF"),
    ("A20", "gqa8", {"pd_role_switch": True, PP: 2}, "FFF"),
    ("A20", "mla", {"pd_role_switch": True, DCP: 2, TP: 2}, "FFF"),
    ("A20", "gqa8", {"pd_role_switch": True, SPEC: "NGRAM"}, "FFF"),
    ("A20", "gqa8", {PP: 2, "expert_parallel": 2}, "PPP"),
    ("A20", "gqa8", unknown("pd_role_switch"), "UUU"),
    # Prefill TP 2 of 8 heads holds 4; decode TP 1 takes 4, TP 4 takes 2, TP 8 takes 1 a slice.
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": {1, 4}}, {TP: 4}), "PFP"),
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": {4, 8}}, {TP: 4}), "PFP"),
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": {2, 4}}, {TP: 4}), "PPP"),
    ("A21", "gqa8", sides({TP: 8, "decode_tp_sizes": {1, 2, 4}}, {TP: 4}), "PPP"),
    # More ranks than heads repeat one: decode TP 8 and 16 both take one head.
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": {8, 16}}, {TP: 8}), "PPP"),
    ("A21", "mla", sides({TP: 2, "decode_tp_sizes": {1, 4}}, {TP: 4}), "PPP"),
    ("A21", None, sides({TP: 2, "decode_tp_sizes": {1, 4}}, {TP: 4}), "PUP"),
    # Nobody told which others there are: at equal TP their own pairs would show it, and latent rows have no slices.
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": None}, {TP: 4}), "PUP"),
    ("A21", "gqa8", sides({TP: 4, "decode_tp_sizes": None}, {TP: 2}), "PUP"),
    ("A21", "gqa8", sides({TP: 4, "decode_tp_sizes": None}, {TP: 4}), "PPP"),
    ("A21", "mla", sides({TP: 2, "decode_tp_sizes": None}, {TP: 4}), "PPP"),
    ("A21", None, sides({TP: 2, "decode_tp_sizes": {4}}, {TP: 4}), "PPP"),
    ("B5", "dsa", sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="auto"), "FFF"),
    ("B5", "dsa", {"accelerator": SM100, "kv_dtype": "auto"}, "PPP"),
    ("B5", "dsa", sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="bfloat16"), "PPP"),
    ("B5", "v4", sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="auto"), "PPP"),
    ("B5", "dsa", {"kv_dtype": "auto"}, "UUU"),
    ("B5", "mla", {"kv_dtype": "auto"}, "PPP"),
    ("B6", "v4", {"kv_dtype": "fp8_e4m3", **prefill(dsa_backend="trtllm"), **decode(dsa_backend="flashmla_kv")}, "PPP"),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3", **prefill(dsa_backend="trtllm"), **decode(dsa_backend="tilelang")}, "PPP"),
    ("B6", "dsa", {"kv_dtype": "fp8_e4m3", **prefill(dsa_backend="triton"), **decode(dsa_backend="fa3")}, "PPP"),
    (
        "B6",
        "dsa",
        {
            "kv_dtype": "fp8_e4m3",
            "accelerator": Accelerator.ROCM,
            **prefill(dsa_backend="triton"),
            **decode(dsa_backend="flashmla_kv"),
        },
        "FFF",
    ),
    ("B9", "gqa8", {"kv_dtype": "nvfp4", "accelerator": SM100, "attention_backend": "trtllm_mha"}, "FFF"),
    ("B10", "gqa8", prefill(hnd_kv_cache=True), "FFF"),
    ("B10", "linear", decode(hnd_kv_cache=True), "FFF"),
    ("B10", "mla", {"hnd_kv_cache": True}, "PPP"),
    ("B10", "gqa8", {}, "PPP"),
    ("B10", "gqa8", unknown("hnd_kv_cache"), "UUU"),
    ("B10", None, {"hnd_kv_cache": True}, "UUU"),
    ("B11", "v4", prefill(dsv4_kv_layout="v41"), "FFF"),
    ("B11", "v4", {"dsv4_kv_layout": "v41"}, "PPP"),
    ("B11", "v4", {}, "PPP"),
    ("B11", "v4", {"dsv4_attention_backend": "trtllm"}, "FFF"),
    ("B11", "v4", sides({"accelerator": SM90}, {"accelerator": SM100}, dsv4_kv_layout="auto"), "FFF"),
    ("B11", "v4", {"dsv4_kv_layout": "auto"}, "UUU"),
    # V4.1 on SM100 takes flashmla_mega by itself, and with it the v41 layout; on SM90 flashmla and v4.
    ("B11", "v41", sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="fp8_e4m3"), "FFF"),
    ("B11", "v41", sides({"accelerator": SM100}, {"accelerator": SM100}, kv_dtype="fp8_e4m3"), "PPP"),
    ("B11", "v41", {"kv_dtype": "fp8_e4m3"}, "UUU"),
    ("B11", "v41", {"dsv4_attention_backend": "flashmla", "kv_dtype": "fp8_e4m3"}, "PPP"),
    (
        "B11",
        "v41",
        sides(
            {"dsv4_compressed_kv_layout": "fp4"},
            {},
            dsv4_kv_layout="v41",
            dsv4_attention_backend="flashmla",
        ),
        "FFF",
    ),
    ("B11", "v4", sides({"dsv4_compressed_kv_layout": "fp8"}, {}), "PPP"),
    ("B11", "gqa8", prefill(dsv4_kv_layout="v41"), "PPP"),
    ("B11", "v4", unknown("dsv4_kv_layout"), "UUU"),
    # Each of 4 attention-DP ranks gets 250 tokens of a chunk of 1000: no multiple of 8.
    (
        "B12",
        "gqa8",
        prefill(tensor_parallel=4, attention_data_parallel=4, chunked_prefill_size=1000, page_size=8),
        "FFF",
    ),
    (
        "B12",
        "gqa8",
        prefill(tensor_parallel=4, attention_data_parallel=4, chunked_prefill_size=2048, page_size=64),
        "PPP",
    ),
    ("B13", "gqa8", {}, "PPP"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "expected"), TABLE)
def test_rule_a_and_b_per_backend(
    pair: Pair, rule: str, model: str | None, settings: dict[str, Any], expected: str
) -> None:
    assert "".join(decided(pair, rule, model, settings, b, rewritten=False)[0] for b in Backend) == expected


# (rule, model, settings, backend, the table's outcome word)
OUTCOMES: list[tuple[str, str, dict[str, Any], Backend, str]] = [
    ("A3", "gqa8", tp(2, 3), Backend.NIXL, "REQ"),
    ("A3", "gqa8", tp(3, 2), Backend.NIXL, "HANG"),
    ("A6", "gqa4", tp(8, 16), Backend.NIXL, "PDEAD"),
    ("A7", "mimo", tp(2, 4), Backend.NIXL, "PDEAD"),
    ("A7", "mimo", tp(2, 4), Backend.MOONCAKE, "WRONG"),
    ("A8", "gqa8", sides({PP: 4}, {PP: 2}), Backend.MOONCAKE, "DCRASH"),
    # SGLang's common classes refuse it; the plugin turns that into the failure of a request.
    ("A8", "gqa8", sides({PP: 4}, {PP: 2}), Backend.PDCLUSTER, "REQ"),
    ("A9", "gqa8", sides({PP: 2}, {}), Backend.NIXL, "PDEAD"),
    ("A9", "swa8", sides({PP: 2}, {}), Backend.MOONCAKE, "WRONG"),
    ("A9", "swa8", sides({PP: 2}, {}), Backend.PDCLUSTER, "START"),
    (
        "A13",
        "mla",
        prefill(tensor_parallel=2, context_parallel=2, all_cp_ranks_transfer=True),
        Backend.PDCLUSTER,
        "START",
    ),
    ("A14", "mla", {TP: 4, "decode": {DCP: 2}}, Backend.PDCLUSTER, "START"),
    ("A14", "mla", {TP: 4, "prefill": {DCP: 2}}, Backend.PDCLUSTER, "REQ"),
    ("A14", "mla", {TP: 4, "prefill": {DCP: 2}}, Backend.NIXL, "PDEAD"),
    ("A16", "mla", {TP: 4, "prefill": {DCP: 2}}, Backend.NIXL, "WARN"),
    ("A18", "mla", sides({TP: 4, "kv_cache_sharding": True}, {TP: 2}), Backend.NIXL, "DCRASH"),
    ("A18", "mla", sides({TP: 4, "kv_cache_sharding": True}, {TP: 4}), Backend.PDCLUSTER, "START"),
    ("A19", "gqa8", prefill(allocation_policy="prefill_complete"), Backend.MOONCAKE, "REQ"),
    ("A19", "gqa8", {"unified_memory": True}, Backend.NIXL, "START"),
    ("A20", "gqa8", {"pd_role_switch": True}, Backend.NIXL, "WARN"),
    ("A20", "gqa8", {"pd_role_switch": True, PP: 2}, Backend.NIXL, "START"),
    ("A21", "gqa8", sides({TP: 2, "decode_tp_sizes": {1, 4}}, {TP: 4}), Backend.NIXL, "REQ"),
    ("B5", "dsa", sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="auto"), Backend.NIXL, "DCRASH"),
    ("B4", "gqa8", {"kv_dtype": "auto", **decode(model_dtype="float16")}, Backend.NIXL, "WRONG"),
    ("B4", "gqa8", {"kv_dtype": "auto", **decode(model_dtype="float16")}, Backend.PDCLUSTER, "REQ"),
    ("B7", "gqa8", decode(model_name="example/other"), Backend.NIXL, "WRONG"),
    ("B7", "gqa8", decode(model_name="example/other"), Backend.PDCLUSTER, "REQ"),
    ("B9", "gqa8", {"kv_dtype": "nvfp4"}, Backend.NIXL, "WRONG"),
    (
        "B9",
        "gqa8",
        {"kv_dtype": "nvfp4", "accelerator": SM100, "attention_backend": "trtllm_mha"},
        Backend.NIXL,
        "START",
    ),
    ("B10", "gqa8", {"hnd_kv_cache": True}, Backend.NIXL, "START"),
    ("B11", "v4", prefill(dsv4_kv_layout="v41"), Backend.NIXL, "DCRASH"),
    ("B11", "v4", {"dsv4_attention_backend": "trtllm"}, Backend.NIXL, "START"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "backend", "outcome"), OUTCOMES)
def test_outcome_a_and_b_is_the_tables_word(
    pair: Pair, rule: str, model: str, settings: dict[str, Any], backend: Backend, outcome: str
) -> None:
    assert decided(pair, rule, model, settings, backend, rewritten=False)[1] == outcome


def test_memory_for_decode_context_parallelism_is_the_tables_example(pair: Pair) -> None:
    """A17: 32768 tokens, 61 layers of 576 x 2 bytes and 4 threads are 4 x 32768 x 61 x 1152 bytes, 8.58 GiB."""
    sizes: dict[str, Any] = {"tensor_parallel": 4, "chunked_prefill_size": 32768, "decode": {DCP: 4}}
    finding = check(*pair("mla", **sizes), Backend.NIXL).finding("A17")
    assert finding and "9210691584 bytes (8.58 GiB)" in finding.message
    # Two pipeline stages of 30 and 31 layers: the larger one counts.
    half = check(*pair("mla", **sizes | {"prefill": {PP: 2}}), Backend.NIXL).finding("A17")
    assert half and f"{4 * 32768 * 31 * 1152} bytes" in half.message


def test_another_geometry_hurts_by_which_side_is_larger(pair: Pair) -> None:
    """B7: NIXL refuses fewer regions on decode and longer items on prefill, and takes the rest for right."""
    p, d = pair("gqa8", tensor_parallel=4)
    assert p.geometry is not None
    for change, words in (
        ({"layers": 30}, ("PDEAD", "WRONG")),  # fewer layers on decode, then on prefill
        ({"kv_heads": 4}, ("PDEAD", "WRONG")),  # 1 head a rank against 2
        ({"head_dim": 32}, ("PDEAD", "WRONG")),
        ({"kv_heads": 16}, ("WRONG", "PDEAD")),
    ):
        other = p.geometry.model_copy(update=change)
        found = [
            check(p.model_copy(update={"geometry": a}), d.model_copy(update={"geometry": b}), Backend.NIXL).finding(
                "B7"
            )
            for a, b in ((p.geometry, other), (other, p.geometry))
        ]
        assert tuple(f.severity for f in found if f) == words, change


def test_messages_name_both_values(pair: Pair) -> None:
    shown = {
        ("A21", "gqa8", Backend.NIXL): (
            sides({TP: 2, "decode_tp_sizes": {1, 4}}, {TP: 4}),
            ("TP 1", "TP 4", "4 heads"),
        ),
        ("B5", "dsa", Backend.NIXL): (
            sides({"accelerator": SM90}, {"accelerator": SM100}, kv_dtype="auto"),
            ("SM90", "bfloat16", "SM100", "fp8_e4m3"),
        ),
        ("B11", "v4", Backend.NIXL): (prefill(dsv4_kv_layout="v41"), ("v41/auto", "v4/fp8")),
        ("C6", "v41", Backend.NIXL): ({SPEC: "DSPARK", **sides({"draft_tokens": 8}, {"draft_tokens": 4})}, ("8", "4")),
        ("D5", "linear", Backend.NIXL): (prefill(ssm_dtype="bfloat16"), ("bfloat16", "float32")),
    }
    for (rule, model, backend), (settings, words) in shown.items():
        finding = check(*pair(model, **settings), backend).finding(rule)
        assert finding and finding.action, rule
        assert all(word in finding.message for word in words), (rule, finding.message)


def test_what_only_the_command_line_tells_is_decided_before_launch(pair: Pair) -> None:
    """On cards alone nothing is said of such a rule: it is neither passed nor unknown."""
    p, d = (f.model_copy(update={"observed": True, "hnd_kv_cache": None, "lmcache": None}) for f in pair())
    report = check(p, d)
    assert report.finding("B10") is None or report.finding("B10").status is Status.PASS  # type: ignore[union-attr]
    # What stops an engine at its start did not stop these.
    assert check(*pair(lmcache=True, observed=True)).finding("D7").status is Status.PASS  # type: ignore[union-attr]


def test_an_outcome_other_than_a_refused_start_is_said_of_running_engines_too(pair: Pair) -> None:
    running = pair("mla", **sides({TP: 4, "kv_cache_sharding": True}, {TP: 2}), observed=True)
    finding = check(*running, Backend.NIXL).finding("A18")
    assert finding and finding.severity == "DCRASH"


def test_every_rule_of_the_table_is_there() -> None:
    ids = {r.id for r in RULES}
    wanted = {"A": 21, "B": 14, "C": 7, "D": 7}
    # B2 is what the engine rewrites by itself (contract.effective and cards).
    assert {f"{letter}{n}" for letter, count in wanted.items() for n in range(1, count + 1)} - ids == set()
