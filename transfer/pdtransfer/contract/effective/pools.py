"""Which sliding-window layers really have a pool of their own.

Formulas: sglang.srt.configs.model_config (ModelConfig._derive_hybrid_model, is_hybrid_swa_model), and the overrides
that set disable_hybrid_swa_memory. All other models keep the KV of sliding layers in the one pool, for all tokens: for
a transfer they are layers like the others.
"""

from __future__ import annotations

from pdtransfer.contract.effective.models import is_step3p
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.families import DEEPSEEK_V4_ARCHITECTURES

POOL_OF_ITS_OWN = frozenset(
    {
        "BeamForCausalLM",
        "Llama4ForConditionalGeneration",
        "GptOssForCausalLM",
        "GraniteSWAForCausalLM",
        "GraniteMoeSWAForCausalLM",
        "IQuestQ1ForCausalLM",
        "IQuestQ1MTP",
        "MiMoV2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2MTP",
        "Step3p5ForCausalLM",
        "Step3p5MTP",
        "Step3p7ForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "EmbeddingGemma2Model",
        "Gemma4UnifiedForConditionalGeneration",
        "DiffusionGemmaForBlockDiffusion",
        "LagunaForCausalLM",
        "MellumForCausalLM",
        "MuseGlimmerForCausalLM",
        "MuseGlimmerForConditionalGeneration",
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
        "UnlimitedOCRForCausalLM",
    }
    | DEEPSEEK_V4_ARCHITECTURES
)


def sliding_layers(d: Draft) -> None:
    """The geometry that the engine makes of the model's."""
    geometry = d.geometry
    if geometry is None or not geometry.sliding_window_layers or geometry.architecture is None or d.now.observed:
        return
    name = geometry.architecture
    asks_for_it = geometry.hybrid_swa or name in POOL_OF_ITS_OWN
    if asks_for_it and d.now.disable_hybrid_swa is None:
        return
    if asks_for_it and not d.now.disable_hybrid_swa and not (is_step3p(name) and d.now.hierarchical_cache):
        return
    d.geometry = geometry.model_copy(update={"sliding_window_layers": (), "sliding_window": None})
    d.quietly(geometry=d.geometry)
