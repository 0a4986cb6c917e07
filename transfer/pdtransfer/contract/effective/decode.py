"""Decode's caches and queues, and prefill's optimistic passes (rules E1, E5, E7, E9).

Formulas: sglang.srt.arg_groups.pd_disaggregation_hook.handle_pd_disaggregation,
mem_cache.kv_cache_builder.resolve_decode_retraction_backup, arg_groups.serving_hook.handle_other_validations.
"""

from __future__ import annotations

from pdtransfer.contract.accelerator import Accelerator
from pdtransfer.contract.effective.hicache import receives_on_host
from pdtransfer.contract.effective.rewrite import Draft
from pdtransfer.contract.families import is_deepseek_v4, is_glm5_next, is_minimax_m3

_PD = "arg_groups/pd_disaggregation_hook.py handle_pd_disaggregation"
SMALL_BATCH = 32
"""Largest batch of one worker that gets extra slots."""


def radix_cache(d: Draft) -> None:
    """Decode has no prefix cache but by its own flag."""
    if not d.decode or d.now.decode_radix_cache is None:
        return
    on = d.now.decode_radix_cache
    why = (
        "--disaggregation-decode-enable-radix-cache is set"
        if on
        else "decode without --disaggregation-decode-enable-radix-cache"
    )
    d.set("E1", "disable_radix_cache", not on, why, _PD)


def host_receive(d: Draft) -> None:
    """Receiving into host memory shares the retraction pool."""
    if receives_on_host(d.now) and d.now.retraction_backup != "cpu_tensor":
        d.set("E5", "retraction_backup", "host_pool", "host receive uses that pool", _PD)


def extra_slots(d: Draft) -> None:
    """Slots for requests that are being received, on top of the running ones."""
    if not d.decode or not d.unset("decode_extra_slots"):
        return
    running = d.now.max_running_requests
    ranks = max(1, d.now.attention_dp * d.now.data_parallel)
    slots, why = 0, "max_running_requests is not set"
    if running is not None:
        per_worker = max(1, running // ranks)
        slots = 2 * per_worker if per_worker <= SMALL_BATCH else 0
        why = f"{per_worker} running requests a worker"
    d.set("E9", "decode_extra_slots", slots, why, _PD)


def running_requests(d: Draft) -> None:
    """Limits that models and speculation bring along."""
    if not d.unset("max_running_requests"):
        return
    if is_deepseek_v4(d.geometry):
        d.set("E9", "max_running_requests", 256, "DeepSeek-V4's default", "arg_groups/deepseek_v4_hook.py")
    elif d.now.speculative_algorithm:
        source = "arg_groups/speculative_hook.py"
        d.set("E9", "max_running_requests", 48, "the default with speculation", source)


def optimistic_prefill(d: Draft) -> None:
    """Off with pipeline stages and with most HiCache modes."""
    now = d.now
    if not d.prefill or not now.optimistic_prefill:
        return
    source = "arg_groups/serving_hook.py handle_other_validations"
    if now.pipeline_parallel > 1:
        d.set("E7", "optimistic_prefill", 0, f"{now.pipeline_parallel} pipeline stages", source)
        return
    if not now.hierarchical_cache or now.hicache_storage_backend is None or now.hicache_write_policy is None:
        return
    policy = now.hicache_write_policy
    plain = not now.hicache_storage_backend and policy in ("write_back", "write_through")
    through = (
        bool(now.hicache_storage_backend)
        and now.hicache_host_memory_mode == "buffer_only"
        and policy == "write_through"
    )
    if not plain and not through:
        why = f"HiCache in mode {now.hicache_host_memory_mode} with {policy} and storage " + (
            now.hicache_storage_backend or "none"
        )
        d.set("E7", "optimistic_prefill", 0, why, source)


def retraction_backup(d: Draft) -> None:
    """Where decode keeps the KV of requests that it has to take back, when nobody says."""
    if not d.decode or not d.unset("retraction_backup"):
        return
    source = "mem_cache/kv_cache_builder.py resolve_decode_retraction_backup"
    now, geometry = d.now, d.geometry
    deciding = (now.decode_radix_cache, now.decode_offload, now.priority_scheduling, now.disable_priority_preemption)
    if None in deciding or geometry is None:
        d.set("E5", "retraction_backup", None, "", source)
        return
    against = {
        "ROCm": d.accelerator is Accelerator.ROCM,
        "decode context parallelism": now.dcp_size > 1,
        "decode's radix cache": now.decode_radix_cache,
        "decode's KV offload": now.decode_offload,
        "priority preemption": now.priority_scheduling and not now.disable_priority_preemption,
        "recurrent state": bool(geometry.linear_layers) or is_glm5_next(geometry),
        f"{geometry.attention.value} attention": geometry.latent,
        "sparse attention": is_deepseek_v4(geometry) or is_minimax_m3(geometry),
        "no full-attention layer": not geometry.kv_layers,
        "4-bit or unified KV": now.unified_memory and bool(geometry.sliding_window_layers),
    }
    reason = next((name for name, holds in against.items() if holds), None)
    d.quietly(retraction_backup_chosen=True)
    if reason is None:
        why = "MHA or sliding-window KV, and nothing that excludes it"
        d.set("E5", "retraction_backup", "host_pool", why, source)
    else:
        d.set("E5", "retraction_backup", "cpu_tensor", f"{reason} excludes host_pool", source)
