"""LISTs what a PDCluster owns. Pods are read each time; nodes and the children that only the operator
and people with rights change (Services, router, policies) are kept for seconds."""

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
FIXTURES_MAX_AGE = 15.0
"""Seconds until a Service or router that somebody deleted is missed at the latest."""
ROUTER_ROLE = "router"
APPLIED_HASH = "pdcluster.io/applied-hash"
_POLICIES = (("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget"))


@dataclass(frozen=True)
class Fixtures:
    """Children that are not engine pods. `hashes`: `Kind/name` to its applied-hash annotation, None
    when some kind may not be listed."""

    services: frozenset[str]
    router_deployment: dict[str, Any] | None
    hashes: dict[str, str] | None


@dataclass(frozen=True)
class Children:
    """What exists in the API for one PDCluster."""

    pods: tuple[PodSeen, ...]
    router_pods: tuple[PodSeen, ...]
    fixtures: Fixtures


@dataclass(frozen=True)
class Problem:
    """A refusal of the API that stands in the way, as conditions tell it."""

    reason: str
    message: str


def problem_of(error: KubeError, doing: str) -> Problem:
    """What a failed call means to a person who reads the status."""
    if error.status in (401, 403):
        return Problem(Reason.API_FORBIDDEN, f"{doing}: {error.status} {error.reason}: {error.message}")
    return Problem(Reason.API_ERROR, f"{doing}: {error.status} {error.reason}: {error.message}")


class Observer:
    """Reads through a KubePort. One for the whole process."""

    def __init__(self, kube: KubePort, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._nodes: tuple[NodeOffer, ...] | None = None
        self._nodes_at: float | None = None
        self._nodes_lock = asyncio.Lock()
        self._fixtures: dict[str, tuple[float, Fixtures]] = {}

    async def children(self, cluster: ClusterObject) -> Children:
        """Pods, Services and router Deployment of this PDCluster. Raises KubeError: a decision on
        half of what exists would create pods twice."""
        selector = f"{LABEL_CLUSTER_UID}={cluster.uid}"
        pods, fixtures = await asyncio.gather(
            self._kube.list("v1", "Pod", cluster.namespace, selector), self._kept_fixtures(cluster, selector)
        )
        engines = [pod_seen(p) for p in pods if owned_by(p, cluster.uid)]
        return Children(
            pods=tuple(sorted((p for p in engines if p.engine_role is not None), key=_order)),
            # A router pod is owned by its ReplicaSet; the UID label comes from our own template.
            router_pods=tuple(sorted((p for p in map(pod_seen, pods) if p.role == ROUTER_ROLE), key=_order)),
            fixtures=fixtures,
        )

    def invalidate(self, uid: str) -> None:
        """Fixtures of this PDCluster were written (or it is gone): read them anew."""
        self._fixtures.pop(uid, None)

    async def _kept_fixtures(self, cluster: ClusterObject, selector: str) -> Fixtures:
        kept = self._fixtures.get(cluster.uid)
        if kept is None or self._clock() - kept[0] >= FIXTURES_MAX_AGE:
            at = self._clock()
            kept = self._fixtures[cluster.uid] = (at, await self._read_fixtures(cluster, selector))
        return kept[1]

    async def _read_fixtures(self, cluster: ClusterObject, selector: str) -> Fixtures:
        namespace = cluster.namespace
        services, deployments = await asyncio.gather(
            self._kube.list("v1", "Service", namespace, selector),
            self._kube.list("apps/v1", "Deployment", namespace, selector),
        )
        policies = await asyncio.gather(
            *[self._list_or_none(api, kind, namespace, selector) for api, kind in _POLICIES]
        )
        ours = [o for o in (*services, *deployments) if owned_by(o, cluster.uid)]
        hashes: dict[str, str] | None = {_name(o): _hash(o) for o in ours}
        for found in policies:
            if found is None or hashes is None:
                hashes = None
            else:
                hashes |= {_name(o): _hash(o) for o in found if owned_by(o, cluster.uid)}
        router = router_name(cluster.name)
        return Fixtures(
            services=frozenset(o["metadata"]["name"] for o in ours if o["kind"] == "Service"),
            router_deployment=next(
                (o for o in ours if o["kind"] == "Deployment" and o["metadata"]["name"] == router), None
            ),
            hashes=hashes,
        )

    async def _list_or_none(self, api_version: str, kind: str, namespace: str, selector: str) -> list[Manifest] | None:
        try:
            return await self._kube.list(api_version, kind, namespace, selector)
        except KubeError as error:
            if error.status in (403, 404):
                return None
            raise

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


def _name(obj: Manifest) -> str:
    return f"{obj['kind']}/{obj['metadata']['name']}"


def _hash(obj: Manifest) -> str:
    return str((obj["metadata"].get("annotations") or {}).get(APPLIED_HASH, ""))


def _order(pod: PodSeen) -> tuple[str, int, str]:
    return (pod.role, pod.replica, pod.name)
