"""What holds of families A to D for any facts: total, every message complete, and more knowledge keeps a failure."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat import RULES, Status, check
from pdtransfer.contract.compat.rule import NeedsFact
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry

FAMILIES = "ABCD"
small = st.integers(1, 9)
switch = st.sampled_from([None, None, False, True])
ARCHITECTURES = (
    None,
    "LlamaForCausalLM",
    "DeepseekV4ForCausalLM",
    "DeepseekV41ForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "Glm5NextForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
)


@st.composite
def geometries(draw: st.DrawFn) -> ModelGeometry:
    layers = draw(st.integers(1, 12))
    some = st.lists(st.integers(0, layers - 1), unique=True, max_size=layers).map(tuple)
    latent = draw(st.booleans())
    return ModelGeometry(
        attention=draw(st.sampled_from(AttentionKind)),
        layers=layers,
        kv_heads=draw(small),
        head_dim=draw(small),
        v_head_dim=draw(st.none() | small),
        kv_lora_rank=512 if latent else None,
        qk_rope_head_dim=64 if latent else None,
        sliding_window_layers=draw(some),
        linear_layers=draw(some),
        swa_kv_heads=draw(st.none() | small),
        architecture=draw(st.sampled_from(ARCHITECTURES)),
        dtype=draw(st.sampled_from([None, "bfloat16", "odd"])),
        compressed_index_heads=draw(st.none() | small),
        ssm_dtype=draw(st.sampled_from([None, "float32"])),
        minicpm_sparse=draw(st.booleans()),
        index_values=draw(st.booleans()),
    )


SWITCHES = (
    "kv_cache_sharding",
    "dsa_cache_layer_split",
    "pd_role_switch",
    "hnd_kv_cache",
    "multi_layer_eagle",
    "linear_replayssm",
    "linear_replayssm_spec",
    "lmcache",
    "watermark",
    "response_store",
    "pdmux",
    "minicpm_force_dense",
    "unified_memory",
    "staging_buffer",
    "decode_radix_cache",
    "disable_radix_cache",
    "hierarchical_cache",
    "all_cp_ranks_transfer",
    "rust_server",
)
WORDS: dict[str, list[str | None]] = {
    "allocation_policy": [None, "early", "prefill_complete"],
    "moe_a2a_backend": [None, "none", "deepep"],
    "dsv4_attention_backend": [None, "auto", "flashmla", "trtllm"],
    "dsv4_kv_layout": [None, "", "v41", "auto"],
    "dsv4_compressed_kv_layout": [None, "auto", "fp4"],
    "mamba_cache_strategy": [None, "auto", "no_buffer", "extra_buffer_lazy"],
    "dllm_algorithm": [None, "", "LowConfidence"],
    "speculative_algorithm": [None, "", "EAGLE", "EAGLE3", "NGRAM", "DSPARK"],
    "ssm_dtype": [None, "float32", "bfloat16"],
    "kv_dtype": [None, "auto", "bfloat16", "fp8_e4m3", "mxfp8", "nvfp4"],
    "dsa_backend": [None, "trtllm", "flashmla_kv", "tilelang"],
    "attention_backend": [None, "", "fa3", "trtllm_mha"],
    "nixl_backend": [None, "UCX", "LIBFABRIC"],
}
NUMBERS = ("expert_parallel", "draft_tokens", "draft_layers", "max_prefill_tokens", "transfer_queues", "page_size")


def role_facts(role: Role) -> st.SearchStrategy[RoleFacts]:
    fields: dict[str, Any] = dict.fromkeys(SWITCHES, switch)
    fields |= {name: st.sampled_from(words) for name, words in WORDS.items()}
    fields |= {name: st.none() | small for name in NUMBERS}
    return st.builds(
        RoleFacts,
        role=st.just(role),
        geometry=st.none() | geometries(),
        tensor_parallel=small,
        pipeline_parallel=small,
        context_parallel=small,
        attention_data_parallel=small,
        dcp_size=small,
        chunked_prefill_size=st.sampled_from([None, -1, 0, 16, 1000]),
        accelerator=st.none() | st.sampled_from(Accelerator),
        host_kv=st.sampled_from(HostKVMode),
        decode_tp_sizes=st.none() | st.frozensets(small, max_size=3),
        observed=st.booleans(),
        **fields,
    )


@settings(max_examples=100, deadline=None)
@given(role_facts(Role.PREFILL), role_facts(Role.DECODE), st.sampled_from(Backend))
def test_families_a_to_d_are_total_and_say_what_to_change(p: RoleFacts, d: RoleFacts, backend: Backend) -> None:
    report = check(p, d, backend)
    told = {f.rule for f in report.findings} | set(report.deferred)
    assert {r.id for r in RULES if r.family in FAMILIES} <= told
    for finding in report.findings:
        if finding.rule[0] in FAMILIES and finding.status in (Status.FAIL, Status.WARN):
            assert finding.message and finding.action and finding.severity, finding.rule


@settings(max_examples=100, deadline=None)
@given(role_facts(Role.PREFILL), role_facts(Role.DECODE), st.sampled_from(Backend))
def test_a_rule_decides_the_same_twice_and_raises_nothing_else(p: RoleFacts, d: RoleFacts, backend: Backend) -> None:
    """By the rules themselves, before the engine rewrites anything."""
    for rule in RULES:
        if rule.family not in FAMILIES:
            continue
        answers: list[object] = []
        for _ in range(2):
            try:
                answers.append(rule.decide(p, d, backend))
            except NeedsFact as missing:
                answers.append(str(missing))
        assert answers[0] == answers[1]
