"""Environment of an engine pod's containers: what the operator sets itself, and what is left for the spec to add."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import EnvVar, FabricType, PDClusterSpec, TimeoutsSpec
from pdoperator.domain.transfer_settings import PLUGIN_ENV, nixl_env
from pdtransfer.contract.base import Backend

OWN_ENV = (
    "POD_UID",
    "POD_NAME",
    "POD_IP",
    "POD_NAMESPACE",
    "PDCLUSTER_UID",
    "PDCLUSTER_ROLE",
    "PDCLUSTER_REVISION",
    "PDTRANSFER_SOCKET",
    "PDTRANSFER_TLS_DIR",
    "PDTRANSFER_TRANSFER_TIMEOUT",
    "PDTRANSFER_NET_DEVICES",
    *PLUGIN_ENV,
)
"""Names in `env` that the operator sets itself; a spec that sets one of them is refused."""


def own_env(*, with_sidecar: bool) -> list[dict[str, Any]]:
    """Who the pod is and where its ranks and its sidecar meet, for the engine and for the sidecar alike."""

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
    ]
    if with_sidecar:
        env.append({"name": "PDTRANSFER_SOCKET", "value": names.SOCKET_PATH})
        env.append({"name": "PDTRANSFER_TLS_DIR", "value": names.TLS_DIR})
    return env


def user_env(env: tuple[EnvVar, ...]) -> list[dict[str, Any]]:
    """Variables of the spec, without those that the operator sets itself."""
    return [
        {"name": e.name} | ({"valueFrom": e.value_from} if e.value_from is not None else {"value": e.value or ""})
        for e in env
        if e.name not in OWN_ENV
    ]


_CORE_DUMPS_WANTED = "CUDA_ENABLE_USER_TRIGGERED_COREDUMP"
"""CUDA's own switch: without it no process can be asked for a core dump."""


def replaceable_env(spec: PDClusterSpec, theirs: Collection[str] = ()) -> list[dict[str, Any]]:
    """What SGLang should know of the pod, unless the spec's env, whose names are `theirs`, says otherwise. Kubernetes
    fills $(POD_IP) in."""
    return [e for e in _defaults(spec, theirs) if e["name"] not in theirs]


def _defaults(spec: PDClusterSpec, theirs: Collection[str]) -> list[dict[str, Any]]:
    env = [{"name": "SGLANG_HOST_IP", "value": "$(POD_IP)"}]
    if _CORE_DUMPS_WANTED not in theirs:
        # When a rank dies SGLang asks the others for CUDA core dumps and waits 60 s for them before the engine ends,
        # also where CUDA was not told to make any: a minute more until it is started again.
        env.append({"name": "SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "value": "false"})
    fabric = spec.transfer.fabric
    if spec.transfer.backend is Backend.NIXL and fabric.type is FabricType.TCP and fabric.devices:
        env.append({"name": "UCX_NET_DEVICES", "value": ",".join(fabric.devices)})
    return env


def sglang_env(spec: PDClusterSpec) -> list[dict[str, Any]]:
    """What SGLang takes from the environment, only where the spec differs from SGLang's own defaults."""
    env = nixl_env(spec)
    waiting = spec.transfer.timeouts.waiting_seconds
    if waiting != TimeoutsSpec().waiting_seconds:
        for name in ("BOOTSTRAP", "WAITING"):
            env.append({"name": f"SGLANG_DISAGGREGATION_{name}_TIMEOUT", "value": str(waiting)})
    return env
