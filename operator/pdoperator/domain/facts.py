"""What a spec tells about its two roles, in the words of the fit rules: read from the command line and the
environment that the operator composes from it, so that what is checked is what is launched."""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.quantities import parse_quantity
from pdoperator.api.spec import PDClusterSpec, RoleSpec
from pdoperator.domain.container_env import sglang_env
from pdoperator.domain.engine_command import MOONCAKE_TCP, backend_flag, engine_command, model_path
from pdoperator.domain.fact_flags import parse_fact_flags
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

_TRUE = ("1", "true", "yes", "on", "y", "t")
_SWITCHES = {
    "SGLANG_DISAGG_STAGING_BUFFER": "staging_buffer",
    "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER": "all_cp_ranks_transfer",
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK": "sampling_mask",
    "SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK": "force_query_prefill_dp_rank",
    "SGLANG_RUST_SERVER": "rust_server",
}
_TEXTS = {
    "UCX_NET_DEVICES": "ucx_net_devices",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": "nixl_params",
    "SGLANG_DISAGGREGATION_NIXL_BACKEND": "nixl_backend",
}
_NUMBERS = {
    "SGLANG_DISAGG_STAGING_POOL_SIZE_MB": "staging_pool_mb",
    "SGLANG_DISAGGREGATION_SAMPLING_MASK_MAX_TOKENS": "sampling_mask_max_tokens",
}


def spec_geometry(spec: PDClusterSpec) -> ModelGeometry | None:
    """Geometry that the spec states, or None."""
    stated = spec.model.geometry
    if stated is None:
        return None
    return ModelGeometry(**stated.model_dump(exclude_none=True))


def _memory_kinds(spec: PDClusterSpec, role: Role) -> frozenset[MemoryKind] | None:
    """Only where the spec makes it certain (rule F1: prefill is always VRAM)."""
    if role is Role.PREFILL:
        return frozenset({MemoryKind.VRAM})
    mode = spec.decode.host_kv.mode
    if mode is HostKVMode.OFF:
        return frozenset({MemoryKind.VRAM})
    if mode is HostKVMode.HOST_RECEIVE and spec.engine.type is EngineType.REFERENCE:
        return frozenset({MemoryKind.DRAM})
    return None


def environment(spec: PDClusterSpec, side: RoleSpec) -> dict[str, str]:
    """Variables of the engine container whose value the spec tells, as the container gets them: ours win."""
    said = {e.name: e.value for e in side.env if e.value is not None}
    if spec.engine.type is EngineType.REFERENCE:
        return said
    return said | {e["name"]: str(e["value"]) for e in sglang_env(spec) if "value" in e}


def _from_environment(env: dict[str, str]) -> dict[str, Any]:
    facts: dict[str, Any] = {name: env.get(variable, "").lower() in _TRUE for variable, name in _SWITCHES.items()}
    facts |= {name: env[variable] for variable, name in _TEXTS.items() if variable in env}
    facts |= {name: int(env[variable]) for variable, name in _NUMBERS.items() if env.get(variable, "").isdigit()}
    host = env.get("SGLANG_HOST_IP") or env.get("HOST_IP")
    return facts | ({"rank_host": host} if host else {})


def memory_limit(side: RoleSpec) -> int | None:
    """Bytes that all ranks of a pod may use; None where the spec sets no limit (or one that is no quantity)."""
    limit = side.resources.get("limits", {}).get("memory")
    try:
        return None if limit is None else int(parse_quantity(limit))
    except ValueError:
        return None


def _from_command(spec: PDClusterSpec, role: Role, side: RoleSpec) -> dict[str, Any]:
    _, args = engine_command(spec, role, side)
    facts = dict(parse_fact_flags(args).fields)
    kernels = {r: facts.pop(f"dsa_{r.value}_backend", None) for r in Role}
    facts["dsa_backend"] = kernels[role]
    return {name: value for name, value in facts.items() if name in RoleFacts.model_fields and value is not None}


def role_facts(spec: PDClusterSpec, role: Role, geometry: ModelGeometry | None = None) -> RoleFacts:
    """Facts of one role. `geometry` (from a config.json) is used where the spec states none."""
    side = role_spec(spec, role)
    facts: dict[str, Any] = {
        "role": role,
        "engine": spec.engine.type,
        "engine_version": spec.engine.version,
        "backend": spec.transfer.backend,
        "mooncake_tcp": backend_flag(spec) == MOONCAKE_TCP,
        "geometry": spec_geometry(spec) or geometry,
        "model_name": spec.model.source or spec.model.served_name or model_path(spec),
        "model_revision": spec.model.revision,
        "tensor_parallel": side.tensor_parallel_size,
        "pipeline_parallel": side.pipeline_parallel_size,
        "attention_data_parallel": side.attention_data_parallel_size,
        "page_size": spec.kv_cache.page_size,
        "kv_dtype": spec.kv_cache.dtype,
        "host_kv": spec.decode.host_kv.mode if role is Role.DECODE else HostKVMode.OFF,
        "memory_kinds": _memory_kinds(spec, role),
        "nixl_backend": spec.transfer.plugin.name if spec.transfer.backend is not Backend.MOONCAKE else None,
        "bootstrap_port": names.PORT_BOOTSTRAP,
        "host": "0.0.0.0",
        "host_memory": memory_limit(side),
    }
    facts |= _from_environment(environment(spec, side))
    facts |= _from_command(spec, role, side)
    if spec.engine.type is EngineType.REFERENCE:
        # Reference has one scheduler without a radix tree, mixed chunks or speculation.
        facts |= {"page_size": facts["page_size"] or 16, "kv_dtype": facts["kv_dtype"] or "auto"}
    # The operator composes the whole command line: a flag that is absent has its engine's default.
    return RoleFacts(**facts).with_launch_defaults()


def spec_facts(spec: PDClusterSpec, geometry: ModelGeometry | None = None) -> tuple[RoleFacts, RoleFacts]:
    """(prefill, decode) facts of a spec."""
    return role_facts(spec, Role.PREFILL, geometry), role_facts(spec, Role.DECODE, geometry)
