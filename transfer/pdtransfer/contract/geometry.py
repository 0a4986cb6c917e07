"""Shape of a model's KV, from a spec or a Hugging Face config.json, and its byte formulas."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from pdtransfer.contract.base import ContractModel


class AttentionKind(StrEnum):
    """How the model stores KV. GQA covers MHA (kv_heads == query heads)."""

    GQA = "GQA"
    MLA = "MLA"
    DSA = "DSA"


class ModelGeometry(ContractModel):
    """Layers, heads and dims that decide what a page holds."""

    attention: AttentionKind
    layers: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    v_head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None
    index_head_dim: int | None = None
    sliding_window_layers: tuple[int, ...] = ()
    linear_layers: tuple[int, ...] = ()
    dtype: str | None = None
    model_type: str | None = None
