"""Family E: prefix caches of decode, hierarchical cache, offload, retraction."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every, known
from pdtransfer.contract.facts import HostKVMode, RoleFacts

E = Family()


@E.rule(
    "E1",
    "Decode keeps the radix cache that was asked for",
    every(Outcome.NORM),
    needs=("disable_radix_cache", "decode_radix_cache"),
    change="pass --disaggregation-decode-enable-radix-cache to decode, or leave its radix cache off",
    engines=SGLANG_ONLY,
)
def e1(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    # Only a value that somebody set is worth a word when the engine rewrites it.
    if d.disable_radix_cache is not False or known(d.decode_radix_cache, d, "decode_radix_cache"):
        return None
    return Hit(
        "decode sets disable_radix_cache to False without --disaggregation-decode-enable-radix-cache",
        consequence="The engine rewrites it to True: decode keeps no prefix cache.",
    )


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
    change="drop --disaggregation-decode-enable-radix-cache, or HiSparse, or the hierarchical cache",
    engines=SGLANG_ONLY,
)
def e3(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.host_kv is HostKVMode.HISPARSE and known(d.decode_radix_cache, d, "decode_radix_cache"):
        return Hit("decode has its radix cache on and host KV mode HiSparse")
    geometry = p.geometry or d.geometry
    if not (geometry and geometry.sliding_window_layers and d.decode_radix_cache):
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
    return None


@E.rule(
    "E6",
    "Retraction backup host_pool",
    every(Outcome.START),
    needs=("retraction_backup", "geometry"),
    change="leave the retraction backup to the engine, or set cpu_tensor",
    engines=SGLANG_ONLY,
)
def e6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.retraction_backup == "host_pool":
        return Hit("prefill has retraction backup host_pool, a decode setting")
    geometry = p.geometry or d.geometry
    if d.retraction_backup == "host_pool" and geometry and geometry.linear_layers:
        return Hit(f"decode has retraction backup host_pool, and {len(geometry.linear_layers)} layers keep state")
    return None


@E.rule(
    "E7",
    "Optimistic prefill in one stage",
    every(Outcome.NORM),
    needs=("optimistic_prefill", "pipeline_parallel"),
    change="drop optimistic prefill or set prefill pipelineParallelSize to 1",
    engines=SGLANG_ONLY,
)
def e7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if not p.optimistic_prefill or p.pipeline_parallel == 1:
        return None
    return Hit(
        f"prefill has optimistic prefill on and {p.pipeline_parallel} pipeline stages",
        consequence="The engine switches optimistic prefill off.",
    )
