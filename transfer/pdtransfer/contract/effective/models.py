"""Attention backends that SGLang 0.5.23 gives certain models where the user set none.

From sglang.srt.arg_groups.model_overrides, one entry per function there that sets an attention backend.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdtransfer.contract.accelerator import Accelerator

DIFFUSION_GEMMA = "DiffusionGemmaForBlockDiffusion"
EMBEDDING_GEMMA2 = "EmbeddingGemma2Model"
IQUEST = frozenset({"IQuestQ1ForCausalLM", "IQuestQ1MTP"})
KIMI_K3 = "KimiK3ForConditionalGeneration"


def _table(otherwise: str = "", **special: str) -> dict[Accelerator, str]:
    """Backend by accelerator; `otherwise` '' leaves the rest to the common default."""
    found = {a: special.get(a.name, otherwise) for a in Accelerator}
    return {a: backend for a, backend in found.items() if backend}


_LLAMA4 = _table("triton", SM100="trtllm_mha", SM90="fa3", ROCM="aiter", CPU="")
_GPT_OSS = _table("triton", SM100="trtllm_mha", SM90="fa3", ROCM="aiter", CPU="intel_amx")
_GEMMA4 = _table("triton", SM100="trtllm_mha")
_OLMO2 = {a: "fa3" if a.nvidia else "triton" for a in Accelerator} | {Accelerator.SM100: "trtllm_mha"}
_INKLING = _table("triton", SM90="fa4", SM100="fa4")
_BEAM = _table(SM90="trtllm_mha", SM100="trtllm_mha", SM120="trtllm_mha")
_TRITON = _table(SM100="triton")
_FLASHINFER = _table(SM100="flashinfer")
_MIMO = _table(SM100="fa4")

BASE_UNSET: Mapping[str, Mapping[Accelerator, str]] = {
    "Llama4ForConditionalGeneration": _LLAMA4,
    "Llama4ForCausalLM": _LLAMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
    DIFFUSION_GEMMA: _table("triton"),
    EMBEDDING_GEMMA2: _table("triton"),
    "Olmo2ForCausalLM": _OLMO2,
    "Exaone4ForCausalLM": _OLMO2,
    "ExaoneMoEForCausalLM": _OLMO2,
    "ExaoneMoeForCausalLM": _OLMO2,
    "FalconH1ForCausalLM": _TRITON,
    "JetNemotronForCausalLM": _TRITON,
    "JetVLMForConditionalGeneration": _TRITON,
    "MiniCPMV4_6ForConditionalGeneration": _TRITON,
    "MiniCPMV4_7ForConditionalGeneration": _TRITON,
    "Lfm2ForCausalLM": _FLASHINFER,
    "Lfm2MoeForCausalLM": _FLASHINFER,
}
"""Chosen where --attention-backend is not set, whatever the two split backends are."""
NONE_SET: Mapping[str, Mapping[Accelerator, str]] = {
    "GptOssForCausalLM": _GPT_OSS,
    "InklingForConditionalGeneration": _INKLING,
    "InklingForConditionalGenerationMTP": _INKLING,
    "BeamForCausalLM": _BEAM,
    "MiMoV2ForCausalLM": _MIMO,
    "MiMoV2FlashForCausalLM": _MIMO,
    **dict.fromkeys(IQUEST, _table("fa3")),
}
"""Chosen where none of the three backends is set."""

QWEN4 = "Qwen4ExpForConditionalGeneration"
QWEN_HYBRID = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        QWEN4,
    }
)
"""Their backend and page size on SM100 hang on how recurrent state is cached."""

NEMOTRON = frozenset({"NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3"})

GRANITE = "GraniteMoeHybridForCausalLM"
MINICPM = frozenset({"MiniCPMForCausalLM", "MiniCPMSALAForCausalLM"})
MOSS_VL = "MossVLForConditionalGeneration"
QWEN3_VL = frozenset({"Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"})
WHISPER = "WhisperForConditionalGeneration"
MUSE_SPARK = "MuseSparkForConditionalGeneration"
DTYPE_IS_BFLOAT16 = frozenset({"MistralLarge3ForCausalLM", "PixtralForConditionalGeneration"})
"""Run in bfloat16 whatever --dtype says."""


def is_step3p(architecture: str) -> bool:
    """Step-3.5 and 3.7, which SGLang knows by a part of the name."""
    return "Step3p5ForCausalLM" in architecture or "Step3p7ForConditionalGeneration" in architecture


def drafts_in_layers(architecture: str) -> bool:
    """Models with which EAGLE always is multi-layer EAGLE."""
    named = {"MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM", "GigaChat35ForCausalLM", "GigaChat35ForCausalLMNextN"}
    return architecture in named or is_step3p(architecture)


TRITON_TO_BE_DETERMINISTIC = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "MistralLarge3ForCausalLM",
        "PixtralForConditionalGeneration",
        "GlmMoeDsaForCausalLM",
        "Glm4MoeLiteForCausalLM",
    }
)
"""For these FlashInfer is not deterministic on Blackwell."""

SINKS = IQUEST | {"GptOssForCausalLM", "GraniteSWAForCausalLM", "GraniteMoeSWAForCausalLM"}
"""Their attention has sinks, which FlashInfer does not know."""
SINKS_UNTOLD = frozenset({"MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"})
"""Whether their attention has sinks only their config tells."""
