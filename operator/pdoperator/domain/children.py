"""Children besides engine pods: Services, the router, NetworkPolicy, PodDisruptionBudgets.

Each manifest carries a hash of itself in an annotation; it is applied again only when that hash
differs from the one seen in the cluster, so that a quiet cluster causes no writes.
"""

from __future__ import annotations

from typing import Any

from pdoperator.api import names
from pdoperator.api.spec import PDClusterSpec, RouterType
from pdoperator.domain.containers import LAST_WORDS
from pdoperator.domain.observed import ClusterObject
from pdoperator.domain.pods import child_labels, owner_reference
from pdoperator.domain.revision import role_spec
from pdoperator.domain.rollout import max_unavailable
from pdoperator.domain.settings import DecideSettings
from pdoperator.domain.template import apply_template, merge_mounts, merge_named
from pdtransfer.contract.base import EngineType, Role, content_hash

ROUTER_UID = 65532
Manifest = dict[str, Any]


def applied_hash(manifest: Manifest | None) -> str:
    """Hash annotation of a manifest; '' when there is none."""
    meta = (manifest or {}).get("metadata") or {}
    return str((meta.get("annotations") or {}).get(names.ANNOTATION_APPLIED_HASH, ""))


def _child(cluster: ClusterObject, api_version: str, kind: str, name: str, role: str, spec: dict[str, Any]) -> Manifest:
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": cluster.namespace,
            "labels": child_labels(cluster, role),
            "ownerReferences": [owner_reference(cluster)],
        },
        "spec": spec,
    }
    manifest["metadata"]["annotations"] = {names.ANNOTATION_APPLIED_HASH: content_hash(manifest)[:16]}
    return manifest


def _selector(cluster: ClusterObject, role: str = "") -> dict[str, str]:
    labels = {names.LABEL_CLUSTER_UID: cluster.uid}
    return labels | ({names.LABEL_ROLE: role} if role else {})


def headless_service(cluster: ClusterObject) -> Manifest:
    """Stable DNS names of engine pods, also before they are ready (wiring happens before readiness)."""
    return _child(
        cluster,
        "v1",
        "Service",
        names.headless_service_name(cluster.name),
        "",
        {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _selector(cluster),
            "ports": [
                {"name": "http", "port": names.PORT_ENGINE_HTTP, "targetPort": names.PORT_ENGINE_HTTP},
                {"name": "bootstrap", "port": names.PORT_BOOTSTRAP, "targetPort": names.PORT_BOOTSTRAP},
            ],
        },
    )


def router_service(cluster: ClusterObject) -> Manifest:
    """Where clients send requests."""
    return _child(
        cluster,
        "v1",
        "Service",
        names.router_name(cluster.name),
        names.ROLE_ROUTER,
        {
            "selector": _selector(cluster, names.ROLE_ROUTER),
            "ports": [{"name": "http", "port": names.PORT_ROUTER_HTTP, "targetPort": names.PORT_ROUTER_HTTP}],
        },
    )


def _health_checks(spec: PDClusterSpec) -> list[str]:
    """How the router looks at its workers by itself; the operator takes dead and unwired ones off before. One late
    answer must not take every prefill pod away: a busy node gives many. SGLang's /health computes a token and answers
    after the prefill chunk that is under way."""
    sglang = spec.engine.type is EngineType.SGLANG
    timeout, failures = ("10", "3") if sglang else ("2", "2")
    return [
        *("--health-check-interval-secs", "1", "--health-check-timeout-secs", timeout),
        *("--health-failure-threshold", failures, "--health-success-threshold", "1"),
    ]


def router_deployment(cluster: ClusterObject, spec: PDClusterSpec, settings: DecideSettings) -> Manifest:
    """smg, started without workers: the operator sets them through its worker API, with a key."""
    router = spec.router
    template = router.template
    args = ["--pd-disaggregation", "--host", "0.0.0.0", "--port", str(names.PORT_ROUTER_HTTP)]
    args += ["--prometheus-host", "0.0.0.0", "--prometheus-port", str(names.PORT_ROUTER_METRICS)]
    args += ["--control-plane-api-keys", "pdcluster:pdcluster-operator:admin:$(ROUTER_KEY)"]
    args += _health_checks(spec)
    if router.policies.prefill:
        args += ["--prefill-policy", router.policies.prefill]
    if router.policies.decode:
        args += ["--decode-policy", router.policies.decode]
    # A path that is there locally keeps the router from trying to download a tokenizer.
    if spec.model.volume:
        args += ["--model-path", names.MODEL_PATH]
    labels = child_labels(cluster, names.ROLE_ROUTER)
    container: dict[str, Any] = {
        "name": names.CONTAINER_ROUTER,
        "image": router.image or settings.router_image,
        "imagePullPolicy": settings.image_pull_policy,
        "command": ["smg", "launch"],
        "args": args,
        "terminationMessagePolicy": LAST_WORDS,
        "env": [
            {
                "name": "ROUTER_KEY",
                "valueFrom": {"secretKeyRef": {"name": names.router_key_secret_name(cluster.name), "key": "key"}},
            }
        ],
        "ports": [
            {"name": "http", "containerPort": names.PORT_ROUTER_HTTP},
            {"name": "metrics", "containerPort": names.PORT_ROUTER_METRICS},
        ],
        "readinessProbe": {
            "httpGet": {"path": "/liveness", "port": names.PORT_ROUTER_HTTP},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "securityContext": template.container_security_context
        or {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
    }
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {}}]
    if spec.model.volume:
        volumes.append({"name": names.VOLUME_MODEL} | dict(spec.model.volume))
        container["volumeMounts"].append({"name": names.VOLUME_MODEL, "mountPath": names.MODEL_PATH, "readOnly": True})
    container["volumeMounts"] = merge_mounts(container["volumeMounts"], template.volume_mounts)
    pod_spec: dict[str, Any] = {
        "automountServiceAccountToken": template.service_account_name is not None,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": ROUTER_UID,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": template.termination_grace_period_seconds or 30,
        "containers": [container],
        "volumes": merge_named(volumes, template.volumes),
    }
    apply_template(pod_spec, template)
    metadata = {"labels": dict(template.labels) | labels}
    if template.annotations:
        metadata["annotations"] = dict(template.annotations)
    return _child(
        cluster,
        "apps/v1",
        "Deployment",
        names.router_name(cluster.name),
        names.ROLE_ROUTER,
        {
            "replicas": router.replicas,
            "selector": {"matchLabels": _selector(cluster, names.ROLE_ROUTER)},
            "template": {"metadata": metadata, "spec": pod_spec},
        },
    )


def disruption_budget(cluster: ClusterObject, spec: PDClusterSpec, role: Role) -> Manifest:
    """Integer minAvailable per role: a percentage needs a controller with /scale behind the pods."""
    replicas = role_spec(spec, role).replicas
    return _child(
        cluster,
        "policy/v1",
        "PodDisruptionBudget",
        f"{cluster.name}-{role.value}",
        role.value,
        {
            "minAvailable": max(0, replicas - max(1, max_unavailable(spec, replicas))),
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": _selector(cluster, role.value)},
        },
    )


def network_policy(cluster: ClusterObject, settings: DecideSettings) -> Manifest:
    """Engine pods take KV, control and bootstrap traffic from their own cluster only; the sidecar's
    control port from the operator's namespace too. HTTP stays open (routers, EPPs, kubelet probes).
    Random KV ports (UCX, ZMQ) are why whole pods are allowed between peers, not ports."""
    own = {"podSelector": {"matchLabels": _selector(cluster)}}
    operator = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}}}

    def ports(*numbers: int) -> list[dict[str, Any]]:
        return [{"protocol": "TCP", "port": n} for n in numbers]

    return _child(
        cluster,
        "networking.k8s.io/v1",
        "NetworkPolicy",
        f"{cluster.name}-pods",
        "",
        {
            "podSelector": {
                "matchLabels": _selector(cluster),
                "matchExpressions": [{"key": names.LABEL_ROLE, "operator": "In", "values": [r.value for r in Role]}],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [own]},
                {"from": [operator], "ports": ports(names.PORT_SIDECAR_CONTROL)},
                {"ports": ports(names.PORT_ENGINE_HTTP, names.PORT_SIDECAR_HEALTH)},
            ],
        },
    )


def wanted_children(cluster: ClusterObject, spec: PDClusterSpec, settings: DecideSettings) -> list[Manifest]:
    """Every child but engine pods and Secrets, in the order they are applied."""
    wanted = [headless_service(cluster)]
    if settings.network_policy:
        wanted.append(network_policy(cluster, settings))
    if settings.disruption_budgets:
        wanted += [disruption_budget(cluster, spec, role) for role in Role]
    if spec.router.type is RouterType.SMG:
        wanted += [router_deployment(cluster, spec, settings), router_service(cluster)]
    return wanted
