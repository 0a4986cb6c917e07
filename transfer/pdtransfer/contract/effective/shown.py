"""Effective settings as people read them: in the status of a PDCluster and in the preflight's output."""

from __future__ import annotations

from collections.abc import Mapping

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.effective.engine import effective
from pdtransfer.contract.effective.rewrite import Value
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

ALWAYS: Mapping[str, str] = {
    "pageSize": "page_size",
    "kvCacheDtype": "kv_dtype",
    "attentionBackend": "attention_backend",
    "attentionDataParallelSize": "attention_data_parallel",
    "maxRunningRequests": "max_running_requests",
    "loadBalanceMethod": "load_balance_method",
}
DECODE: Mapping[str, str] = {
    "disableRadixCache": "disable_radix_cache",
    "retractionBackup": "retraction_backup",
    "decodeExtraSlots": "decode_extra_slots",
}
PREFILL: Mapping[str, str] = {"optimisticPrefillAttempts": "optimistic_prefill"}
HICACHE: Mapping[str, str] = {
    "hicacheMemLayout": "hicache_mem_layout",
    "hicacheIOBackend": "hicache_io_backend",
    "hicacheWritePolicy": "hicache_write_policy",
    "hicacheHostMemoryMode": "hicache_host_memory_mode",
    "hicacheHostMemoryFraction": "hicache_host_memory_fraction",
    "hicacheStorageBackend": "hicache_storage_backend",
    "hicacheRatio": "hicache_ratio",
    "hicacheSizeGB": "hicache_size",
}
NIXL: Mapping[str, str] = {"nixlPlugin": "nixl_backend", "nixlParameters": "nixl_params"}


def effective_values(
    facts: RoleFacts, geometry: ModelGeometry | None = None, accelerator: Accelerator | None = None
) -> dict[str, Value]:
    """Settings that the engine will run with, by their names in camel case. None is not known yet (or, for a
    limit and the memory fraction, not set); those of HiCache are there where it, or a pool for retraction,
    is on, those of NIXL where NIXL moves the KV and they are set."""
    now = effective(facts, geometry, accelerator).facts
    names = {**ALWAYS, **(DECODE if now.role is Role.DECODE else PREFILL)}
    if now.dsa_backend is not None:
        names["dsaBackend"] = "dsa_backend"
    pool = now.role is Role.DECODE and now.retraction_backup == "host_pool"
    if now.hierarchical_cache or now.decode_offload or pool:
        names |= HICACHE
    if now.backend is not Backend.MOONCAKE:
        names |= {name: fact for name, fact in NIXL.items() if getattr(now, fact) not in (None, "", "{}")}
    shown: dict[str, Value] = {name: _value(getattr(now, field)) for name, field in names.items()}
    shown["attentionTensorParallelSize"] = now.attention_tp
    if now.host_kv is not HostKVMode.OFF:
        shown["hostKV"] = now.host_kv.value
    if now.host_kv is HostKVMode.HOST_RECEIVE:
        shown["hostReceiveThreshold"] = now.host_receive_threshold
    return shown


def _value(fact: object) -> Value:
    if fact == "":
        return "none"
    return fact if isinstance(fact, str | int | float | bool) else None
