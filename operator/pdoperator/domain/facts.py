"""What a spec tells about its two roles, in the words of the fit rules: read from the command line and the
environment that the operator composes from it, so that what is checked is what is launched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pdoperator.api import names
from pdoperator.api.quantities import parse_quantity
from pdoperator.api.spec import PDClusterSpec, RoleSpec, RouterType
from pdoperator.domain.container_env import replaceable_env, sglang_env
from pdoperator.domain.engine_command import engine_command
from pdoperator.domain.revision import role_spec
from pdoperator.domain.transfer_settings import nixl_env
from pdtransfer.contract.accelerator import Accelerator, from_capability
from pdtransfer.contract.base import Backend, EngineType, MemoryKind, Role
from pdtransfer.contract.facts import NO_LIMIT, HostKVMode, RoleFacts
from pdtransfer.contract.geometry import ModelGeometry
from pdtransfer.contract.nixl_plugins import DEFAULT, PARAMS_VARIABLE, PLUGIN_VARIABLE
from pdtransfer.contract.sglang_cli import (
    Flags,
    command_facts,
    given_facts,
    has_reference,
    hidden_fact,
    read_flags,
)

_CAPABILITY = ("nvidia.com/gpu.compute.major", "nvidia.com/gpu.compute.minor")
"""Labels of NVIDIA's feature discovery on nodes."""
_VENDORS = {"nvidia.com": Accelerator.NVIDIA, "amd.com": Accelerator.ROCM}
"""Who makes the GPU, by the domain of its resource."""
_TAG = re.compile(r":v?([0-9]+\.[0-9]+\.[0-9]+(?:\.?(?:post|rc)[0-9]+)?)(?:-[\w.-]+)?(?:@sha256:[0-9a-f]+)?$")


def spec_geometry(spec: PDClusterSpec) -> ModelGeometry | None:
    """Geometry that the spec states, or None."""
    stated = spec.model.geometry
    if stated is None:
        return None
    return ModelGeometry(**stated.model_dump(exclude_none=True))


def environment(spec: PDClusterSpec, side: RoleSpec) -> dict[str, str]:
    """Variables of the engine container, as it gets them. One whose value only the pod knows (valueFrom) has the
    value `$(its name)`."""
    theirs = {e.name: e.value if e.value is not None else f"$({e.name})" for e in side.env}

    def plain(entries: list[dict[str, Any]]) -> dict[str, str]:
        return {e["name"]: str(e["value"]) for e in entries if "value" in e}

    if spec.engine.type is EngineType.REFERENCE:
        return theirs | plain(nixl_env(spec))
    return plain(replaceable_env(spec)) | theirs | plain(sglang_env(spec))


def memory_limit(side: RoleSpec) -> int | None:
    """Bytes that all ranks of a pod may use; None where the spec sets no limit (or one that is no quantity)."""
    limit = side.resources.get("limits", {}).get("memory")
    try:
        return None if limit is None else int(parse_quantity(limit))
    except ValueError:
        return None


def accelerator(side: RoleSpec) -> Accelerator | None:
    """GPU generation where the role's node selector asks for one, else whose GPU it asks for; None where it is not
    known."""
    told = [side.template.node_selector.get(label, "") for label in _CAPABILITY]
    if all(t.isdigit() for t in told):
        return from_capability(int(told[0]), int(told[1]))
    asked = {name.partition("/")[0] for name in side.resources.get("limits", {})}
    return next((kind for domain, kind in _VENDORS.items() if domain in asked), None)


def engine_version(spec: PDClusterSpec) -> str | None:
    """Version of the engine as the spec states it, else as SGLang's image tag does (lmsysorg/sglang:v0.5.23-cu129);
    None where neither tells."""
    if spec.engine.version is not None:
        return spec.engine.version.removeprefix("v")
    found = _TAG.search(spec.engine.image) if spec.engine.type is EngineType.SGLANG else None
    return found[1] if found else None


def role_facts(spec: PDClusterSpec, role: Role, geometry: ModelGeometry | None = None) -> RoleFacts:
    """Facts of one role. `geometry` (from a config.json) is used where the spec states none."""
    shape = spec_geometry(spec) or geometry
    if spec.engine.type is EngineType.REFERENCE:
        return _of_reference(spec, role, shape)
    side = role_spec(spec, role)
    _, args = engine_command(spec, role, side)
    flags, variables = read_flags(args, [a for a in args if has_reference(a)]), environment(spec, side)
    hidden = _only_in_the_pod(role, flags, variables)
    read = command_facts(
        role,
        flags,
        {k: v for k, v in variables.items() if k not in hidden},
        unknown=hidden,
        geometry=shape,
        engine_version=engine_version(spec),
        accelerator=accelerator(side),
    )
    told = {"host_memory": memory_limit(side), "max_top_logprobs": _top_logprobs(spec)} | _nixl(spec, read.facts)
    return read.facts.model_copy(update=told)


def _top_logprobs(spec: PDClusterSpec) -> int | None:
    """What requests can ask for. SGLang refuses no number, and neither does its router on all of its paths; what
    another router does, who brings it knows."""
    router = spec.router
    if router.max_top_logprobs is not None:
        return router.max_top_logprobs
    return NO_LIMIT if router.type is RouterType.SMG and router.replicas else None


def _nixl(spec: PDClusterSpec, facts: RoleFacts) -> dict[str, Any]:
    """The environment names NIXL's plugin only where it is not the default."""
    if spec.transfer.backend is Backend.MOONCAKE:
        return {"nixl_backend": None}
    return {"nixl_backend": facts.nixl_backend or spec.transfer.plugin.name}


def _only_in_the_pod(role: Role, flags: Flags, variables: Mapping[str, str]) -> list[str]:
    """Settings and variables with a value that Kubernetes fills in, which some rule would read."""
    names = [*flags.hidden, *(name for name, value in variables.items() if has_reference(value))]
    return [name for name in names if hidden_fact(role, name)]


def _of_reference(spec: PDClusterSpec, role: Role, geometry: ModelGeometry | None) -> RoleFacts:
    """It has one scheduler without a radix tree, mixed chunks, caches or speculation, and splits by tensor only."""
    side = role_spec(spec, role)
    host_kv = spec.decode.host_kv.mode if role is Role.DECODE else HostKVMode.OFF
    variables = environment(spec, side)
    over_nixl = spec.transfer.backend is not Backend.MOONCAKE
    facts: dict[str, Any] = given_facts(role, read_flags(side.extra_args))
    facts |= {
        "engine": EngineType.REFERENCE,
        "engine_version": spec.engine.version,
        "backend": spec.transfer.backend,
        "geometry": geometry,
        "model_name": spec.model.source or spec.model.served_name,
        "model_revision": spec.model.revision,
        "tensor_parallel": side.tensor_parallel_size,
        "pipeline_parallel": side.pipeline_parallel_size,
        "attention_data_parallel": side.attention_data_parallel_size,
        "page_size": spec.kv_cache.page_size or 16,
        "kv_dtype": spec.kv_cache.dtype or "auto",
        "hierarchical_cache": side.hierarchical_cache is not None,
        "host_kv": host_kv,
        "memory_kinds": _registered(role, host_kv),
        "nixl_backend": variables.get(PLUGIN_VARIABLE) or DEFAULT if over_nixl else None,
        "nixl_params": variables.get(PARAMS_VARIABLE, ""),
        "bootstrap_port": names.PORT_BOOTSTRAP,
        "host": "0.0.0.0",
    }
    return RoleFacts(role=role, **facts).with_launch_defaults()


def _registered(role: Role, host_kv: HostKVMode) -> frozenset[MemoryKind] | None:
    """Memory kinds of the pool, only where the spec makes them certain (rule F1: prefill is always VRAM)."""
    if role is Role.PREFILL or host_kv is HostKVMode.OFF:
        return frozenset({MemoryKind.VRAM})
    return frozenset({MemoryKind.DRAM}) if host_kv is HostKVMode.HOST_RECEIVE else None


def spec_facts(spec: PDClusterSpec, geometry: ModelGeometry | None = None) -> tuple[RoleFacts, RoleFacts]:
    """(prefill, decode) facts of a spec. Where the operator's router pairs pods by their common revision, as it does
    those of SGLang's own backends, prefill serves the decode pods of this spec and no others."""
    prefill, decode = role_facts(spec, Role.PREFILL, geometry), role_facts(spec, Role.DECODE, geometry)
    ours = spec.router.type is RouterType.SMG and spec.router.replicas > 0
    if ours and spec.transfer.backend is not Backend.PDCLUSTER and decode.attention_tp is not None:
        prefill = prefill.model_copy(update={"decode_tp_sizes": frozenset({decode.attention_tp})})
    return prefill, decode
