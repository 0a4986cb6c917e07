"""Kubernetes Events on a PDCluster: one object per (reason, message), counted, and rate limited.

The name is a hash of what the event says, so a repetition patches the same object; a repetition
within `quiet` seconds is only counted, and a cluster that says many different things is held to a
budget. Losing an event loses nothing that conditions do not say.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pdoperator.api import names
from pdoperator.api.status import timestamp
from pdoperator.domain.actions import EmitEvent
from pdoperator.domain.observed import ClusterObject
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.port import KubePort, Manifest

_MESSAGE_LIMIT = 1000
_REMEMBERED = 128


@dataclass
class _Told:
    first: float
    written: float
    count: int = 0


@dataclass
class _Budget:
    tokens: float
    at: float
    told: dict[str, _Told] = field(default_factory=dict)


class EventRecorder:
    """`burst` events at once per PDCluster, one more every `refill` seconds."""

    def __init__(
        self,
        kube: KubePort,
        *,
        instance: str = "",
        quiet: float = 30.0,
        burst: float = 20.0,
        refill: float = 10.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._instance = instance
        self._quiet, self._burst, self._refill = quiet, burst, refill
        self._clock = clock
        self._budgets: dict[str, _Budget] = {}

    async def emit(self, cluster: ClusterObject, event: EmitEvent) -> bool:
        """Write it, or only count it. True when it was written. Raises KubeError."""
        now = self._clock()
        budget = self._budgets.setdefault(cluster.uid, _Budget(self._burst, now))
        budget.tokens = min(self._burst, budget.tokens + (now - budget.at) / self._refill)
        budget.at = now
        digest = hashlib.sha256("\0".join((cluster.uid, event.type, event.reason, event.message)).encode())
        name = f"{cluster.name[:200]}.{digest.hexdigest()[:16]}"
        told = budget.told.setdefault(name, _Told(first=now, written=float("-inf")))
        told.count += 1
        if now - told.written < self._quiet or budget.tokens < 1.0:
            return False
        budget.tokens -= 1.0
        told.written = now
        while len(budget.told) > _REMEMBERED:
            del budget.told[next(iter(budget.told))]
        await self._kube.apply(_manifest(cluster, event, name, told, now, self._instance))
        return True

    def forget(self, cluster_uid: str) -> None:
        """The PDCluster is gone."""
        self._budgets.pop(cluster_uid, None)


def _manifest(cluster: ClusterObject, event: EmitEvent, name: str, told: _Told, now: float, instance: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": cluster.namespace},
        "involvedObject": {
            "apiVersion": PDCLUSTER_API,
            "kind": names.KIND,
            "name": cluster.name,
            "namespace": cluster.namespace,
            "uid": cluster.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:_MESSAGE_LIMIT],
        "count": told.count,
        "firstTimestamp": timestamp(told.first),
        "lastTimestamp": timestamp(now),
        "source": {"component": names.FIELD_MANAGER},
        "reportingComponent": names.FIELD_MANAGER,
        "reportingInstance": instance,
    }
