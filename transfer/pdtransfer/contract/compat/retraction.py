"""Family E, continued: what decode keeps of requests that it takes back, and its queues."""

from __future__ import annotations

from pdtransfer.contract.base import Backend
from pdtransfer.contract.compat.rule import SGLANG_ONLY, Family, Hit, Outcome, every
from pdtransfer.contract.facts import RoleFacts
from pdtransfer.contract.families import is_glm5_next
from pdtransfer.contract.geometry import GeometryError, region_bytes

E = Family()
BACKUP_RATIO = 0.2
GIB = 1 << 30


@E.rule(
    "E5",
    "Host memory for retracted requests",
    every(Outcome.WARN),
    needs=("retraction_backup", "geometry", "max_total_tokens", "host_memory"),
    change="give decode pods more memory, or set decode's retraction backup to cpu_tensor",
    engines=SGLANG_ONLY,
)
def e5(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.retraction_backup != "host_pool" or d.host_memory is None:
        return None
    needed = host_pool_bytes(p, d)
    if needed is None or needed <= d.host_memory:
        return None
    ranks = d.tensor_parallel * d.pipeline_parallel
    return Hit(
        f"decode's retraction backup is host_pool: {ranks} ranks take {needed / GIB:.1f} GiB of host memory, and the "
        f"pod may use {d.host_memory / GIB:.1f} GiB",
        consequence="The pod runs out of memory while the engine starts.",
    )


def host_pool_bytes(p: RoleFacts, d: RoleFacts) -> int | None:
    """Host memory that all of decode's ranks take for retraction: ratio x device KV a rank, or the size that is set.
    None where the pool's size is not known yet."""
    ranks = d.tensor_parallel * d.pipeline_parallel
    if d.hicache_size:
        return ranks * d.hicache_size * 10**9
    geometry, tokens, page, dtype = p.geometry or d.geometry, d.max_total_tokens, d.page_size, d.kv_dtype
    if geometry is None or tokens is None or page is None or dtype is None:
        return None
    tp = d.attention_tp
    if tp is None:
        return None
    try:
        device = region_bytes(geometry.page_bytes(page, tp, dtype), tokens, page) // d.pipeline_parallel
    except GeometryError:
        return None
    return int(ranks * device * max(d.hicache_ratio or 0.0, BACKUP_RATIO))


@E.rule(
    "E6",
    "Retraction backup host_pool",
    every(Outcome.START),
    needs=("retraction_backup", "geometry", "dcp_size", "priority_scheduling"),
    change="leave the retraction backup to the engine, or set cpu_tensor",
    engines=SGLANG_ONLY,
)
def e6(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if p.retraction_backup == "host_pool":
        return Hit("prefill has retraction backup host_pool, a decode setting")
    if d.retraction_backup != "host_pool":
        return None
    if d.dcp_size > 1:
        return Hit(f"decode has retraction backup host_pool and DCP size {d.dcp_size}")
    if d.priority_scheduling and not d.disable_priority_preemption:
        return Hit(
            "decode has retraction backup host_pool and priority scheduling with preemption",
            change="pass --disable-priority-preemption to decode, or set retraction backup cpu_tensor",
        )
    geometry = p.geometry or d.geometry
    if geometry and (geometry.linear_layers or is_glm5_next(geometry)):
        return Hit("decode has retraction backup host_pool, and the model keeps recurrent state")
    if geometry and not geometry.kv_layers:
        return Hit("decode has retraction backup host_pool, and all layers have sliding windows")
    return None


@E.rule(
    "E9",
    "Slots for requests that are being received",
    every(Outcome.NORM),
    needs=("decode_extra_slots", "max_running_requests"),
    change="set --disaggregation-decode-extra-slots on decode",
    engines=SGLANG_ONLY,
)
def e9(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return None  # The engine's choice is a rewrite.
