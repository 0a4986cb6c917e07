"""Runs every rule over the facts of a pair. Pure; never raises for any facts."""

from __future__ import annotations

from collections.abc import Mapping

from pdtransfer.contract.base import Backend, EngineType
from pdtransfer.contract.compat import (
    caches,
    context,
    devices,
    endpoints,
    exclusions,
    features,
    formats,
    geometry,
    hicache,
    hostkv,
    nixl,
    parallelism,
    pipeline,
    retraction,
    speculation,
    staging,
    state,
    transport,
)
from pdtransfer.contract.compat.report import Finding, Report, Status
from pdtransfer.contract.compat.rewritten import with_rewrites
from pdtransfer.contract.compat.rule import CONSEQUENCE, Hit, NeedsFact, Outcome, Rule
from pdtransfer.contract.effective import effective
from pdtransfer.contract.facts import RoleFacts

_FAMILIES = "VABCDEFGH"


def _place(rule: Rule) -> tuple[int, int]:
    return _FAMILIES.index(rule.family), int(rule.id[1:])


RULES: tuple[Rule, ...] = tuple(
    sorted(
        (
            *transport.V.rules,
            *parallelism.A.rules,
            *pipeline.A.rules,
            *context.A.rules,
            *features.A.rules,
            *geometry.B.rules,
            *formats.B.rules,
            *speculation.C.rules,
            *state.D.rules,
            *exclusions.D.rules,
            *caches.E.rules,
            *retraction.E.rules,
            *hicache.E.rules,
            *hostkv.F.rules,
            *staging.G.rules,
            *transport.H.rules,
            *nixl.H.rules,
            *devices.H.rules,
            *endpoints.H.rules,
        ),
        key=_place,
    )
)
"""Every rule once, in the order findings are listed."""

_STARTED = "both engines started"

CARD_FACTS = frozenset({"memory_kinds", "segments", "regions_without_memory_kind", "max_total_tokens", "layers"})
"""Facts that only a started rank can tell."""

RUNNING_FACTS = frozenset({"route_registered", "host_memory"})
"""Facts that somebody has to look for elsewhere than in specs and cards; nobody is asked for them."""

STATED_FACTS: Mapping[str, str] = {
    "decode_tp_sizes": "name every decode group that this prefill serves; those of other attention TP do not fit",
    "nixl_plugins": "ask NIXL in the engine's image: nixl_agent('x', nixl_agent_config(backends=[])).get_plugin_list()",
    "max_top_logprobs": "state what limits it in front of the engines; SGLang takes any number",
}
"""Facts that nothing tells of itself: somebody has to state them. How, for each."""

FLAG_FACTS = frozenset(
    {
        "decode_radix_cache",
        "disable_radix_cache",
        "hierarchical_cache",
        "decode_offload",
        "hicache_storage_backend",
        "retraction_backup",
        "mixed_chunk",
        "staging_buffer",
        "all_cp_ranks_transfer",
        "sampling_mask",
        "optimistic_prefill",
        "dsa_backend",
        "host",
        "bootstrap_port",
        "kv_cache_sharding",
        "dsa_cache_layer_split",
        "allocation_policy",
        "pd_role_switch",
        "expert_parallel",
        "moe_a2a_backend",
        "decode_tp_sizes",
        "max_top_logprobs",
        "nixl_plugins",
        "hnd_kv_cache",
        "dsv4_attention_backend",
        "dsv4_kv_layout",
        "dsv4_compressed_kv_layout",
        "draft_tokens",
        "multi_layer_eagle",
        "linear_replayssm",
        "linear_replayssm_spec",
        "mamba_cache_strategy",
        "lmcache",
        "watermark",
        "response_store",
        "pdmux",
        "dllm_algorithm",
        "minicpm_force_dense",
        "max_prefill_tokens",
        "deterministic",
        "prefill_cp",
        "cp_strategy",
        "disable_hybrid_swa",
        "aiter_unified_attention",
        "aiter_kv_layout",
        "transfer_queues",
        "priority_scheduling",
        "disable_priority_preemption",
        "hicache_mem_layout",
        "hicache_io_backend",
        "hicache_write_policy",
        "hicache_host_memory_mode",
        "hicache_host_memory_fraction",
        "hicache_ratio",
        "hicache_size",
        "host_receive_threshold",
        "speculative_eagle_topk",
        "speculative_adaptive",
        "ngram_breadth",
        "max_running_requests",
        "decode_extra_slots",
        "staging_pool_mb",
        "mooncake_tcp",
        "ib_device",
        "ucx_net_devices",
        "net_devices",
        "mc_force_tcp",
        "base_gpu_id",
        "gpu_id_step",
        "nodes",
        "one_visible_device",
        "use_ray",
        "nixl_params",
        "load_balance_method",
        "force_query_prefill_dp_rank",
        "sampling_mask_max_tokens",
        "kv_checksum",
        "rank_host",
        "rust_server",
        "port",
        "unified_memory",
        "attention_backend",
        "accelerator",
        "ssm_dtype",
    }
)
"""Facts that a card does not carry: the spec (and what the operator composes) tells them."""


def check(prefill: RoleFacts, decode: RoleFacts, backend: Backend | None = None) -> Report:
    """Whether these two roles fit, rule by rule. `backend` defaults to prefill's.

    Facts are given as they were asked for; the rules decide on what the engine makes of them (contract.effective), and
    say so where it changes a value."""
    chosen = backend or prefill.backend
    geometry = prefill.geometry or decode.geometry
    p, d = effective(prefill, geometry), effective(decode, geometry)
    findings: list[Finding] = []
    deferred: list[str] = []
    for rule in RULES:
        finding = with_rewrites(rule, _decide(rule, p.facts, d.facts, chosen), p, d)
        if finding is None:
            deferred.append(rule.id)
        else:
            findings.append(finding)
    return Report(backend=chosen, findings=tuple(findings), deferred=tuple(deferred))


def _decide(rule: Rule, p: RoleFacts, d: RoleFacts, backend: Backend) -> Finding | None:
    """The rule's finding; None when only a check at another time can decide it."""
    if not (rule.applies(p) and rule.applies(d)):
        return _passed(rule, "does not apply to this engine or version")
    column = rule.outcome(backend)
    if column is Outcome.FINE:
        return _passed(rule, f"no limit of backend {backend.value}")
    started = p.observed and d.observed
    try:
        hit = rule.decide(p, d, backend)
    except NeedsFact as missing:
        return _passed(rule, _STARTED) if started and column is Outcome.START else _unknown(rule, missing)
    if hit is not None and started and (hit.outcome or column) is Outcome.START:
        return _passed(rule, _STARTED)
    if hit is not None and hit.outcome is Outcome.FINE:
        return _passed(rule, f"{hit.problem}. {hit.change}" if hit.change else f"{hit.problem}.")
    return _passed(rule) if hit is None else _broken(rule, hit, column, p, d, backend)


def _passed(rule: Rule, message: str = "") -> Finding:
    return Finding(rule=rule.id, status=Status.PASS, title=rule.title, message=message)


def _unknown(rule: Rule, missing: NeedsFact) -> Finding | None:
    facts, name = missing.facts, missing.name
    if name in RUNNING_FACTS or name in (FLAG_FACTS if facts.observed else CARD_FACTS):
        return None
    when = STATED_FACTS.get(name) or (
        "state it in the spec, or it is known once the engine has started and shows its card"
        if name not in FLAG_FACTS
        else "state it in the spec; cards do not tell it"
    )
    return Finding(
        rule=rule.id,
        status=Status.UNKNOWN,
        title=rule.title,
        message=f"{rule.title}: {facts.role.value}'s {name.replace('_', ' ')} is not known.",
        action=when,
        needs=f"{facts.role.value}.{name}",
    )


def _broken(rule: Rule, hit: Hit, column: Outcome, p: RoleFacts, d: RoleFacts, backend: Backend) -> Finding:
    outcome = hit.outcome or column
    emulated = backend is not Backend.PDCLUSTER and EngineType.REFERENCE in (p.engine, d.engine)
    message = f"{hit.problem}. {hit.consequence or CONSEQUENCE[outcome]}"
    if emulated:
        message += f" (Emulated: the Reference engine holds itself to the limits of SGLang's {backend.value} backend.)"
    return Finding(
        rule=rule.id,
        status=Status.WARN if outcome.tolerable else Status.FAIL,
        title=rule.title,
        message=message,
        action=hit.change or rule.change,
        severity=outcome.value,
        emulated=emulated,
    )
