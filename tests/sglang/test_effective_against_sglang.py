"""contract.effective against SGLang 0.5.23 itself: its own parser and resolution, on machines described to it.

Where the two disagree, SGLang is right. What SGLang decides only once its memory pools exist (retraction backup,
decode's HiCache ratio) is not in this comparison.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from kit_configs import MODELS
from kit_settings import Case, as_facts, ask

from pdtransfer.contract.base import Role
from pdtransfer.contract.effective import effective

GPUS = ("SM80", "SM89", "SM90", "SM100", "SM120", "ROCm")

# Fact of ours -> setting of SGLang's.
COMPARED = {
    "page_size": "page_size",
    "attention_backend": "attention_backend",
    "kv_dtype": "kv_cache_dtype",
    "disable_radix_cache": "disable_radix_cache",
    "decode_extra_slots": "disaggregation_decode_extra_slots",
    "load_balance_method": "load_balance_method",
    "max_running_requests": "max_running_requests",
    "optimistic_prefill": "optimistic_prefill_attempts",
    "attention_data_parallel": "attn_dp_size",
    "data_parallel": "dp_size",
    "bootstrap_port": "disaggregation_bootstrap_port",
    "ib_device": "disaggregation_ib_device",
    "speculative_algorithm": "speculative_algorithm",
}
HICACHE = {
    "hicache_mem_layout": "hicache_mem_layout",
    "hicache_io_backend": "hicache_io_backend",
    "hicache_write_policy": "hicache_write_policy",
    "hicache_host_memory_fraction": "hicache_host_memory_fraction",
    "hicache_ratio": "hicache_ratio",
}
DSA_KERNELS = {Role.PREFILL: "dsa_prefill_backend", Role.DECODE: "dsa_decode_backend"}
DECODE_ONLY = frozenset({"decode_extra_slots"})
PREFILL_ONLY = frozenset({"optimistic_prefill"})
BUILT_LATER = frozenset({"hicache_ratio"})
"""On decode SGLang settles it with the pools."""


def _cases() -> list[Case]:
    roles = (Role.PREFILL, Role.DECODE)
    found = [Case(m, a, r) for m in MODELS for a in GPUS for r in roles]
    # Page sizes that are kept or rewritten, by backend.
    for backend, page in itertools.product(
        ("fa3", "flashinfer", "triton", "trtllm_mha", "fa4"), ("1", "8", "16", "32", "64", "128")
    ):
        chip = "SM100" if backend in ("trtllm_mha", "fa4") else "SM90"
        argv = ("--attention-backend", backend, "--page-size", page)
        found.append(Case("llama", chip, Role.DECODE, argv))
    # Models with a choice of their own, where only one of the split backends is set.
    own = ("llama4", "gpt_oss", "olmo2", "falcon_h1", "lfm2", "mimo", "minimax_m3", "nemotron_h", "gemma3")
    for model, chip, side in itertools.product(own, ("SM80", "SM90", "SM100"), ("prefill", "decode")):
        backend = "trtllm_mha" if chip == "SM100" else "triton"
        found.append(Case(model, chip, Role.DECODE, (f"--{side}-attention-backend", backend)))
    for page in ("1", "16", "64", "128"):
        found += [Case("llama", a, Role.PREFILL, ("--page-size", page)) for a in GPUS]
        found += [Case("deepseek_v32", a, Role.DECODE, ("--page-size", page)) for a in ("SM90", "SM100")]
        found += [Case("qwen3_next", a, r, ("--page-size", page)) for a in ("SM90", "SM100") for r in roles]
    for backend, page in itertools.product(("flashmla", "trtllm_mla", "cutedsl_mla", "flashinfer"), ("1", "32", "64")):
        argv = ("--attention-backend", backend, "--page-size", page)
        found.append(Case("deepseek_v3", "SM100", Role.DECODE, argv))
    found += [
        Case("llama", "SM100", r, ("--decode-attention-backend", "trtllm_mha", "--prefill-attention-backend", "fa4"))
        for r in roles
    ]
    found.append(Case("llama", "SM90", Role.DECODE, ("--kv-cache-dtype", "fp8_e5m2")))
    # DSA's KV dtype.
    for dtype, chip in itertools.product(("auto", "bf16", "bfloat16", "fp8_e4m3"), ("SM90", "SM100", "SM120")):
        found += [Case("deepseek_v32", chip, r, ("--kv-cache-dtype", dtype)) for r in roles]
        found += [Case("glm_dsa", chip, r, ("--kv-cache-dtype", dtype)) for r in roles]
    for chip, dtype in itertools.product(("SM90", "SM100"), ("auto", "bfloat16", "fp8_e4m3")):
        found.append(Case("deepseek_v32", chip, Role.DECODE, ("--enable-hisparse", "--kv-cache-dtype", dtype)))
    receiving = ("--disaggregation-decode-host-receive-threshold", "0.5")
    found.append(Case("llama", "SM90", Role.DECODE, receiving))
    found.append(Case("llama", "SM90", Role.DECODE, (*receiving, "--hicache-mem-layout", "page_first_direct")))
    # Hybrid models: what caches recurrent state.
    for strategy, overlap in itertools.product(
        ("auto", "no_buffer", "extra_buffer"), ((), ("--disable-overlap-schedule",))
    ):
        argv = ("--mamba-radix-cache-strategy", strategy, *overlap)
        found += [Case("qwen3_next", "SM100", r, argv) for r in roles]
    # HiCache.
    layouts, ios = ("layer_first", "page_first", "page_first_direct"), ("direct", "kernel")
    storages = ((), ("--hicache-storage-backend", "file"), ("--hicache-storage-backend", "mooncake"))
    for layout, io, storage in itertools.product(layouts, ios, storages):
        argv = ("--hicache-mem-layout", layout, "--hicache-io-backend", io, *storage)
        found.append(Case("llama", "SM90", Role.PREFILL, ("--enable-hierarchical-cache", *argv)))
        on = ("--enable-hierarchical-cache", "--disaggregation-decode-enable-radix-cache")
        found.append(Case("llama", "SM90", Role.DECODE, (*on, *argv)))
        found.append(Case("llama", "SM90", Role.DECODE, argv))
        found.append(Case("llama", "SM90", Role.DECODE, (*argv, "--disaggregation-decode-retraction-backup", "none")))
    for size in ((), ("--hicache-ratio", "3"), ("--hicache-size", "8")):
        found.append(Case("llama", "SM90", Role.PREFILL, ("--enable-hierarchical-cache", *size)))
    buffered = ("--enable-hierarchical-cache", "--hicache-host-memory-mode", "buffer_only")
    for policy in ("write_back", "write_through", "write_through_selective"):
        argv = (*buffered, "--hicache-storage-backend", "file", "--hicache-write-policy", policy)
        found.append(Case("llama", "SM90", Role.PREFILL, argv))
    # Decode's queues, prefill's optimism.
    for running, dp in itertools.product(("16", "32", "33", "64", "512"), ("1", "2", "4")):
        argv = ("--max-running-requests", running, "--tp-size", "4", "--attn-dp-size", dp)
        found.append(Case("llama", "SM90", Role.DECODE, argv))
    found.append(Case("llama", "SM90", Role.DECODE, ("--disaggregation-decode-extra-slots", "5")))
    legacy = ("--tp-size", "4", "--dp-size", "4", "--enable-dp-attention", "--max-running-requests", "64")
    found += [Case("llama", "SM90", r, legacy) for r in roles]
    optimistic = ("--optimistic-prefill-attempts", "3")
    found += [
        Case("llama", "SM90", Role.PREFILL, (*optimistic, *more))
        for more in (
            (),
            ("--pp-size", "2"),
            ("--enable-hierarchical-cache",),
            ("--enable-hierarchical-cache", "--hicache-write-policy", "write_back"),
            ("--enable-hierarchical-cache", "--hicache-write-policy", "write_through_selective"),
            ("--enable-hierarchical-cache", "--hicache-storage-backend", "file"),
            (*buffered, "--hicache-storage-backend", "file"),
        )
    ]
    # Speculation and transport.
    for algorithm in ("NGRAM",):
        found += [Case("llama", "SM90", r, ("--speculative-algorithm", algorithm)) for r in roles]
    mooncake = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-ib-device", "mlx5_0")
    found += [Case("llama", "SM90", r, mooncake) for r in roles]
    found += [
        Case("llama", "SM90", r, ("--load-balance-method", m)) for r in roles for m in ("round_robin", "total_tokens")
    ]
    rust = {"SGLANG_RUST_SERVER": "1"}
    found += [Case("llama", "SM90", r, ("--port", "31000"), rust) for r in roles]
    found += [Case("llama", "CPU", r) for r in roles]
    return found


CASES = _cases()


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    return ask(CASES, [*COMPARED.values(), *HICACHE.values(), *DSA_KERNELS.values()])


def differences(case: Case, theirs: dict[str, Any]) -> list[str]:
    """Settings in which ours are not SGLang's. What we do not know is no difference."""
    facts = effective(as_facts(case)).facts
    named = dict(COMPARED)
    if case.model in ("deepseek_v32", "glm_dsa"):
        named["dsa_backend"] = DSA_KERNELS[case.role]
    if facts.hierarchical_cache or (case.role is Role.DECODE and facts.retraction_backup in ("host_pool", "")):
        named |= HICACHE if facts.hierarchical_cache else {k: v for k, v in HICACHE.items() if k in LAYOUT}
    skipped = PREFILL_ONLY | BUILT_LATER if case.role is Role.DECODE else DECODE_ONLY
    found = []
    for fact, setting in named.items():
        if fact in skipped:
            continue
        mine, sglangs = getattr(facts, fact), theirs[setting]
        if mine is None and fact not in NONE_MEANS_NONE:
            continue
        if (mine or None) != (sglangs or None):
            found.append(f"{fact}: ours {mine!r}, SGLang's {sglangs!r}")
    return found


LAYOUT = frozenset({"hicache_mem_layout", "hicache_io_backend"})
NONE_MEANS_NONE = frozenset({"hicache_host_memory_fraction", "max_running_requests"})


def test_sglang_resolves_nearly_all_of_the_cases(answers: dict[str, dict[str, Any]]) -> None:
    refused = {name: a["error"] for name, a in answers.items() if "error" in a}
    assert len(refused) < len(answers) // 10, refused


def test_effective_settings_are_sglangs(answers: dict[str, dict[str, Any]]) -> None:
    wrong = {
        case.id: found
        for case in CASES
        if "values" in answers[case.id] and (found := differences(case, answers[case.id]["values"]))
    }
    assert not wrong, json.dumps(wrong, indent=1)


def test_a_wrong_value_would_be_seen(answers: dict[str, dict[str, Any]]) -> None:
    case = CASES[0]
    values = answers[case.id]["values"]
    assert differences(case, values) == []
    assert differences(case, values | {"page_size": 99}) == ["page_size: ours 1, SGLang's 99"]
