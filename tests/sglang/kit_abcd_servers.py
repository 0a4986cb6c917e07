"""Servers of which test_rules_against_sglang_launch.py asks whether they start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pdtransfer.contract.base import Backend, Role

NAMES = {Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake", Backend.PDCLUSTER: "pdcluster"}
P, D = Role.PREFILL, Role.DECODE


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
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
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _config("LlamaForCausalLM", "llama"),
    "mla": _config("DeepseekV3ForCausalLM", "deepseek_v3", **_LATENT),
    "dsa": _config(
        "DeepseekV32ForCausalLM", "deepseek_v32", index_head_dim=128, index_n_heads=4, index_topk=64, **_LATENT
    ),
    "linear": _config(
        "Qwen3NextForCausalLM",
        "qwen3_next",
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
    "v4": _config(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        head_dim=512,
        q_lora_rank=64,
        o_lora_rank=64,
        qk_rope_head_dim=64,
        compress_ratios=[0, 4, 0, 4],
        index_head_dim=128,
        index_n_heads=4,
        index_topk=64,
        sliding_window=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "diffusion": _config("SDARForCausalLM", "qwen3"),
    "minicpm": _config("MiniCPMSALAForCausalLM", "minicpm_sala", sparse_config={"topk": 64}),
}


@dataclass(frozen=True)
class Server:
    """One server: its flags beside those of every server here, and its environment."""

    rule: str
    role: Role
    flags: str = ""
    model: str = "llama"
    backend: Backend = Backend.NIXL
    accelerator: str = "SM90"
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def argv(self) -> list[str]:
        """All arguments but the model."""
        mode = ["--disaggregation-mode", self.role.value, "--disaggregation-transfer-backend", NAMES[self.backend]]
        return [*mode, *self.flags.split()]


def both(rule: str, flags: str = "", **more: Any) -> list[Server]:
    return [Server(rule, role, flags, **more) for role in (P, D)]


def each(rule: str, role: Role, flags: str, **more: Any) -> list[Server]:
    return [Server(rule, role, flags, backend=b, **more) for b in NAMES]


SHARD = "--tp-size 4 --enable-kv-cache-sharding --attention-backend fa3 --page-size 64 --chunked-prefill-size 8192"
LATE = "--disaggregation-decode-allocation-policy prefill_complete"
RADIX = "--disaggregation-decode-enable-radix-cache"
SERVERS: list[Server] = [
    *(
        s
        for m in MODELS
        if m not in ("minicpm", "diffusion")
        for s in both("none", model=m, accelerator="SM100" if m == "v4" else "SM90")
    ),
    *(s for b in NAMES for s in both("none", backend=b)),
    *both("A2", "--tp-size 6 --attn-dp-size 4"),
    *both("A2", "--tp-size 4 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --attn-dp-size 2"),
    *both("A2", "--tp-size 4 --dp-size 2 --enable-dp-attention"),
    *both("A11", "--pp-size 2 --speculative-algorithm NGRAM"),
    *both("A11", "--speculative-algorithm NGRAM"),
    *both("A11", "--pp-size 2"),
    *each("A14", D, "--tp-size 4 --dcp-size 2", model="mla"),
    *both("A16", "--tp-size 4 --dcp-size 2", model="dsa"),
    Server("A16", P, "--tp-size 4 --dcp-size 2", model="mla"),
    *each("A18", P, SHARD, model="mla"),
    Server("A18", D, SHARD, model="mla"),
    Server("A18", P, SHARD.replace("--tp-size 4", "--tp-size 1"), model="mla"),
    Server("A18", P, f"{SHARD} --attn-dp-size 2", model="mla"),
    Server("A18", P, SHARD.replace("64", "1"), model="mla"),
    Server("A18", P, SHARD.replace("8192", "-1"), model="mla"),
    Server("A18", P, SHARD.replace("8192", "1000"), model="mla"),
    Server("A18", P, f"{SHARD} --dcp-size 2", model="mla"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache", model="mla"),
    Server("A18", P, f"{SHARD} --enable-hierarchical-cache --hicache-storage-backend file", model="mla"),
    Server("A18", P, f"{SHARD} --enable-lmcache", model="mla"),
    Server("A18", P, SHARD),
    Server("A18", P, SHARD, model="mla", variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *each("A19", P, "--enable-dsa-cache-layer-split", model="mla"),
    *each("A19", P, LATE),
    *each("A19", D, LATE),
    *(
        Server("A19", role, f"{LATE} {more}", backend=Backend.MOONCAKE)
        for role in (P, D)
        for more in (
            "--tp-size 2",
            "--tp-size 2 --dp-size 2 --enable-dp-attention",
            "--pp-size 2",
            "--enable-pd-role-switch",
            "--enable-hierarchical-cache",
            "--enable-hierarchical-cache --hicache-write-policy write_back",
        )
    ),
    Server("A19", D, f"{LATE} {RADIX}", backend=Backend.MOONCAKE),
    Server("A19", P, LATE, backend=Backend.MOONCAKE, variables=(("SGLANG_DISAGG_STAGING_BUFFER", "1"),)),
    *both("A19", "--enable-unified-memory"),
    *both("A20", "--enable-pd-role-switch"),
    *both("A20", "--enable-pd-role-switch --pp-size 2"),
    *both("A20", "--enable-pd-role-switch --tp-size 2 --ep-size 2", model="mla"),
    *both("A20", "--enable-pd-role-switch --speculative-algorithm NGRAM"),
    *both("A20", "--enable-pd-role-switch", backend=Backend.MOONCAKE),
    *both("B9", "--kv-cache-dtype nvfp4 --attention-backend trtllm_mha", accelerator="SM100"),
    *both("B11", "--dsv4-attn-backend trtllm", model="v4", accelerator="SM100"),
    *both("B11", "--dsv4-attn-backend flashmla", model="v4", accelerator="SM100"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1000"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1024"),
    *both("B12", "--page-size 16 --chunked-prefill-size -1"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1056 --tp-size 2 --attn-dp-size 2"),
    *both("B12", "--page-size 16 --chunked-prefill-size 1064 --tp-size 2 --attn-dp-size 2"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NGRAM"),
    Server("C7", D, RADIX),
    Server("C7", D, f"{RADIX} --speculative-algorithm EAGLE", model="mla"),
    Server("C7", D, f"{RADIX} --speculative-algorithm NEXTN", model="mla"),
    *both("D6", "--enable-linear-replayssm --disable-overlap-schedule", model="linear"),
    *both("D6", "--enable-linear-replayssm-spec", model="linear"),
    *(
        Server("D6", role, f"--disable-overlap-schedule --mamba-radix-cache-strategy {kept} {more}", model="linear")
        for role, more in ((P, ""), (P, "--disable-radix-cache"), (D, ""), (D, RADIX))
        for kept in (
            "no_buffer --page-size 1",
            "no_buffer --page-size 64",
            "extra_buffer --page-size 64",
            "extra_buffer_lazy --page-size 64",
            "auto --page-size 64",
        )
    ),
    *both("D7", "--enable-lmcache"),
    *both("D7", "--enable-watermark"),
    *both("D7", "--enable-response-store"),
    *both("D7", "--enable-pdmux --chunked-prefill-size -1 --disable-overlap-schedule"),
    *both("none", "--dllm-algorithm LowConfidence", model="diffusion"),
    *both("D7", model="minicpm"),
    *both("D7", "--attention-backend minicpm_flashattn", model="minicpm"),
    *both("D7", "--attention-backend fa3", model="minicpm"),
    *both("D7", model="minicpm", variables=(("SGLANG_MINICPM_FORCE_DENSE", "1"),)),
]
