"""Containers of an engine pod: the engine with the flags the operator owns, and the sidecar.

Liveness probes are left out on purpose: a long compile stall must not kill a rank. The sidecar has
no startup probe either, it would block the engine's start.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import EnvVar, FabricType, HierarchicalCacheSpec, PDClusterSpec, RoleSpec, TimeoutsSpec
from pdoperator.domain.settings import DecideSettings
from pdtransfer.contract.base import Backend, EngineType, Role
from pdtransfer.contract.facts import HostKVMode

BACKEND_FLAG = {Backend.PDCLUSTER: "pdcluster", Backend.NIXL: "nixl", Backend.MOONCAKE: "mooncake"}
OWN_ENV = (
    "POD_UID",
    "POD_NAME",
    "POD_IP",
    "POD_NAMESPACE",
    "PDCLUSTER_UID",
    "PDCLUSTER_ROLE",
    "PDCLUSTER_REVISION",
    "PDTRANSFER_FABRIC",
    "PDTRANSFER_DEVICES",
    "PDTRANSFER_GPUDIRECT",
    "PDTRANSFER_SOCKET",
    "PDTRANSFER_TLS_DIR",
)
"""Names in `env` that the operator sets itself; a spec that sets one of them is refused."""


LAST_WORDS = "FallbackToLogsOnError"
"""terminationMessagePolicy: the end of a failed container's log goes into its status, then into conditions."""


def model_path(spec: PDClusterSpec) -> str:
    """Where the engine finds the weights."""
    return spec.model.source or names.MODEL_PATH


def _own_env(spec: PDClusterSpec, with_sidecar: bool) -> list[dict[str, Any]]:
    def field(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    env: list[dict[str, Any]] = [
        field("POD_UID", "metadata.uid"),
        field("POD_NAME", "metadata.name"),
        field("POD_IP", "status.podIP"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("PDCLUSTER_UID", f"metadata.labels['{names.LABEL_CLUSTER_UID}']"),
        field("PDCLUSTER_ROLE", f"metadata.labels['{names.LABEL_ROLE}']"),
        field("PDCLUSTER_REVISION", f"metadata.labels['{names.LABEL_REVISION}']"),
        {"name": "PDTRANSFER_FABRIC", "value": spec.transfer.fabric.type.value},
    ]
    if spec.transfer.fabric.type is FabricType.RDMA:
        env.append({"name": "PDTRANSFER_GPUDIRECT", "value": spec.transfer.fabric.gpu_direct.value})
        if spec.transfer.fabric.devices:
            env.append({"name": "PDTRANSFER_DEVICES", "value": ",".join(spec.transfer.fabric.devices)})
    if with_sidecar:
        env.append({"name": "PDTRANSFER_SOCKET", "value": names.SOCKET_PATH})
        env.append({"name": "PDTRANSFER_TLS_DIR", "value": names.TLS_DIR})
    return env


def _user_env(env: tuple[EnvVar, ...]) -> list[dict[str, Any]]:
    return [
        {"name": e.name} | ({"valueFrom": e.value_from} if e.value_from is not None else {"value": e.value or ""})
        for e in env
        if e.name not in OWN_ENV
    ]


def _mount(name: str, path: str, read_only: bool = False) -> dict[str, Any]:
    mount: dict[str, Any] = {"name": name, "mountPath": path}
    if read_only:
        mount["readOnly"] = True
    return mount


def sidecar_container(spec: PDClusterSpec, settings: DecideSettings) -> dict[str, Any]:
    """Native sidecar: an init container that keeps running, started before the engine and ended after it."""
    args = [
        "--socket",
        names.SOCKET_PATH,
        "--socket-mode",
        "0666",
        "--tls-dir",
        names.TLS_DIR,
        "--control-port",
        str(names.PORT_SIDECAR_CONTROL),
        "--health-port",
        str(names.PORT_SIDECAR_HEALTH),
    ]
    if spec.transfer.backend is not Backend.PDCLUSTER:
        args += ["--wiring", "off"]
    return {
        "name": names.CONTAINER_SIDECAR,
        "image": spec.transfer.image or settings.transfer_image,
        "imagePullPolicy": settings.image_pull_policy,
        "restartPolicy": "Always",
        "command": ["pdtransfer-sidecar"],
        "args": args,
        "terminationMessagePolicy": LAST_WORDS,
        "env": _own_env(spec, with_sidecar=True),
        "ports": [
            {"name": "pd-control", "containerPort": names.PORT_SIDECAR_CONTROL},
            {"name": "pd-health", "containerPort": names.PORT_SIDECAR_HEALTH},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": names.PORT_SIDECAR_HEALTH},
            # It listens after a second or two and can not be ready before the engine: fewer false alarms.
            "initialDelaySeconds": 2,
            "periodSeconds": 1,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "volumeMounts": [
            _mount(names.VOLUME_SOCKET, names.SOCKET_DIR),
            _mount(names.VOLUME_TLS, names.TLS_DIR, read_only=True),
        ],
    }


_NOTHING_BELOW = (names.SOCKET_DIR, names.TLS_DIR, names.PLUGIN_DIR)


def merge_mounts(ours: list[dict[str, Any]], theirs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Ours, then theirs that neither take a path of ours nor lie in the socket's, certificates' or
    plugin's folder, however the path is spelled."""
    taken = {str(m["mountPath"]) for m in ours}

    def free(mount: Mapping[str, Any]) -> bool:
        path = posixpath.normpath("/" + str(mount.get("mountPath", "")).lstrip("/"))
        return path not in taken and not any(path == d or path.startswith(d + "/") for d in _NOTHING_BELOW)

    return ours + [dict(m) for m in theirs if free(m)]


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


def engine_command(
    spec: PDClusterSpec, side: Role, role: RoleSpec, *, with_sidecar: bool
) -> tuple[list[str], list[str]]:
    """(command, args) of the engine. What the user adds comes last and can not name a flag of ours."""
    args = _common_args(spec, side, role)
    if spec.engine.type is EngineType.REFERENCE:
        args += ["--kv-memory-kind", kv_memory_kind(spec, side), "--advertise-host", "$(POD_IP)"]
        if spec.model.revision:
            args += ["--model-revision", spec.model.revision]
        if with_sidecar:
            args += ["--sidecar-socket", names.SOCKET_PATH, "--tls-dir", names.TLS_DIR]
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
    if spec.transfer.backend is not Backend.PDCLUSTER and spec.transfer.fabric.devices:
        args += ["--disaggregation-ib-device", ",".join(spec.transfer.fabric.devices)]
    args += ["--enable-metrics"]
    return ["python3", "-m", "sglang.launch_server"], [*args, *role.extra_args]


def _sglang_env(spec: PDClusterSpec) -> list[dict[str, Any]]:
    """What SGLang takes from the environment, only where the spec differs from SGLang's own defaults."""
    env: list[dict[str, Any]] = []
    plugin = spec.transfer.plugin
    if spec.transfer.backend is not Backend.MOONCAKE:
        if plugin.name != "UCX":
            env.append({"name": "SGLANG_DISAGGREGATION_NIXL_BACKEND", "value": plugin.name})
        if plugin.parameters:
            text = json.dumps(dict(sorted(plugin.parameters.items())), separators=(",", ":"))
            env.append({"name": "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS", "value": text})
    waiting = spec.transfer.timeouts.waiting_seconds
    if waiting != TimeoutsSpec().waiting_seconds:
        for name in ("BOOTSTRAP", "WAITING"):
            env.append({"name": f"SGLANG_DISAGGREGATION_{name}_TIMEOUT", "value": str(waiting)})
    return env


def _resources(spec: PDClusterSpec, role: RoleSpec) -> dict[str, Any]:
    resources: dict[str, Any] = {k: dict(v) if isinstance(v, dict) else v for k, v in role.resources.items()}
    fabric = spec.transfer.fabric
    if fabric.type is not FabricType.RDMA:
        return resources
    for want in fabric.resources:
        for kind in ("requests", "limits"):
            # Extended resources need requests == limits.
            resources.setdefault(kind, {})[want.name] = str(want.count)
    if fabric.resource_claim_template:
        ranks = max(1, role.tensor_parallel_size * role.pipeline_parallel_size // role.nodes_per_replica)
        resources["claims"] = [{"name": f"r{i}"} for i in range(ranks)]
    return resources


def engine_container(
    spec: PDClusterSpec, side: Role, role: RoleSpec, settings: DecideSettings, *, with_sidecar: bool
) -> dict[str, Any]:
    """The engine. Its readiness probe asks the engine alone; being wired is the sidecar's and the gate's."""
    command, args = engine_command(spec, side, role, with_sidecar=with_sidecar)
    reference = spec.engine.type is EngineType.REFERENCE
    fabric = spec.transfer.fabric
    mounts = [_mount(names.VOLUME_SHM, "/dev/shm")]
    if spec.model.volume:
        mounts.append(_mount(names.VOLUME_MODEL, names.MODEL_PATH, read_only=True))
    if with_sidecar:
        mounts.append(_mount(names.VOLUME_SOCKET, names.SOCKET_DIR))
        mounts.append(_mount(names.VOLUME_TLS, names.TLS_DIR, read_only=True))
    env = _own_env(spec, with_sidecar)
    if not reference and spec.transfer.backend is Backend.PDCLUSTER:
        mounts.append(_mount("pdtransfer-plugin", names.PLUGIN_DIR, read_only=True))
        # A PYTHONPATH of the user's comes after the plugin's, not instead of it.
        theirs = [e.value for e in role.env if e.name == "PYTHONPATH" and e.value]
        env.append({"name": "PYTHONPATH", "value": ":".join([names.PLUGIN_DIR, *theirs])})
    if not reference:
        env += _sglang_env(spec)
    mounts = merge_mounts(mounts, role.template.volume_mounts)
    container: dict[str, Any] = {
        "name": names.CONTAINER_ENGINE,
        "image": spec.engine.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": command,
        "args": args,
        "terminationMessagePolicy": LAST_WORDS,
        "env": env + [e for e in _user_env(role.env) if e["name"] not in {o["name"] for o in env}],
        "ports": [
            {"name": "http", "containerPort": names.PORT_ENGINE_HTTP},
            {"name": "bootstrap", "containerPort": names.PORT_BOOTSTRAP},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready" if reference else "/health", "port": names.PORT_ENGINE_HTTP},
            "periodSeconds": 2,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        # Routers and EPPs drop a terminating pod within a few seconds; until then it still serves.
        "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_SECONDS}}},
        "resources": _resources(spec, role),
        "volumeMounts": mounts,
    }
    context = dict(role.template.container_security_context or {})
    if fabric.type is FabricType.RDMA:
        if fabric.privileged:
            context["privileged"] = True
        capabilities = dict(context.get("capabilities", {}))
        capabilities["add"] = sorted({*capabilities.get("add", []), "IPC_LOCK"})
        context["capabilities"] = capabilities
    if context:
        container["securityContext"] = context
    return container


PRESTOP_SECONDS = 5
