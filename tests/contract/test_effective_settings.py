"""What SGLang makes of settings of its kernels, pages and transports, by hand from the SGLang PD rules (A1, B2, B5, B6,
H9, H13), and what follows where something is not known. tests/sglang/test_effective_against_sglang.py asks SGLang."""

from __future__ import annotations

from typing import Any

import pytest
from effective_kit import DSA, LLAMA, MIMO, MLA, ROCM, SM90, SM100, V4, decode, of, prefill
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_kit import Pair

from pdtransfer.contract.accelerator import Accelerator, from_capability
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.compat import RULES, Status, check
from pdtransfer.contract.effective import Effective, effective, effective_values
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry


@pytest.mark.parametrize(
    ("geometry", "chip", "given", "page"),
    [
        (LLAMA, SM90, {}, 1),
        (LLAMA, SM100, {}, 64),  # trtllm_mha by default
        (LLAMA, SM100, {"page_size": 32}, 32),
        (LLAMA, SM100, {"page_size": 8}, 64),
        (LLAMA, SM90, {"page_size": 8}, 8),
        (LLAMA, SM90, {"attention_backend": "flashmla", "page_size": 32}, 64),
        (MLA, SM100, {"attention_backend": "trtllm_mla", "page_size": 16}, 64),
        (MLA, SM100, {"attention_backend": "cutedsl_mla", "page_size": 32}, 32),
        (LLAMA, SM100, {"attention_backend": "fa4", "page_size": 64}, 128),
        (LLAMA, SM90, {"attention_backend": "fa4", "page_size": 64}, 64),
        (MIMO, SM100, {}, 128),  # fa4, since K and V differ in width
        (DSA, SM90, {"page_size": 16}, 64),
        (DSA.model_copy(update={"index_pool": 4}), SM90, {}, 256),
        (V4, SM100, {"page_size": 64}, 256),
        (MLA, ROCM, {}, 1),  # aiter or triton
        (MIMO, Accelerator.SM89, {}, 1),  # flashinfer or triton
        (LLAMA, Accelerator.CPU, {}, 1),
    ],
)
def test_page_size_follows_the_attention_backend_and_the_model(
    geometry: ModelGeometry, chip: Accelerator, given: dict[str, Any], page: int
) -> None:
    result = decode(geometry, chip, **given)
    assert result.facts.page_size == page
    asked = given.get("page_size")
    rewrite = result.rewrite("page_size")
    if asked == page:
        assert rewrite is None
    else:
        assert rewrite and (rewrite.asked, rewrite.effective, rewrite.rule) == (asked, page, "B2")
        assert rewrite.overrides == (asked is not None) and rewrite.why and rewrite.source


def test_a_hybrid_model_gets_two_page_sizes_on_sm100_because_decode_has_no_radix_cache() -> None:
    """B2: without extra_buffer prefill gets 1 and decode 64."""
    qwen = LLAMA.model_copy(
        update={"architecture": "Qwen3NextForCausalLM", "linear_layers": tuple(i for i in range(36) if (i + 1) % 4)}
    )
    assert (prefill(qwen, SM100).facts.page_size, decode(qwen, SM100).facts.page_size) == (1, 64)
    buffered = {"mamba_cache_strategy": "extra_buffer"}
    assert (prefill(qwen, SM100, **buffered).facts.page_size, decode(qwen, SM100).facts.page_size) == (64, 64)
    p = RoleFacts(role=Role.PREFILL, geometry=qwen, accelerator=SM100, page_size=64).with_launch_defaults()
    d = RoleFacts(role=Role.DECODE, geometry=qwen, accelerator=SM100, page_size=64).with_launch_defaults()
    report = check(p, d)
    b1, b2 = report.finding("B1"), report.finding("B2")
    assert b1 and b1.status is Status.FAIL and "prefill page size is 1, decode page size is 64" in b1.message
    assert b2 and b2.status is Status.WARN and "prefill: page size is set to 64, and will be 1" in b2.message


@pytest.mark.parametrize(
    ("chip", "asked", "dtype"),
    [
        (SM90, None, "bfloat16"),
        (SM100, None, "fp8_e4m3"),
        (Accelerator.SM120, None, "fp8_e4m3"),
        (SM100, "bf16", "bfloat16"),
        (SM90, "fp8_e4m3", "fp8_e4m3"),
    ],
)
def test_dsa_spells_its_kv_dtype_out_by_generation(chip: Accelerator, asked: str | None, dtype: str) -> None:
    assert decode(DSA, chip, kv_dtype=asked).facts.kv_dtype == dtype
    assert decode(LLAMA, chip, kv_dtype=asked).facts.kv_dtype == (asked or "auto")


@pytest.mark.parametrize(
    ("chip", "role", "kv_dtype", "mode", "kernels"),
    [
        (SM90, Role.PREFILL, "fp8_e4m3", HostKVMode.OFF, "flashmla_kv"),
        (SM100, Role.PREFILL, "fp8_e4m3", HostKVMode.OFF, "trtllm"),
        (SM100, Role.DECODE, "fp8_e4m3", HostKVMode.HISPARSE, "flashmla_kv"),
        (SM90, Role.DECODE, "bfloat16", HostKVMode.HISPARSE, "flashmla_sparse"),
        (SM90, Role.PREFILL, "bfloat16", HostKVMode.OFF, "flashmla_sparse"),
        (SM90, Role.DECODE, "bfloat16", HostKVMode.OFF, "fa3"),
        (SM100, Role.DECODE, "bfloat16", HostKVMode.OFF, "trtllm"),
    ],
)
def test_dsa_kernels_by_role_dtype_and_generation(
    chip: Accelerator, role: Role, kv_dtype: str, mode: HostKVMode, kernels: str
) -> None:
    assert of(role, DSA, chip, kv_dtype=kv_dtype, host_kv=mode).facts.dsa_backend == kernels


def test_hisparse_on_blackwell_gets_other_rows_than_prefill_and_the_check_sees_it() -> None:
    """B6: raw 576-byte rows on prefill, 656 on decode, without a flag that says so."""
    common: dict[str, Any] = {"geometry": DSA, "accelerator": SM100, "kv_dtype": "fp8_e4m3", "backend": Backend.NIXL}
    p = RoleFacts(role=Role.PREFILL, **common).with_launch_defaults()
    d = RoleFacts(role=Role.DECODE, host_kv=HostKVMode.HISPARSE, **common).with_launch_defaults()
    finding = check(p, d).finding("B6")
    assert finding and finding.status is Status.FAIL and "576" in finding.message and "656" in finding.message


def test_the_legacy_spelling_of_attention_dp() -> None:
    result = prefill(tensor_parallel=4, data_parallel=2, dp_attention_flag=True)
    now = result.facts
    assert (now.attention_data_parallel, now.data_parallel, now.attention_tp) == (2, 1, 2)
    told = result.rewrite("attention_data_parallel")
    assert told and told.asked == "--dp-size 2 --enable-dp-attention" and told.why == "attention DP 2, attention TP 2"


def test_transport_choices() -> None:
    assert (prefill().facts.load_balance_method, decode().facts.load_balance_method) == (
        "follow_bootstrap_room",
        "round_robin",
    )
    assert prefill(load_balance_method="round_robin").facts.load_balance_method == "round_robin"
    tcp = {"backend": Backend.MOONCAKE, "mooncake_tcp": True, "ib_device": "mlx5_0"}
    assert decode(**tcp).facts.ib_device == ""
    nixl = {"backend": Backend.NIXL}
    assert prefill(**nixl).facts.nixl_params == '{"num_threads": "8"}'
    assert prefill(**nixl, nixl_params='{"num_threads": "2"}').facts.nixl_params == '{"num_threads": "2"}'
    assert decode(**nixl).facts.nixl_params == "" and prefill().facts.nixl_params == ""
    rust = {"rust_server": True, "port": 31000}
    assert prefill(**nixl, **rust).facts.bootstrap_port == 31000
    assert prefill(**rust).facts.bootstrap_port == 8998  # PDCluster brings a bootstrap server of its own


def test_what_hangs_on_an_unknown_accelerator_is_unknown_and_says_on_what() -> None:
    result = decode(chip=None)
    page = result.rewrite("page_size")
    assert result.facts.page_size is None and page and page.effective is None
    assert "1 on SM80, SM89, SM90, SM120, ROCm; 64 on SM100" in page.why
    assert decode(chip=None, page_size=64).facts.page_size == 64  # all kinds keep it
    assert decode(chip=Accelerator.NVIDIA).facts.retraction_backup == "host_pool"
    assert decode(chip=None).facts.retraction_backup is None  # cpu_tensor on ROCm
    assert decode(DSA, None).facts.kv_dtype is None
    report = check(
        RoleFacts(role=Role.PREFILL, geometry=DSA).with_launch_defaults(),
        RoleFacts(role=Role.DECODE, geometry=DSA).with_launch_defaults(),
    )
    finding = report.finding("B3")
    assert finding and finding.status is Status.UNKNOWN and finding.needs == "prefill.kv_dtype"


def test_nothing_is_assumed_of_a_command_that_is_not_known_whole() -> None:
    facts = effective(RoleFacts(role=Role.DECODE, geometry=LLAMA, accelerator=SM90)).facts
    for name in ("page_size", "kv_dtype", "retraction_backup", "decode_extra_slots", "load_balance_method"):
        assert getattr(facts, name) is None, name


def test_a_model_that_is_not_told_keeps_an_explicit_page_and_has_no_default_one() -> None:
    unnamed = LLAMA.model_copy(update={"architecture": None})
    assert decode(unnamed, SM100, page_size=8).facts.page_size == 8
    assert decode(unnamed, SM100).facts.page_size is None


def test_reference_and_what_a_server_told_of_itself_are_left_alone() -> None:
    told = RoleFacts(role=Role.DECODE, geometry=DSA, page_size=1, accelerator=SM90)
    for change in ({"engine": EngineType.REFERENCE}, {"resolved": True}):
        facts = told.model_copy(update=change).with_launch_defaults()
        assert effective(facts) == Effective(facts)


def test_what_a_card_tells_is_not_rewritten_again() -> None:
    observed = RoleFacts(
        role=Role.DECODE, geometry=LLAMA, accelerator=SM100, page_size=1, kv_dtype="auto", observed=True
    ).with_launch_defaults()
    assert effective(observed).facts.page_size == 1
    assert effective(observed).facts.disable_radix_cache is True  # cards do not tell it


def test_values_for_the_status() -> None:
    facts = RoleFacts(
        role=Role.DECODE, geometry=LLAMA, accelerator=SM100, tensor_parallel=2, page_size=32
    ).with_launch_defaults()
    assert effective_values(facts) == {
        "pageSize": 32,
        "kvCacheDtype": "auto",
        "attentionBackend": "trtllm_mha",
        "attentionDataParallelSize": 1,
        "attentionTensorParallelSize": 2,
        "maxRunningRequests": None,
        "loadBalanceMethod": "round_robin",
        "disableRadixCache": True,
        "retractionBackup": "host_pool",
        "decodeExtraSlots": 0,
        "hicacheMemLayout": "page_first",
        "hicacheIOBackend": "kernel",
        "hicacheWritePolicy": "write_through",
        "hicacheHostMemoryMode": "cache",
        "hicacheHostMemoryFraction": 0.8,
        "hicacheStorageBackend": "none",
        "hicacheRatio": None,
        "hicacheSizeGB": 0,
        "nixlPlugin": "UCX",
    }
    plain = effective_values(facts.model_copy(update={"role": Role.PREFILL}))
    assert "hicacheRatio" not in plain and plain["optimisticPrefillAttempts"] == 0


def test_capabilities_of_gpus() -> None:
    known = [from_capability(*c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 1), (7, 5))]
    assert known == [
        Accelerator.SM80,
        Accelerator.SM89,
        SM90,
        SM100,
        SM100,
        Accelerator.SM120,
        None,
    ]


def test_a_rewrite_of_what_was_set_is_a_warning_and_a_choice_is_told(pair: Pair) -> None:
    p, d = pair("dsa", page_size=16)
    finding = check(p, d).finding("B2")
    assert finding and finding.status is Status.WARN and finding.severity == "NORM" and finding.action
    assert "prefill: page size is set to 16, and will be 64" in finding.message
    chosen = check(*pair()).finding("E9")
    assert chosen and chosen.status is Status.PASS and "will be 0 (max_running_requests is not set)" in chosen.message


maybe_bool = st.sampled_from([None, True, False])
geometries = st.sampled_from([None, LLAMA, MLA, DSA, V4, MIMO])


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(Role),
    geometries,
    st.none() | st.sampled_from(Accelerator),
    st.booleans(),
    st.fixed_dictionaries(
        {
            "page_size": st.none() | st.sampled_from([1, 16, 64]),
            "kv_dtype": st.sampled_from([None, "auto", "bf16", "fp8_e4m3"]),
            "attention_backend": st.sampled_from([None, "", "fa3", "trtllm_mha", "fa4", "flashmla"]),
            "hicache_mem_layout": st.sampled_from([None, "layer_first", "page_first", "page_first_direct"]),
            "hicache_io_backend": st.sampled_from([None, "direct", "kernel"]),
            "hicache_storage_backend": st.sampled_from([None, "", "mooncake", "file"]),
            "hierarchical_cache": maybe_bool,
            "decode_radix_cache": maybe_bool,
            "decode_offload": maybe_bool,
            "retraction_backup": st.sampled_from([None, "", "host_pool", "cpu_tensor"]),
            "host_receive_threshold": st.sampled_from([None, 0.5, 1.0]),
            "max_running_requests": st.none() | st.integers(1, 100),
            "speculative_algorithm": st.sampled_from([None, "", "NEXTN", "NGRAM"]),
            "nixl_params": st.sampled_from([None, "", "{", "[]", '{"a": "b"}']),
            "backend": st.sampled_from(Backend),
        }
    ),
)
def test_effective_is_total_stable_and_only_speaks_of_rules_that_exist(
    role: Role, geometry: ModelGeometry | None, chip: Accelerator | None, whole: bool, given_facts: dict[str, Any]
) -> None:
    facts = RoleFacts(role=role, geometry=geometry, accelerator=chip, **given_facts)
    facts = facts.with_launch_defaults() if whole else facts
    result = effective(facts)
    assert result == effective(facts.model_copy())
    ids = {r.id for r in RULES}
    for rewrite in result.rewrites:
        assert rewrite.rule in ids and rewrite.why and rewrite.source
        assert rewrite.effective is None or rewrite.asked != rewrite.effective
        now = getattr(result.facts, rewrite.field)
        assert now == rewrite.effective or (now is None and rewrite.effective is None)
    assert not result.facts.whole_command
    # Told the accelerator, nothing that was known becomes something else.
    if chip is None:
        for kind in (SM90, SM100, ROCM):
            sure = effective(facts, accelerator=kind).facts
            for field in ("page_size", "kv_dtype", "retraction_backup", "attention_backend"):
                known = getattr(result.facts, field)
                assert known is None or known == getattr(sure, field), field
