"""spec.model, spec.engine and spec.kvCache: what is served, by which engine, and what both roles agree on."""

from __future__ import annotations

from pydantic import Field, StrictInt

from pdoperator.api.base import ApiModel
from pdoperator.api.kubetypes import VolumeSource
from pdoperator.api.scalars import LayerId, ShortText, Text
from pdtransfer.contract.base import EngineType
from pdtransfer.contract.geometry import AttentionKind


class GeometrySpec(ApiModel):
    """Shape of the model's KV cache, so that fit can be decided before any pod exists. The numbers are
    those of the model's config.json."""

    attention: AttentionKind = Field(
        default=AttentionKind.GQA,
        description="How the model stores KV: GQA (also plain multi-head attention), MLA or DSA.",
    )
    layers: StrictInt = Field(ge=1, le=4096, description="Number of hidden layers.")
    kv_heads: StrictInt = Field(
        ge=1, le=4096, description="Number of key/value heads over all ranks (num_key_value_heads)."
    )
    head_dim: StrictInt = Field(ge=1, le=65536, description="Dimension of one key head.")
    v_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Dimension of one value head where it differs from headDim."
    )
    kv_lora_rank: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Rank of the compressed KV (MLA, DSA)."
    )
    qk_rope_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Rotary dimension stored beside the compressed KV (MLA, DSA)."
    )
    index_head_dim: StrictInt | None = Field(
        default=None, ge=1, le=65536, description="Dimension of the sparse-attention index keys (DSA)."
    )
    sliding_window_layers: tuple[LayerId, ...] = Field(
        default=(), max_length=4096, description="Ids of the layers that use sliding-window attention."
    )
    linear_layers: tuple[LayerId, ...] = Field(
        default=(), max_length=4096, description="Ids of the layers with recurrent state (Mamba, linear attention)."
    )
    dtype: ShortText | None = Field(default=None, description="The model's own dtype, for example bfloat16.")
    architecture: ShortText | None = Field(
        default=None,
        description="First of the config's architectures, for example LlamaForCausalLM. SGLang chooses attention "
        "backend and page size by it; without it those choices are Unknown until the first pods report them.",
    )


class ModelSpec(ApiModel):
    """What to serve. Set source, volume or both."""

    source: Text | None = Field(
        default=None,
        description="Path of the model in the engine container, or an id on a model hub. May be left out when "
        "volume is set: then the model is read from /mnt/models.",
    )
    revision: ShortText | None = Field(
        default=None, description="Revision of the model on the hub (branch, tag or commit)."
    )
    served_name: ShortText | None = Field(
        default=None, description="Name under which clients ask for the model. Defaults to the source."
    )
    volume: VolumeSource | None = Field(
        default=None,
        description="Any pod volume source with exactly one key, for example {persistentVolumeClaim: {claimName: m}}, "
        "{image: {reference: r}} or {configMap: {name: m}}. Mounted read-only at /mnt/models in every engine pod.",
    )
    geometry: GeometrySpec | None = Field(
        default=None,
        description="Shape of the model's KV cache. With it the fit of prefill and decode is decided before any "
        "pod is launched; without it some rules are Unknown until the first pods report their layout.",
    )


class EngineSpec(ApiModel):
    """The inference engine that runs in prefill and decode pods."""

    type: EngineType = Field(
        default=EngineType.SGLANG,
        description="SGLang, or Reference: a small CPU engine for demos, conformance and chaos tests.",
    )
    image: Text = Field(description="Container image of the engine. SGLang images are used unmodified.")
    version: ShortText | None = Field(
        default=None,
        pattern=r"^v?[0-9]+(\.[0-9A-Za-z]+)*([-+][0-9A-Za-z.-]+)?$",
        description="Version of the engine in the image, for example 0.5.23, where the image's tag does not tell. "
        "It decides which compatibility rules apply; the running engine is asked as well.",
    )


class KVCacheSpec(ApiModel):
    """What both roles must agree on. Written explicitly to both, because their own defaults may differ."""

    page_size: StrictInt | None = Field(
        default=None, ge=1, le=4096, description="Tokens in a page of the KV pool. The same on both roles."
    )
    dtype: ShortText | None = Field(
        default=None,
        pattern="^[a-z0-9_]+$",
        description="Dtype of the KV cache, for example bfloat16 or fp8_e4m3. SGLang compares the spelling, so one "
        "spelling is given to both roles.",
    )
