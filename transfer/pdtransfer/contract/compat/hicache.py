"""Family E, continued: settings of the hierarchical cache (HiCache) that the engine rewrites or refuses."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every, known
from pdtransfer.contract.effective.hicache import receives_on_host
from pdtransfer.contract.facts import RoleFacts

E = Family()


@E.rule(
    "E7",
    "Optimistic prefill in one stage",
    every(Outcome.NORM),
    needs=("optimistic_prefill", "pipeline_parallel", "hierarchical_cache"),
    change="drop --optimistic-prefill-attempts, or set prefill pipelineParallelSize to 1 and HiCache to write_back or "
    "write_through without storage",
    engines=SGLANG_ONLY,
)
def e7(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return None  # That the engine switches it off is a rewrite.


@E.rule(
    "E10",
    "HiCache's layout, I/O, policy and size",
    every(Outcome.NORM),
    needs=("hicache_mem_layout", "hicache_io_backend", "hicache_storage_backend", "hicache_ratio"),
    change="set hierarchicalCache to what will be used: page_first_direct goes with direct I/O, page_first with kernel "
    "I/O, and storage mooncake with either of them",
    engines=SGLANG_ONLY,
)
def e10(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return None  # What the engine makes of them are rewrites.


@E.rule(
    "E11",
    "HiCache settings that exclude each other",
    every(Outcome.START),
    needs=("hierarchical_cache", "hicache_host_memory_mode", "hicache_storage_backend", "dcp_size", "geometry"),
    change="change hierarchicalCache as the message says, or drop it",
    engines=SGLANG_ONLY,
)
def e11(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if (hit := _host_memory(facts)) or (hit := _sharded(p, d, facts)) or (hit := _layout(facts)):
            return hit
    return None


def _runs(facts: RoleFacts) -> bool:
    """SGLang looks at these settings: HiCache or offload is on, or decode may build a host pool for retraction (which
    is settled later than it looks)."""
    if facts.hierarchical_cache or facts.decode_offload:
        return True
    pool = facts.retraction_backup == "host_pool" or facts.retraction_backup_chosen
    return facts.role.value == "decode" and pool


def _host_memory(facts: RoleFacts) -> Hit | None:
    role, mode = facts.role.value, facts.hicache_host_memory_mode
    fraction = facts.hicache_host_memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        return Hit(f"{role} has HiCache host memory fraction {fraction:g}, which is not above 0 and at most 1")
    if facts.hierarchical_cache and facts.disable_radix_cache and role == "prefill":
        return Hit(
            "prefill has a hierarchical cache and its radix cache off", change="drop --disable-radix-cache on prefill"
        )
    if not _runs(facts) or mode != "buffer_only":
        return None
    if not known(facts.hicache_storage_backend, facts, "hicache_storage_backend"):
        return Hit(
            f"{role} has HiCache host memory mode buffer_only and no storage backend",
            change="set hierarchicalCache.storageBackend, or host memory mode cache",
        )
    if role == "decode":
        return Hit(
            "decode has HiCache host memory mode buffer_only, which is prefill's only",
            change="set host memory mode cache on decode",
        )
    return None


def _sharded(p: RoleFacts, d: RoleFacts, facts: RoleFacts) -> Hit | None:
    """HiCache with decode context parallelism."""
    if not facts.hierarchical_cache or facts.dcp_size == 1:
        return None
    what = f"{facts.role.value} has a hierarchical cache and DCP size {facts.dcp_size}"
    if facts.hicache_host_memory_mode == "buffer_only" and facts.hicache_storage_backend:
        return Hit(f"{what}, in host memory mode buffer_only with storage", change="use host memory mode cache")
    geometry = p.geometry or d.geometry
    if geometry is not None and not geometry.latent:
        return Hit(f"{what}, and the model has {geometry.attention.value} attention, not MLA")
    if facts.speculative_algorithm and facts.speculative_algorithm.upper() not in ("DSPARK", "NONE"):
        return Hit(f"{what}, with speculative algorithm {facts.speculative_algorithm}: only DSPARK goes with it")
    return None


def _layout(facts: RoleFacts) -> Hit | None:
    """Host receive shares the host pool, and the storage wants another layout."""
    if receives_on_host(facts) and facts.hicache_mem_layout not in (None, "layer_first"):
        return Hit(
            f"{facts.role.value} receives into host memory, which needs HiCache layout layer_first, and with storage "
            f"{facts.hicache_storage_backend} the layout becomes {facts.hicache_mem_layout}",
            change="use another hierarchicalCache.storageBackend than mooncake, or no host receive",
        )
    return None
