"""Model families that SGLang treats in ways of their own, by the names in a model's config.

SGLang goes by `architectures`; a geometry that does not tell it is known by its `model_type`, which is
the outer or the text model's. Names are those of SGLang 0.5.23 and transformers 5.19.
"""

from __future__ import annotations

from pdtransfer.contract.geometry import AttentionKind, ModelGeometry

DEEPSEEK_V4_ARCHITECTURES = frozenset(
    {"DeepseekV4ForCausalLM", "DeepseekV4ForCausalLMNextN", "DeepseekV4ForCausalLMDSpark", "DeepseekV41ForCausalLM"}
)
DEEPSEEK_V4_TYPES = frozenset({"deepseek_v4", "deepseek_v41", "deepseek_v41_text"})
DEEPSEEK_V41_TYPES = frozenset({"deepseek_v41", "deepseek_v41_text"})
MINIMAX_M3_ARCHITECTURES = frozenset({"MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration"})
MINIMAX_M3_TYPES = frozenset({"minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text"})
DSA_ARCHITECTURES = frozenset(
    {
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "Glm5NextForConditionalGeneration",
        "LongcatFlashForCausalLM",
        "Dots3NoteForCausalLM",
        "HYV4ForCausalLM",
        "HYV4ForCausalLMNextN",
        "LongcatFlashForCausalLMNextN",
    }
)
"""Those that are DSA where their config has `index_topk`."""
MLA_ON_TRTLLM = frozenset(
    {"DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "KimiK25ForConditionalGeneration"} | DSA_ARCHITECTURES
)
"""MLA models that SGLang gives trtllm_mla on SM100 where nothing else is asked for."""


def _is(geometry: ModelGeometry | None, architectures: frozenset[str], types: frozenset[str]) -> bool:
    if geometry is None:
        return False
    if geometry.architecture is not None:
        return geometry.architecture in architectures
    return geometry.model_type in types


def is_deepseek_v4(geometry: ModelGeometry | None) -> bool:
    """DeepSeek-V4 and V4.1: a hybrid of compressed and windowed layers with a page of 256 tokens."""
    return _is(geometry, DEEPSEEK_V4_ARCHITECTURES, DEEPSEEK_V4_TYPES)


def is_minimax_m3(geometry: ModelGeometry | None) -> bool:
    """MiniMax-M3 and M3.1 (sparse GQA)."""
    return _is(geometry, MINIMAX_M3_ARCHITECTURES, MINIMAX_M3_TYPES)


def is_dsa(geometry: ModelGeometry | None) -> bool:
    """DeepSeek sparse attention: DeepSeek-V3.2, GLM-5 and their kin (not DeepSeek-V4)."""
    return geometry is not None and geometry.attention is AttentionKind.DSA and not is_deepseek_v4(geometry)


def is_deepseek_v41(geometry: ModelGeometry | None) -> bool:
    """DeepSeek-V4.1. SGLang gives it V4's architecture and tells it by its type."""
    return geometry is not None and (
        geometry.architecture == "DeepseekV41ForCausalLM" or geometry.model_type in DEEPSEEK_V41_TYPES
    )


def is_glm5_next(geometry: ModelGeometry | None) -> bool:
    """GLM-5-Next, which can share one group between context and tensor parallelism on prefill."""
    return _is(geometry, frozenset({"Glm5NextForConditionalGeneration"}), frozenset({"glm5_next", "glm5_next_text"}))


def is_hrm_text(geometry: ModelGeometry | None) -> bool:
    """HRM-Text, where its prompts are attended to in both directions."""
    return (
        geometry is not None
        and (geometry.model_type == "hrm_text" or geometry.architecture == "HrmTextForCausalLM")
        and geometry.prefix_lm
    )
