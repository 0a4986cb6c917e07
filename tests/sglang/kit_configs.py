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
_SLIDING = ["sliding_attention", "full_attention"]
_LINEAR_HEADS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 64,
    "indexer_budget": 4096,
    "indexer_compress_ratio": 8,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64}
_QWEN4 = {"num_hidden_layers": 4, "full_attention_interval": 4, **_LINEAR_HEADS}


def _nested(architecture: str, model_type: str, text_type: str, **text: Any) -> dict[str, Any]:
    """A multimodal model: its language model under text_config."""
    inner = tiny_config(architecture, text_type, **text)
    return {"architectures": [architecture], "model_type": model_type, "dtype": "bfloat16", "text_config": inner}


OWN_CHOICES: dict[str, dict[str, Any]] = {
    "exaone4": tiny_config(
        "Exaone4ForCausalLM", "exaone4", sliding_window=128, sliding_window_pattern=2, layer_types=_SLIDING
    ),
    "exaone4_full": tiny_config(
        "Exaone4ForCausalLM", "exaone4", sliding_window=None, layer_types=["full_attention"] * 2
    ),
    "exaone_moe": tiny_config(
        "ExaoneMoEForCausalLM", "exaone_moe", sliding_window=128, sliding_window_pattern=2, layer_types=_SLIDING
    ),
    "granite_hybrid": tiny_config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_MAMBA, layer_types=["mamba", "attention"]
    ),
    "granite_plain": tiny_config(
        "GraniteMoeHybridForCausalLM", "granitemoehybrid", **_MAMBA, layer_types=["attention", "attention"]
    ),
    "iquest_q1": tiny_config(
        "IQuestQ1ForCausalLM",
        "iquest_q1",
        sliding_window=128,
        first_layers_types=["full_attention"],
        hybrid_layers_types_block=["sliding_attention"],
        num_hybrid_layers_block=1,
        last_layers_types=[],
    ),
    "kimi_k3": _nested(
        "KimiK3ForConditionalGeneration",
        "kimi_k3",
        "kimi_linear",
        **LATENT,
        linear_attn_config={
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 64,
            "short_conv_kernel_size": 4,
        },
    ),
    "minicpm_dense": tiny_config("MiniCPMForCausalLM", "llama"),
    "minicpm_lightning": tiny_config(
        "MiniCPMSALAForCausalLM", "minicpm_sala", mixer_types=["lightning", "minicpm4"], lightning_nh=4, lightning_nkv=4
    ),
    "moss_vl": tiny_config("MossVLForConditionalGeneration", "llama"),
    "qwen3_vl": tiny_config("Qwen3VLForConditionalGeneration", "llama"),
    "qwen3_vl_moe": tiny_config("Qwen3VLMoeForConditionalGeneration", "llama"),
    "qwen4_exp": tiny_config("Qwen4ExpForConditionalGeneration", "qwen4_exp_text", **_QWEN4),
    "qwen4_exp_qsa": tiny_config("Qwen4ExpForConditionalGeneration", "qwen4_exp_text", **_QWEN4, **_QSA),
    "whisper": tiny_config("WhisperForConditionalGeneration", "llama"),
    "hrm_text": tiny_config("HrmTextForCausalLM", "hrm_text"),
    "hrm_text_causal": tiny_config("HrmTextForCausalLM", "hrm_text", prefix_lm=False),
    "embedding_gemma2": tiny_config("EmbeddingGemma2Model", "llama"),
    "diffusion_gemma": tiny_config("DiffusionGemmaForBlockDiffusion", "llama"),
    "step3p5": tiny_config("Step3p5ForCausalLM", "step3p5", layer_types=_SLIDING, sliding_window=128),
    "muse_spark": tiny_config("MuseSparkForConditionalGeneration", "llama"),
    "beam": tiny_config("BeamForCausalLM", "beam", layer_types=_SLIDING, sliding_window=128),
    "gemma3n": tiny_config("Gemma3nForCausalLM", "gemma3_text", sliding_window=128, layer_types=_SLIDING),
    "gemma4": tiny_config("Gemma4ForCausalLM", "gemma3_text", sliding_window=128, layer_types=_SLIDING),
    "granite_swa": tiny_config("GraniteSWAForCausalLM", "llama", layer_types=_SLIDING, sliding_window=128),
    "mimo_sinks": {**MODELS["mimo"], "add_swa_attention_sink_bias": True},
    "mimo_plain": {**MODELS["mimo"], "add_swa_attention_sink_bias": False, "add_full_attention_sink_bias": False},
    "hy_v4": tiny_config("HYV4ForCausalLM", "hy_v4", **LATENT, **INDEX),
    "glm4_moe": tiny_config("Glm4MoeForCausalLM", "llama"),
    "mistral": tiny_config("MistralForCausalLM", "mistral", sliding_window=128),
}
"""Models with choices of their own, in which they are unlike all others."""
CONFIGS = MODELS | ODD | OWN_CHOICES
