"""The operator's Lease: who may act, and the term that orders rosters (its transitions count).

One replica and Recreate do not exclude two operators: when a node is lost, a second one starts
while the first may still reach pods. So each holder's term is higher than the last one's, a holder
that can not renew stops acting before another may take over, and pods refuse lower terms.

Expiry is judged by how long the record has stood still on our own clock, never by comparing the
holder's clock with ours.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from pdoperator.kube.port import KubeError, KubePort, Manifest

log = logging.getLogger(__name__)

API, KIND = "coordination.k8s.io/v1", "Lease"
LEASE_NAME = "pdcluster-operator"


@dataclass(frozen=True)
class LeaseTimes:
    """Seconds. A holder stops acting `duration - margin` after its last proven renewal began."""

    duration: float = 15.0
    renew: float = 5.0
    retry: float = 1.0
    margin: float = 3.0


class LeaseLost(Exception):
    """Another operator holds the Lease, or it could not be renewed in time. The process must end."""


class Lease:
    """`identity` is unique per process (a restart is another holder)."""

    def __init__(
        self,
        kube: KubePort,
        namespace: str,
        identity: str,
        times: LeaseTimes | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._kube = kube
        self._namespace = namespace
        self._identity = identity
        self._times = times or LeaseTimes()
        self._clock, self._wall = clock, wall
        self._record: Manifest | None = None
        self._good_until = float("-inf")
        self._seen: tuple[str, float] = ("", 0.0)
        self.term = 0

    def held(self) -> bool:
        """True while acting is safe: nobody else can have taken over yet."""
        return self._clock() < self._good_until

    async def acquire(self) -> int:
        """Wait until the Lease is ours; returns the term. API errors are retried for ever."""
        while True:
            try:
                if await self._try_acquire():
                    log.info("lease=%s/%s event=acquired term=%d", self._namespace, LEASE_NAME, self.term)
                    return self.term
            except KubeError as error:
                log.warning("lease=%s/%s event=retry error=%r", self._namespace, LEASE_NAME, str(error))
            await asyncio.sleep(self._times.retry * random.uniform(0.8, 1.2))

    async def keep(self) -> None:
        """Renew until cancelled. Raises LeaseLost; `held()` is False by then."""
        while True:
            await asyncio.sleep(self._times.renew * random.uniform(0.9, 1.0))
            await self._renew()

    async def release(self) -> None:
        """Hand over on a clean end, so that the next one need not wait. Never raises for the API."""
        record, mine = self._record, self.held()
        self._good_until = float("-inf")
        if record is None or not mine:
            return
        try:
            await self._kube.replace(self._with(record, holder="", duration=1))
            log.info("lease=%s/%s event=released term=%d", self._namespace, LEASE_NAME, self.term)
        except KubeError as error:
            log.warning("lease=%s/%s event=release-failed error=%r", self._namespace, LEASE_NAME, str(error))

    # --- inside -------------------------------------------------------------------------------

    async def _try_acquire(self) -> bool:
        began = self._clock()
        current = await self._kube.get(API, KIND, self._namespace, LEASE_NAME)
        if current is None:
            fresh: Manifest = {
                "apiVersion": API,
                "kind": KIND,
                "metadata": {"name": LEASE_NAME, "namespace": self._namespace},
                "spec": {},
            }
            return await self._take(lambda: self._kube.create(self._taken(fresh)), began)
        spec = current.get("spec") or {}
        if spec.get("holderIdentity"):
            version = str(current["metadata"].get("resourceVersion", ""))
            if version != self._seen[0]:
                self._seen = (version, began)
                holder = str(spec["holderIdentity"])
                log.info("lease=%s/%s event=waiting holder=%s", self._namespace, LEASE_NAME, holder)
            stood_still = began - self._seen[1]
            if stood_still < max(float(spec.get("leaseDurationSeconds") or 0), self._times.duration):
                return False
        return await self._take(lambda: self._kube.replace(self._taken(current)), began)

    async def _take(self, write: Callable[[], object], began: float) -> bool:
        try:
            stored = await write()  # type: ignore[misc]
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        self._accept(stored, began)
        self.term = int(stored["spec"]["leaseTransitions"])
        return True

    async def _renew(self) -> None:
        while True:
            began = self._clock()
            record = self._record
            if record is None or not self.held():
                raise LeaseLost(f"not renewed within {self._times.duration - self._times.margin:g} s")
            # A write that hangs must neither use up all the time there is nor keep us acting beyond it.
            patience = max(0.05, min(self._times.renew, self._good_until - began))
            try:
                async with asyncio.timeout(patience):
                    stored = await self._kube.replace(self._with(record, holder=self._identity))
                self._accept(stored, began)
                return
            except TimeoutError:
                log.warning("lease=%s/%s event=renew-hangs seconds=%.1f", self._namespace, LEASE_NAME, patience)
                continue
            except KubeError as error:
                log.warning("lease=%s/%s event=renew-failed error=%r", self._namespace, LEASE_NAME, str(error))
                if error.status in (404, 409):
                    await self._after_conflict()
                    if not self.held():
                        raise LeaseLost("another operator holds the Lease") from error
            await asyncio.sleep(self._times.retry)

    async def _after_conflict(self) -> None:
        """The record changed under us: ours if the answer to a renewal was lost, else lost."""
        try:
            async with asyncio.timeout(max(0.05, min(self._times.renew, self._good_until - self._clock()))):
                current = await self._kube.get(API, KIND, self._namespace, LEASE_NAME)
        except (KubeError, TimeoutError):
            return  # no proof either way; the margin decides
        spec = (current or {}).get("spec") or {}
        if (
            current is None
            or spec.get("holderIdentity") != self._identity
            or int(spec.get("leaseTransitions") or 0) != self.term
        ):
            self._good_until = float("-inf")
            return
        self._record = current

    def _accept(self, stored: Manifest, began: float) -> None:
        # Counted from before the write: others may see the new record that early.
        self._record = stored
        self._good_until = began + self._times.duration - self._times.margin

    def _taken(self, current: Manifest) -> Manifest:
        spec = dict(current.get("spec") or {})
        spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec["acquireTime"] = self._stamp()
        return self._with({**current, "spec": spec}, holder=self._identity)

    def _with(self, current: Manifest, *, holder: str, duration: int | None = None) -> Manifest:
        spec = {
            **(current.get("spec") or {}),
            "holderIdentity": holder,
            "leaseDurationSeconds": duration or max(1, round(self._times.duration)),
            "renewTime": self._stamp(),
        }
        return {**current, "spec": spec}

    def _stamp(self) -> str:
        """MicroTime."""
        return datetime.fromtimestamp(self._wall(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
