"""With the model's architecture stated, the spec's check sees what SGLang makes of page size and sliding layers."""

from __future__ import annotations

from typing import Any

import pytest

from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.facts import spec_facts
from pdoperator.domain.preflight import preflight
from pdtransfer.contract.effective import effective

SM100 = {"nvidia.com/gpu.compute.major": "10", "nvidia.com/gpu.compute.minor": "0"}


def spec(architecture: str | None, **decode: Any) -> PDClusterSpec:
    geometry: dict[str, Any] = {"layers": 6, "kvHeads": 8, "headDim": 64, "slidingWindowLayers": [0, 1, 2, 3, 4]}
    if architecture:
        geometry["architecture"] = architecture
    template = {"template": {"nodeSelector": SM100}}
    return PDClusterSpec.model_validate(
        {
            "model": {"source": "m", "geometry": geometry},
            "engine": {"image": "lmsysorg/sglang:v0.5.23"},
            "transfer": {"backend": "NIXL"},
            "prefill": template,
            "decode": template | decode,
        }
    )


@pytest.mark.parametrize(
    ("architecture", "page"),
    [("LlamaForCausalLM", 64), ("WhisperForConditionalGeneration", 1), ("IQuestQ1ForCausalLM", 1), (None, None)],
)
def test_page_size_follows_from_the_architecture(architecture: str | None, page: int | None) -> None:
    # On SM100: trtllm_mha has pages of 64; FlashInfer and fa3, which these two insist on, have SGLang's default of 1.
    for facts in spec_facts(spec(architecture)):
        assert effective(facts).facts.page_size == page


@pytest.mark.parametrize(("architecture", "status"), [("Gemma3ForCausalLM", "Pass"), ("GptOssForCausalLM", "Fail")])
def test_sliding_layers_break_unequal_tp_only_where_they_have_a_pool(architecture: str, status: str) -> None:
    """D2. SGLang keeps Gemma 3's sliding layers in the one pool, and gpt-oss' in one of their own."""
    found = preflight(spec(architecture, tensorParallelSize=4))
    assert next(f for f in found.findings if f.rule == "D2").status == status
