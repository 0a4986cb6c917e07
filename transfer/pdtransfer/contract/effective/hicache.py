"""HiCache's layout, I/O, write policy and size (rule E10; the table's NORM list).

Formulas: sglang.srt.arg_groups.hicache_hook, and mem_cache.kv_cache_builder for decode's ratio. SGLang also
runs the layout passes on any decode that may build a host pool for retraction.
"""

from __future__ import annotations

from pdtransfer.contract.base import Role
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.facts import HostKVMode, RoleFacts

_HOOK = "arg_groups/hicache_hook.py"
LAYOUTS_NEED_PAGES = frozenset({"mooncake", "npu_memcache"})
"""Storage backends that can not work on layer_first."""
CACHE_RATIO = 2.0
BUFFER_RATIO = 1.2
BACKUP_RATIO = 0.2


def receives_on_host(facts: RoleFacts) -> bool:
    """Decode's host receive is on, by its threshold or by its mode."""
    threshold = facts.host_receive_threshold
    on = facts.host_kv is HostKVMode.HOST_RECEIVE or (threshold is not None and threshold < 1)
    return on and facts.role is Role.DECODE


def size(d: Draft) -> None:
    """An explicit ratio or size switches the automatic fit off; prefill's ratio has a default."""
    now = d.now
    if not (now.hierarchical_cache or (d.decode and now.decode_offload)):
        return
    source = f"{_HOOK} handle_hicache_ratio_default"
    if (now.hicache_ratio is not None or (now.hicache_size or 0) > 0) and now.hicache_host_memory_fraction is not None:
        why = "--hicache-ratio or --hicache-size is set and taken as it is"
        d.set("E10", "hicache_host_memory_fraction", None, why, source)
    if d.prefill and d.unset("hicache_ratio") and now.hicache_host_memory_mode is not None:
        buffer = now.hicache_host_memory_mode == "buffer_only"
        ratio = BUFFER_RATIO if buffer else CACHE_RATIO
        d.set("E10", "hicache_ratio", ratio, f"host memory mode {now.hicache_host_memory_mode}", source)


def layout(d: Draft) -> None:
    """Layout, I/O backend and write policy, in SGLang's order."""
    now = d.now
    maybe_pool = d.decode and now.retraction_backup in ("", "host_pool")
    if not (now.hierarchical_cache or now.decode_offload or maybe_pool):
        return
    buffered = now.hicache_host_memory_mode == "buffer_only" and now.hicache_storage_backend
    if buffered and now.hicache_write_policy == "write_back":
        why = "buffer_only has no host tier to write back to"
        d.set("E10", "hicache_write_policy", "write_through", why, f"{_HOOK} validate_hicache_host_memory_mode")
    if receives_on_host(d.now):
        why = "host receive writes layer by layer into that pool"
        d.set("E10", "hicache_mem_layout", "layer_first", why, f"{_HOOK} handle_hicache")
    source = f"{_HOOK} resolve_layout_io_compatibility"
    if d.now.hicache_mem_layout == "page_first_direct" and d.now.hicache_io_backend == "kernel":
        d.set("E10", "hicache_io_backend", "direct", "the kernel I/O has no page_first_direct", source)
    if d.now.hicache_mem_layout == "page_first" and d.now.hicache_io_backend == "direct":
        d.set("E10", "hicache_mem_layout", "page_first_direct", "direct I/O has no page_first", source)
    _storage(d)
    if d.now.unified_memory and d.now.hicache_mem_layout == "page_first_direct":
        why, source = "unified memory has strided rows", f"{_HOOK} resolve_unified_memory_layout_io"
        d.set("E10", "hicache_mem_layout", "page_first", why, source)
        d.set("E10", "hicache_io_backend", "kernel", why, source)


def _storage(d: Draft) -> None:
    now = d.now
    if now.hicache_storage_backend == "mooncake" and now.dcp_size > 1:
        return
    if now.hicache_storage_backend not in LAYOUTS_NEED_PAGES or now.hicache_mem_layout != "layer_first":
        return
    fitting = {"direct": "page_first_direct", "kernel": "page_first"}.get(now.hicache_io_backend or "")
    if fitting is not None:
        why = f"storage {now.hicache_storage_backend} has no layer_first"
        d.set("E10", "hicache_mem_layout", fitting, why, f"{_HOOK} resolve_storage_layout_compatibility")


def decode_ratio(d: Draft) -> None:
    """Decode's ratio, which SGLang chooses once the pool is built. A pool for retraction alone holds
    at least one longest request (two with host receive): max(0.2, request / pool)."""
    now = d.now
    if not d.decode or not d.unset("hicache_ratio") or now.retraction_backup is None or now.hicache_size is None:
        return
    backup_only = now.retraction_backup == "host_pool" and not now.hierarchical_cache
    if not (now.hierarchical_cache or now.decode_offload or backup_only):
        return
    source = "mem_cache/kv_cache_builder.py resolve_decode_retraction_backup"
    if not backup_only:
        d.set("E10", "hicache_ratio", CACHE_RATIO, "decode's default", source)
        return
    if now.hicache_size > 0:
        return
    longest, pool, page = longest_request(d), now.max_total_tokens, now.page_size
    if longest is None or pool is None or page is None:
        return
    tokens = -(-min(longest - 1, pool) // page) * page * (2 if receives_on_host(d.now) else 1)
    ratio = max(BACKUP_RATIO, tokens / pool)
    d.set("E5", "hicache_ratio", ratio, f"room for {tokens} tokens of a pool of {pool}", source)


def longest_request(d: Draft) -> int | None:
    """Tokens of the longest request that decode takes; None when it is not known."""
    return d.now.context_length or (d.geometry.max_context if d.geometry else None)
