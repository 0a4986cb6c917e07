"""Command line of the engines: the flags that the operator owns, then the spec's extraArgs.

Pure: the fit check reads its facts from the same line, so that what is checked is what is launched.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from pdoperator.api import names
from pdoperator.api.quantities import parse_quantity
from pdoperator.api.spec import (
    DecodeCacheMode,
    DecodeHierarchicalCacheSpec,
    DecodeSpec,
    FabricType,
    HierarchicalCacheSpec,
    HiSparseSpec,
    HostKVSpec,
    PDClusterSpec,
    RoleSpec,
)
from pdoperator.domain.transfer_settings import reference_flags
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.facts import HostKVMode
from pdtransfer.contract.nixl_plugins import DEFAULT

BACKEND_FLAG = {Backend.PDCLUSTER: "pdcluster", Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake"}
MOONCAKE_TCP = "mooncake_tcp"
"""SGLang's word for Mooncake without RDMA."""
GB = 10**9
"""What --hicache-size counts in."""


@dataclass(frozen=True)
class NodePlace:
    """Place of a pod in an engine instance that spans several: its number from 0, and the name (or address) at
    which the others reach pod 0."""

    rank: int
    leader: str


def model_path(spec: PDClusterSpec) -> str:
    """Where the engine finds the weights."""
    return spec.model.source or names.MODEL_PATH


def kv_memory_kind(spec: PDClusterSpec, role: Role) -> str:
    """Reference's `--kv-memory-kind`: device memory (emulated on the host), except where decode
    receives into host memory."""
    if role is Role.DECODE and spec.decode.host_kv.mode is HostKVMode.HOST_RECEIVE:
        return "dram"
    if role is Role.DECODE and spec.decode.host_kv.mode is HostKVMode.HISPARSE:
        return "mixed"
    return "vram-emulated"


def backend_flag(spec: PDClusterSpec) -> str:
    """Value of --disaggregation-transfer-backend."""
    over_tcp = spec.transfer.fabric.type is FabricType.TCP and spec.engine.type is EngineType.SGLANG
    if spec.transfer.backend is Backend.MOONCAKE and over_tcp:
        return MOONCAKE_TCP
    return BACKEND_FLAG[spec.transfer.backend]


def whole_gb(quantity: str) -> int:
    """GB (10^9 bytes) of a quantity, rounded down. ValueError for what is no quantity."""
    return int(parse_quantity(quantity) // GB)


def _flags(*pairs: tuple[str, object | None]) -> list[str]:
    """`--flag value` for each value that is set."""
    return [word for flag, value in pairs if value is not None for word in (flag, str(value))]


def _common(spec: PDClusterSpec, side: Role, role: RoleSpec) -> list[str]:
    args = ["--model-path", model_path(spec)]
    if spec.model.served_name:
        args += ["--served-model-name", spec.model.served_name]
    args += ["--host", "0.0.0.0", "--port", str(names.PORT_ENGINE_HTTP)]
    args += ["--tp-size", str(role.tensor_parallel_size)]
    args += _flags(("--page-size", spec.kv_cache.page_size), ("--kv-cache-dtype", spec.kv_cache.dtype))
    args += ["--disaggregation-mode", side.value]
    args += ["--disaggregation-transfer-backend", backend_flag(spec)]
    args += ["--disaggregation-bootstrap-port", str(names.PORT_BOOTSTRAP)]
    return args


def _reference(spec: PDClusterSpec, side: Role) -> list[str]:
    args = ["--kv-memory-kind", kv_memory_kind(spec, side), "--advertise-host", "$(POD_IP)"]
    if spec.model.revision:
        args += ["--model-revision", spec.model.revision]
    args += ["--sidecar-socket", names.SOCKET_PATH, "--tls-dir", names.TLS_DIR]
    if spec.transfer.fabric.devices and spec.transfer.plugin.name == DEFAULT:
        args += ["--net-devices", ",".join(spec.transfer.fabric.devices)]
    limits = spec.transfer.timeouts
    args += ["--kv-waiting-timeout", str(limits.waiting_seconds)]
    args += ["--kv-transfer-timeout", str(limits.transfer_seconds)]
    args += ["--drain-timeout", str(limits.drain_seconds)]
    return args + reference_flags(spec, side)


def _nodes(role: RoleSpec, place: NodePlace | None) -> list[str]:
    if place is None or role.nodes_per_replica == 1:
        return []
    leader = f"[{place.leader}]" if ":" in place.leader else place.leader
    return [
        "--nnodes", str(role.nodes_per_replica),
        "--node-rank", str(place.rank),
        "--dist-init-addr", f"{leader}:{names.PORT_DIST_INIT}",
    ]  # fmt: skip


def _storage_config(cache: HierarchicalCacheSpec) -> str | None:
    if cache.storage_config is None:
        return None
    return json.dumps(cache.storage_config, sort_keys=True, separators=(",", ":"))


def _hierarchical_cache(cache: HierarchicalCacheSpec) -> list[str]:
    offload = isinstance(cache, DecodeHierarchicalCacheSpec) and cache.mode is DecodeCacheMode.OFFLOAD
    head = "--disaggregation-decode-enable-offload-kvcache" if offload else "--enable-hierarchical-cache"
    flags = _flags(
        ("--hicache-host-memory-mode", cache.host_memory_mode),
        ("--hicache-ratio", cache.ratio),
        ("--hicache-size", cache.size),
        ("--hicache-host-memory-fraction", cache.host_memory_fraction),
        ("--hicache-write-policy", cache.write_policy),
        ("--hicache-mem-layout", cache.layout),
        ("--hicache-io-backend", cache.io_backend),
        ("--hicache-storage-backend", cache.storage_backend),
        ("--hicache-storage-backend-extra-config", _storage_config(cache)),
        ("--hicache-storage-prefetch-policy", cache.storage_prefetch_policy),
    )
    return [head, *flags]


def hisparse_config(host: HostKVSpec) -> str | None:
    """Value of --hisparse-config; None where nothing differs from the engine's defaults."""
    sizes = host.hi_sparse or HiSparseSpec()
    told: dict[str, object] = {}
    if host.hi_sparse is not None:
        told["top_k"] = sizes.top_k
    if sizes.device_buffer_size is not None:
        told["device_buffer_size"] = sizes.device_buffer_size
    if host.ratio is not None:
        told["host_to_device_ratio"] = host.ratio
    return json.dumps(told, sort_keys=True, separators=(",", ":")) if told else None


def _host_kv(host: HostKVSpec) -> list[str]:
    if host.mode is HostKVMode.HISPARSE:
        return ["--enable-hisparse", *_flags(("--hisparse-config", hisparse_config(host)))]
    if host.mode is HostKVMode.HOST_RECEIVE:
        # It shares its host pool, and the pool's size flags, with retraction and with a hierarchical cache.
        return _flags(
            ("--disaggregation-decode-host-receive-threshold", host.threshold or 0),
            ("--hicache-ratio", host.ratio),
            ("--hicache-size", None if host.size is None else whole_gb(host.size)),
        )
    return []


def _decode(spec: PDClusterSpec) -> list[str]:
    role: DecodeSpec = spec.decode
    cache = role.hierarchical_cache
    args = []
    if role.radix_cache or (cache is not None and cache.mode is DecodeCacheMode.CACHE):
        # Rule E2: SGLang refuses a hierarchical cache on decode without its radix cache.
        args += ["--disaggregation-decode-enable-radix-cache"]
    args += _host_kv(role.host_kv)
    return args + _flags(("--disaggregation-decode-retraction-backup", role.retraction_backup))


def ib_devices(spec: PDClusterSpec) -> str | None:
    """Value of --disaggregation-ib-device: RDMA adapters, for SGLang's own backends. NIXL appends port 1 itself and
    takes no names with a port; over TCP and for this project's backend, devices are chosen in the environment."""
    fabric = spec.transfer.fabric
    if spec.transfer.backend is Backend.PDCLUSTER or fabric.type is not FabricType.RDMA or not fabric.devices:
        return None
    return ",".join(name.removesuffix(":1") for name in fabric.devices)


def _sglang(spec: PDClusterSpec, side: Role, role: RoleSpec, place: NodePlace | None) -> list[str]:
    args = _nodes(role, place)
    if role.pipeline_parallel_size > 1:
        args += ["--pp-size", str(role.pipeline_parallel_size)]
    if role.attention_data_parallel_size > 1:
        args += ["--attn-dp-size", str(role.attention_data_parallel_size)]
    args += _flags(("--revision", spec.model.revision))
    if role.hierarchical_cache is not None:
        args += _hierarchical_cache(role.hierarchical_cache)
    if side is Role.DECODE:
        args += _decode(spec)
    args += _flags(("--disaggregation-ib-device", ib_devices(spec)))
    return [*args, "--enable-metrics"]


def own_args(spec: PDClusterSpec, side: Role, role: RoleSpec, place: NodePlace | None = None) -> list[str]:
    """What the operator itself passes to the engine."""
    args = _common(spec, side, role)
    if spec.engine.type is EngineType.REFERENCE:
        return args + _reference(spec, side)
    return args + _sglang(spec, side, role, place)


def engine_command(
    spec: PDClusterSpec, side: Role, role: RoleSpec, place: NodePlace | None = None
) -> tuple[list[str], list[str]]:
    """(command, args) of the engine. What the user adds comes last and can not name a flag of ours. `place` is for
    an instance of more than one pod."""
    reference = spec.engine.type is EngineType.REFERENCE
    command = ["pdtransfer-reference"] if reference else ["python3", "-m", "sglang.launch_server"]
    return command, [*own_args(spec, side, role, place), *role.extra_args]
