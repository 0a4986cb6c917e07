"""Shape of a model's KV and its byte formulas (section 7 of the SGLang PD rules).

`from_hf_config` reads it from a Hugging Face config.json; a PDCluster's spec may also state it,
and cards tell most of it. All sizes are bytes, all layer and head numbers count from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field, model_validator

from pdtransfer.contract.base import ContractModel
from pdtransfer.contract.layout import HeadSlice


class AttentionKind(StrEnum):
    """How the model stores KV. GQA covers MHA (kv_heads == query heads)."""

    GQA = "GQA"
    MLA = "MLA"
    DSA = "DSA"


class GeometryError(ValueError):
    """A model's shape can't be told or doesn't divide; `field` names what is missing or wrong."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


_DTYPE_BYTES = {
    "bfloat16": 2,
    "bf16": 2,
    "float16": 2,
    "fp16": 2,
    "half": 2,
    "float32": 4,
    "fp32": 4,
    "float": 4,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


def dtype_bytes(kv_dtype: str, model_dtype: str | None = None) -> int:
    """Bytes of one KV element. `auto` means the model's dtype. Packed 4-bit dtypes hold two
    elements and scales per byte run and have no answer here (rule B9): GeometryError."""
    name = kv_dtype.lower().removeprefix("torch.")
    if name == "auto":
        if not model_dtype:
            raise GeometryError("kv_dtype", "'auto' means the model's dtype, and that is not known")
        return dtype_bytes(model_dtype)
    size = _DTYPE_BYTES.get(name)
    if size is None:
        raise GeometryError("kv_dtype", f"{kv_dtype!r} has no whole number of bytes per element known here")
    return size


def is_fp8(kv_dtype: str) -> bool:
    """True for the 8-bit float KV dtypes."""
    return kv_dtype.lower().startswith(("fp8", "float8"))


class ModelGeometry(ContractModel):
    """Layers, heads and dims that decide what a page holds.

    MLA and DSA store one latent row per token of `kv_lora_rank` + `qk_rope_head_dim` elements;
    `kv_heads` is then 1 and `head_dim` the row's width. Layers in `sliding_window_layers`
    and `linear_layers` hold state instead of paged KV, those in `kvless_layers` nothing.
    """

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
    kvless_layers: tuple[int, ...] = ()
    """Layers that own no KV: MLP only, or they read another layer's."""
    sliding_window: int | None = None
    """Tokens in the window of the sliding layers."""
    swa_kv_heads: int | None = None
    """KV heads of the sliding layers where they differ (MiMo-V2); likewise the two dims."""
    swa_head_dim: int | None = None
    swa_v_head_dim: int | None = None
    max_context: int | None = None
    """Longest sequence the model was made for, tokens."""
    architecture: str | None = None
    """First of the config's `architectures`, by which SGLang knows the model."""
    index_pool: int = Field(default=1, gt=0)
    """Tokens that share one index key (DSA `index_kpool`); kpool in the formulas."""
    compressed_index_heads: int | None = None
    """Heads of the compressed sparse index (QSA of Qwen4-Exp, `indexer_n_heads`); None without one."""
    ssm_dtype: str | None = None
    """Dtype of the recurrent state as the config names it, SGLang's float32 where it names none."""
    minicpm_sparse: bool = False
    """Some layers use MiniCPM's sparse attention."""
    minicpm_lightning: bool = False
    """Some layers use MiniCPM's lightning attention."""
    attention_sinks: bool | None = None
    """Attention has learned sinks by a field of the config; None where no config was read."""
    hybrid_swa: bool = False
    """The config itself asks for a pool of its own for sliding layers (`is_hybrid_swa`)."""
    prefix_lm: bool = True
    """HRM-Text: the prompt is attended to in both directions, unless the config says otherwise."""
    index_values: bool = False
    """MiniMax-M3: some sparse layers keep an index value beside the index key."""

    @model_validator(mode="after")
    def _complete(self) -> ModelGeometry:
        for name in ("sliding_window_layers", "linear_layers", "kvless_layers"):
            outside = [i for i in getattr(self, name) if not 0 <= i < self.layers]
            if outside:
                raise GeometryError(name, f"layer {outside[0]} is outside 0..{self.layers - 1}")
        return self

    @property
    def latent(self) -> bool:
        """True when all ranks hold the same row per token (MLA, DSA): nothing splits by head."""
        return self.attention is not AttentionKind.GQA

    @property
    def value_dim(self) -> int:
        """Head dim of V."""
        return self.v_head_dim or self.head_dim

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers whose KV lies in paged regions; the others hold state, or nothing."""
        other = {*self.sliding_window_layers, *self.linear_layers, *self.kvless_layers}
        return tuple(i for i in range(self.layers) if i not in other)

    def heads_per_rank(self, tp_size: int) -> int:
        """KV heads one attention-TP rank stores: max(1, H // tp)."""
        return max(1, self.kv_heads // tp_size)

    def head_slice(self, tp_rank: int, tp_size: int) -> HeadSlice | None:
        """KV heads of attention-TP rank `tp_rank`, None for a latent row.

        With more ranks than heads, tp_size // H neighbouring ranks hold the same head.
        GeometryError when neither of H and tp_size divides the other (engines refuse it too)."""
        if not 0 <= tp_rank < tp_size:
            raise GeometryError("tp_rank", f"{tp_rank} is outside 0..{tp_size - 1}")
        if self.latent:
            return None
        h = self.kv_heads
        if h % tp_size == 0:
            count = h // tp_size
            return HeadSlice(first=tp_rank * count, count=count, total=h)
        if tp_size % h == 0:
            return HeadSlice(first=tp_rank // (tp_size // h), count=1, total=h)
        raise GeometryError("kv_heads", f"{h} KV heads do not split over {tp_size} ranks")

    def stage_layers(self, pp_rank: int, pp_size: int) -> tuple[int, ...]:
        """Layers of one pipeline stage. The last `layers % pp_size` stages hold one more, as
        SGLang's get_pp_indices does (SGLANG_PP_LAYER_PARTITION is not looked at)."""
        if not 0 <= pp_rank < pp_size:
            raise GeometryError("pp_rank", f"{pp_rank} is outside 0..{pp_size - 1}")
        base, extra = divmod(self.layers, pp_size)
        longer_before = max(0, pp_rank - (pp_size - extra))
        start = pp_rank * base + longer_before
        return tuple(range(start, start + base + (1 if pp_rank >= pp_size - extra else 0)))

    def key_item_bytes(self, page_size: int, tp_size: int, kv_dtype: str) -> int:
        """One page of one layer's K on one rank: p * h * head_dim * b."""
        return page_size * self.heads_per_rank(tp_size) * self.head_dim * dtype_bytes(kv_dtype, self.dtype)

    def value_item_bytes(self, page_size: int, tp_size: int, kv_dtype: str) -> int:
        """One page of one layer's V on one rank: p * h * v_head_dim * b."""
        return page_size * self.heads_per_rank(tp_size) * self.value_dim * dtype_bytes(kv_dtype, self.dtype)

    def latent_item_bytes(self, page_size: int, kv_dtype: str, *, raw_fp8: bool = False) -> int:
        """One page of one layer's latent row, the same on every rank.

        p * (rank + rope) * b; DSA in fp8 stores the rank part quantised with an fp32 scale per
        128 values and the rope part in 2 bytes, p * (rank + rank/128*4 + rope*2), unless the
        trtllm kernels hold the row raw (`raw_fp8`, rule B6)."""
        if not self.latent:
            raise GeometryError("attention", "GQA has no latent row")
        rank, rope = self.kv_lora_rank, self.qk_rope_head_dim
        if rank is None or rope is None:
            raise GeometryError("kv_lora_rank" if rank is None else "qk_rope_head_dim", "not known")
        if self.attention is AttentionKind.DSA and is_fp8(kv_dtype) and not raw_fp8:
            return page_size * (rank + rank // 128 * 4 + rope * 2)
        return page_size * (rank + rope) * dtype_bytes(kv_dtype, self.dtype)

    def index_item_bytes(self, page_size: int, kpool: int = 1) -> int:
        """One page of one layer's index K (DSA): (p / kpool) * (dim + 4 per 128 values), 0 without one."""
        if not self.index_head_dim:
            return 0
        return page_size // kpool * (self.index_head_dim + self.index_head_dim // 128 * 4)

    def page_bytes(self, page_size: int, tp_size: int, kv_dtype: str) -> int:
        """One page over all paged layers on one rank (all stages, state not counted)."""
        if self.latent:
            one = self.latent_item_bytes(page_size, kv_dtype)
        else:
            one = self.key_item_bytes(page_size, tp_size, kv_dtype) + self.value_item_bytes(
                page_size, tp_size, kv_dtype
            )
        return one * len(self.kv_layers)

    def request_bytes(
        self, prompt_tokens: int, page_size: int, tp_size: int, kv_dtype: str, cached_prefix: int = 0
    ) -> int:
        """Bytes of one request's paged KV to one decode rank, `cached_prefix` tokens left out:
        ceil((prompt - prefix) / p) * bytes of a page. State (SWA, linear, index) comes on top."""
        pages = -(-max(0, prompt_tokens - cached_prefix) // page_size)
        return pages * self.page_bytes(page_size, tp_size, kv_dtype)


def from_hf_config(config: Mapping[str, Any]) -> ModelGeometry:
    """Geometry from a parsed config.json; GeometryError names the field that is missing or wrong."""
    from pdtransfer.contract.hf_config import read_geometry  # that module builds on this one

    return read_geometry(config)


def region_bytes(item_bytes: int, tokens: int, page_size: int) -> int:
    """Length of one registered region: item * (tokens / p + 1); one page more than the pool."""
    return item_bytes * (tokens // page_size + 1)
