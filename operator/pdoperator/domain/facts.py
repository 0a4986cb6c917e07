"""What a spec tells about its two roles, in the words of the fit rules. What it does not tell stays None."""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec
from pdoperator.domain.engine_flags import parse_fact_flags
from pdoperator.domain.revision import role_spec
from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.facts import HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry

_TRUE = ("1", "true", "yes", "on", "y", "t")


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


def role_facts(spec: PDClusterSpec, role: Role, geometry: ModelGeometry | None = None) -> RoleFacts:
    """Facts of one role. `geometry` (from a config.json) is used where the spec states none."""
    side = role_spec(spec, role)
    env = {e.name: e.value for e in side.env if e.value is not None}
    hicache = side.hierarchical_cache
    reference = spec.engine.type is EngineType.REFERENCE
    facts: dict[str, Any] = {
        "role": role,
        "engine": spec.engine.type,
        "engine_version": spec.engine.version,
        "backend": spec.transfer.backend,
        "geometry": spec_geometry(spec) or geometry,
        "model_name": spec.model.source or spec.model.served_name,
        "model_revision": spec.model.revision,
        "tensor_parallel": side.tensor_parallel_size,
        "pipeline_parallel": side.pipeline_parallel_size,
        "attention_data_parallel": side.attention_data_parallel_size,
        "page_size": spec.kv_cache.page_size,
        "kv_dtype": spec.kv_cache.dtype,
        "hierarchical_cache": hicache is not None,
        "hicache_storage_backend": hicache.storage_backend if hicache else None,
        "host_kv": spec.decode.host_kv.mode if role is Role.DECODE else HostKVMode.OFF,
        "memory_kinds": _memory_kinds(spec, role),
        "staging_buffer": env.get("SGLANG_DISAGG_STAGING_BUFFER", "").lower() in _TRUE,
        "all_cp_ranks_transfer": env.get("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "").lower() in _TRUE,
        "sampling_mask": env.get("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", "").lower() in _TRUE,
        "nixl_backend": spec.transfer.plugin.name if spec.transfer.backend is not Backend.MOONCAKE else None,
        "bootstrap_port": names.PORT_BOOTSTRAP,
        "host": "0.0.0.0",
    }
    if "SGLANG_DISAGGREGATION_NIXL_BACKEND" in env:
        facts["nixl_backend"] = env["SGLANG_DISAGGREGATION_NIXL_BACKEND"]
    if reference:
        # Reference has one scheduler without a radix tree, mixed chunks or speculation.
        facts |= {"page_size": facts["page_size"] or 16, "kv_dtype": facts["kv_dtype"] or "auto"}
    elif role is Role.DECODE:
        # The operator sets the radix flag together with a hierarchical cache (rule E2), else it stays off.
        facts["decode_radix_cache"] = hicache is not None
    told = parse_fact_flags(side.extra_args)
    facts |= {k: v for k, v in told.fields.items() if k in RoleFacts.model_fields}
    # The operator composes the whole command line: a flag that is absent has its engine's default.
    return RoleFacts(**facts).with_launch_defaults()


def spec_facts(spec: PDClusterSpec, geometry: ModelGeometry | None = None) -> tuple[RoleFacts, RoleFacts]:
    """(prefill, decode) facts of a spec."""
    return role_facts(spec, Role.PREFILL, geometry), role_facts(spec, Role.DECODE, geometry)
