"""The pod the operator wants for one slot of a role: names, labels, volumes, containers, gates."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import FabricType, PDClusterSpec
from pdoperator.domain.containers import engine_container, rank_claims, sidecar_container, wants_sidecar
from pdoperator.domain.observed import ClusterObject
from pdoperator.domain.plugin import installer_container, plugin_volume, wants_plugin
from pdoperator.domain.revision import role_spec
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.template import apply_template, merge_named
from pdtransfer.contract.base import Backend, Role

_NAME_MAX = 63
NETWORKS_ANNOTATION = "k8s.v1.cni.cncf.io/networks"
BOOTSTRAP_PORT_ANNOTATION = "sglang.ai/bootstrap-port"


@dataclass(frozen=True)
class Slot:
    """Place of one pod: replica ordinal and node of a role."""

    role: Role
    replica: int
    node: int = 0

    @property
    def key(self) -> str:
        """Name of the slot in status, for example prefill-0."""
        return f"{self.role.value}-{self.replica}" + (f"-{self.node}" if self.node else "")


def short_name(prefix: str, rest: str, limit: int = _NAME_MAX) -> str:
    """`prefix-rest`, with the prefix cut and marked by a hash of itself where it would be too long."""
    if len(prefix) + 1 + len(rest) <= limit:
        return f"{prefix}-{rest}"
    mark = hashlib.sha256(prefix.encode()).hexdigest()[:6]
    room = limit - len(rest) - len(mark) - 2
    return f"{prefix[: max(1, room)].rstrip('-.')}-{mark}-{rest}"


def pod_name(cluster: str, slot: Slot, revision: str, attempt: int) -> str:
    """`<cluster>-<role>-<replica>-<node>-<revision>-<attempt>`, at most 63 characters (it is a hostname too)."""
    return short_name(cluster.replace(".", "-"), f"{slot.role.value}-{slot.replica}-{slot.node}-{revision}-{attempt}")


def owner_reference(cluster: ClusterObject) -> dict[str, Any]:
    """Controller reference without blockOwnerDeletion (that would need rights on finalizers)."""
    return {
        "apiVersion": f"{names.GROUP}/{names.VERSION}",
        "kind": names.KIND,
        "name": cluster.name,
        "uid": cluster.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def child_labels(cluster: ClusterObject, role: str = "") -> dict[str, str]:
    """Labels that every child carries. A label value holds 63 characters: longer names are cut and hashed."""
    labels = {
        names.LABEL_CLUSTER: label_value(cluster.name),
        names.LABEL_CLUSTER_UID: cluster.uid,
        names.LABEL_MANAGED_BY: names.MANAGED_BY,
    }
    if role:
        labels[names.LABEL_ROLE] = role
    return labels


def label_value(text: str) -> str:
    """The text itself, or a shortened form that is still unique, for use as a label's value."""
    return text if len(text) <= _NAME_MAX else short_name(text[:50], hashlib.sha256(text.encode()).hexdigest()[:8])


def wants_gate(spec: PDClusterSpec) -> bool:
    """Only pods that the operator wires wait for their wiring."""
    return spec.transfer.backend is Backend.PDCLUSTER


def engine_pod(
    cluster: ClusterObject,
    spec: PDClusterSpec,
    slot: Slot,
    revision: str,
    attempt: int,
    settings: DecideSettings,
) -> dict[str, Any]:
    """Manifest of one engine pod."""
    role = role_spec(spec, slot.role)
    template = role.template
    fabric = spec.transfer.fabric
    rdma = fabric.type is FabricType.RDMA
    own_labels = child_labels(cluster, slot.role.value) | {
        names.LABEL_REPLICA: str(slot.replica),
        names.LABEL_REVISION: revision,
        names.LABEL_LLMD_ROLE: slot.role.value,
        names.LABEL_LLMD_ENGINE: "sglang",
        "llm-d.ai/inference-serving": "true",
    }
    own_annotations = {
        names.ANNOTATION_ATTEMPT: str(attempt),
        BOOTSTRAP_PORT_ANNOTATION: str(names.PORT_BOOTSTRAP),
        "kubectl.kubernetes.io/default-container": names.CONTAINER_ENGINE,
    }
    fabric_annotations = dict(fabric.annotations) if rdma else {}
    if rdma and fabric.networks:
        fabric_annotations[NETWORKS_ANNOTATION] = ", ".join(fabric.networks)
    name = pod_name(cluster.name, slot, revision, attempt)
    grace = template.termination_grace_period_seconds or spec.transfer.timeouts.drain_seconds + 30
    pod_spec: dict[str, Any] = {
        "hostname": name,
        "subdomain": names.headless_service_name(cluster.name),
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace,
        "automountServiceAccountToken": template.service_account_name is not None,
        "enableServiceLinks": False,
        "containers": [engine_container(spec, slot.role, role, settings)],
        "volumes": merge_named(_volumes(cluster, spec), template.volumes),
    }
    if wants_sidecar(spec):
        pod_spec["initContainers"] = [sidecar_container(spec, settings)]
    if wants_plugin(spec):
        pod_spec["initContainers"].append(installer_container(spec, settings))
    if wants_gate(spec):
        pod_spec["readinessGates"] = [{"conditionType": names.GATE_KV_WIRED}]
    if rdma and fabric.host_network:
        pod_spec["hostNetwork"] = True
        pod_spec["dnsPolicy"] = "ClusterFirstWithHostNet"
    if rdma and fabric.resource_claim_template:
        pod_spec["resourceClaims"] = [
            {"name": name, "resourceClaimTemplateName": fabric.resource_claim_template} for name in rank_claims(role)
        ]
    apply_template(pod_spec, template)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": dict(template.labels) | own_labels,
            "annotations": dict(template.annotations) | fabric_annotations | own_annotations,
            "ownerReferences": [owner_reference(cluster)],
        },
        "spec": pod_spec,
    }


def _volumes(cluster: ClusterObject, spec: PDClusterSpec) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [{"name": names.VOLUME_SHM, "emptyDir": {"medium": "Memory"}}]
    if spec.model.volume:
        volumes.append({"name": names.VOLUME_MODEL} | dict(spec.model.volume))
    if wants_sidecar(spec):
        volumes.append({"name": names.VOLUME_SOCKET, "emptyDir": {}})
        volumes.append({"name": names.VOLUME_TLS, "secret": {"secretName": names.tls_secret_name(cluster.name)}})
    if wants_plugin(spec):
        volumes.append(plugin_volume())
    return volumes
