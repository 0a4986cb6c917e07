"""Family A, continued: SGLang's switches that change who holds which KV, and the backends they are made for."""

from __future__ import annotations

from pdtransfer.contract.base import Backend, Role
from pdtransfer.contract.compat.parallelism import geometry_of, sizes
from pdtransfer.contract.compat.rule import (
    SGLANG_ONLY,
    Family,
    Hit,
    Outcome,
    attention_tp,
    columns,
    every,
    known,
)
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.families import is_dsa, is_glm5_next

A = Family()
_MOONCAKE = "use transfer.backend Mooncake, or drop the flag"


@A.rule(
    "A18",
    "What a sharded KV cache needs",
    every(Outcome.START),
    needs=(
        "kv_cache_sharding",
        "page_size",
        "geometry",
        "tensor_parallel",
        "context_parallel",
        "speculative_algorithm",
    ),
    change="drop --enable-kv-cache-sharding, or use it on prefill with transfer.backend NIXL or Mooncake and without "
    "what the message names",
    engines=SGLANG_ONLY,
)
def a18(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    if d.kv_cache_sharding:
        return Hit("decode has --enable-kv-cache-sharding, a prefill flag")
    if not known(p.kv_cache_sharding, p, "kv_cache_sharding"):
        return None
    if backend is Backend.PDCLUSTER:
        return Hit("prefill has --enable-kv-cache-sharding, which SGLang gives to Mooncake and NIXL only")
    geometry = geometry_of(p, d)
    if is_dsa(geometry) and backend is Backend.NIXL:
        return Hit("prefill has --enable-kv-cache-sharding, and for DSA only Mooncake takes it", change=_MOONCAKE)
    if (against := _unshardable(p)) is not None:
        return Hit(f"prefill has --enable-kv-cache-sharding and {against}")
    if not geometry.latent:
        if p.context_parallel > 1:
            return None
        return Hit("prefill has --enable-kv-cache-sharding with GQA and context parallel size 1")
    if p.context_parallel > 1:
        return None
    if p.tensor_parallel == 1 or p.attention_dp > 1:
        return Hit(
            f"prefill has --enable-kv-cache-sharding with {geometry.attention.value}, TP {p.tensor_parallel} and "
            f"attention DP {p.attention_dp}; it needs TP above 1 without attention DP"
        )
    if attention_tp(p) != attention_tp(d):
        return Hit(
            f"prefill shards {geometry.attention.value} rows over its TP ranks, {sizes(p, d)}",
            outcome=Outcome.DCRASH,
            change="use equal TP, or drop --enable-kv-cache-sharding",
        )
    return None


def _unshardable(p: RoleFacts) -> str | None:
    """First of prefill's other settings that its sharded cache excludes."""
    size = p.chunked_prefill_size
    excluded = (
        (p.host_kv is HostKVMode.HISPARSE, "HiSparse"),
        (p.dcp_size > 1, f"DCP size {p.dcp_size}"),
        (bool(p.staging_buffer), "the staging buffer"),
        (bool(p.unified_memory), "unified memory"),
        (bool(p.lmcache), "LMCache"),
        (bool(p.hierarchical_cache and p.hicache_storage_backend), f"HiCache storage {p.hicache_storage_backend}"),
        (size is not None and size <= 0, f"chunked_prefill_size {size}"),
    )
    found = next((what for holds, what in excluded if holds), None)
    if found is None and known(p.page_size, p, "page_size") == 1:
        return "page size 1"
    return found


@A.rule(
    "A19",
    "Features that only Mooncake's backend has",
    every(Outcome.START),
    needs=("dsa_cache_layer_split", "allocation_policy", "unified_memory", "context_parallel", "geometry"),
    change=_MOONCAKE,
    engines=SGLANG_ONLY,
)
def a19(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    return _layer_split(p, d, backend) or _unified(p, d, backend) or _late(p, d, backend) or _shared(p, d, backend)


def _layer_split(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    flag = "--enable-dsa-cache-layer-split"
    if d.dsa_cache_layer_split:
        return Hit(f"decode has {flag}, a prefill flag", change=f"drop {flag}")
    if not known(p.dsa_cache_layer_split, p, "dsa_cache_layer_split"):
        return None
    if backend is not Backend.MOONCAKE:
        return Hit(f"prefill has {flag}, and the transfer backend is {backend.value}")
    if p.pipeline_parallel > 1:
        return Hit(f"prefill has {flag} and {p.pipeline_parallel} pipeline stages", change=f"drop {flag}")
    geometry = geometry_of(p, d)
    return None if is_dsa(geometry) else Hit(f"prefill has {flag}, and the model is not DSA", change=f"drop {flag}")


def _unified(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    flag, change = "--enable-unified-memory", "drop --enable-unified-memory"
    ours, theirs = known(p.unified_memory, p, "unified_memory"), known(d.unified_memory, d, "unified_memory")
    for facts in (p, d):
        if not facts.unified_memory:
            continue
        who = f"{facts.role.value} has {flag}"
        if backend is not Backend.MOONCAKE:
            return Hit(f"{who}, and the transfer backend is {backend.value}")
        if facts.pipeline_parallel > 1:
            return Hit(f"{who} and {facts.pipeline_parallel} pipeline stages", change=change)
        if known(facts.speculative_algorithm, facts, "speculative_algorithm"):
            return Hit(f"{who} and speculative algorithm {facts.speculative_algorithm}", change=change)
        if facts.host_kv is HostKVMode.HISPARSE or facts.dcp_size > 1:
            other = "HiSparse" if facts.host_kv is HostKVMode.HISPARSE else f"DCP size {facts.dcp_size}"
            return Hit(f"{who} and {other}", change=change)
    if ours != theirs:
        one = Role.PREFILL if ours else Role.DECODE
        return Hit(
            f"{one.value} has {flag}, {one.other.value} has not: one region of whole pages against one a layer",
            outcome=Outcome.PDEAD,
            consequence="SGLang's transfer thread of the prefill rank dies with the error.",
            change=f"set {flag} on both roles or on neither",
        )
    if ours and attention_tp(p) != attention_tp(d):
        return Hit(
            f"both roles have {flag}, {sizes(p, d)}: whole pages do not split by head",
            outcome=Outcome.PDEAD,
            consequence="SGLang's transfer thread of the prefill rank dies with the error.",
            change="use equal TP, or drop the flag",
        )
    return None


def _late(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """--disaggregation-decode-allocation-policy prefill_complete."""
    ours, theirs = (
        known(p.allocation_policy, p, "allocation_policy"),
        known(d.allocation_policy, d, "allocation_policy"),
    )
    change = "leave --disaggregation-decode-allocation-policy at early on both roles"
    for facts in (p, d):
        if facts.allocation_policy != "prefill_complete":
            continue
        who = f"{facts.role.value} has allocation policy prefill_complete"
        if backend is not Backend.MOONCAKE:
            return Hit(f"{who}, and the transfer backend is {backend.value}")
        if (against := _not_late(facts)) is not None:
            return Hit(f"{who} and {against}", change=change)
    if ours != theirs:
        return Hit(
            f"prefill's allocation policy is {ours}, decode's {theirs}",
            outcome=Outcome.REQ,
            change="set --disaggregation-decode-allocation-policy alike on both roles",
        )
    return None


def _not_late(facts: RoleFacts) -> str | None:
    """First setting of a role that allocation after prefill excludes."""
    decode = facts.role is Role.DECODE
    storage = facts.hierarchical_cache and (
        bool(facts.hicache_storage_backend) or facts.hicache_write_policy not in (None, "write_back")
    )
    excluded = (
        (max(facts.pipeline_parallel, facts.context_parallel, facts.dcp_size) > 1, "pipeline or context parallelism"),
        # It counts attention DP by a flag that SGLang has rewritten by then (A1), so that TP itself has to be 1.
        (facts.tensor_parallel > 1, f"TP {facts.tensor_parallel}"),
        (bool(facts.pdmux), "PD multiplexing"),
        (bool(facts.pd_role_switch), "role switching"),
        (facts.host_kv is not HostKVMode.OFF, f"host KV mode {facts.host_kv.value}"),
        (decode and bool(facts.decode_radix_cache or facts.hierarchical_cache), "decode's radix or hierarchical cache"),
        (not decode and bool(storage), "a hierarchical cache other than write_back without storage"),
        (bool(facts.staging_buffer), "the staging buffer"),
        (bool(facts.rust_server), "SGLANG_RUST_SERVER"),
    )
    return next((what for holds, what in excluded if holds), None)


def _shared(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    """GLM-5-Next: prefill's context-parallel group is its tensor-parallel group."""
    if p.context_parallel == 1 or not is_glm5_next(p.geometry or d.geometry):
        return None
    who = f"prefill has context parallel size {p.context_parallel} with GLM-5-Next"
    if backend is not Backend.MOONCAKE:
        return Hit(f"{who}, and the transfer backend is {backend.value}")
    if p.pipeline_parallel > 1 or p.data_parallel > 1:
        return Hit(f"{who} and pipeline or data parallelism", change="use prefill context parallel size 1")
    return None


@A.rule(
    "A20",
    "Switching roles at run time",
    columns(Outcome.WARN, Outcome.WARN, Outcome.START),
    needs=(
        "pd_role_switch",
        "expert_parallel",
        "moe_a2a_backend",
        "pipeline_parallel",
        "dcp_size",
        "speculative_algorithm",
    ),
    change="drop --enable-pd-role-switch",
    engines=SGLANG_ONLY,
)
def a20(p: RoleFacts, d: RoleFacts, backend: Backend) -> Hit | None:
    for facts in (p, d):
        if not known(facts.pd_role_switch, facts, "pd_role_switch"):
            continue
        who = f"{facts.role.value} has --enable-pd-role-switch"
        excluded = (
            ((facts.expert_parallel or 1) > 1, f"expert parallel size {facts.expert_parallel}"),
            (facts.moe_a2a_backend not in (None, "none"), f"MoE all-to-all {facts.moe_a2a_backend}"),
            (facts.pipeline_parallel > 1, f"{facts.pipeline_parallel} pipeline stages"),
            (facts.dcp_size > 1, f"DCP size {facts.dcp_size}"),
            (bool(facts.speculative_algorithm), f"speculative algorithm {facts.speculative_algorithm}"),
        )
        against = next((what for holds, what in excluded if holds), None)
        if against is not None:
            return Hit(f"{who} and {against}", outcome=Outcome.START)
        if backend is not Backend.MOONCAKE:
            return Hit(
                f"{who}, and transfer backend {backend.value} does not switch",
                consequence="The server starts, and refuses when it is told to switch.",
            )
    return None
