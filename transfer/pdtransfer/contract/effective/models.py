"""Attention backends that SGLang 0.5.23 gives certain models where the user set none.

From sglang.srt.arg_groups.model_overrides, one entry per function there that sets an attention backend.
"""

from __future__ import annotations

from collections.abc import Mapping

from pdtransfer.contract.accelerator import Accelerator


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
    "Olmo2ForCausalLM": _OLMO2,
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
    "BeamForCausalLM": _BEAM,
    "MiMoV2ForCausalLM": _MIMO,
    "MiMoV2FlashForCausalLM": _MIMO,
}
"""Chosen where none of the three backends is set."""

QWEN_HYBRID = frozenset(
    {
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "InternS2PreviewForConditionalGeneration",
        "InternS2MobiusForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
    }
)
"""Their backend and page size on SM100 hang on how recurrent state is cached."""

NEMOTRON = frozenset({"NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Omni_Reasoning_V3"})

NOT_MODELLED = frozenset(
    {
        "DiffusionGemmaForBlockDiffusion",
        "EmbeddingGemma2Model",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "GraniteMoeHybridForCausalLM",
        "HrmTextForCausalLM",
        "IQuestQ1ForCausalLM",
        "IQuestQ1MTP",
        "KimiK3ForConditionalGeneration",
        "MiniCPMForCausalLM",
        "MiniCPMSALAForCausalLM",
        "MossVLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen4ExpForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
"""Models with choices of their own that are not worked out here: unknown until the engine has started."""

SINKS_UNTOLD = frozenset({"MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"})
"""Whether their attention has sinks stands in a field that no geometry carries."""
