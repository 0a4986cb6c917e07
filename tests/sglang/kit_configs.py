"""Small models as their config.json: enough for SGLang to resolve a command line, with nothing to load."""

from __future__ import annotations

from typing import Any


def tiny_config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    """A config.json of two layers and four heads, two of them for KV; `more` replaces and adds entries."""
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


LATENT = {
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
INDEX = {"index_head_dim": 128, "index_n_heads": 4, "index_topk": 64}

MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("LlamaForCausalLM", "llama"),
    "qwen3": tiny_config("Qwen3ForCausalLM", "qwen3"),
    "deepseek_v3": tiny_config("DeepseekV3ForCausalLM", "deepseek_v3", **LATENT),
    "deepseek_v32": tiny_config("DeepseekV32ForCausalLM", "deepseek_v32", **LATENT, **INDEX),
    "glm_dsa": tiny_config("GlmMoeDsaForCausalLM", "glm_moe_dsa", **LATENT, **INDEX),
    "gpt_oss": tiny_config(
        "GptOssForCausalLM",
        "gpt_oss",
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": tiny_config(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3_next": tiny_config(
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
    "deepseek_v4": tiny_config(
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
    "mimo": tiny_config(
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
    "minimax_m3": tiny_config("MiniMaxM3SparseForCausalLM", "minimax_m3_vl_text"),
    "nemotron_h": tiny_config("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M*"),
    "llama4": tiny_config("Llama4ForCausalLM", "llama4_text", num_local_experts=2, num_experts_per_tok=1),
    "olmo2": tiny_config("Olmo2ForCausalLM", "olmo2"),
    "falcon_h1": tiny_config("FalconH1ForCausalLM", "falcon_h1"),
    "lfm2": tiny_config("Lfm2ForCausalLM", "lfm2", layer_types=["conv", "full_attention"]),
}
ODD: dict[str, dict[str, Any]] = {
    "diffusion": tiny_config("SDARForCausalLM", "qwen3"),
    "minicpm": tiny_config("MiniCPMSALAForCausalLM", "minicpm_sala", sparse_config={"topk": 64}),
}
"""Models that SGLang does not serve disaggregated, or not as others."""
CONFIGS = MODELS | ODD
