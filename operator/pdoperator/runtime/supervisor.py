"""One task per PDCluster UID: never two reconciles of one object, never one object waiting for another.

Wake-ups only set an event, so any number of them while a reconcile runs leads to one more. A timer
(requeue_after) heals what a missed watch event would have told, and a full LIST every `resync`
seconds heals missed PDClusters. After a look that could not see or decide only a new spec or the
backoff's end looks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdoperator.api.names import GATE_KV_WIRED, LABEL_CLUSTER_UID
from pdoperator.kube.execute import NotLeading
from pdoperator.kube.kinds import PDCLUSTER_API
from pdoperator.kube.port import KubeError, KubePort, Manifest
from pdoperator.runtime.carried import ClusterState, Result
from pdoperator.runtime.metrics import Metrics
from pdoperator.runtime.reconciler import Reconciler

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pace:
    """Seconds, and how many reconciles run at once."""

    concurrency: int = 32
    deadline: float = 60.0
    coalesce: float = 0.1
    max_requeue: float = 60.0
    crowd: float = 0.02
    """The timer of each PDCluster is at least this long for every PDCluster there is, up to `crowd_max`."""
    crowd_max: float = 5.0
    backoff_first: float = 1.0
    backoff_max: float = 60.0
    resync: float = 30.0


@dataclass
class _Worker:
    state: ClusterState
    seen: tuple[Any, ...]
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Supervisor:
    """Start with `run()`; feed it watch events; `stop()` ends every task."""

    def __init__(
        self,
        kube: KubePort,
        reconciler: Reconciler,
        *,
        namespaces: Sequence[str] = (),
        pace: Pace | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self._kube, self._reconciler = kube, reconciler
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._pace = pace or Pace()
        self._metrics = metrics or Metrics()
        self._slots = asyncio.Semaphore(self._pace.concurrency)
        self._workers: dict[str, _Worker] = {}
        self._pods: dict[str, str] = {}
        self._fatal: asyncio.Future[None] | None = None
        self._passes_at: float | None = None
        self._stopping = False

    # --- watch events (from main) ---------------------------------------------------------------

    def cluster_event(self, event: str | None, manifest: Manifest) -> None:
        """A PDCluster was seen. Our own status writes change neither generation nor deletion."""
        uid = manifest["metadata"]["uid"]
        if event == "DELETED":
            self._drop(uid)
            return
        meta = manifest["metadata"]
        seen = (meta.get("generation"), meta.get("deletionTimestamp"))
        worker = self._workers.get(uid)
        if worker is None:
            self._start(ClusterState(meta["namespace"], meta["name"], uid), seen)
        elif worker.seen != seen:
            worker.seen = seen
            worker.urgent.set()
            worker.wake.set()

    def pod_event(self, event: str | None, manifest: Manifest) -> None:
        """A pod that carries our UID label changed; what we wrote ourselves (the gate) wakes nobody."""
        meta = manifest["metadata"]
        digest = pod_digest(manifest)
        if event == "DELETED":
            self._pods.pop(meta["uid"], None)
        elif self._pods.get(meta["uid"]) == digest:
            return
        else:
            self._pods[meta["uid"]] = digest
        self.wake((meta.get("labels") or {}).get(LABEL_CLUSTER_UID, ""))

    def wake(self, uid: str) -> None:
        """Look again soon."""
        if worker := self._workers.get(uid):
            worker.wake.set()

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Resync for ever. Raises what ended a worker for a reason that is not a PDCluster's own."""
        self._fatal = asyncio.get_running_loop().create_future()
        while True:
            await self.resync()
            self._passes_at = asyncio.get_running_loop().time()
            pause = self._pace.resync * random.uniform(0.9, 1.1)
            done, _ = await asyncio.wait({self._fatal}, timeout=pause)
            if done:
                self._fatal.result()

    async def resync(self) -> None:
        """LIST every PDCluster; start, wake and end tasks accordingly. A failed LIST changes nothing."""
        found: dict[str, Manifest] = {}
        try:
            for namespace in self._namespaces:
                for manifest in await self._kube.list(PDCLUSTER_API, "PDCluster", namespace):
                    found[manifest["metadata"]["uid"]] = manifest
        except KubeError as error:
            log.warning("action=resync error=%r", str(error))
            return
        for manifest in found.values():
            self.cluster_event("MODIFIED", manifest)
        for uid in set(self._workers) - set(found):
            # Made after the LIST? Its own GET decides; a wake-up is enough.
            self.wake(uid)
        self._metrics.clusters.set(len(self._workers))

    def age(self) -> float | None:
        """Seconds since the last pass of the loop; None before the first."""
        if self._passes_at is None:
            return None
        return asyncio.get_running_loop().time() - self._passes_at

    async def stop(self, timeout: float = 10.0) -> None:
        """Cancel every task; waits for them at most `timeout` seconds."""
        self._stopping = True
        tasks = [w.task for w in self._workers.values() if w.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        self._workers.clear()

    @property
    def uids(self) -> frozenset[str]:
        """PDClusters that have a task."""
        return frozenset(self._workers)

    # --- one PDCluster ----------------------------------------------------------------------------

    def _start(self, state: ClusterState, seen: tuple[Any, ...]) -> None:
        if self._stopping:
            return
        worker = _Worker(state, seen)
        self._workers[state.uid] = worker
        worker.task = asyncio.create_task(self._life(worker), name=f"{state.namespace}/{state.name}")
        worker.task.add_done_callback(lambda task: self._ended(worker, task))

    def _drop(self, uid: str) -> None:
        worker = self._workers.pop(uid, None)
        if worker is not None and worker.task is not None:
            worker.task.cancel()

    def _ended(self, worker: _Worker, task: asyncio.Task[None]) -> None:
        if self._workers.get(worker.state.uid) is worker:
            del self._workers[worker.state.uid]
        if task.cancelled() or self._fatal is None or self._fatal.done():
            return
        if (error := task.exception()) is not None:
            self._fatal.set_exception(error)

    async def _life(self, worker: _Worker) -> None:
        state, failures = worker.state, 0
        try:
            while True:
                worker.wake.clear()
                worker.urgent.clear()
                result = await self._one(state)
                if result.gone:
                    return
                failures = failures + 1 if result.blind else 0
                if result.blind:
                    await _wait(worker.urgent, backoff(failures, self._pace))
                else:
                    # A look costs about 15 ms of CPU: many PDClusters share one core's worth of looks.
                    crowd = min(self._pace.crowd_max, self._pace.crowd * len(self._workers))
                    pause = min(max(result.requeue_after, crowd), self._pace.max_requeue)
                    await self._calm(worker, pause, result.peeks)
                await asyncio.sleep(self._pace.coalesce)
        finally:
            await self._reconciler.forget(state.uid)

    async def _calm(self, worker: _Worker, pause: float, peeks: int) -> None:
        """Wait until a look is due: something woke us, a peek saw news, or the time has come."""
        await _wait(worker.wake, pause)
        for _ in range(peeks):
            if worker.wake.is_set() or not await self._same(worker.state):
                return
            await _wait(worker.wake, pause)

    async def _same(self, state: ClusterState) -> bool:
        async with self._slots:
            try:
                async with asyncio.timeout(self._pace.deadline):
                    return not await self._reconciler.peek(state)
            except Exception:
                # The look that follows says what is wrong.
                log.exception("namespace=%s name=%s action=peek error=unexpected", state.namespace, state.name)
                return False

    async def _one(self, state: ClusterState) -> Result:
        loop = asyncio.get_running_loop()
        async with self._slots:
            began = loop.time()
            outcome = "error"
            try:
                async with asyncio.timeout(self._pace.deadline):
                    result = await self._reconciler.once(state)
                outcome = "failed" if result.failed else "ok"
                return result
            except (NotLeading, asyncio.CancelledError):
                outcome = "ended"  # the Lease is lost, or the PDCluster is gone
                raise
            except TimeoutError:
                log.error(
                    "namespace=%s name=%s error=deadline seconds=%g", state.namespace, state.name, self._pace.deadline
                )
            except Exception:
                # A broken object or a bug must cost this PDCluster only.
                log.exception("namespace=%s name=%s error=unexpected", state.namespace, state.name)
            finally:
                self._metrics.reconciled(outcome, loop.time() - began)
        return Result(failed=True, blind=True)


def backoff(failures: int, pace: Pace) -> float:
    """Exponential with jitter: first, 2x, 4x ... up to the maximum, each times 0.5 to 1."""
    whole = min(pace.backoff_max, pace.backoff_first * 2.0 ** min(failures - 1, 30))
    return whole * random.uniform(0.5, 1.0)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return


def pod_digest(manifest: Manifest) -> str:
    """What of a pod is news to us: all but its gate, resource version and managed fields."""
    meta, status = manifest["metadata"], manifest.get("status") or {}
    conditions = [
        (c.get("type"), c.get("status"), c.get("reason"), c.get("message"))
        for c in status.get("conditions") or []
        if c.get("type") != GATE_KV_WIRED
    ]
    news = {
        "deleting": meta.get("deletionTimestamp"),
        "labels": meta.get("labels"),
        "owners": meta.get("ownerReferences"),
        "node": (manifest.get("spec") or {}).get("nodeName"),
        "conditions": conditions,
        "status": {
            k: status.get(k) for k in ("phase", "podIP", "reason", "initContainerStatuses", "containerStatuses")
        },
    }
    return hashlib.sha256(json.dumps(news, sort_keys=True, default=str).encode()).hexdigest()
