"""Family E: prefix caches of decode and its KV offload."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.parallelism import geometry_of
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every, known
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.families import is_deepseek_v4, is_minimax_m3
from pdtransfer.contract.geometry import ModelGeometry

E = Family()
SWA_COMPRESS = frozenset(
    {
        "MiMoV2ForCausalLM",
        "MiMoV2FlashForCausalLM",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "InklingForConditionalGeneration",
        "InklingForConditionalGenerationMTP",
        "EmbeddingGemma2Model",
        "DiffusionGemmaForBlockDiffusion",
        "MiMoV2MTP",
    }
)
"""Models whose sliding layers have a shape of their own (ModelConfig.is_hybrid_swa_compress)."""


@E.rule(
    "E1",
    "Decode keeps the radix cache that was asked for",
    every(Outcome.NORM),
    needs=("disable_radix_cache", "decode_radix_cache"),
    change="pass --disaggregation-decode-enable-radix-cache to decode, or leave its radix cache off",
    engines=SGLANG_ONLY,
)
def e1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return None  # What the engine makes of it is a rewrite.


@E.rule(
    "E2",
    "Decode's hierarchical cache needs its radix cache",
    every(Outcome.START),
    needs=("hierarchical_cache", "decode_radix_cache"),
    change="pass --disaggregation-decode-enable-radix-cache to decode, or drop its hierarchicalCache",
    engines=SGLANG_ONLY,
)
def e2(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.decode_radix_cache or not known(d.hierarchical_cache, d, "hierarchical_cache"):
        return None
    known(d.decode_radix_cache, d, "decode_radix_cache")
    return Hit("decode has a hierarchical cache, and --disaggregation-decode-enable-radix-cache is off")


@E.rule(
    "E3",
    "What decode's radix cache excludes",
    every(Outcome.START),
    needs=("decode_radix_cache", "host_kv", "hierarchical_cache", "geometry"),
    change="drop --disaggregation-decode-enable-radix-cache, or what it excludes (HiSparse, or the hierarchical cache)",
    engines=SGLANG_ONLY,
)
def e3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.host_kv is HostKVMode.HISPARSE and known(d.decode_radix_cache, d, "decode_radix_cache"):
        return Hit("decode has its radix cache on and host KV mode HiSparse")
    if not known(d.decode_radix_cache, d, "decode_radix_cache"):
        return None
    geometry = geometry_of(p, d)
    if is_deepseek_v4(geometry):
        return Hit(
            "decode has its radix cache on, and the model is DeepSeek-V4, which needs the unified KV layout for it "
            "(SGLANG_HACK_FLASHMLA_BACKEND=unified_kv_triton, ROCm only)",
            change="drop --disaggregation-decode-enable-radix-cache",
        )
    if geometry.architecture in SWA_COMPRESS:
        return Hit(f"decode has its radix cache on, which {geometry.architecture} does not support yet")
    if not geometry.sliding_window_layers:
        return None
    if known(d.hierarchical_cache, d, "hierarchical_cache"):
        return Hit("decode has its radix cache and a hierarchical cache on, and the model has sliding windows")
    return None


@E.rule(
    "E4",
    "Decode's KV offload",
    every(Outcome.START),
    needs=("decode_offload", "hicache_storage_backend", "retraction_backup"),
    change="set hierarchicalCache.storageBackend on decode, drop host_pool, and offload on decode only",
    engines=SGLANG_ONLY,
)
def e4(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.decode_offload:
        return Hit("prefill has --disaggregation-decode-enable-offload-kvcache, a decode flag")
    if not known(d.decode_offload, d, "decode_offload"):
        return None
    if not known(d.hicache_storage_backend, d, "hicache_storage_backend"):
        return Hit("decode offloads its KV cache without a storage backend to put it in")
    if d.retraction_backup == "host_pool":
        return Hit("decode offloads its KV cache and has retraction backup host_pool")
    geometry = p.geometry or d.geometry
    if geometry is not None and (reason := _not_offloaded(geometry)):
        return Hit(f"decode offloads its KV cache, and the model has {reason}, whose KV it can not offload")
    ours = known(p.hicache_storage_backend, p, "hicache_storage_backend")
    if ours != d.hicache_storage_backend:
        return Hit(
            f"decode offloads to storage {d.hicache_storage_backend}, prefill's storage is {ours or 'none'}",
            change="give both roles the same hierarchicalCache.storageBackend",
            outcome=Outcome.WARN,
            consequence="Decode only stores what it generates: the prompt's pages are missing there, and nothing "
            "checks that.",
        )
    return None


def _not_offloaded(geometry: ModelGeometry) -> str:
    """What keeps this model's KV from decode's offload, which knows plain MHA and MLA pools."""
    if geometry.sliding_window_layers:
        return "sliding windows"
    if geometry.linear_layers:
        return "recurrent state"
    return "sparse attention" if is_deepseek_v4(geometry) or is_minimax_m3(geometry) else ""


@E.rule(
    "E8",
    "Decode's radix cache is experimental",
    every(Outcome.WARN),
    needs=("decode_radix_cache", "attention_data_parallel"),
    change="leave decode's radix cache off, or measure what it saves",
    engines=SGLANG_ONLY,
)
def e8(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not known(d.decode_radix_cache, d, "decode_radix_cache"):
        return None
    routed = (
        f" With attention DP {d.attention_dp} a prefix is found only where the router sends requests by prefix."
        if d.attention_dp > 1
        else ""
    )
    return Hit(
        "decode keeps a prefix cache, and only the suffix of a prompt is transferred",
        consequence="SGLang calls it experimental: a prefix that can't be read back from host memory or storage fails "
        f"its request.{routed}",
    )
