"""Families C and D rule by rule: broken, fitting and unknown, per backend. Expected by hand from the SGLang PD rules,
and where SGLang's own code says otherwise (tests/sglang/test_rules_against_sglang_abcd.py) from that."""

from __future__ import annotations

from typing import Any

import pytest
from rules_kit import CP, DCP, PP, TP, Pair, decided, decode, prefill, sides, tp, unknown

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend
from pdtransfer.contract.facts import HostKVMode

SPEC, RADIX = "speculative_algorithm", "decode_radix_cache"
SM90, SM100 = Accelerator.SM90, Accelerator.SM100
HISPARSE = HostKVMode.HISPARSE

# (rule, model, settings, PDCluster NIXL Mooncake): P pass, W warn, F fail, U unknown, - decided at another time
TABLE: list[tuple[str, str | None, dict[str, Any], str]] = [
    # At equal TP NIXL pairs by position; Mooncake looks for V by the same arithmetic there.
    ("C3", "gqa8", decode(speculative_algorithm="STANDALONE", draft_layers=36), "PPF"),
    ("C3", "gqa8", decode(speculative_algorithm="STANDALONE", draft_layers=35), "PPP"),
    # Its depth is known where its config or its KV is seen. EAGLE drafts are of one layer, other models' too.
    ("C3", "gqa8", decode(speculative_algorithm="STANDALONE"), "PPU"),
    ("C3", "gqa8", sides({TP: 2}, {TP: 4, "speculative_algorithm": "STANDALONE"}), "PUU"),
    ("C3", "gqa8", sides({TP: 2}, {TP: 4, "speculative_algorithm": "EAGLE"}), "PPP"),
    ("C3", "mla", decode(speculative_algorithm="STANDALONE", draft_layers=61), "PPP"),
    ("C3", "linear", decode(speculative_algorithm="STANDALONE", draft_layers=12), "PPP"),
    ("C6", "v41", {SPEC: "DSPARK", "draft_tokens": 8}, "FPP"),
    ("C6", "v41", {"draft_tokens": 8, **decode(speculative_algorithm="DSPARK")}, "FFF"),
    ("C6", "v41", {"draft_tokens": 8, **prefill(speculative_algorithm="DSPARK")}, "FFF"),
    ("C6", "v41", {SPEC: "DSPARK", **sides({"draft_tokens": 8}, {"draft_tokens": 4})}, "FFF"),
    ("C6", "v41", {SPEC: "DSPARK", "draft_tokens": 8, **tp(2, 4)}, "FFF"),
    ("C6", "v41", sides({TP: 4, CP: 4}, {TP: 4}, speculative_algorithm="DSPARK", draft_tokens=8), "FPP"),
    ("C6", "v41", {SPEC: "DSPARK", "draft_tokens": 8, TP: 2, DCP: 2}, "FFF"),
    ("C6", "v41", {SPEC: "EAGLE"}, "FFF"),
    ("C6", "v41", {PP: 2}, "FFF"),
    ("C6", "v41", {}, "PPP"),
    ("C6", "v41", {SPEC: "DSPARK"}, "FUU"),
    # Pages are of 64 tokens here. NGRAM drafts trees of width 10 by default, which FlashInfer alone takes over pages.
    ("C8", "gqa8", {SPEC: "NGRAM", "attention_backend": "triton"}, "FFF"),
    ("C8", "gqa8", {SPEC: "NGRAM", "attention_backend": "flashinfer"}, "PPP"),
    ("C8", "gqa8", {SPEC: "NGRAM", "attention_backend": "triton", "ngram_breadth": 1}, "PPP"),
    ("C8", "gqa8", {SPEC: "NGRAM", "attention_backend": "triton", "page_size": 1}, "PPP"),
    ("C8", "gqa8", {SPEC: "NGRAM"}, "UUU"),  # whose choice hangs on the model and the GPU
    ("C8", "gqa8", {SPEC: "NGRAM", "ngram_breadth": 1, TP: 2, "attention_data_parallel": 2}, "FFF"),
    ("C8", "gqa8", {SPEC: "STANDALONE", TP: 2, "attention_data_parallel": 2}, "FFF"),
    ("C8", "gqa8", {SPEC: "EAGLE", TP: 2, "attention_data_parallel": 2, "attention_backend": "fa3"}, "PPP"),
    ("C8", "gqa8", {SPEC: "EAGLE", "attention_backend": "fa4", "speculative_eagle_topk": 4}, "FFF"),
    ("C8", "gqa8", {SPEC: "EAGLE", "attention_backend": "fa4", "speculative_eagle_topk": 1}, "PPP"),
    ("C8", "gqa8", {SPEC: "EAGLE", "attention_backend": "fa4"}, "UUU"),  # 4 for Llama, 1 for most others
    ("C8", "gqa8", {SPEC: "EAGLE", "attention_backend": "fa3", "speculative_eagle_topk": 4}, "PPP"),
    ("C8", "gqa8", {SPEC: "EAGLE3", "attention_backend": "trtllm_mha", "speculative_eagle_topk": 2}, "FFF"),
    ("C8", "gqa8", {}, "PPP"),
    ("C6", "v4", {SPEC: "EAGLE"}, "PPP"),
    ("C6", "v41", unknown(SPEC), "UUU"),
    ("D1", "kimi", tp(1, 2), "FWW"),
    ("D1", "kimi", tp(2, 2), "PPP"),
    ("D2", "swa8", sides({TP: 1, PP: 2}, {TP: 4}), "PFF"),
    ("D2", "mimo-swa", tp(2, 4), "FFF"),
    ("D2", "mimo-swa", tp(4, 4), "PPP"),
    ("D2", None, tp(2, 4), "UUU"),
    ("D2", None, tp(4, 4), "PPP"),
    ("D3", "qsa", tp(1, 2), "FFP"),
    ("D3", "qsa", tp(2, 2), "PPP"),
    ("D3", "gqa8", tp(2, 4, kv_dtype="mxfp8"), "FFF"),
    ("D3", "gqa8", tp(4, 4, kv_dtype="mxfp8"), "PPP"),
    ("D3", "v4", tp(2, 4), "PPP"),
    ("D3", None, tp(2, 4), "UUU"),
    ("D4", "m3", tp(2, 4), "FFF"),
    ("D4", "m3", tp(4, 4), "PPP"),
    ("D4", "m3", {PP: 2}, "FFF"),
    ("D4", "m3-values", {}, "FFF"),
    ("D4", "gqa8", tp(2, 4), "PPP"),
    ("D4", None, tp(4, 4), "UUU"),
    ("D5", "linear", sides({"ssm_dtype": "float32"}, {"ssm_dtype": "bfloat16"}), "FFF"),
    # The config names none, so that the default is float32.
    ("D5", "linear", prefill(ssm_dtype="float32"), "PPP"),
    ("D5", "linear", tp(1, 2) | {"prefill": {TP: 1, "ssm_dtype": "bfloat16"}}, "FFF"),
    ("D5", None, prefill(ssm_dtype="bfloat16"), "UUU"),
    ("D6", "linear", {"linear_replayssm": True}, "FFF"),
    ("D6", "linear", prefill(linear_replayssm_spec=True), "FFF"),
    ("D6", "linear", decode(linear_replayssm_spec=True), "PPP"),
    ("D6", "linear", prefill(mamba_cache_strategy="extra_buffer_lazy"), "FFF"),
    ("D6", "linear", decode(mamba_cache_strategy="extra_buffer_lazy"), "PPP"),
    ("D6", "linear", decode(mamba_cache_strategy="extra_buffer_lazy", decode_radix_cache=True), "FFF"),
    ("D6", "linear", prefill(mamba_cache_strategy="no_buffer"), "FFF"),
    ("D6", "linear", prefill(mamba_cache_strategy="no_buffer", page_size=1), "PPP"),
    ("D6", "linear", prefill(mamba_cache_strategy="no_buffer", disable_radix_cache=True), "PPP"),
    ("D6", "linear", {"mamba_cache_strategy": "extra_buffer"}, "PPP"),
    ("D6", "gqa8", prefill(mamba_cache_strategy="no_buffer"), "PPP"),
    ("D6", "linear", unknown("linear_replayssm"), "UUU"),
    ("D7", "gqa8", prefill(lmcache=True), "FFF"),
    ("D7", "gqa8", decode(watermark=True), "FFF"),
    ("D7", "gqa8", {"response_store": True}, "FFF"),
    ("D7", "gqa8", {"pdmux": True}, "FFF"),
    ("D7", "gqa8", {"dllm_algorithm": "LowConfidence"}, "WWW"),
    ("D7", "gqa8", prefill(dllm_algorithm="LowConfidence"), "FFF"),
    ("D7", "minicpm", {"accelerator": SM90}, "FFF"),
    ("D7", "minicpm", {"accelerator": SM100}, "FFF"),
    ("D7", "minicpm", {"attention_backend": "minicpm_flashinfer"}, "FFF"),
    ("D7", "minicpm", {"attention_backend": "fa3"}, "PPP"),
    ("D7", "minicpm", {"minicpm_force_dense": True}, "PPP"),
    ("D7", "m3", {SPEC: "DFLASH", "kv_dtype": "nvfp4"}, "FFF"),
    ("D7", "gqa8", unknown("lmcache"), "UUU"),
    # MiniCPM with sparse layers is refused, and nothing tells that it is not one.
    ("D7", None, {}, "UUU"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "expected"), TABLE)
def test_rule_c_and_d_per_backend(
    pair: Pair, rule: str, model: str | None, settings: dict[str, Any], expected: str
) -> None:
    assert "".join(decided(pair, rule, model, settings, b, rewritten=False)[0] for b in Backend) == expected


# (rule, model, settings, backend, the table's outcome word)
OUTCOMES: list[tuple[str, str, dict[str, Any], Backend, str]] = [
    ("C2", "gqa8", prefill(speculative_algorithm="EAGLE"), Backend.NIXL, "PDEAD"),
    ("C2", "mla", prefill(speculative_algorithm="EAGLE"), Backend.NIXL, "PDEAD"),
    ("C2", "gqa8", prefill(speculative_algorithm="EAGLE"), Backend.MOONCAKE, "PDEAD"),
    ("C2", "mla", prefill(speculative_algorithm="EAGLE"), Backend.MOONCAKE, "WRONG"),
    ("C5", "gqa8", sides({SPEC: "EAGLE"}, {SPEC: "DSPARK"}), Backend.NIXL, "WRONG"),
    ("C5", "gqa8", sides({SPEC: "EAGLE"}, {SPEC: "DSPARK"}), Backend.PDCLUSTER, "REQ"),
    ("C6", "v41", {"draft_tokens": 8, **decode(speculative_algorithm="DSPARK")}, Backend.NIXL, "DCRASH"),
    ("C6", "v41", {SPEC: "DSPARK", "draft_tokens": 8}, Backend.PDCLUSTER, "START"),
    ("D2", "swa8", sides({TP: 1, PP: 2}, {TP: 4}), Backend.NIXL, "REQ"),
    ("D2", "swa8", tp(1, 4), Backend.NIXL, "HANG"),
    # 8 window heads where the full layers have 4: over TP 2 and 4 both halve (4 of 2, 2 of 1); over 4 and 8 the full
    # layers' one head stays (2 of 1, 1 of 1).
    ("D2", "mimo-swa", tp(2, 4), Backend.NIXL, "HANG"),
    ("D2", "mimo-swa", tp(4, 8), Backend.NIXL, "REQ"),
    ("D2", "mimo-swa", tp(4, 8), Backend.MOONCAKE, "PDEAD"),
    ("D3", "qsa", tp(1, 2), Backend.NIXL, "REQ"),
    ("D4", "m3", tp(2, 4), Backend.NIXL, "DCRASH"),
    ("D4", "m3", {PP: 2}, Backend.NIXL, "REQ"),
    ("D4", "m3-values", {}, Backend.MOONCAKE, "START"),
    ("D5", "linear", prefill(ssm_dtype="bfloat16"), Backend.NIXL, "REQ"),
    ("D5", "linear", prefill(ssm_dtype="bfloat16", nixl_backend="LIBFABRIC"), Backend.NIXL, "WRONG"),
    ("D5", "linear", {PP: 2, **prefill(ssm_dtype="bfloat16")}, Backend.NIXL, "WRONG"),
    ("D5", "linear", prefill(ssm_dtype="bfloat16"), Backend.MOONCAKE, "PDEAD"),
    ("D6", "linear", {"linear_replayssm": True}, Backend.NIXL, "START"),
    ("D7", "gqa8", {"dllm_algorithm": "LowConfidence"}, Backend.NIXL, "NORM"),
]


@pytest.mark.parametrize(("rule", "model", "settings", "backend", "outcome"), OUTCOMES)
def test_outcome_c_and_d_is_the_tables_word(
    pair: Pair, rule: str, model: str, settings: dict[str, Any], backend: Backend, outcome: str
) -> None:
    assert decided(pair, rule, model, settings, backend, rewritten=False)[1] == outcome
