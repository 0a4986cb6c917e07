"""What a cluster has besides its programs: DNS, and the nodes' labels and emulated devices.

There is no network policy controller: NetworkPolicy objects are accepted and
enforce nothing, as in any cluster whose network plugin doesn't know them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import addressing
from .addressing import NodeAddresses
from .errors import ClusterError
from .image_set import coredns_image
from .kube import KubeClient, condition
from .paths import Layout
from .tools import Tools

RDMA_RESOURCE = "rdma/hca"
RDMA_PER_NODE = "8"
EMULATED_LABEL = "pdcluster.io/emulated-rdma"
_DNS = "/apis/apps/v1/namespaces/kube-system/deployments/coredns"


def apply_dns(layout: Layout, tools: Tools) -> None:
    text = (Path(__file__).parent / "manifests" / "coredns.yaml").read_text()
    values = {
        "%DOMAIN%": addressing.CLUSTER_DOMAIN,
        "%IMAGE%": coredns_image(),
        "%ADDRESS%": str(addressing.DNS_SERVICE),
    }
    for mark, value in values.items():
        text = text.replace(mark, value)
    command = [tools["kubectl"], f"--kubeconfig={layout.kubeconfig}", "apply"]
    command += ["--server-side", "--force-conflicts", "--filename=-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise ClusterError(f"CoreDNS can't be installed: {done.stderr.strip()}")


def dns_available(client: KubeClient) -> bool:
    return bool(client.get(_DNS).get("status", {}).get("availableReplicas"))


def describe_nodes(client: KubeClient, nodes: Sequence[NodeAddresses]) -> None:
    """Labels the nodes and gives each an extended resource that stands for RDMA devices.

    No device plugin runs and no device is behind it: it makes the scheduler count, nothing
    else. The label says so.
    """
    escaped = RDMA_RESOURCE.replace("/", "~1")
    for node in nodes:
        path = f"/api/v1/nodes/{node.name}"
        client.merge_patch(path, {"metadata": {"labels": {EMULATED_LABEL: "true"}}})
        if not client.get(path)["spec"].get("podCIDR"):
            ranges = {"podCIDR": str(node.pods), "podCIDRs": [str(node.pods)]}
            client.merge_patch(path, {"spec": ranges})
        client.json_patch(
            f"{path}/status",
            [
                {"op": "add", "path": f"/status/{field}/{escaped}", "value": RDMA_PER_NODE}
                for field in ("capacity", "allocatable")
            ],
        )


def nodes_ready(client: KubeClient, nodes: Sequence[NodeAddresses]) -> bool:
    items = client.get("/api/v1/nodes")["items"]
    ready = {item["metadata"]["name"] for item in items if condition(item, "Ready")}
    return {node.name for node in nodes} <= ready
