"""Every address of the embedded cluster, from one small documentation range.

All of it exists only inside network namespaces that the cluster makes, so it
never meets the host's own interface, whatever range that uses:

    192.0.2.32/27, .64/27, .96/27   pods of node-1, node-2, node-3
    192.0.2.128/26                  Services
    192.0.2.224/27                  the nodes, and the fabric that joins them
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

PODS = IPv4Network("192.0.2.0/25")
SERVICES = IPv4Network("192.0.2.128/26")
NODES = IPv4Network("192.0.2.224/27")

FABRIC = IPv4Address("192.0.2.254")
API_SERVER_PORT = 6443
API_SERVICE = SERVICES[1]
DNS_SERVICE = SERVICES[2]

CLUSTER_DOMAIN = "cluster.local"
_POD_PREFIX = 27
MAX_NODES = PODS.num_addresses // 2 ** (32 - _POD_PREFIX) - 1


@dataclass(frozen=True)
class NodeAddresses:
    """The addresses of one node; nodes count from 1."""

    index: int

    def __post_init__(self) -> None:
        if not 1 <= self.index <= MAX_NODES:
            raise ValueError(f"a cluster has 1 to {MAX_NODES} nodes; there is no {self.index}")

    @property
    def name(self) -> str:
        return f"node-{self.index}"

    @property
    def node(self) -> IPv4Address:
        return NODES[self.index]

    @property
    def pods(self) -> IPv4Network:
        return list(PODS.subnets(new_prefix=_POD_PREFIX))[self.index]

    @property
    def max_pods(self) -> int:
        """Less the range's network, broadcast and gateway addresses."""
        return self.pods.num_addresses - 3


def nodes(count: int) -> list[NodeAddresses]:
    return [NodeAddresses(index) for index in range(1, count + 1)]


def api_server_url() -> str:
    """The API server as the components inside the fabric reach it."""
    return f"https://{FABRIC}:{API_SERVER_PORT}"
