"""Command line of the engines: the flags that the operator owns, then the spec's extraArgs."""

from __future__ import annotations

from pdoperator.api import names
from pdoperator.api.spec import HierarchicalCacheSpec, PDClusterSpec, RoleSpec
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.facts import HostKVMode

BACKEND_FLAG = {Backend.PDCLUSTER: "pdcluster", Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake"}


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


def _common_args(spec: PDClusterSpec, side: Role, role: RoleSpec) -> list[str]:
    args = ["--model-path", model_path(spec)]
    if spec.model.served_name:
        args += ["--served-model-name", spec.model.served_name]
    args += ["--host", "0.0.0.0", "--port", str(names.PORT_ENGINE_HTTP)]
    args += ["--tp-size", str(role.tensor_parallel_size)]
    if spec.kv_cache.page_size is not None:
        args += ["--page-size", str(spec.kv_cache.page_size)]
    if spec.kv_cache.dtype is not None:
        args += ["--kv-cache-dtype", spec.kv_cache.dtype]
    args += ["--disaggregation-mode", side.value]
    args += ["--disaggregation-transfer-backend", BACKEND_FLAG[spec.transfer.backend]]
    args += ["--disaggregation-bootstrap-port", str(names.PORT_BOOTSTRAP)]
    return args


def _hierarchical_cache(cache: HierarchicalCacheSpec) -> list[str]:
    flags: tuple[tuple[str, object | None], ...] = (
        ("--hicache-ratio", cache.ratio),
        ("--hicache-size", cache.size),
        ("--hicache-write-policy", cache.write_policy),
        ("--hicache-mem-layout", cache.layout),
        ("--hicache-io-backend", cache.io_backend),
        ("--hicache-storage-backend", cache.storage_backend),
    )
    return ["--enable-hierarchical-cache"] + [a for flag, v in flags if v is not None for a in (flag, str(v))]


def engine_command(spec: PDClusterSpec, side: Role, role: RoleSpec) -> tuple[list[str], list[str]]:
    """(command, args) of the engine. What the user adds comes last and can not name a flag of ours."""
    args = _common_args(spec, side, role)
    if spec.engine.type is EngineType.REFERENCE:
        args += ["--kv-memory-kind", kv_memory_kind(spec, side), "--advertise-host", "$(POD_IP)"]
        if spec.model.revision:
            args += ["--model-revision", spec.model.revision]
        args += ["--sidecar-socket", names.SOCKET_PATH, "--tls-dir", names.TLS_DIR]
        if spec.transfer.fabric.devices:
            args += ["--net-devices", ",".join(spec.transfer.fabric.devices)]
        limits = spec.transfer.timeouts
        args += ["--kv-waiting-timeout", str(limits.waiting_seconds)]
        args += ["--kv-transfer-timeout", str(limits.transfer_seconds)]
        args += ["--drain-timeout", str(limits.drain_seconds)]
        return ["pdtransfer-reference"], [*args, *role.extra_args]
    if role.pipeline_parallel_size > 1:
        args += ["--pp-size", str(role.pipeline_parallel_size)]
    if role.attention_data_parallel_size > 1:
        args += ["--attn-dp-size", str(role.attention_data_parallel_size)]
    if spec.model.revision:
        args += ["--revision", spec.model.revision]
    if role.hierarchical_cache is not None:
        args += _hierarchical_cache(role.hierarchical_cache)
        if side is Role.DECODE:
            # Rule E2: SGLang refuses a hierarchical cache on decode without its radix cache.
            args += ["--disaggregation-decode-enable-radix-cache"]
    if side is Role.DECODE:
        if spec.decode.host_kv.mode is HostKVMode.HISPARSE:
            args += ["--enable-hisparse"]
        elif spec.decode.host_kv.mode is HostKVMode.HOST_RECEIVE:
            args += ["--disaggregation-decode-host-receive-threshold", "0"]
    if spec.transfer.fabric.devices:
        args += ["--disaggregation-ib-device", ",".join(spec.transfer.fabric.devices)]
    args += ["--enable-metrics"]
    return ["python3", "-m", "sglang.launch_server"], [*args, *role.extra_args]
