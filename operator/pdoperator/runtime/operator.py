"""The operator without kopf: Lease, credentials, clients and supervisor, from start to a bounded end."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from pdoperator.kube.events import EventRecorder
from pdoperator.kube.execute import KubeExecutor
from pdoperator.kube.observe import Observer
from pdoperator.kube.port import KubeError, KubePort, Manifest
from pdoperator.pods.engine_probe import EngineProber
from pdoperator.pods.router import RouterClient
from pdoperator.pods.sidecar import SidecarClient
from pdoperator.runtime import credentials
from pdoperator.runtime.act import Actor
from pdoperator.runtime.lease import Lease, LeaseTimes
from pdoperator.runtime.metrics import Metrics
from pdoperator.runtime.reconciler import Decide, Reconciler
from pdoperator.runtime.supervisor import Pace, Supervisor
from pdoperator.settings import OperatorSettings

log = logging.getLogger(__name__)

STALE_AFTER = 120.0
"""Liveness fails when the resync loop has not passed for this many seconds."""
_CREDENTIAL_RETRY = 5.0
_CA_CHECK = 30.0


class AuthorityEnded(Exception):
    """The CA's certificate ended while the process ran."""


class Operator:
    """`run()` returns only by an exception: LeaseLost, a damaged CA, a bug. Then the process ends."""

    def __init__(
        self,
        kube: KubePort,
        settings: OperatorSettings,
        decide: Decide,
        *,
        pace: Pace | None = None,
        times: LeaseTimes | None = None,
        sidecars: Callable[[credentials.Credentials], SidecarClient] | None = None,
        routers: RouterClient | None = None,
        prober: EngineProber | None = None,
    ) -> None:
        self._kube, self._settings, self._decide = kube, settings, decide
        self._pace = pace
        self.metrics = Metrics()
        identity = f"{settings.pod_name}_{uuid.uuid4().hex[:12]}"
        self.lease = Lease(kube, settings.operator_namespace, identity, times)
        self._make_sidecars = sidecars or (lambda keys: SidecarClient(keys.client_context))
        self._routers = routers
        self._prober = prober
        self._sidecars: SidecarClient | None = None
        self.supervisor: Supervisor | None = None
        self._started: float | None = None

    async def run(self) -> None:
        """Wait for the Lease, then reconcile until something ends it."""
        self._started = asyncio.get_running_loop().time()
        await self.lease.acquire()
        self.metrics.leading.set(1)
        keeper = asyncio.create_task(self.lease.keep(), name="lease")
        worker = asyncio.create_task(self._lead(), name="supervisor")
        try:
            done, _ = await asyncio.wait({keeper, worker}, return_when=asyncio.FIRST_COMPLETED)
            for task in (keeper, worker):
                if task in done:
                    task.result()
        finally:
            for task in (keeper, worker):
                task.cancel()
            await asyncio.wait({keeper, worker}, timeout=2.0)
            if self.supervisor is not None:  # without the Lease not even a status may be written
                await self.supervisor.stop(timeout=2.0)
            self.metrics.leading.set(0)

    async def stop(self) -> None:
        """End tasks and connections and hand the Lease over. Bounded; call after `run` was cancelled."""
        if self.supervisor is not None:
            await self.supervisor.stop(timeout=5.0)
        try:
            async with asyncio.timeout(5.0):
                await self.lease.release()
        except TimeoutError:
            log.warning("action=stop error='the Lease was not released in time'")
        if self._sidecars is not None:
            await self._sidecars.close()
        if self._routers is not None:
            await self._routers.close()
        if self._prober is not None:
            await self._prober.close()

    # --- watch events -----------------------------------------------------------------------------

    def cluster_event(self, event: str | None, manifest: Manifest) -> None:
        """Before the Lease is held events are dropped: the first resync lists everything."""
        if self.supervisor is not None:
            self.supervisor.cluster_event(event, manifest)

    def pod_event(self, event: str | None, manifest: Manifest) -> None:
        """As cluster_event."""
        if self.supervisor is not None:
            self.supervisor.pod_event(event, manifest)

    def health(self) -> str:
        """What the liveness probe shows. Raises when the loop stands still; waiting for the Lease is healthy."""
        if self.supervisor is None:
            return "waiting for the Lease"
        age = self.supervisor.age()
        if age is None:
            return "first resync under way"
        if age > STALE_AFTER:
            raise RuntimeError(f"the resync loop has not passed for {age:.0f} s")
        return f"last pass {age:.0f} s ago, term {self.lease.term}"

    # --- inside -------------------------------------------------------------------------------

    async def _lead(self) -> None:
        keys = await self._credentials()
        events = EventRecorder(self._kube, instance=self._settings.pod_name)
        self._sidecars = self._make_sidecars(keys)
        self._routers = self._routers or RouterClient()
        self._prober = self._prober or EngineProber()
        executor = KubeExecutor(self._kube, keys, events, time.time)
        actor = Actor(executor, self._sidecars, self._routers, keys.router_key, self.lease.held, self._prober)
        reconciler = Reconciler(
            kube=self._kube,
            observer=Observer(self._kube),
            sidecars=self._sidecars,
            routers=self._routers,
            prober=self._prober,
            actor=actor,
            events=events,
            keys=keys,
            decide=self._decide,
            settings=self._settings.decide_settings(),
            term=lambda: self.lease.term,
        )
        self.supervisor = Supervisor(
            self._kube,
            reconciler,
            namespaces=self._settings.watch_namespaces,
            pace=self._pace,
            metrics=self.metrics,
        )
        self._prober.news = self.supervisor.wake
        self._prober.measured = self.metrics.probed
        reconciling = asyncio.create_task(self.supervisor.run(), name="resync")
        try:
            while not reconciling.done():
                await asyncio.wait({reconciling}, timeout=_CA_CHECK)
                if keys.ended:
                    raise AuthorityEnded("the CA has ended; the next start makes a new one")
            await reconciling
        finally:
            reconciling.cancel()

    async def _credentials(self) -> credentials.Credentials:
        while True:
            try:
                return await credentials.load(self._kube, self._settings.operator_namespace)
            except KubeError as error:
                # 403 here is a broken installation; it heals when the Role is there.
                log.error("secret=%s action=load error=%r", credentials.CA_SECRET, str(error))
                await asyncio.sleep(_CREDENTIAL_RETRY)
