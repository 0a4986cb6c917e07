"""contract.effective against SGLang 0.5.23 itself: its own parser and resolution, on machines described to it.

Where the two disagree, SGLang is right. What SGLang decides only once its memory pools exist (retraction backup,
decode's HiCache ratio) is not in this comparison.
"""

from __future__ import annotations

import itertools
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kit_machine import TREE, cpu_variables, environment

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.effective import effective
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import from_hf_config
from pdtransfer.contract.sglang_cli import command_facts, read_flags

GPUS = ("SM80", "SM89", "SM90", "SM100", "SM120", "ROCm")
RESOLVE_S = 500

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
DECODE_ONLY = frozenset({"decode_extra_slots"})
PREFILL_ONLY = frozenset({"optimistic_prefill"})
BUILT_LATER = frozenset({"hicache_ratio"})
"""On decode SGLang settles it with the pools."""


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        **more,
    }


_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_INDEX = {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": _config("LlamaForCausalLM", "llama"),
    "qwen3": _config("Qwen3ForCausalLM", "qwen3"),
    "deepseek_v3": _config("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT),
    "deepseek_v32": _config("DeepseekV32ForCausalLM", "deepseek_v32", **_LATENT, **_INDEX),
    "glm_dsa": _config("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_LATENT, **_INDEX),
    "gpt_oss": _config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": _config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_next": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        num_hidden_layers=4,
        full_attention_interval=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "deepseek_v4": _config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        head_dim=512,
        num_key_value_heads=1,
        q_lora_rank=64,
        o_lora_rank=64,
        qk_rope_head_dim=64,
        compress_ratios=[0, 4],
        index_head_dim=128,
        index_n_heads=4,
        index_topk=64,
        sliding_window=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "mimo": _config(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        head_dim=192,
        v_head_dim=128,
        swa_head_dim=192,
        swa_v_head_dim=128,
        swa_num_key_value_heads=2,
        hybrid_layer_pattern=[0, 1],
        sliding_window_size=128,
    ),
    "minimax_m3": _config("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text"),
    "nemotron_h": _config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M*"),
    "llama4": _config("Llama4ForCausalLM", "llama4_text", num_local_experts=2, num_experts_per_tok=1),
    "olmo2": _config("Olmo2ForCausalLM", "olmo2"),
    "falcon_h1": _config("FalconH1ForCausalLM", "falcon_h1"),
    "lfm2": _config("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]),
}


@dataclass(frozen=True)
class Case:
    """One server: `argv` after the model, with its role."""

    model: str
    accelerator: str
    role: Role
    argv: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict, hash=False)

    @property
    def id(self) -> str:
        """For messages."""
        variables = " ".join(f"{k}={v}" for k, v in self.environment.items())
        return f"{variables} {self.model} on {self.accelerator}, {self.role.value}: {' '.join(self.argv)}".strip()

    @property
    def command(self) -> list[str]:
        """All arguments but the model."""
        backend = (
            [] if "--disaggregation-transfer-backend" in self.argv else ["--disaggregation-transfer-backend", "nixl"]
        )
        return ["--disaggregation-mode", self.role.value, *backend, *self.argv]


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
    """SGLang's answer to every case, from one process of its own Python."""
    home = environment()
    if home is None:
        pytest.skip("SGLang's environment is not there: run make sglang-env")
    fields = [*COMPARED.values(), *HICACHE.values()]
    asked = [
        {
            "config": MODELS[c.model],
            "accelerator": c.accelerator,
            "argv": c.command,
            "environment": c.environment,
            "fields": fields,
        }
        for c in CASES
    ]
    done = subprocess.run(
        [str(home / "bin" / "python"), "-W", "ignore", str(Path(__file__).with_name("kit_resolve.py"))],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=RESOLVE_S,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), **cpu_variables()},
        cwd=TREE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip((c.id for c in CASES), json.loads(done.stdout), strict=True))


def ours(case: Case) -> RoleFacts:
    """The same case as facts, through our reader of command lines, and what they become."""
    asked = command_facts(
        case.role,
        read_flags(case.command),
        case.environment,
        geometry=from_hf_config(MODELS[case.model]),
        accelerator=Accelerator(case.accelerator),
    )
    assert not asked.problems, asked.problems
    return effective(asked.facts).facts


def differences(case: Case, theirs: dict[str, Any]) -> list[str]:
    """Settings in which ours are not SGLang's. What we do not know is no difference."""
    facts = ours(case)
    named = dict(COMPARED)
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
