"""Shapes of models that the rules tell apart, by hand from their published configs."""

from __future__ import annotations

from typing import Any

from pdtransfer.contract.geometry import AttentionKind, ModelGeometry


def _bf16(attention: AttentionKind, **more: Any) -> ModelGeometry:
    return ModelGeometry(attention=attention, dtype="bfloat16", **more)


def gqa(layers: int, kv_heads: int, head_dim: int, **more: Any) -> ModelGeometry:
    """A model of grouped-query attention."""
    return _bf16(AttentionKind.GQA, layers=layers, kv_heads=kv_heads, head_dim=head_dim, **more)


def latent(layers: int, *, attention: AttentionKind = AttentionKind.MLA, **more: Any) -> ModelGeometry:
    """A model of latent rows of 576 (DeepSeek-V3's), with dense attention or (DSA) an index."""
    return _bf16(attention, layers=layers, kv_heads=1, head_dim=576, kv_lora_rank=512, qk_rope_head_dim=64, **more)


GEOMETRIES = {
    "gqa8": gqa(36, 8, 64),
    "gqa4": gqa(36, 4, 64),
    "swa8": gqa(36, 8, 64, sliding_window_layers=tuple(range(0, 36, 2))),
    "linear": gqa(48, 2, 256, linear_layers=tuple(i for i in range(48) if (i + 1) % 4), ssm_dtype="float32"),
    "qsa": gqa(
        48,
        2,
        256,
        linear_layers=tuple(i for i in range(48) if (i + 1) % 4),
        ssm_dtype="float32",
        compressed_index_heads=4,
        architecture="Qwen4ExpForConditionalGeneration",
    ),
    "kimi": latent(
        27,
        linear_layers=tuple(i for i in range(27) if (i + 1) % 4),
        ssm_dtype="float32",
        architecture="KimiLinearForCausalLM",
    ),
    "mimo-swa": gqa(
        48, 4, 192, v_head_dim=128, swa_kv_heads=8, sliding_window_layers=tuple(i for i in range(48) if i % 6)
    ),
    "v4": _bf16(
        AttentionKind.DSA,
        layers=43,
        kv_heads=1,
        head_dim=512,
        index_head_dim=128,
        model_type="deepseek_v4",
        architecture="DeepseekV4ForCausalLM",
    ),
    "v41": _bf16(
        AttentionKind.DSA,
        layers=43,
        kv_heads=1,
        head_dim=512,
        index_head_dim=128,
        model_type="deepseek_v41",
        architecture="DeepseekV41ForCausalLM",
    ),
    "m3": gqa(60, 4, 128, model_type="minimax_m2", architecture="MiniMaxM3SparseForConditionalGeneration"),
    "m3-values": gqa(60, 4, 128, architecture="MiniMaxM3SparseForCausalLM", index_values=True),
    "minicpm": gqa(32, 2, 128, architecture="MiniCPMSALAForCausalLM", minicpm_sparse=True),
    "glm5": latent(
        78, attention=AttentionKind.DSA, index_head_dim=128, architecture="Glm5NextForConditionalGeneration"
    ),
    "mimo": gqa(48, 4, 192, v_head_dim=128),
    "mla": latent(61, model_type="deepseek_v3"),
    "dsa": latent(61, attention=AttentionKind.DSA, index_head_dim=128, model_type="deepseek_v32"),
}
