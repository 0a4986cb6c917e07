"""What does not fit is refused before a pod exists; what the fabric lacks is named."""

from __future__ import annotations

import time

from e2e.kit import install, requests
from e2e.kit.cluster import Target
from e2e.kit.kubectl import Kubectl
from e2e.suite.conftest import Model


def test_what_does_not_fit_launches_nothing_and_fixing_it_runs(target: Target, kubectl: Kubectl, model: Model) -> None:
    manifest = install.example("does-not-fit", target.image)
    name = manifest["metadata"]["name"]
    kubectl.apply(manifest)
    kubectl.wait_condition("pdcluster", name, "Compatible", "False", timeout=120)
    time.sleep(5)
    assert kubectl.get("pods", selector=f"pdcluster.io/cluster={name}") == []
    described = kubectl("describe", "pdc", name)
    assert "F3" in described
    assert "PDCluster" in described  # what to change
    ready = kubectl.condition("pdcluster", name, "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "DoesNotFit")

    manifest["spec"]["transfer"]["backend"] = "PDCluster"
    kubectl.apply(manifest)
    kubectl.wait_condition("pdcluster", name, "Ready", timeout=300)
    with kubectl.forward(f"service/{name}-router", 30000) as port:
        assert requests.wrong(requests.compare(f"http://127.0.0.1:{port}", model.cases)) == []
    kubectl("delete", "pdcluster", name, "--timeout=120s", timeout=150)


def test_rdma_that_is_not_there_is_named(target: Target, kubectl: Kubectl) -> None:
    manifest = install.example("quickstart", target.image)
    manifest["metadata"]["name"] = "rdma"
    spec = manifest["spec"]
    spec["transfer"]["fabric"] = {"type": "RDMA", "resources": [{"name": "rdma/hca", "count": 1}]}
    spec["prefill"]["tensorParallelSize"] = 1
    spec["decode"]["replicas"] = 1
    spec["router"] = {"type": "None"}
    kubectl.apply(manifest)
    # The node offers the resource, the pod gets it, and still only TCP is there: that must not pass for RDMA.
    fabric = kubectl.wait_condition("pdcluster", "rdma", "FabricReady", "False", timeout=300)
    assert fabric["reason"] in ("RDMANotFound", "SilentTCP")
    assert kubectl.condition("pdcluster", "rdma", "Ready")["status"] == "False"

    spec["transfer"]["fabric"]["resources"][0]["name"] = "rdma/not-there"
    manifest["metadata"]["name"] = "rdma-not-there"
    kubectl.apply(manifest)
    fabric = kubectl.wait_condition("pdcluster", "rdma-not-there", "FabricReady", "False", timeout=120)
    assert fabric["reason"] == "ResourceNotOffered"
    assert "rdma/hca" in fabric["message"]  # what the nodes do offer
    kubectl("delete", "pdcluster", "rdma", "rdma-not-there", "--timeout=120s", timeout=150)
