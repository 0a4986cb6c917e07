"""Containers of an engine pod: the engine and the sidecar. The plugin's installer has its own module.

Liveness probes are left out on purpose: a long compile stall must not kill a rank. The sidecar has
no startup probe either, it would block the engine's start.
"""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import FabricType, PDClusterSpec, RoleSpec
from pdoperator.domain.container_env import own_env, replaceable_env, sglang_env, user_env
from pdoperator.domain.engine_command import engine_command
from pdoperator.domain.plugin import launched, plugin_env, plugin_mount, wants_plugin
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.template import merge_mounts
from pdoperator.domain.transfer_settings import nixl_env, setting_env
from pdtransfer.contract.base import Backend, EngineType, Role

PRESTOP_SECONDS = 5
LAST_WORDS = "FallbackToLogsOnError"
"""terminationMessagePolicy: the end of a failed container's log goes into its status, then into conditions."""


def wants_sidecar(spec: PDClusterSpec) -> bool:
    """Reference reports through a sidecar with either backend; SGLang's own backends know no cards."""
    return spec.engine.type is EngineType.REFERENCE or wants_plugin(spec)


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
        "env": own_env(with_sidecar=True),
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


def rank_claims(role: RoleSpec) -> list[str]:
    """Names of a pod's resource claims: one per rank."""
    ranks = max(1, role.tensor_parallel_size * role.pipeline_parallel_size // role.nodes_per_replica)
    return [f"r{i}" for i in range(ranks)]


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
        resources["claims"] = [{"name": name} for name in rank_claims(role)]
    return resources


def engine_container(spec: PDClusterSpec, side: Role, role: RoleSpec, settings: DecideSettings) -> dict[str, Any]:
    """The engine. Its readiness probe asks the engine alone; being wired is the sidecar's and the gate's."""
    command, args = engine_command(spec, side, role)
    reference = spec.engine.type is EngineType.REFERENCE
    fabric = spec.transfer.fabric
    mounts = [_mount(names.VOLUME_SHM, "/dev/shm")]
    if spec.model.volume:
        mounts.append(_mount(names.VOLUME_MODEL, names.MODEL_PATH, read_only=True))
    if wants_sidecar(spec):
        mounts.append(_mount(names.VOLUME_SOCKET, names.SOCKET_DIR))
        mounts.append(_mount(names.VOLUME_TLS, names.TLS_DIR, read_only=True))
    env = own_env(with_sidecar=wants_sidecar(spec))
    theirs = user_env(role.env)
    if reference:
        env += nixl_env(spec)
    else:
        env += sglang_env(spec) + replaceable_env(spec, {e["name"] for e in theirs})
    if wants_plugin(spec):
        command = launched(command)
        mounts.append(plugin_mount(read_only=True))
        env += plugin_env(spec) + setting_env(spec, side)
    mounts = merge_mounts(mounts, role.template.volume_mounts)
    container: dict[str, Any] = {
        "name": names.CONTAINER_ENGINE,
        "image": spec.engine.image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": command,
        "args": args,
        "terminationMessagePolicy": LAST_WORDS,
        "env": env + [e for e in theirs if e["name"] not in {o["name"] for o in env}],
        "ports": [
            {"name": "http", "containerPort": names.PORT_ENGINE_HTTP},
            {"name": "bootstrap", "containerPort": names.PORT_BOOTSTRAP},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/ready" if reference else "/health", "port": names.PORT_ENGINE_HTTP},
            "periodSeconds": 2,
            # SGLang answers after the prefill chunk that is under way.
            "timeoutSeconds": 5 if reference else 10,
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
