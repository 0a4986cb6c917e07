"""LISTs what a PDCluster owns. Nothing is cached except nodes, which change rarely and are many."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdoperator.api.conditions import Reason
from pdoperator.api.names import LABEL_CLUSTER_UID, router_name
from pdoperator.domain.observed import ClusterObject, NodeOffer, PodSeen
from pdoperator.kube.parse import node_offer, owned_by, pod_seen
from pdoperator.kube.port import KubeError, KubePort, Manifest

NODES_MAX_AGE = 30.0
ROUTER_ROLE = "router"


@dataclass(frozen=True)
class Children:
    """What exists in the API for one PDCluster."""

    pods: tuple[PodSeen, ...]
    router_pods: tuple[PodSeen, ...]
    services: frozenset[str]
    router_deployment: dict[str, Any] | None


@dataclass(frozen=True)
class Problem:
    """A refusal of the API that stands in the way, as conditions tell it."""

    reason: str
    message: str


def problem_of(error: KubeError, doing: str) -> Problem:
    """What a failed call means to a person who reads the status."""
    if error.status in (401, 403):
        return Problem(
            Reason.API_FORBIDDEN,
            f"{doing}: {error.message}. Grant the operator the verb named here "
            "(the chart's ClusterRole has every rule it needs).",
        )
    return Problem(Reason.API_ERROR, f"{doing}: {error.status} {error.reason}: {error.message}")


class Observer:
    """Reads through a KubePort. One for the whole process."""

    def __init__(self, kube: KubePort, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._nodes: tuple[NodeOffer, ...] | None = None
        self._nodes_at: float | None = None
        self._nodes_lock = asyncio.Lock()

    async def children(self, cluster: ClusterObject) -> Children:
        """Pods, Services and router Deployment of this PDCluster. Raises KubeError: a decision on
        half of what exists would create pods twice."""
        selector = f"{LABEL_CLUSTER_UID}={cluster.uid}"
        pods, services, deployment = await asyncio.gather(
            self._kube.list("v1", "Pod", cluster.namespace, selector),
            self._kube.list("v1", "Service", cluster.namespace, selector),
            self._kube.get("apps/v1", "Deployment", cluster.namespace, router_name(cluster.name)),
        )
        if deployment is not None and not owned_by(deployment, cluster.uid):
            deployment = None
        engines = [pod_seen(p) for p in pods if owned_by(p, cluster.uid)]
        return Children(
            pods=tuple(sorted((p for p in engines if p.engine_role is not None), key=_order)),
            # A router pod is owned by its ReplicaSet; the UID label comes from our own template.
            router_pods=tuple(sorted((p for p in map(pod_seen, pods) if p.role == ROUTER_ROLE), key=_order)),
            services=frozenset(s["metadata"]["name"] for s in services if owned_by(s, cluster.uid)),
            router_deployment=deployment,
        )

    async def nodes(self) -> tuple[NodeOffer, ...] | None:
        """What schedulable nodes offer, at most 30 s old; None when nodes may not be listed."""
        async with self._nodes_lock:
            fresh = self._nodes_at is not None and self._clock() - self._nodes_at < NODES_MAX_AGE
            if not fresh:
                self._nodes = await self._list_nodes()
                self._nodes_at = self._clock()
            return self._nodes

    async def _list_nodes(self) -> tuple[NodeOffer, ...] | None:
        try:
            found: list[Manifest] = await self._kube.list("v1", "Node", None)
        except KubeError:
            return None
        return tuple(n for n in map(node_offer, found) if n is not None)


def _order(pod: PodSeen) -> tuple[str, int, str]:
    return (pod.role, pod.replica, pod.name)
