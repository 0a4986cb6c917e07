"""Deleting takes everything of ours away, with or without an operator."""

from __future__ import annotations

from e2e.kit import install
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.kit.shell import wait_for

CHILDREN = "pods,services,deployments,replicasets,secrets,networkpolicies,poddisruptionbudgets,controllerrevisions"


def _children(kubectl: Kubectl, name: str) -> list[str]:
    found = kubectl.get(CHILDREN)
    return [
        f"{c['kind']}/{c['metadata']['name']}"
        for c in found
        if c["metadata"]["name"].startswith(name) or c["metadata"].get("labels", {}).get("pdcluster.io/cluster") == name
    ]


def test_deleting_the_pdcluster_removes_every_child(kubectl: Kubectl, quickstart: str) -> None:
    assert _children(kubectl, quickstart)
    kubectl("delete", "pdcluster", quickstart, "--timeout=120s", timeout=150)
    wait_for(
        "all children are gone",
        lambda: not _children(kubectl, quickstart),
        timeout=240,
        context=lambda: str(_children(kubectl, quickstart)),
    )


def test_the_namespace_goes_away_after_helm_uninstall(target: Target, kubectl: Kubectl) -> None:
    manifest = install.example("quickstart", target.image)
    manifest["metadata"]["name"] = "orphan"
    manifest["spec"]["prefill"]["tensorParallelSize"] = 1
    manifest["spec"]["decode"]["replicas"] = 1
    kubectl.apply(manifest)
    wait_for(
        "its pods were made",
        lambda: len(kubectl.get("pods", selector="pdcluster.io/cluster=orphan") or []) >= 2,
        timeout=180,
    )
    install.uninstall(target)
    assert target.kubectl.get("crd", "pdclusters.pdcluster.io") is not None  # resource-policy: keep
    install.remove_namespace(target, kubectl.namespace, timeout=300)
