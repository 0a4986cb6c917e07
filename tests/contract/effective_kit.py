"""Command lines of small shapes, and what SGLang makes of them."""

from __future__ import annotations

from typing import Any

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Role
from pdtransfer.contract.effective import Effective, effective
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.geometry import AttentionKind, ModelGeometry

LLAMA = ModelGeometry(
    attention=AttentionKind.GQA,
    layers=36,
    kv_heads=8,
    head_dim=64,
    dtype="bfloat16",
    architecture="LlamaForCausalLM",
    max_context=8192,
)
MLA = ModelGeometry(
    attention=AttentionKind.MLA,
    layers=61,
    kv_heads=1,
    head_dim=576,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    architecture="DeepseekV3ForCausalLM",
)
DSA = MLA.model_copy(
    update={"attention": AttentionKind.DSA, "index_head_dim": 128, "architecture": "DeepseekV32ForCausalLM"}
)
V4 = ModelGeometry(
    attention=AttentionKind.MLA, layers=4, kv_heads=1, head_dim=512, architecture="DeepseekV4ForCausalLM"
)
MIMO = LLAMA.model_copy(update={"head_dim": 192, "v_head_dim": 128, "architecture": "MiMoV2FlashForCausalLM"})
SM90, SM100, ROCM = Accelerator.SM90, Accelerator.SM100, Accelerator.ROCM


def of(role: Role, geometry: ModelGeometry | None = LLAMA, chip: Accelerator | None = SM90, **given: Any) -> Effective:
    """A whole command line: what is not given has SGLang's default."""
    facts = RoleFacts(role=role, geometry=geometry, accelerator=chip, **given).with_launch_defaults()
    return effective(facts)


def decode(geometry: ModelGeometry | None = LLAMA, chip: Accelerator | None = SM90, **given: Any) -> Effective:
    """Decode's."""
    return of(Role.DECODE, geometry, chip, **given)


def prefill(geometry: ModelGeometry | None = LLAMA, chip: Accelerator | None = SM90, **given: Any) -> Effective:
    """Prefill's."""
    return of(Role.PREFILL, geometry, chip, **given)
