"""LISTs what a PDCluster owns. Pods are read each time; nodes and the children that only the operator
and people with rights change (Services, router, policies) are kept for seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pdoperator.api.conditions import Reason
from pdoperator.api.names import LABEL_CLUSTER_UID, ROLE_ROUTER, router_name
from pdoperator.domain.children import applied_hash
from pdoperator.domain.observed import ClusterObject, NodeOffer, PodSeen, StoredSpec
from pdoperator.domain.poddiagnosis import not_starting
from pdoperator.kube.parse import node_offer, owned_by, pod_seen, pod_warnings, stored_spec
from pdoperator.kube.port import KubeError, KubePort, Manifest

NODES_MAX_AGE = 30.0
WARNINGS_AFTER = 10.0
"""Seconds after its creation from which the events of a pod that starts nothing are read."""
WARNINGS_MAX_AGE = 10.0
_WARNINGS_PODS = 4
"""Pods of one PDCluster whose events are read: one cause is often that of all."""
FIXTURES_MAX_AGE = 15.0
"""Seconds until a Service or router that somebody deleted is missed at the latest."""
_POLICIES = (("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget"))


@dataclass(frozen=True)
class Fixtures:
    """Children that are not engine pods. `hashes`: `Kind/name` to its applied-hash annotation, None
    when some kind may not be listed."""

    services: frozenset[str]
    router_deployment: dict[str, Any] | None
    hashes: dict[str, str] | None
    stored: tuple[StoredSpec, ...] | None = None


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


_REFUSED_BY_ADMISSION = ("exceeded quota", "violates PodSecurity", "admission webhook", "LimitRange", "usage per ")


def problem_of(error: KubeError, doing: str) -> Problem:
    """What a failed call means to a person who reads the status. A 403 is the operator's missing right,
    or an admission plugin's word: quota, Pod Security, a namespace that goes away."""
    said = f"{doing}: {error.status} {error.reason}: {error.message}"
    if error.status == 403 and "being terminated" in error.message:
        return Problem(Reason.NAMESPACE_TERMINATING, said)
    if any(mark in error.message for mark in _REFUSED_BY_ADMISSION):
        return Problem(Reason.ADMISSION_REFUSED, said)
    if error.status in (401, 403):
        return Problem(Reason.API_FORBIDDEN, said)
    return Problem(Reason.API_ERROR, said)


Warnings = tuple[tuple[str, str], ...]


class Observer:
    """Reads through a KubePort. One for the whole process."""

    def __init__(self, kube: KubePort, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube = kube
        self._clock = clock
        self._nodes: tuple[NodeOffer, ...] | None = None
        self._nodes_at: float | None = None
        self._nodes_lock = asyncio.Lock()
        self._fixtures: dict[str, tuple[float, Fixtures]] = {}
        self._warnings: dict[str, dict[str, tuple[float, Warnings | None]]] = {}

    async def children(self, cluster: ClusterObject, now: float | None = None) -> Children:
        """Pods, Services and router Deployment of this PDCluster at `now` (Unix seconds). Raises
        KubeError: a decision on half of what exists would create pods twice."""
        now = time.time() if now is None else now
        selector = f"{LABEL_CLUSTER_UID}={cluster.uid}"
        pods, fixtures = await asyncio.gather(
            self._kube.list("v1", "Pod", cluster.namespace, selector), self._kept_fixtures(cluster, selector)
        )
        engines = [pod_seen(p) for p in pods if owned_by(p, cluster.uid)]
        engines = sorted((p for p in engines if p.engine_role is not None), key=_order)
        # A router pod is owned by its ReplicaSet; the UID label comes from our own template.
        routers = sorted((p for p in map(pod_seen, pods) if p.role == ROLE_ROUTER), key=_order)
        warned = await self._read_warnings(cluster, [*engines, *routers], now)
        return Children(
            pods=tuple(replace(p, warnings=warned.get(p.uid)) for p in engines),
            router_pods=tuple(replace(p, warnings=warned.get(p.uid)) for p in routers),
            fixtures=fixtures,
        )

    async def _read_warnings(
        self, cluster: ClusterObject, pods: list[PodSeen], now: float
    ) -> dict[str, Warnings | None]:
        """Events of a few pods that start no container: only there it says that a volume is missing."""
        stuck = [p for p in pods if not_starting(p) and now - p.created >= WARNINGS_AFTER][:_WARNINGS_PODS]
        before = self._warnings.get(cluster.uid, {})
        kept = {p.uid: before[p.uid] for p in stuck if p.uid in before}
        due = [p for p in stuck if p.uid not in kept or self._clock() - kept[p.uid][0] >= WARNINGS_MAX_AGE]
        for pod, found in zip(due, await asyncio.gather(*(self._warnings_of(cluster, p) for p in due)), strict=True):
            kept[pod.uid] = (self._clock(), found)
        if kept:
            self._warnings[cluster.uid] = kept
        else:
            self._warnings.pop(cluster.uid, None)
        return {uid: found for uid, (_, found) in kept.items()}

    async def _warnings_of(self, cluster: ClusterObject, pod: PodSeen) -> Warnings | None:
        try:
            found = await self._kube.list(
                "v1", "Event", cluster.namespace, field_selector=f"involvedObject.uid={pod.uid},type=Warning"
            )
        except KubeError:
            return None  # the right to read events is optional, and nothing hangs on them
        return pod_warnings(found)

    def invalidate(self, uid: str) -> None:
        """Fixtures of this PDCluster were written (or it is gone): read them anew."""
        self._fixtures.pop(uid, None)

    def forget(self, uid: str) -> None:
        """The PDCluster is gone."""
        self.invalidate(uid)
        self._warnings.pop(uid, None)

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
        revisions = await self._list_or_none("apps/v1", "ControllerRevision", namespace, selector)
        policies = await asyncio.gather(
            *[self._list_or_none(api, kind, namespace, selector) for api, kind in _POLICIES]
        )
        ours = [o for o in (*services, *deployments) if owned_by(o, cluster.uid)]
        hashes: dict[str, str] | None = {_name(o): applied_hash(o) for o in ours}
        for found in policies:
            if found is None or hashes is None:
                hashes = None
            else:
                hashes |= {_name(o): applied_hash(o) for o in found if owned_by(o, cluster.uid)}
        router = router_name(cluster.name)
        return Fixtures(
            services=frozenset(o["metadata"]["name"] for o in ours if o["kind"] == "Service"),
            router_deployment=next(
                (o for o in ours if o["kind"] == "Deployment" and o["metadata"]["name"] == router), None
            ),
            hashes=hashes,
            stored=None if revisions is None else tuple(stored_spec(o) for o in revisions if owned_by(o, cluster.uid)),
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


def _order(pod: PodSeen) -> tuple[str, int, str]:
    return (pod.role, pod.replica, pod.name)
